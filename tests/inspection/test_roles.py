"""Roles, on a kernel small enough to check by hand: two warps that do different things, and one that does both."""

from __future__ import annotations

from test_sass import function

from fa4.inspection.graph import dominated
from fa4.inspection.roles import roles

# A load warp and an MMA warp, each with a wait whose retry lies behind the exit; 16 bytes an instruction.
LINES = (
    "MOV R0, R1",
    "@P3 BRA `(.L_mma)",
    "MOV R2, RZ",  # load: 0x20
    ".L_load:",
    "SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4], R0",
    "@!P0 BRA `(.L_retry)",
    ".L_done:",
    "UTMALDG.4D [UR8], [UR6], desc[URZ]",
    "@P1 BRA `(.L_load)",
    "EXIT",
    ".L_mma:",
    "MOV R3, RZ",
    ".L_products:",
    "UTCHMMA gdesc[UR8], gdesc[UR10], tmem[UR4]",
    "UTCHMMA gdesc[UR8], gdesc[UR10], tmem[UR4]",
    "@P1 BRA `(.L_products)",
    "UTCHMMA gdesc[UR8], gdesc[UR10], tmem[UR4]",
    "EXIT",
    ".L_retry:",
    "MOV R5, R6",
    ".L_spin:",
    "SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R5], R0",
    "@!P0 BRA `(.L_spin)",
    "BRA `(.L_done)",
)


def test_each_role_has_what_its_entry_dominates():
    found = roles(function(*LINES))
    assert set(found) == {"load", "mma"}
    load, mma = found["load"], found["mma"]
    assert (load.copies, mma.copies) == (1, 1)
    assert load.instructions == 1 + 4 + 1 + 4  # its retry, which lies behind the other role, too
    assert mma.instructions == 1 + 3 + 2


def test_trips_and_what_only_waits():
    found = roles(function(*LINES))
    (load,), (mma,) = found["load"].trips, found["mma"].trips
    assert (load.instructions, load.waiting) == (8, 4)
    assert load.histogram["async copy"] == 1
    assert (mma.instructions, mma.waiting, mma.histogram["mma"]) == (3, 0, 2)
    assert (found["load"].outside, found["mma"].outside) == (2, 3)


def test_roles_that_are_not_there_are_left_out():
    mixed = [line.replace("UTCHMMA gdesc[UR8], gdesc[UR10], tmem[UR4]", "UTMALDG.4D [UR8], [UR6], desc[URZ]") for line in LINES]
    assert set(roles(function(*mixed))) == {"load"}
    assert roles(function("MOV R0, R1", "EXIT")) == {}


def test_dominated_blocks():
    found = dominated(function(*LINES))
    assert found[0] == frozenset(range(0, 16 * len([line for line in LINES if not line.endswith(":")]), 16))
    assert frozenset(range(16 * 2, 16 * 7, 16)) < found[1]  # the load warp's, and its retry
    assert dominated(function()) == []


def test_outermost_loops_where_a_trip_has_a_loop_inside():
    """By default the loop inside is the trip; a loop around it without a product of its own is none either way."""
    nested = (
        ".L_around:",
        "MOV R1, R2",
        ".L_trip:",
        "UTCHMMA gdesc[UR8], gdesc[UR10], tmem[UR4]",
        ".L_inside:",
        "UTCHMMA gdesc[UR8], gdesc[UR10], tmem[UR4]",
        "@P0 BRA `(.L_inside)",
        "@P1 BRA `(.L_trip)",
        "@P2 BRA `(.L_around)",
        "EXIT",
    )
    for outermost, expected in ((False, 2), (True, 4)):
        (trip,) = roles(function(*nested), outermost=outermost)["mma"].trips
        assert trip.instructions == expected
