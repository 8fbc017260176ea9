"""``fa4 cache``: where compiled kernels are kept, what is there, whether it is intact."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

from fa4.errors import ArgumentError

if TYPE_CHECKING:
    from fa4.compiler.cache import DiskCache, EntryInfo


def add_command(commands: Any) -> None:
    """Add ``fa4 cache``."""
    parser = commands.add_parser("cache", help="show, check or clear the compiled kernels on disk")
    actions = {
        "path": (_path, "print the folder"),
        "list": (_list, "list its kernels, the least recently used first"),
        "verify": (_verify, "check every file against its checksum; exit status 1 where one is damaged"),
        "clear": (_clear, "remove every kernel that is not being compiled right now"),
    }
    parser.add_argument("action", choices=actions, help="; ".join(f"{name}: {text}" for name, (_, text) in actions.items()))
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=lambda arguments: actions[arguments.action][0](_cache(), arguments.json))


def _cache() -> DiskCache:
    from fa4.compiler.cache import default_cache

    cache = default_cache()
    if cache is None:
        raise ArgumentError("FA4_CACHE", "0", "the compile cache is turned off", "unset it to look at the cache")
    return cache


def _path(cache: DiskCache, as_json: bool) -> int:
    print(json.dumps({"path": str(cache.root)}) if as_json else cache.root)
    return 0


def _list(cache: DiskCache, as_json: bool) -> int:
    from fa4._table import format_table

    entries = cache.entries()
    if as_json:
        print(json.dumps([{"key": e.key, "bytes": e.bytes, "used": e.used, **_describe(e)} for e in entries]))
        return 0
    rows = [
        [e.key[:12], *_describe(e).values(), f"{e.bytes / 1024:.0f}", time.strftime("%Y-%m-%d %H:%M", time.localtime(e.used))]
        for e in entries
    ]
    print(format_table(["key", "kernel", "arch", "dsl", "KiB", "last used"], rows))
    print(f"{len(entries)} kernels, {sum(e.bytes for e in entries) / 2**20:.1f} of at most {cache.limit / 2**20:.0f} MiB, in {cache.root}")
    return 0


def _describe(entry: EntryInfo) -> dict[str, str]:
    if entry.summary is None:
        return {"kernel": "(damaged)", "arch": "-", "dsl": "-"}
    tools = entry.summary["toolchain"]
    return {"kernel": entry.summary["function"], "arch": entry.summary["arch"], "dsl": f"{tools['dsl']} {tools['flavour']}"}


def _verify(cache: DiskCache, as_json: bool) -> int:
    result = cache.verify()
    damaged = {key: reason for key, reason in result.items() if reason is not None}
    if as_json:
        print(json.dumps(result))
    else:
        for key, reason in damaged.items():
            print(f"{key}: {reason}")
        print(f"{len(result)} kernels, {len(damaged)} damaged" + " (they are rebuilt when they are needed)" * bool(damaged))
    return 1 if damaged else 0


def _clear(cache: DiskCache, as_json: bool) -> int:
    try:
        removed = cache.clear()
    except OSError as error:
        raise ArgumentError("FA4_CACHE_DIR", str(cache.root), str(error), "clear it by hand") from error
    print(json.dumps({"removed": removed}) if as_json else f"removed {removed} kernels from {cache.root}")
    return 0
