"""Tools to find where results stop being bitwise reproducible, and why: ``check`` and ``fingerprint``; docs/determinism.md is a guide."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, TypeGuard

import torch
from torch import Tensor

from fa4 import _settings
from fa4.errors import ArgumentError, DtypeError
from fa4.kernels.common.dq_layout import dq_element, dq_offset
from fa4.runtime import virtual
from fa4.schedule.order import Schedule, section_size
from fa4.schedule.tiles import TileProblem
from fa4.vgpu.sums import Sums, differences

CHUNK_BYTES = 1 << 26
DIGITS = 32


def fingerprint(tensor: Tensor) -> str:
    r"""32 hexadecimal digits that say of two tensors whether dtype, shape and every bit of their elements are the same.

    Strides, device, storage and gradients do not matter; 0.0 and -0.0 differ, and so do two NaN with different bits. The digest is the
    first half of the SHA-256 of ``b"fa4-fingerprint-1\0"``, the name of the dtype (``bfloat16``), ``\0``, the sizes in decimal joined by
    commas, ``\0``, and the elements in row-major order, little-endian: the same in every process, on every machine, in later versions.
    Waits for the tensor's device; uses at most 64 MB of host memory at a time.

    Raises:
        DtypeError: not a dense tensor.
    """
    if not isinstance(tensor, Tensor) or tensor.layout != torch.strided or tensor.is_nested or tensor.is_quantized:
        raise DtypeError("tensor", type(tensor).__name__, "must be a dense torch.Tensor", "convert with torch.as_tensor or .to_dense()")
    dtype = str(tensor.dtype).removeprefix("torch.")
    digest = hashlib.sha256(f"fa4-fingerprint-1\0{dtype}\0{','.join(map(str, tensor.shape))}\0".encode())
    for part in _chunks(tensor.detach()):
        digest.update(_bytes(part))
    return digest.hexdigest()[:DIGITS]


def _chunks(x: Tensor) -> Iterator[Tensor]:
    """Parts of at most CHUNK_BYTES, whose elements one after the other are those of ``x`` in row-major order."""
    if x.dim() == 0 or x.numel() * x.element_size() <= CHUNK_BYTES:
        yield x
        return
    rows = max(1, CHUNK_BYTES * x.shape[0] // (x.numel() * x.element_size()))
    for part in x.split(rows):
        yield from _chunks(part[0]) if rows == 1 else [part]


def _bytes(x: Tensor) -> bytes:
    flat = x.resolve_conj().resolve_neg().contiguous().cpu().reshape(-1)
    raw = flat.view(torch.uint8).numpy()
    if sys.byteorder == "big":
        width = x.element_size() // (2 if x.dtype.is_complex else 1)
        raw = raw.reshape(-1, width)[:, ::-1]
    return raw.tobytes()


@dataclass(frozen=True)
class Run:
    """How a run was made: on which CUDA stream, by number, and with which seed of the virtual GPU; None where neither matters."""

    number: int
    stream: int | None
    seed: int | None

    def __str__(self) -> str:
        how = [f"{name} {value}" for name, value in (("seed", self.seed), ("stream", self.stream)) if value is not None]
        return f"run {self.number}" + (f" ({', '.join(how)})" if how else "")


@dataclass(frozen=True)
class Step:
    """One addition to the sum that differs: the tile, the number that it added, and the sum after it, in float32."""

    tile: str
    added: float
    total: float


@dataclass(frozen=True)
class Order:
    """In which order a run of the virtual GPU added up a float32 number, ``place`` in memory of ``kernel``."""

    kernel: str
    place: str
    steps: tuple[Step, ...]

    def __str__(self) -> str:
        return "\n".join(f"    {step.total:>16.9g} after {step.added:.9g} of {step.tile}" for step in self.steps)


@dataclass(frozen=True)
class Difference:
    """The first element, of the first output, in which two runs differ.

    ``bits`` are the two patterns, hexadecimal; ``elements`` counts how many of the output differ. On the virtual GPU ``orders`` has for
    each run the order in which a sum was added up that differs: that of this element where it is one of dq, else the first of all. None
    where no sum differs.
    """

    output: str
    index: tuple[int, ...]
    bits: tuple[str, str]
    values: tuple[Any, Any]
    elements: int
    runs: tuple[Run, Run]
    orders: tuple[Order, Order] | None = None

    def __str__(self) -> str:
        lines = [f"{self.output} differs in {self.elements} elements, first at {self.index}:"]
        lines += [f"  {run}: {value!r}, bits 0x{bits}" for run, value, bits in zip(self.runs, self.values, self.bits, strict=True)]
        if self.orders is not None:
            first = self.orders[0]
            lines.append(f"{first.kernel} added up {first.place} in different orders:")
            for run, order in zip(self.runs, self.orders, strict=True):
                lines += [f"  {run}:", str(order)]
        return "\n".join(lines)


@dataclass(frozen=True)
class Unordered:
    """Two additions to one sum that no synchronisation orders: they came in this order by chance."""

    place: str
    before: str
    after: str

    def __str__(self) -> str:
        return f"nothing orders the addition of {self.after} to {self.place} behind that of {self.before}"


@dataclass(frozen=True)
class Check:
    """Outcome of ``check``: true where all ``runs`` runs gave the same bits in all ``outputs``.

    On the virtual GPU ``unordered`` names the first two additions of the first run whose order is not enforced; None where there are none.
    """

    runs: int
    outputs: tuple[str, ...]
    difference: Difference | None
    unordered: Unordered | None = None

    def __bool__(self) -> bool:
        return self.difference is None

    def __str__(self) -> str:
        lines = [f"{self.runs} runs gave the same bits in {', '.join(self.outputs)}" if self else str(self.difference)]
        return "\n".join(lines + ([str(self.unordered)] if self.unordered else []))


def check(
    fn: Callable[..., Any], inputs: Sequence[Any], *, runs: int | None = None, streams: int = 1, seeds: Iterable[int] | None = None
) -> Check:
    """Call ``fn(*inputs)`` several times and compare the bits of what it returns: a tensor, or tuples, lists and dicts of them.

    Where ``fn`` uses the virtual GPU, each run has a seed of its own and strict random priorities (``vgpu_schedule="priority"``): the
    orders in which hardware may, once in a long while, run the tiles. If two runs differ there, both are done again, and
    ``difference.orders`` says which order of which tiles led to the two values. Whether the order of additions is enforced at all is
    looked at in the first run, with the checks of order on (``vgpu_checks="hazards"``): see ``Check.unordered``.

    Args:
        fn: the function; it must not change its inputs, and compute gradients itself.
        inputs: its arguments.
        runs: how often it is called; by default as often as there are seeds, or 5 times.
        streams: CUDA streams that the runs take turns on; only for inputs on CUDA.
        seeds: seeds of the virtual GPU, used in turn; 0, 1, 2 and so on by default.

    Raises:
        ArgumentError: fewer than 2 runs, fewer than 1 stream, several streams without CUDA tensors, no seeds.
        DtypeError: ``fn`` returns something else than tensors.
    """
    chosen = None if seeds is None else list(seeds)
    count = runs if runs is not None else len(chosen) if chosen else 5
    if count < 2:
        raise ArgumentError("runs", count, "one run has nothing to be compared with", "use 2 or more")
    if chosen is not None and not chosen:
        raise ArgumentError("seeds", chosen, "there must be one at least", "leave it out for 0, 1, 2, ...")
    on_gpu = [x.device for x in inputs if isinstance(x, Tensor) and x.is_cuda]
    if streams < 1 or (streams > 1 and not on_gpu):
        raise ArgumentError("streams", streams, "must be at least 1, and more only for CUDA tensors", "leave it out")
    queues = [torch.cuda.Stream(on_gpu[0]) for _ in range(streams)] if streams > 1 else []
    plan = [Run(i, i % streams if queues else None, None if on_gpu else (chosen[i % len(chosen)] if chosen else i)) for i in range(count)]
    first, unordered = _first(fn, inputs, plan[0], queues)
    for run in plan[1:]:
        results = _results(fn, inputs, run, queues)
        difference = _compare(first, results, (plan[0], run))
        if difference is not None:
            return Check(run.number + 1, tuple(first), _explained(difference, fn, inputs), unordered)
    return Check(count, tuple(first), None, unordered)


def _first(fn: Callable[..., Any], inputs: Sequence[Any], run: Run, queues: Sequence[Any]) -> tuple[dict[str, Tensor], Unordered | None]:
    """The outputs of the first run, and the first additions in it that nothing orders."""
    if run.seed is None:
        return _results(fn, inputs, run, queues), None
    checks = "hazards" if _settings.current().vgpu_checks == "basic" else _settings.current().vgpu_checks
    with virtual.recorded_sums() as recorded, _settings.settings(vgpu_checks=checks):
        results = _results(fn, inputs, run, queues)
    for sums in recorded:
        if sums.unordered is not None:
            before, after = (sums.additions[i] for i in sums.unordered)
            place = _place(sums.about, after.buffer, max(before.offset, after.offset))
            return results, Unordered(place, *(tile_name(sums.about, each.cta) for each in (before, after)))
    return results, None


def _results(fn: Callable[..., Any], inputs: Sequence[Any], run: Run, queues: Sequence[Any] = ()) -> dict[str, Tensor]:
    """The outputs of a run by name, on the host."""
    schedule = {} if run.seed is None else {"vgpu_seed": run.seed, "vgpu_schedule": "priority"}
    where: AbstractContextManager[Any] = nullcontext()
    if run.stream is not None:
        queues[run.stream].wait_stream(torch.cuda.current_stream(queues[run.stream].device))
        where = torch.cuda.stream(queues[run.stream])
    with _settings.settings(**schedule), where:
        return {name: x.detach().cpu().clone() for name, x in _named(fn(*inputs), "")}


def _named(value: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    """The tensors in nested containers, with names such as ``out``, ``[1]`` or ``grads.q``."""
    if isinstance(value, Tensor):
        yield name or "output", value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _named(item, f"{name}.{key}" if name else str(key))
    elif isinstance(value, (tuple, list)):
        fields = getattr(value, "_fields", None)
        for i, item in enumerate(value):
            yield from _named(item, (f"{name}.{fields[i]}" if name else fields[i]) if fields else f"{name}[{i}]")
    elif value is not None:
        raise DtypeError("fn", type(value).__name__, "must return tensors, or tuples, lists and dicts of them", "return tensors only")


def _compare(first: dict[str, Tensor], other: dict[str, Tensor], runs: tuple[Run, Run]) -> Difference | None:
    """The first difference of two runs; outputs that only one has, or of another shape or dtype, differ as a whole."""
    for name in dict.fromkeys((*first, *other)):
        a, b = first.get(name), other.get(name)
        if a is None or b is None or a.shape != b.shape or a.dtype != b.dtype:
            shapes = tuple("absent" if x is None else f"{x.dtype} {tuple(x.shape)}" for x in (a, b))
            return Difference(name, (), ("", ""), (shapes[0], shapes[1]), 0, runs)
        if a.numel() == 0:
            continue
        left, right = (x.contiguous().reshape(-1).view(torch.uint8).reshape(x.numel(), -1) for x in (a, b))
        differing = (left != right).any(1).nonzero().reshape(-1)
        if differing.numel():
            at = int(differing[0])
            index = tuple(int(i) for i in torch.unravel_index(torch.tensor(at), a.shape))
            patterns = tuple(bytes(x[at].tolist())[:: -1 if sys.byteorder == "little" else 1].hex() for x in (left, right))
            values = (a[index].item(), b[index].item())
            return Difference(name, index, (patterns[0], patterns[1]), values, int(differing.numel()), runs)
    return None


def _explained(difference: Difference, fn: Callable[..., Any], inputs: Sequence[Any]) -> Difference:
    """With the orders of additions, where the virtual GPU ran: both runs are done again, which they repeat exactly by their seeds."""
    if any(run.seed is None for run in difference.runs):
        return difference
    recorded = []
    for run in difference.runs:
        with virtual.recorded_sums() as sums:
            _results(fn, inputs, run)
        recorded.append(sums)
    for left, right in zip(*recorded, strict=False):
        found = differences(left, right)
        if found is not None:
            buffer, offsets = found
            mine = _offset(left.about, difference.index)
            orders = tuple(_order(sums, buffer, mine if mine in offsets else int(offsets[0])) for sums in (left, right))
            return replace(difference, orders=(orders[0], orders[1]))
    return difference


def _order(sums: Sums, buffer: str, offset: int) -> Order:
    """The additions to one float32 of a launch, which begins as zero."""
    total = torch.zeros((), dtype=torch.float32)
    steps = []
    for cta, data in sums.to(buffer, offset):
        added = torch.frombuffer(bytearray(data.tobytes()), dtype=torch.float32)[0]
        total = total + added
        steps.append(Step(tile_name(sums.about, cta), float(added), float(total)))
    return Order(sums.kernel, _place(sums.about, buffer, offset), tuple(steps))


_SUMS = 5
"""Which argument of the main kernel of a backward is the sums of dq."""


def _offset(launched: virtual.Launched | None, index: tuple[int, ...]) -> int:
    """Bytes from the start of the sums of dQ to the sum that becomes dq[index]; -1 where there is none."""
    if not _is_backward(launched) or len(index) != 4:
        return -1
    batch, row, head, column = index
    _, heads, rounded, columns = launched.shapes[_SUMS]
    return 4 * ((batch * heads + head) * rounded * columns + dq_offset(row, column, columns))


def _place(launched: virtual.Launched | None, buffer: str, offset: int) -> str:
    """The sum at a byte offset in words."""
    if not _is_backward(launched):
        return f"the float32 at byte {offset} of {buffer}"
    _, heads, rounded, columns = launched.shapes[_SUMS]
    slab, word = divmod(offset // 4, rounded * columns)
    row, column = dq_element(word, columns)
    return f"dq[{slab // heads}, {row}, {slab % heads}, {column}]"


def _is_backward(launched: virtual.Launched | None) -> TypeGuard[virtual.Launched]:
    return launched is not None and launched.artifact.problem["direction"] == "backward"


def tile_name(launched: virtual.Launched | None, cta: int) -> str:
    """The tile of a CTA in words; of kernels whose order of tiles is not known here, the CTA's number."""
    if not _is_backward(launched):
        return f"CTA {cta}"
    problem, config = launched.artifact.problem, launched.artifact.config
    (batch, seqlen_q, heads_q, _), (_, seqlen_k, heads_kv, _) = launched.shapes[:2]
    cluster = 2 if config.get("cta_pair") else 1
    left, right = problem["window"]
    tiles = TileProblem(
        lengths=((seqlen_q * (heads_q // heads_kv), seqlen_k),),  # a tile goes through the queries of all heads of its group
        batch=batch,
        heads=heads_kv,
        heads_kv=heads_kv,
        head_dims=(problem["head_dim"], problem["head_dim_v"]),
        tile=(128, 128 * cluster),
        window=(0 if left else None, 0 if right or problem["causal"] else None),
        backward=True,
    )
    schedule = Schedule(tiles, config["order"], section_size(tiles, 2 * config["l2_budget"]))
    block, head, sequence = schedule.tile(cta // cluster)
    keys = f"{block * tiles.tile[1]} to {min((block + 1) * tiles.tile[1], seqlen_k) - 1}"
    return f"key tile {block} (keys {keys}) of key head {head}, sequence {sequence}, CTA {cta}"
