"""Happens-before of the asynchronous tensor cores: what ``tcgen05.mma`` and ``wgmma`` read and write, see ``fa4.vgpu.hazards``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy.typing as npt

from fa4.vgpu import tensor_core
from fa4.vgpu.clocks import MEMORY, SITES
from fa4.vgpu.descriptor import Operand
from fa4.vgpu.hazards import Hazards, Ticket
from fa4.vgpu.tensor_order import COLUMNS, PIPE

if TYPE_CHECKING:
    from fa4.vgpu.state import Cta, Gang
    from fa4.vgpu.tensor_multiply import MmaForm, Multiply
    from fa4.vgpu.warpgroup import WgmmaForm

Array = npt.NDArray[Any]


def issue(hazards: Hazards, multiply: Multiply, members: Sequence[Cta]) -> Ticket:
    """A tcgen05.mma is issued: what it reads from shared memory must be fenced.

    Raises:
        FaultError: it is not.
    """
    ticket = hazards.ticket(multiply.issuer, multiply.issuer.cta, PIPE)
    for cta in members:
        for name, cells in _shared_operands(hazards, [multiply]):
            hazards.check_published(cta, cells, ticket.issued, f"{name} of tcgen05.mma")
    return ticket


def _shared_operands(hazards: Hazards, steps: Sequence[Multiply]) -> Iterator[tuple[str, Any]]:
    """(name, cells) of the operands in the shared memory of each CTA."""
    form = steps[0].form
    if not steps[0].a_in_tensor_memory:
        operand = Operand("A", form.rows, form.k, tensor_core.ITEMSIZE[form.a], form.transposed[0])
        yield "A", hazards.operand(tuple(s.a for s in steps), True, operand)
    operand = Operand("B", form.n // form.group, form.k, tensor_core.ITEMSIZE[form.b], form.transposed[1])
    yield "B", hazards.operand(tuple(s.b for s in steps), True, operand)


def _columns(address: int, count: int) -> Iterator[slice]:
    """Cells of columns of tensor memory, in every quadrant."""
    for quadrant in range(4):
        start = quadrant * COLUMNS + (address & 0xFFFF)
        yield slice(start, start + count)


def execute(hazards: Hazards, steps: Sequence[Multiply], members: Sequence[Cta]) -> None:
    """Instructions into the same D are carried out: they read their operands, and write D, in the order of their issue.

    Raises:
        FaultError: a race.
    """
    form: MmaForm = steps[0].form
    width = form.k * tensor_core.ITEMSIZE[form.a] // 4
    first = True
    for _, group in groupby(steps, key=lambda s: id(s.ticket.issued) if s.ticket else 0):
        some = list(group)
        ticket = some[-1].ticket
        assert ticket is not None
        agent = ticket.agent
        hazards.clocks.inherit(agent, ticket.issued)
        clock, stamp = hazards.clocks.known[agent], hazards.clocks.base(agent) + ticket.site
        who, tensor_who = (agent, clock[MEMORY], stamp), (agent, clock, stamp)
        for cta in members:
            for _, cells in _shared_operands(hazards, some):
                hazards.apply(hazards.shared[cta.rank], cells, who, False, f"shared memory of CTA {cta.id}")
            if some[0].a_in_tensor_memory:
                for step in some:
                    for cells in _columns(step.a, width):
                        hazards.tensor.access(cta, cells, tensor_who, False)
            if first:
                for cells in _columns(some[0].d, form.columns):
                    hazards.tensor.access(cta, cells, tensor_who, True)
            hazards.touch(cta, agent, stamp)
        first = False


def start_wgmma(hazards: Hazards, gang: Gang, form: WgmmaForm, descriptors: tuple[Array | None, Array]) -> Array:
    """wgmma.mma_async by the warps of a gang: what it reads must be fenced; their clocks.

    Raises:
        FaultError: it is not.
    """
    issued = hazards.issued(gang)
    for i in range(gang.warps):
        for name, cells in _wgmma_operands(hazards, form, descriptors, (i, (gang.first + i) % 4)):
            hazards.check_published(gang.cta, cells, issued[i], f"{name} of wgmma")
    return issued


def _wgmma_operands(
    hazards: Hazards, form: WgmmaForm, descriptors: tuple[Array | None, Array], at: tuple[int, int]
) -> Iterator[tuple[str, Any]]:
    """What entry ``at[0]`` reads from shared memory: of A the rows of its warp, the ``at[1]``-th of the warpgroup; and B."""
    size = tensor_core.ITEMSIZE[form.a]
    if descriptors[0] is not None:
        yield "A", hazards.operand((int(descriptors[0][at[0]]),), False, Operand("A", 64, form.k, size, form.transposed[0]), at[1])
    yield "B", hazards.operand((int(descriptors[1][at[0]]),), False, Operand("B", form.n, form.k, size, form.transposed[1]))


def finish_wgmma(
    hazards: Hazards, where: tuple[Cta, int, int], form: WgmmaForm, descriptors: tuple[Array | None, Array], issue: tuple[Array, int]
) -> None:
    """A warp waited for a wgmma, which read its operands some time since its issue; ``where`` is (CTA, warp, its entry).

    Raises:
        FaultError: a race.
    """
    cta, warp, entry = where
    stream = hazards.stream(cta, ("wgmma of warp", warp))
    clock, base = hazards.clocks.operation(stream, issue[0][entry])
    for _, cells in _wgmma_operands(hazards, form, descriptors, (entry, warp % 4)):
        hazards.apply(hazards.shared[cta.rank], cells, (stream, clock[0], base + issue[1]), False, f"shared memory of CTA {cta.id}")
    hazards.clocks.follow(hazards.warp(cta, warp), stream, base + SITES - 1)
