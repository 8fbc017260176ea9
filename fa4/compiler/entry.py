"""One cache entry: a folder with an artifact's files and a metadata file that vouches for each of them."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from fa4.compiler.artifact import Artifact, from_parts
from fa4.compiler.key import FORMAT

METADATA_FILE = "metadata.json"


class DamagedEntryError(Exception):
    """An entry is incomplete, changed, of another format or owner, or not what its name says."""


def write_entry(folder: Path, key: str, artifact: Artifact) -> None:
    """Write an entry into an existing empty folder, and wait until the disk has it.

    Raises:
        OSError: the file system refuses.
    """
    files = artifact.files()
    content: dict[str, Any] = {
        "format": FORMAT,
        "key": key,
        "files": {name: {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()} for name, data in files.items()},
        "artifact": artifact.metadata(),
    }
    content["sha256"] = _checksum(content)
    for name, data in files.items():
        _write(folder / name, data)
    _write(folder / METADATA_FILE, json.dumps(content, indent=1).encode())


def read_entry(folder: Path, key: str) -> Artifact:
    """The artifact of an entry, every byte of it verified.

    Raises:
        FileNotFoundError: there is no entry.
        DamagedEntryError: there is one, but it must not be used.
        OSError: it cannot be read.
    """
    if folder.stat().st_uid != os.getuid():
        raise DamagedEntryError("it belongs to another user")
    metadata = read_metadata(folder)
    if metadata["key"] != key:
        raise DamagedEntryError("it was made for another key")
    files = {}
    for name, expected in metadata["files"].items():
        if os.sep in name:
            raise DamagedEntryError(f"it names a file outside itself, {name}")
        try:
            data = (folder / name).read_bytes()
        except FileNotFoundError:
            raise DamagedEntryError(f"{name} is missing") from None
        if len(data) != expected["bytes"] or hashlib.sha256(data).hexdigest() != expected["sha256"]:
            raise DamagedEntryError(f"{name} was changed")
        files[name] = data
    try:
        return from_parts(metadata["artifact"], files)
    except (KeyError, TypeError, ValueError) as error:
        raise DamagedEntryError(f"it does not hold an artifact: {error!r}") from error


def read_metadata(folder: Path) -> dict[str, Any]:
    """The metadata of an entry, verified against its own checksum.

    Raises:
        DamagedEntryError: not there, not JSON, of another format, or changed.
        OSError: it cannot be read.
    """
    try:
        content = json.loads((folder / METADATA_FILE).read_bytes())
    except FileNotFoundError:
        raise DamagedEntryError(f"{METADATA_FILE} is missing") from None
    except ValueError:  # of JSON, or of UTF-8
        raise DamagedEntryError(f"{METADATA_FILE} is not JSON") from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise DamagedEntryError("it has another format")
    if content.pop("sha256", None) != _checksum(content):
        raise DamagedEntryError(f"{METADATA_FILE} was changed")
    return content


def _checksum(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _write(path: Path, data: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(descriptor, view) :]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
