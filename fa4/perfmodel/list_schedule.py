"""A list schedule of the PTX: what the order of instructions may be where the machine code is not at hand.

Each basic block by itself: of the instructions whose operands are ready the one on the longest chain goes first. Everything that
synchronises or moves memory stays in program order. Moves between registers cost nothing, as ptxas removes most of them. What ptxas
does to registers, spills above all, cannot be seen from here.
"""

from __future__ import annotations

import re
from functools import lru_cache
from heapq import heappop, heappush
from typing import NamedTuple

from fa4.errors import ModelError
from fa4.perfmodel.schedule import SILENT, Schedule, Step, WarpSchedule
from fa4.perfmodel.trace import Event, Trace
from fa4.vgpu.observe import observed
from fa4.vgpu.program import Block, Kernel, Op, Register


class Cost(NamedTuple):
    """The pipe of an instruction, the name of its latency, and what a schedule takes both to be; ``work`` as in ``Step``."""

    pipe: str
    latency: str = ""
    clocks: int = 1
    hold: int = 1
    work: int = 1


_FREE = Cost("none")
_ALU = Cost("alu", "alu_latency", 5, 2)
_FMA = Cost("fma", "fma_latency", 4, 1)
_FMA2 = Cost("fma2", "fma_latency", 4, 2)
_MUFU = Cost("mufu", "mufu_latency", 22, 8)
_CONVERT = Cost("convert", "alu_latency", 5, 2)
_OTHER = Cost("other", "alu_latency", 5, 1)
_SHUFFLE = Cost("lsu", "lds_latency", 28, 1)
_LOAD = Cost("lsu", "", 30, 1)
_STORE = Cost("lsu", "", 1, 1)
_CONSTANT = Cost("other", "constant_latency", 30, 1)

_FLOAT = re.compile(r"b?f(16|32|64)(x2)?|tf32")
_MUFU_NAMES = frozenset(("ex2", "lg2", "rcp", "rsqrt", "sqrt", "sin", "cos", "tanh"))
_MATRIX = re.compile(r"m(\d+)n(\d+)k(\d+)")


@lru_cache(maxsize=65536)
def cost(op: Op) -> Cost:
    """What an instruction takes."""
    name, mods = op.name, op.mods
    if name in ("mov", "not") or (name == "cvt" and set(mods) <= {"u32", "u64", "s64", "s32", "u16"}) or name in ("cvta", "bar"):
        return _OTHER if name == "bar" else _FREE
    if name in _MUFU_NAMES:
        return _MUFU
    if name in ("fma", "add", "sub", "mul") and _FLOAT.fullmatch(mods[-1]):
        return _FMA2 if mods[-1].endswith("x2") else _FMA
    if name in ("mul", "mad"):
        return _FMA2
    if name == "cvt":
        return _CONVERT if "x2" in mods[-1] + mods[-2] or "f32" not in mods else Cost("convert", "alu_latency", 5, 1)
    if name in ("shfl", "redux"):
        return _SHUFFLE
    if name in ("ld", "ldmatrix", "atom"):
        if {"param", "param::entry", "const"} & set(mods):
            return _CONSTANT
        return Cost("lsu", "local_latency", 34, 1) if "local" in mods else _LOAD
    if name in ("st", "stmatrix", "red"):
        return _STORE
    if name == "mma":
        shape = _MATRIX.match(mods[2]) if len(mods) > 2 else None
        m, n, k = (int(x) for x in shape.groups()) if shape else (16, 8, 16)
        return Cost("mma", "mma_latency", 33, 8, 2 * m * n * k)
    if name == "tcgen05":
        return _tensor(op)
    if name == "mbarrier" and mods[0] in ("try_wait", "test_wait"):
        return Cost("other", "try_wait", 20, 1)
    if name in ("elect", "mbarrier", "cp", "wgmma", "fence", "membar", "barrier", "setmaxnreg", "vote", "activemask", "bra", "brx"):
        return _OTHER
    return _ALU


