from __future__ import annotations

import errno
import json
import os
import stat
import sys
import warnings

import pytest
from compiler_helpers import REQUEST, compile_count, fake_artifact

import fa4
from fa4.compiler import entry, get, lookup
from fa4.compiler.cache import CacheWarning, DiskCache
from fa4.compiler.key import kernel_key

KEY = "0" * 64
MIB = 1 << 20


def entry_folder(folder):
    return folder / "entries" / kernel_key(*REQUEST)


def get_afresh():
    """As a new process would, which has nothing in memory."""
    lookup.forget()
    return get(*REQUEST)


def test_an_entry_comes_back_as_it_was(folder):
    cache = DiskCache(folder, MIB)
    assert cache.load(KEY) is None
    cache.store(KEY, fake_artifact())
    assert cache.load(KEY) == fake_artifact()
    assert sorted(path.name for path in (folder / "entries" / KEY).iterdir()) == ["host.o", "kernel.cubin", "kernel.ptx", "metadata.json"]
    assert list((folder / "staging").iterdir()) == []


def test_memory_then_disk_then_compiler(folder, compiles):
    first = get(*REQUEST)
    assert get(*REQUEST) is first
    assert get_afresh() == first
    assert len(compiles) == 1


def test_turned_off(folder, compiles):
    with fa4.settings(cache=False):
        get(*REQUEST)
        get_afresh()
    assert len(compiles) == 2
    assert not folder.exists()


def test_folders_are_private(folder, compiles):
    get(*REQUEST)
    for path in [folder, *folder.rglob("*")]:
        assert path.stat().st_mode & 0o077 == 0, path


FILES = ("host.o", "kernel.cubin", "kernel.ptx", "metadata.json")


def truncate(path):
    path.write_bytes(path.read_bytes()[:-1])


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def empty(path):
    path.write_bytes(b"")


def remove(path):
    path.unlink()


@pytest.mark.parametrize("damage", [truncate, flip, empty, remove], ids=lambda f: f.__name__)
@pytest.mark.parametrize("file", FILES)
def test_a_damaged_entry_is_rebuilt_with_one_warning(folder, compiles, file, damage):
    get(*REQUEST)
    damage(entry_folder(folder) / file)
    with pytest.warns(CacheWarning) as caught:
        assert get_afresh().function == "fake_2", "the damaged entry was loaded"
    assert len(caught) == 1
    assert str(entry_folder(folder)) in str(caught[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert get_afresh().function == "fake_2", "the rebuilt entry is not used"
    assert len(compiles) == 2


def forge(folder, **changes):
    """Metadata with a right checksum, and something else wrong."""
    path = entry_folder(folder) / "metadata.json"
    content = {**json.loads(path.read_text()), **changes}
    content.pop("sha256")
    path.write_text(json.dumps({**content, "sha256": entry._checksum(content)}))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"format": 0}, "another format"),
        ({"key": KEY}, "another key"),
        ({"files": {}}, "does not hold an artifact"),
        ({"artifact": {}}, "does not hold an artifact"),
        ({"files": {"../../secret": {"bytes": 0, "sha256": ""}}}, "outside itself"),
    ],
    ids=str,
)
def test_a_foreign_entry_is_rebuilt(folder, compiles, changes, reason):
    get(*REQUEST)
    forge(folder, **changes)
    with pytest.warns(CacheWarning, match=reason):
        assert get_afresh().function == "fake_2"


def test_an_entry_of_another_user_is_rebuilt(folder, compiles, monkeypatch):
    get(*REQUEST)

    class OtherUser:  # for entries only; the folder is ours
        getuid = staticmethod(lambda: os.getuid() + 1)
        __getattr__ = staticmethod(lambda name: getattr(os, name))

    monkeypatch.setattr(entry, "os", OtherUser())
    with pytest.warns(CacheWarning, match="belongs to another user"):
        assert get_afresh().function == "fake_2"


@pytest.mark.parametrize("garbage", [b"{", b"[]", b"\xff\xfe", b"null", b"{}"], ids=str)
def test_metadata_that_is_no_metadata(folder, compiles, garbage):
    get(*REQUEST)
    (entry_folder(folder) / "metadata.json").write_bytes(garbage)
    with pytest.warns(CacheWarning, match="it is rebuilt"):
        assert get_afresh().function == "fake_2"


def unusable(reason):
    return pytest.warns(CacheWarning, match=f"cannot be used: .*{reason}.*kept in memory only")


@pytest.mark.parametrize("bits", [0o770, 0o707, 0o777], ids=oct)
def test_a_folder_that_others_may_write_is_refused(folder, compiles, bits):
    get(*REQUEST)
    folder.chmod(bits)
    with unusable("others may write to it") as caught:
        get_afresh()
        get_afresh()
    assert len(caught) == 1
    assert len(compiles) == 3, "an entry of an unsafe folder was used"


def test_a_folder_of_another_user_is_refused(folder, compiles, monkeypatch):
    get(*REQUEST)
    real = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: real + 1)
    with unusable(f"belongs to user {real}, not to {real + 1}"):
        get_afresh()
    assert len(compiles) == 2


