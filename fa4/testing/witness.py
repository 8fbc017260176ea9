"""Kernels that others wrote, as witnesses: where the virtual GPU runs flash-attn-4 right, it is not made to fit this project's kernels.

The peer runs in a process of its own, since importing it changes the DSL's frontend for good.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import fa4
from fa4 import _settings
from fa4.errors import BackendError, Fa4Error
from fa4.testing.compare import Comparison
from fa4.vgpu.capture import Capture

PEER = "flash-attn-4"
VERSION = "4.0.0b36"
MASKS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window_size": (100, 30)},
    "softcap": {"softcap": 10.0},
}
_LENGTHS = ((200, 333), (500, 777), (1, 300), (256, 256))
_PACKED = ((200, 333), (1, 300), (65, 129))
_HEADS = ((2, 2), (2, 1), (3, 1))
_DIMS = {"sm_80": ((64, 64), (128, 128)), "sm_90a": ((64, 64), (128, 128), (192, 128))}
_BLACKWELL = ("sm_100a", "sm_103a")
_DIMS |= dict.fromkeys(_BLACKWELL, ((64, 64), (96, 96), (128, 128), (192, 128)))


@dataclass(frozen=True)
class Witness:
    """One request of the peer.

    ``dims`` are the head dimensions (D, Dv), ``heads`` the numbers of query and key heads, ``lengths`` (Sq, Sk); more than one make a
    packed batch. ``mask`` is a key of ``MASKS``. ``pairs`` lets the kernels use CTA pairs where they do that. ``splits`` of the keys are
    computed apart and combined. ``seed`` is that of the inputs.
    """

    dims: tuple[int, int]
    mask: str = "full"
    heads: tuple[int, int] = (2, 1)
    lengths: tuple[tuple[int, int], ...] = ((256, 256),)
    backward: bool = False
    deterministic: bool = False
    pairs: bool = True
    splits: int = 1
    seed: int = 0

    @property
    def packed(self) -> bool:
        """Whether it is a packed batch."""
        return len(self.lengths) > 1

    def __str__(self) -> str:
        dims = f"D {self.dims[0]}" + (f", Dv {self.dims[1]}" if self.dims[0] != self.dims[1] else "")
        lengths = " ".join(f"{q}x{k}" for q, k in self.lengths)
        more = {
            "packed": self.packed,
            "backward": self.backward,
            "deterministic": self.deterministic,
            "one CTA": not self.pairs,
            f"{self.splits} splits": self.splits > 1,
        }
        return ", ".join(
            [dims, self.mask, f"{self.heads[0]}:{self.heads[1]} heads", lengths, *(name for name, is_so in more.items() if is_so)]
        )


@dataclass(frozen=True)
class Answer:
    """What the peer did with a request.

    ``results`` has a comparison with float64 for each result and sequence; ``kernels`` the names of what was launched, ``instructions``
    how many warp instructions that was, in ``seconds``, and ``opcodes`` which;
    ``digests`` are hashes of the bits of each result; ``failure`` is the error, if there was one.
    """

    witness: Witness
    results: tuple[Comparison, ...] = ()
    kernels: tuple[str, ...] = ()
    instructions: int = 0
    seconds: float = 0.0
    opcodes: tuple[str, ...] = ()
    digests: tuple[tuple[str, str], ...] = ()
    failure: str = ""

    @property
    def paired(self) -> bool:
        """Whether CTA pairs multiplied."""
        return any("cta_group::2" in opcode for opcode in self.opcodes if "mma" in opcode)

    @property
    def ok(self) -> bool:
        """Whether kernels ran and every result is within its bound."""
        return not self.failure and bool(self.kernels and self.results) and all(result.ok for result in self.results)


def witnesses(arch: str, backward: bool = False) -> list[Witness]:
    """The matrix: every head dimension with every mask and every pair of lengths, and the variants of an architecture.

    Raises:
        BackendError: the peer has no such kernels.
    """
    if arch not in _DIMS or (backward and arch == "sm_80"):
        kernels = ("" if backward else "sm_80, ") + "sm_90a, sm_100a or sm_103a"
        raise BackendError("arch", arch, f"{PEER} {VERSION} has no such {'backward' if backward else 'forward'}", f"try {kernels}")
    masks = [mask for mask in MASKS if arch != "sm_80" or mask in ("full", "causal")]
    cases = []
    for i, dims in enumerate(_DIMS[arch]):
        # Its Hopper backward takes groups of query heads only where the two head dimensions are equal.
        no_groups = arch == "sm_90a" and backward and dims[0] != dims[1]
        for j, mask in enumerate(masks):
            for k, lengths in enumerate(_LENGTHS):
                cases.append(Witness(dims, mask, (2, 2) if no_groups else _HEADS[(i + j + k) % 3], (lengths,), backward))
        if arch != "sm_80":
            packed = (("full", (2, 2)), ("causal", (2, 2) if no_groups else (3, 1)))
            cases += [Witness(dims, mask, heads, _PACKED, backward) for mask, heads in packed]
        if arch in _BLACKWELL and (dims[0] == 128 or (dims[0] > 128 and not backward)):  # from D 192 on its backward needs pairs
            cases += [Witness(dims, "full", heads, ((500, 777),), backward, pairs=False) for heads in ((2, 2), (2, 1))]
        if arch in _BLACKWELL and not backward and dims[0] == dims[1]:
            cases += [Witness(dims, mask, lengths=((200, 777),), splits=splits) for mask, splits in (("full", 2), ("causal", 3))]
    if backward:
        chosen = [case for case in cases if case.mask in ("full", "causal") and case.lengths != ((1, 300),)]
        cases += [replace(case, deterministic=True) for case in chosen]
    return cases


def require_peer() -> None:
    """See that flash-attn-4 is installed, by its own name: another package gives an importable flash_attn too.

    Raises:
        BackendError: it is not, or another version is.
    """
    try:
        found = metadata.version(PEER)
    except metadata.PackageNotFoundError:
        found = "none"
    if found != VERSION:
        remedy = f"pip install '{PEER}=={VERSION}' triton"
        raise BackendError("peer", PEER, f"version {VERSION} must be installed, found {found}", remedy)


def run_witnesses(
    arch: str, cases: Sequence[Witness], schedule: str = "priority", seeds: Sequence[int] = (0,), checks: str | None = None
) -> Iterator[Answer]:
    """Run the peer in a process of its own, all cases under each seed of the schedule in turn; ``checks`` None: those of the settings.

    The settings ``vgpu_processes`` and ``vgpu_execution`` hold in that process too. It ends where the iteration is given up.

    Raises:
        BackendError: flash-attn-4 is not installed.
        Fa4Error: the process ended early.
    """
    return _run(cases, [*(["--checks", checks] if checks else []), arch, schedule, *map(str, seeds)], len(cases) * len(seeds))


def captured(arch: str, case: Witness) -> list[Capture]:
    """The launches that the peer makes for a request.

    Raises:
        BackendError: flash-attn-4 is not installed.
        Fa4Error: it fails.
    """
    with TemporaryDirectory() as folder:
        (answer,) = _run([case], ["--captures", folder, arch, "round_robin", "0"], 1)
        if not answer.ok:
            raise Fa4Error(f"{PEER}: {case}: {answer.failure or [str(r) for r in answer.results if not r.ok]}")
        return [Capture.load(Path(folder) / f"{number}.npz") for number in range(len(answer.kernels))]


def _run(cases: Sequence[Witness], arguments: Sequence[str], expected: int) -> Iterator[Answer]:
    require_peer()
    path = os.pathsep.join(filter(None, [str(Path(fa4.__file__).parents[1]), os.environ.get("PYTHONPATH")]))
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-m", "fa4.testing.peer", *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={
            **os.environ,
            "PYTHONPATH": path,
            "FA4_VGPU_PROCESSES": str(_settings.current().vgpu_processes),
            "FA4_VGPU_EXECUTION": _settings.current().vgpu_execution,
        },
    )
    assert process.stdin is not None
    assert process.stdout is not None
    with process:
        process.stdin.write("".join(json.dumps(asdict(case)) + "\n" for case in cases))
        process.stdin.close()
        count = 0
        try:
            for line in process.stdout:
                if line.startswith("{"):
                    count += 1
                    yield _answered(json.loads(line))
        except GeneratorExit:
            process.terminate()
            raise
    if count != expected:
        raise Fa4Error(f"{PEER} answered {count} of {expected} requests, exit status {process.returncode}")


def witness(data: dict[str, Any]) -> Witness:
    """From its JSON."""
    pairs = {name: tuple(data[name]) for name in ("dims", "heads")}
    return Witness(**{**data, **pairs, "lengths": tuple(map(tuple, data["lengths"]))})


def _answered(data: dict[str, Any]) -> Answer:
    results = tuple(Comparison(**{**result, "index": tuple(result["index"])}) for result in data.pop("results"))
    lists = {name: tuple(map(tuple, data[name]) if name == "digests" else data[name]) for name in ("kernels", "opcodes", "digests")}
    return Answer(**{**data, **lists, "witness": witness(data["witness"]), "results": results})
