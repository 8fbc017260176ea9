"""Alignment on made-up machine code, where the path is known."""

from __future__ import annotations

import pytest

from fa4.inspection.sass import Instruction
from fa4.perfmodel.align import Aligner, AlignmentError
from fa4.perfmodel.machine_code import Control, MachineCode
from fa4.perfmodel.trace import Event
from fa4.vgpu import Program

KERNEL = Program.parse(".version 8.8\n.target sm_90a\n.address_size 64\n.visible .entry k() {\nbar.sync 0;\nbar.sync 1;\nret;\n}").kernels[
    "k"
]


def code(*lines):
    """Lines are "opcode" or "@P0 opcode", with "-> position" for jumps; "BRA" never falls through."""
    instructions, moves = [], []
    for i, line in enumerate(lines):
        text, _, target = line.partition(" -> ")
        guard, _, opcode = text.rpartition(" ")
        instructions.append(Instruction(16 * i, guard, opcode, "", "", None, 0))
        moves.append(((int(target),) if target else (), bool(guard) or opcode not in ("BRA", "EXIT")))
    return MachineCode("k", tuple(instructions), (Control(1, None, None, ()),) * len(lines), tuple(moves))


def align(machine, kinds, prefer=None):
    """``kinds`` are kinds of events, each with the instruction of the PTX where it matters: "wait" or "wait 1"."""
    aligner = Aligner(machine, KERNEL)
    aligner.preferred.update(prefer or {})
    events = [Event(kind.split()[0], int(([*kind.split(), "0"])[1]), ()) for kind in kinds]
    return aligner.align(events)


def test_a_loop_goes_round_as_often_as_it_synchronises():
    machine = code("MOV", "SYNCS.PHASECHK", "FADD", "SYNCS.ARRIVE", "@P0 BRA -> 1", "EXIT")
    path = align(machine, ["wait", "arrive"] * 3)
    assert path.positions == (0, *(1, 2, 3, 4) * 3, 5)
    assert [path.positions[i] for i, _ in path.at] == [1, 3] * 3


def test_a_guarded_anchor_may_be_passed_by():
    machine = code("SYNCS.PHASECHK", "@P0 SYNCS.ARRIVE", "LDTM.x32", "EXIT")
    assert align(machine, ["wait", "tld"]).positions == (0, 1, 2, 3)
    with pytest.raises(AlignmentError, match="event 1 of 2"):
        align(code("SYNCS.PHASECHK", "SYNCS.ARRIVE", "LDTM.x32", "EXIT"), ["wait", "tld"])


TWINS = code("@P0 BRA -> 4", "FSEL", "SYNCS.PHASECHK", "BRA -> 5", "SYNCS.PHASECHK", "SYNCS.ARRIVE", "EXIT")
"""Two ways to the arrival with the same anchors; the one with the select is longer."""


def test_the_order_of_the_text_tells_twins_apart():
    assert 2 not in align(TWINS, ["wait 0", "arrive"]).positions
    assert align(TWINS, ["wait 0", "arrive"], {0: 2, 1: 4}).positions == (0, 1, 2, 3, 5, 6)
    assert align(TWINS, ["wait 1", "arrive"], {0: 2, 1: 4}).positions == (0, 4, 5, 6)


def test_events_without_an_instruction_happen_where_the_warp_is():
    machine = code("UTMASTG", "UTMACMDFLUSH", "SYNCS.ARRIVE", "EXIT")
    path = align(machine, ["store", "bulk_commit", "bulk_wait", "arrive"])
    assert path.positions == (0, 1, 2, 3)
    assert path.at == ((0, True), (1, True), (1, False), (2, True))
