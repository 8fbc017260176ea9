"""The compile cache on disk: one folder, safe to share between processes of one user and to be killed at any moment.

    <root>/entries/<key>/     metadata.json, kernel.ptx, kernel.cubin, host.o; complete, since it was written elsewhere and renamed
    <root>/staging/<key>/     an entry being written, by the process that holds the lock
    <root>/locks/<key>.lock   held while a kernel is compiled or removed; the system releases it when its holder dies

Nothing here raises because of the disk: what cannot be read is compiled again, what cannot be written stays in memory.
"""

from __future__ import annotations

import logging
import os
import shutil
import stat
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fa4._settings import current
from fa4.compiler.artifact import Artifact
from fa4.compiler.entry import DamagedEntryError, read_entry, read_metadata, write_entry

if TYPE_CHECKING:
    from filelock import FileLock

_MIB = 1 << 20
_WAIT_SECONDS = 30.0  # between two messages of a process that waits
_POLL_SECONDS = 0.05

_log = logging.getLogger(__name__)
_warned: set[str] = set()  # roots that were reported as unusable


class CacheWarning(UserWarning):
    """The cache works less well than it should; results are not affected."""


@dataclass(frozen=True)
class EntryInfo:
    """One entry as listed: ``bytes`` on disk, ``used`` as seconds since the epoch, ``summary`` None where the entry is damaged."""

    key: str
    bytes: int
    used: float
    summary: dict[str, Any] | None


def default_cache() -> DiskCache | None:
    """The cache that the settings name, or None where they turn it off."""
    settings = current()
    if not settings.cache:
        return None
    if settings.cache_dir is not None:
        return DiskCache(Path(settings.cache_dir).expanduser(), settings.cache_size * _MIB)
    import platformdirs

    return DiskCache(platformdirs.user_cache_path("fa4", appauthor=False), settings.cache_size * _MIB)


