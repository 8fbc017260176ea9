"""The order of floating-point additions in global memory, as launches record it where they are asked to."""

from __future__ import annotations

import numpy as np
import pytest
from ptx_text import run

from fa4.vgpu import Gpu
from fa4.vgpu.sums import differences

pytestmark = pytest.mark.vgpu

# CTA 0 adds 1 to the first number of the second buffer, the others 2^-24: where 1 comes last the sum is 1 + 2^-23, else 1.
VALUE = """
mov.u32 %r1, %ctaid.x;
setp.eq.u32 %p2, %r1, 0;
selp.b32 %r2, 0x3F800000, 0x33800000, %p2;
"""
ADD = f"""{VALUE}
setp.eq.u32 %p1, %r0, 0;
@%p1 red.global.add.f32 [%d1], %r2;
"""
BULK = f"""{VALUE}
mov.u32 %r3, dynamic;
st.shared.v4.u32 [%r3], {{%r2, %r2, %r2, %r2}};
fence.proxy.async.shared::cta;
setp.eq.u32 %p1, %r0, 0;
@!%p1 bra DONE;
cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%d1], [%r3], 16;
cp.async.bulk.commit_group;
cp.async.bulk.wait_group 0;
DONE:
"""


def record(body, seed, grid=3, schedule="priority", checks="basic"):
    gpu = Gpu("sm_90a", schedule=schedule, seed=seed, checks=checks)
    gpu.sums = []
    arrays = run(body, gpu=gpu, grid=grid, shared=128, threads=1)
    (sums,) = gpu.sums
    return sums, arrays[1].view(np.float32)


@pytest.mark.parametrize("body", [ADD, BULK], ids=["red", "cp.reduce.async.bulk"])
def test_additions_in_order_explain_the_sum(body):
    orders = {}
    for seed in range(12):
        sums, array = record(body, seed)
        total = np.float32(0)
        steps = sums.to("b", 0)
        for cta, data in steps:
            added = data.view(np.float32)[0]
            assert added == np.float32(2.0**-24 if cta else 1.0)
            total += added
        assert total == array[0]
        assert sums.after["b"][:4].view(np.float32)[0] == array[0]
        orders[tuple(cta for cta, _ in steps)] = total, sums
    assert all(sorted(order) == [0, 1, 2] for order in orders)
    totals = {total for total, _ in orders.values()}
    assert totals == {1.0, 1.0 + 2.0**-23}, "the orders of these seeds round in both ways"
    one = next(sums for total, sums in orders.values() if total == max(totals))
    other = next(sums for total, sums in orders.values() if total == min(totals))
    name, offsets = differences(one, other)
    assert (name, offsets.tolist()) == ("b", [0] if body == ADD else [0, 4, 8, 12])
    assert differences(one, one) is None


AGAIN = """
cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%d1], [%r3], 16;
cp.async.bulk.commit_group;
cp.async.bulk.wait_group 0;
DONE:
"""


def test_additions_that_nothing_orders_are_found_in_any_order():
    for seed in range(3):
        sums, _ = record(BULK, seed, checks="hazards")
        before, after = (sums.additions[i].cta for i in sums.unordered)
        assert before != after
    assert record(BULK, 0)[0].unordered is None, "without checks of order nothing is known"


@pytest.mark.parametrize(("wait", "ordered"), [("wait_group 0;", True), ("wait_group.read 0;", False)])
def test_a_thread_orders_its_additions_by_waiting_for_their_end(wait, ordered):
    body = BULK.replace("wait_group 0;\nDONE:\n", wait + AGAIN)
    assert body.count("cp.reduce") == 2
    sums, _ = record(body, 0, grid=1, checks="hazards")
    assert len(sums.additions) == 2
    assert (sums.unordered is None) == ordered


def test_what_is_no_sum_of_numbers_is_not_recorded():
    """Integers, shared memory, and plain stores."""
    body = "red.global.add.u32 [%d1], 1;\nst.global.u32 [%d0], 1;\nmov.u32 %r1, 0;\nst.shared.u32 [%r1], 0;\nred.shared.add.f32 [%r1], %r0;"
    sums, _ = record(body, 0, grid=1)
    assert (sums.additions, sums.after) == ([], {})


def test_nothing_is_recorded_unless_asked_for():
    gpu = Gpu("sm_90a")
    run(ADD, gpu=gpu, threads=1)
    assert gpu.sums is None