@pytest.mark.parametrize("call", ["mkdir", "open", "write", "fsync", "rename"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EIO], ids=errno.errorcode.get)
def test_a_disk_that_fails_degrades_to_memory(folder, compiles, monkeypatch, call, code):
    """Injected, since root may write anywhere."""
    real = getattr(os, call)

    def fail(path, *arguments, **options):
        creating = call != "open" or arguments[0] & os.O_CREAT
        if call in ("write", "fsync") or (creating and str(folder) in str(path)):
            raise OSError(code, os.strerror(code), str(path))
        return real(path, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(os, call, fail)
        with unusable(os.strerror(code)) as caught:
            first = get(*REQUEST)
            assert get(*REQUEST) is first
            get_afresh()
        assert len(caught) == 1
    assert len(compiles) == 2
    assert not list(folder.glob("staging/*")), "half an entry was left behind"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        get_afresh()
        assert get_afresh() == get_afresh(), "the cache does not work once the disk does"


def test_a_read_only_folder_still_serves_what_is_in_it(folder, compiles, monkeypatch):
    get(*REQUEST)

    def refuse(path, *arguments, **options):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    for call in ("mkdir", "rename", "utime"):
        monkeypatch.setattr(os, call, refuse)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        get_afresh()
    assert len(compiles) == 1


# --- being killed ---

WATCHED = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.utime"}


def write_in_a_child(folder, kill_at):
    """Compile in a forked child that dies at its n-th step on the disk; its exit status, 0 where it survived."""
    count = 0

    def step():
        nonlocal count
        count += 1
        if count == kill_at:
            os._exit(9)

    def watch(event, arguments):
        if event in WATCHED and str(folder) in str(arguments[0]):
            step()

    def write(descriptor, data, real=os.write):
        step()
        written = real(descriptor, data[: len(data) // 2 + 1])  # in pieces, so that there is a middle to die in
        step()
        return written

    def fsync(descriptor, real=os.fsync):
        step()
        real(descriptor)
        step()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forking where there are threads
        child = os.fork()
    if child == 0:
        try:
            sys.addaudithook(watch)
            os.write, os.fsync = write, fsync
            get_afresh()
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def kill_at_every_step(tmp_path):
    """Exit statuses by step; the last is the one that survived. The next process finds a whole entry or none, and never warns."""
    outcomes = []
    while not outcomes or outcomes[-1] == 9:
        n = len(outcomes) + 1
        folder = tmp_path / str(n) / "cache"
        with fa4.settings(cache_dir=str(folder)):
            outcomes.append(write_in_a_child(folder, n))
            check_after_kill(folder, n)
    return outcomes


def test_a_writer_killed_at_any_step_leaves_nothing_harmful(tmp_path, compiles):
    outcomes = kill_at_every_step(tmp_path)
    assert outcomes[-1] == 0
    assert len(outcomes) > 40, "files, their pieces and the rename should be many more steps"


def check_after_kill(folder, n):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cache = DiskCache(folder, MIB)
        key = kernel_key(*REQUEST)
        assert cache.load(key) in (None, fake_artifact("fake_1")), f"killed at step {n}"
        with cache.lock(key):
            cache.store(key, fake_artifact("fake_1"))
        assert cache.load(key) == fake_artifact("fake_1"), f"killed at step {n}"
        assert not list((folder / "staging").iterdir())


def test_the_kill_test_would_notice_an_entry_written_in_place(tmp_path, compiles, monkeypatch):
    """Planted fault: a writer without rename."""

    def store(self, key, artifact):
        self._make_folders()
        if not self._entry(key).exists():
            self._entry(key).mkdir()
            entry.write_entry(self._entry(key), key, artifact)

    monkeypatch.setattr(DiskCache, "store", store)
    with pytest.raises(AssertionError, match="killed at step"):
        kill_at_every_step(tmp_path)


# --- size ---


def fill(cache, count, size=10_000):
    for number in range(count):
        cache.store(f"{number:064}", fake_artifact(size=size))
        os.utime(cache.root / "entries" / f"{number:064}", (1000 + number, 1000 + number))


def names(cache):
    return [int(info.key) for info in cache.entries()]


def test_the_least_recently_used_are_evicted(folder):
    cache = DiskCache(folder, limit=100_000)
    fill(cache, 4)  # each about 21 kB
    assert names(cache) == [0, 1, 2, 3]
    assert cache.load(f"{0:064}") is not None  # a use
    cache.store(f"{4:064}", fake_artifact(size=10_000))
    assert set(names(cache)) == {0, 2, 3, 4}
    assert sum(info.bytes for info in cache.entries()) <= cache.limit


def test_what_is_being_compiled_is_not_evicted(folder):
    cache = DiskCache(folder, limit=100_000)
    fill(cache, 4)
    with cache.lock(f"{0:064}"):
        cache.store(f"{4:064}", fake_artifact(size=10_000))
        assert set(names(cache)) == {0, 2, 3, 4}


def test_an_entry_larger_than_the_limit_is_kept_until_the_next(folder):
    cache = DiskCache(folder, limit=1000)
    fill(cache, 2)
    assert names(cache) == [1]


def test_list_verify_clear(folder):
    cache = DiskCache(folder, MIB)
    assert cache.entries() == []
    assert cache.verify() == {}
    assert cache.clear() == 0
    fill(cache, 3)
    (folder / "entries" / f"{1:064}" / "host.o").write_bytes(b"changed")
    (folder / "staging" / KEY).mkdir()
    assert [info.summary and info.summary["function"] for info in cache.entries()] == ["fake"] * 3
    assert cache.verify() == {f"{0:064}": None, f"{1:064}": "host.o was changed", f"{2:064}": None}
    with cache.lock(f"{2:064}"):
        assert cache.clear() == 2
    assert names(cache) == [2]
    assert cache.clear() == 1
    assert [path.name for path in folder.rglob("*") if path.is_file()] == []
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert compile_count(folder) == 0