class DiskCache:
    """A cache folder of at most about ``limit`` bytes; the entries unused for longest go first."""

    def __init__(self, root: Path, limit: int) -> None:
        self.root = root
        self.limit = limit

    def load(self, key: str, report: bool = False) -> Artifact | None:
        """A verified artifact, or None. With ``report``, for the holder of the lock, a damaged entry is removed with one warning."""
        entry = self._entry(key)
        try:
            self._check_root()
            artifact = read_entry(entry, key)
        except FileNotFoundError:  # no entry, or one that was evicted while it was read
            return None
        except DamagedEntryError as error:
            if report:
                warnings.warn(f"compile cache entry {entry} is not used, since {error}; it is rebuilt", CacheWarning, stacklevel=2)
                with suppress(OSError):
                    self._remove(key)
            return None
        except OSError as error:
            self._degrade(error)
            return None
        with suppress(OSError):  # a read-only folder: then nothing is evicted either
            os.utime(entry)
        return artifact

    def store(self, key: str, artifact: Artifact) -> None:
        """Keep an artifact, for the holder of the lock; then make room."""
        staging = self.root / "staging" / key
        try:
            self._make_folders()
            shutil.rmtree(staging, ignore_errors=True)  # of a writer that died
            staging.mkdir(mode=0o700)
            write_entry(staging, key, artifact)
            with suppress(FileExistsError):
                _rename(staging, self._entry(key))
            self._evict(keep=key)
        except OSError as error:
            self._degrade(error)
        finally:
            shutil.rmtree(staging, ignore_errors=True)

    @contextmanager
    def lock(self, key: str) -> Iterator[None]:
        """Hold the lock of one key, waiting for as long as somebody else compiles it. Where locks do not work, nothing is held."""
        lock = None
        try:
            self._make_folders()
            lock = self._acquire(key)
        except OSError as error:
            self._degrade(error)
        try:
            yield
        finally:
            if lock is not None:
                lock.release()

    def problem(self) -> str | None:
        """Why kernels cannot be kept here, None where they can. The folder is made where it does not exist."""
        try:
            self._make_folders()
        except OSError as error:
            return error.strerror or str(error)
        return None if os.access(self.root / "staging", os.W_OK | os.X_OK) else "it cannot be written"

    def entries(self) -> list[EntryInfo]:
        """Every entry, the least recently used first."""
        found = []
        for key in self._keys():
            folder = self._entry(key)
            try:
                size = sum(file.stat().st_size for file in folder.iterdir())
                used = folder.stat().st_mtime
                summary = read_metadata(folder)["artifact"]
            except DamagedEntryError:
                summary = None
            except OSError:  # removed while listed
                continue
            found.append(EntryInfo(key, size, used, summary))
        return sorted(found, key=lambda info: info.used)

    def verify(self) -> dict[str, str | None]:
        """What is wrong with each entry, None where nothing is. Reads everything, changes nothing."""
        result: dict[str, str | None] = {}
        for key in self._keys():
            try:
                read_entry(self._entry(key), key)
                result[key] = None
            except FileNotFoundError:
                continue
            except (DamagedEntryError, OSError) as error:
                result[key] = str(error)
        return result

    def clear(self) -> int:
        """Remove every entry, except those that are being compiled at this moment, and what dead writers left. How many it removed."""
        if not self.root.exists():
            return 0
        self._check_root()
        removed = sum(self._remove_unless_busy(key) for key in self._keys())
        for folder in ("staging", "locks"):
            for path in (self.root / folder).glob("*"):
                self._remove_unless_busy(path.name.removesuffix(".lock"))
        return removed

    def _entry(self, key: str) -> Path:
        return self.root / "entries" / key

    def _keys(self) -> list[str]:
        return sorted(path.name for path in (self.root / "entries").glob("*"))

    def _lock_file(self, key: str) -> Path:
        return self.root / "locks" / f"{key}.lock"

    def _check_root(self) -> None:
        """Code is loaded from this folder: nobody else may be able to put any there.

        Raises:
            FileNotFoundError: it does not exist.
            PermissionError: others may write to it, or it is another user's.
        """
        status = self.root.stat()
        if status.st_uid != os.getuid():
            raise PermissionError(f"it belongs to user {status.st_uid}, not to {os.getuid()}; use a folder of your own")
        if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise PermissionError(
                f"others may write to it (mode {stat.S_IMODE(status.st_mode):o}); chmod 700 it after checking what is in it"
            )

    def _make_folders(self) -> None:
        self.root.parent.mkdir(parents=True, exist_ok=True)
        self.root.mkdir(mode=0o700, exist_ok=True)
        self._check_root()
        for name in ("entries", "staging", "locks"):
            (self.root / name).mkdir(mode=0o700, exist_ok=True)

    def _acquire(self, key: str, wait: bool = True) -> FileLock:
        from filelock import FileLock, Timeout

        lock = FileLock(self._lock_file(key), mode=0o600)
        try:
            lock.acquire(timeout=0)
            return lock
        except Timeout:
            if not wait:
                raise
        _log.info("waiting for another process that compiles the same kernel (%s)", lock.lock_file)
        while True:
            try:
                lock.acquire(timeout=_WAIT_SECONDS, poll_interval=_POLL_SECONDS)
                return lock
            except Timeout:
                _log.warning("still waiting for another process that compiles the same kernel (%s)", lock.lock_file)

    def _remove(self, key: str) -> None:
        """Remove an entry in one step, so that nobody finds half of it."""
        aside = self.root / "staging" / key
        shutil.rmtree(aside, ignore_errors=True)
        with suppress(FileNotFoundError):
            os.rename(self._entry(key), aside)
        shutil.rmtree(aside, ignore_errors=True)

    def _remove_unless_busy(self, key: str) -> bool:
        try:
            lock = self._acquire(key, wait=False)
        except OSError:  # Timeout is one: somebody holds it
            return False
        try:
            existed = self._entry(key).exists()
            self._remove(key)
            self._lock_file(key).unlink(missing_ok=True)  # FileLock notices when a file it has opened was removed
            return existed
        finally:
            lock.release()

    def _evict(self, keep: str) -> None:
        entries = self.entries()
        total = sum(info.bytes for info in entries)
        for info in entries:
            if total <= self.limit:
                return
            if info.key != keep and self._remove_unless_busy(info.key):
                _log.info("evicted %s from the compile cache", info.key)
                total -= info.bytes

    def _degrade(self, error: OSError) -> None:
        """Say once per process and folder that it cannot be used."""
        if str(self.root) not in _warned:
            _warned.add(str(self.root))
            reason = error.strerror or str(error)
            warnings.warn(
                f"compile cache {self.root} cannot be used: {reason}; kernels compiled here are kept in memory only "
                "(FA4_CACHE_DIR names another folder, FA4_CACHE=0 turns the cache off)",
                CacheWarning,
                stacklevel=3,
            )


def _rename(source: Path, target: Path) -> None:
    """``os.rename``, with one kind of error where the target exists: somebody without a lock was faster, with the same result.

    Raises:
        FileExistsError: it does.
        OSError: as ``os.rename``.
    """
    try:
        os.rename(source, target)
    except OSError:
        if target.exists():
            raise FileExistsError(str(target)) from None
        raise