def _tensor(op: Op) -> Cost:
    if op.mods[0] in ("ld", "st"):
        times = next((int(m[1:]) for m in op.mods if re.fullmatch(r"x\d+", m)), 1)
        loads = op.mods[0] == "ld"
        return Cost("tmem load" if loads else "tmem store", "tmem load" if loads else "tmem store", 40 + times, times, times)
    return _OTHER


def order(block: Block) -> list[int]:
    """Positions of the instructions of a block in the order of a list schedule."""
    ops = block.all
    costs = [cost(op) for op in ops]
    after: list[list[tuple[int, int]]] = [[] for _ in ops]
    missing = [0] * len(ops)

    def edge(first: int, then: int, clocks: int) -> None:
        after[first].append((then, clocks))
        missing[then] += 1

    writer: dict[Register, int] = {}
    readers: dict[Register, list[int]] = {}
    ordered = -1
    for i, op in enumerate(ops):
        for r in op.read:
            if r in writer:
                edge(writer[r], i, costs[writer[r]].clocks if costs[writer[r]].pipe != "none" else 0)
            readers.setdefault(r, []).append(i)
        for r in op.written:
            for reader in readers.pop(r, ()):
                if reader != i:
                    edge(reader, i, 0)
            if r in writer and writer[r] != i:
                edge(writer[r], i, 0)
            writer[r] = i
        if observed(op) or op is block.end:
            if ordered >= 0:
                edge(ordered, i, 0)
            ordered = i
    if block.end is not None:
        for i in range(len(ops) - 1):
            edge(i, len(ops) - 1, 0)
    chain = [0] * len(ops)
    for i in range(len(ops) - 1, -1, -1):
        chain[i] = costs[i].clocks + max((chain[j] + clocks - costs[i].clocks for j, clocks in after[i]), default=0)
    return _list_schedule(costs, after, missing, chain)


def _list_schedule(costs: list[Cost], after: list[list[tuple[int, int]]], missing: list[int], chain: list[int]) -> list[int]:
    early = [0] * len(costs)
    waiting = [(0, i) for i, n in enumerate(missing) if n == 0]
    ready: list[tuple[int, int]] = []
    free: dict[str, int] = {}
    result: list[int] = []
    now = 0
    while waiting or ready:
        while waiting and waiting[0][0] <= now:
            i = heappop(waiting)[1]
            heappush(ready, (-chain[i], i))
        chosen, later = -1, []
        while ready:
            key, i = heappop(ready)
            if costs[i].pipe == "none" or free.get(costs[i].pipe, 0) <= now:
                chosen = i
                break
            later.append((key, i))
        for entry in later:
            heappush(ready, entry)
        if chosen < 0:
            now = min([t for t, _ in waiting[:1]] + [max(now + 1, min((free[costs[i].pipe] for _, i in later), default=now + 1))])
            continue
        result.append(chosen)
        if costs[chosen].pipe != "none":
            free[costs[chosen].pipe] = now + costs[chosen].hold
        for j, clocks in after[chosen]:
            early[j] = max(early[j], now + clocks)
            missing[j] -= 1
            if missing[j] == 0:
                heappush(waiting, (early[j], j))
        if costs[chosen].pipe != "none":
            now += 1
    return result


