"""setmaxnreg (PTX ISA 9.7.19.5): registers move between the warpgroups of a CTA, out of the pool that its launch got.

PTX does not say how many registers a thread has at the launch: it counts as the most that fit the machine, which is what an assembler
is told to use for kernels with setmaxnreg. The ISA wants all warps of a warpgroup to execute the same instruction; flash-attn-4's sm_100
backward does not (24 in one warp, 88 in another), and runs: here they must only agree whether they grow or shrink.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from fa4.vgpu.engine import Signal, Wait
from fa4.vgpu.errors import BarrierError, DivergenceError
from fa4.vgpu.isa.matrix import whole_warps
from fa4.vgpu.isa.registry import Mods, ending
from fa4.vgpu.lexer import integer
from fa4.vgpu.memory import FaultError
from fa4.vgpu.program import Immediate, Op

if TYPE_CHECKING:
    from fa4.vgpu.emit import Emitter
    from fa4.vgpu.state import Cta

Array = npt.NDArray[Any]

REGISTERS = 65536
"""Registers of 32 bits of a multiprocessor."""


class RegisterPool:
    """Registers of a CTA: ``count`` per thread of each warp, ``free`` that no warp has; ``history`` says whether each warp grew."""

    def __init__(self, cta: Cta) -> None:
        self.cta = cta
        kernel = cta.launch.kernel
        most = REGISTERS // (32 * cta.warp_count * kernel.min_ctas) // 8 * 8
        self.count = [min(kernel.max_registers or 255, most)] * cta.warp_count
        self.free = 0
        self.history: list[list[bool]] = [[] for _ in self.count]
        self.signal = Signal()

    def request(self, warp: int, number: int, grow: bool) -> None:
        """Check what a warp asks for.

        Raises:
            FaultError: it grows to fewer or shrinks to more registers than it has, or another warp of its warpgroup did the opposite.
        """
        have = self.count[warp]
        if (number < have) if grow else (number > have):
            verb = "inc" if grow else "dec"
            raise FaultError(BarrierError, f"setmaxnreg.{verb} to {number} registers in warp {warp}, which has {have}")
        self.history[warp].append(grow)
        step = len(self.history[warp]) - 1
        for other in self.warpgroup(warp):
            theirs = self.history[other]
            if len(theirs) > step and theirs[step] != grow:
                verb = f"inc and warp {other} dec" if grow else f"dec and warp {other} inc"
                raise FaultError(DivergenceError, f"warp {warp} executes setmaxnreg.{verb}, in one warpgroup")

    def warpgroup(self, warp: int) -> range:
        """The four warps around one."""
        return range(warp // 4 * 4, min(warp // 4 * 4 + 4, len(self.count)))

    def shrink(self, warp: int, number: int) -> None:
        """Give registers back."""
        self.free += self.count[warp] - number
        self.count[warp] = number
        self.cta.launch.progress += 1
        self.signal.notify()

    def wait(self, warp: int, number: int) -> Wait:
        """Until there are enough registers for a warp."""

        def ready() -> bool:
            return number - self.count[warp] <= self.free

        def done() -> None:
            self.free -= number - self.count[warp]
            self.count[warp] = number

        return Wait(ready, lambda: f"{number} registers per thread: it has {self.count[warp]}, the pool {self.free} for a warp", done)


def set_registers(g: Any, number: int, grow: bool, mask: Array | None) -> None:
    """Setmaxnreg by whole warps; one that grows waits for those that shrink."""
    whole_warps(g, mask)
    pool: RegisterPool = g.cta.unit(RegisterPool)
    for i in range(g.warps):
        if mask is not None and not mask[32 * i]:
            continue
        warp = g.first + i
        try:
            pool.request(warp, number, grow)
        except FaultError as fault:
            lanes = np.zeros(g.n, bool)
            lanes[32 * i : 32 * i + 32] = True
            raise FaultError(fault.error, fault.message, lanes) from None
        if grow:
            g.block_until(i, pool.wait(warp, number), pool.signal)
        else:
            pool.shrink(warp, number)


@ending("setmaxnreg", section="9.7.19.5", forms="inc dec, sync.aligned.u32; the launch gives as many registers as fit")
def _set(e: Emitter, op: Op, mods: Mods) -> None:
    mods.type("u32")
    kind = mods.take("inc", "dec")
    if not (kind and mods.take("sync") and mods.take("aligned")) or not isinstance(op.operands[0], Immediate):
        raise mods.unsupported()
    number = integer(op.operands[0].text)
    if number % 8 or not 24 <= number <= 256:
        raise mods.unsupported(f"{number} registers: must be a multiple of 8 from 24 to 256")
    e.line(f"{e.helper(set_registers)}(g, {number}, {kind == 'inc'}, {e.masked})")
