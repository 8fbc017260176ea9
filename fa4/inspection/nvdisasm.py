"""Running NVIDIA's disassembler, which comes with the ``inspect`` extra or with a CUDA toolkit."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from importlib import metadata
from pathlib import Path

from fa4.errors import InspectionError

DISTRIBUTION = "nvidia-cuda-nvdisasm"
REMEDY = "pip install 'fa4[inspect]'"
_PROGRAM = "nvdisasm"
_TIMEOUT_SECONDS = 120.0


def find() -> Path | None:
    """The executable: of the installed wheel, else the first on PATH, else None."""
    try:
        files = metadata.files(DISTRIBUTION) or []
    except metadata.PackageNotFoundError:
        files = []
    for file in files:
        path = Path(str(file.locate()))
        if path.name == _PROGRAM and path.exists():
            return path
    found = shutil.which(_PROGRAM)
    return Path(found) if found else None


def disassemble(cubin: bytes) -> str:
    """SASS with a comment wherever the source line changes (``nvdisasm -c -g``).

    Raises:
        InspectionError: there is no nvdisasm, or it cannot read this cubin.
    """
    with tempfile.NamedTemporaryFile(prefix="fa4-", suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return run("-c", "-g", file.name)


def version() -> str:
    """The release of the nvdisasm that is found, such as "V13.0.85".

    Raises:
        InspectionError: there is none, or it does not run.
    """
    words = run("--version").split()
    return next((word.rstrip(",") for word in words if word.startswith("V") and word[1:2].isdigit()), "of unknown version")


def run(*arguments: str) -> str:
    """What nvdisasm prints.

    Raises:
        InspectionError: it is not installed, cannot be started, or fails.
    """
    program = find()
    if program is None:
        raise InspectionError(f"SASS needs nvdisasm, which is not installed; {REMEDY}, or put a CUDA toolkit's bin folder on PATH")
    try:
        result = subprocess.run(
            [str(program), *arguments], capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL, timeout=_TIMEOUT_SECONDS
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise InspectionError(f"{program} does not run: {error}; {REMEDY}") from error
    if result.returncode != 0:
        reason = (result.stderr or result.stdout).strip() or f"exit status {result.returncode}"
        raise InspectionError(f"{program} cannot read this: {reason}; a newer one may: pip install --upgrade {DISTRIBUTION}")
    return result.stdout