class _Builder:
    """Steps of the blocks of a kernel, made when they are first needed."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.table: list[Step] = []
        self.blocks: dict[int, list[tuple[int, int, int, int]]] = {}
        rows = sorted(kernel.registers)
        starts, total = {}, 0
        for bits in rows:
            starts[bits] = total
            total += kernel.registers[bits]
        self.starts, self.slots = starts, max(total, 1)

    def slot(self, r: Register) -> int:
        return self.starts[r.bits] + r.index

    def block(self, index: int) -> list[tuple[int, int, int, int]]:
        """(number of the instruction or -1, its step with an event, without, and as a jump taken) in order."""
        found = self.blocks.get(index)
        if found is None:
            found = self.blocks[index] = list(self._steps(self.kernel.blocks[index], self.kernel.starts[index]))
        return found

    def _steps(self, block: Block, start: int) -> list[tuple[int, int, int, int]]:
        ops = block.all
        sources: dict[Register, frozenset[Register]] = {}
        real: list[tuple[frozenset[Register], tuple[Register, ...]]] = []
        for op in ops:  # registers that moves only rename
            reads = frozenset[Register]().union(*(sources.get(r, frozenset((r,))) for r in op.read))
            written = op.written
            free = cost(op).pipe == "none"
            real.append((reads, written))
            for r in written:
                if free:
                    sources[r] = reads
                else:
                    sources.pop(r, None)
        steps = []
        for i in order(block):
            op, c = ops[i], cost(ops[i])
            may = observed(op)
            if c.pipe == "none" and not may:
                continue
            reads, written = real[i]
            waits = tuple(sorted({self.slot(r) for r in reads}))
            sets = tuple(sorted({self.slot(r) for r in written}))
            text = "tensor stores" if op.name == "tcgen05" and op.mods[0] == "wait::st" else op.opcode
            step = Step(c.pipe, 1, waits, sets, (), c.latency, c.work, place=op.source, text=text)
            if "local" in op.mods and op.name in ("ld", "st"):
                step = step._replace(spill=True)
            plain = self._add(step)
            with_event = self._add(step._replace(events=1)) if may else -1
            jump = self._add(step._replace(taken=True)) if op.name in ("bra", "brx") else plain
            steps.append((start + i, with_event, plain, jump))
        return steps

    def _add(self, step: Step) -> int:
        self.table.append(step)
        return len(self.table) - 1

    def warp(self, path: tuple[int, ...], events: tuple[Event, ...]) -> WarpSchedule:
        """The steps of a warp.

        Raises:
            ModelError: events that the path does not pass.
        """
        steps: list[int] = []
        position, used = 0, []
        for number, index in enumerate(path):
            follows = number + 1 >= len(path) or path[number + 1] == index + 1
            for op, with_event, plain, jump in self.block(index):
                if with_event >= 0:
                    if position < len(events) and events[position].op == op:
                        event = events[position]
                        position += 1
                        if event.kind in SILENT:
                            steps.append(plain)
                        else:
                            used.append(event)
                            steps.append(with_event)
                    elif self.kernel.ops[op].guard is None and not _silent(self.kernel.ops[op]):
                        continue
                    else:
                        steps.append(plain)
                else:
                    steps.append(plain if follows else jump)
        if position != len(events):
            missed = self.kernel.ops[events[position].op]
            rule = f"event {position} of {len(events)} ({missed.opcode}) is not on the path of the warp"
            raise ModelError("trace", self.kernel.name, rule, "record it again")
        return WarpSchedule(tuple(steps), tuple(used))


def _silent(op: Op) -> bool:
    """Whether it gives no event though observers are told of it."""
    return op.name in ("tcgen05", "cp", "st", "ld", "red", "atom", "fence", "bar")


def ptx_schedule(trace: Trace) -> Schedule:
    """The list schedule of every recorded warp.

    Raises:
        ModelError: a trace that contradicts itself.
    """
    builder = _Builder(trace.code)
    warps: dict[tuple[int, int], WarpSchedule] = {}
    seen: dict[tuple[tuple[int, ...], tuple[Event, ...]], WarpSchedule] = {}
    for cta in trace.ctas:
        for i, warp in enumerate(cta.warps):
            key = warp.path, warp.events
            if key not in seen:
                seen[key] = builder.warp(warp.path, warp.events)
            warps[cta.index, i] = seen[key]
    return Schedule("ptx", tuple(builder.table), warps, builder.slots)
