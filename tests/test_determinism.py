"""Fingerprints that anyone can recompute; checks that name the first difference, and on the virtual GPU the order that made it."""

from __future__ import annotations

import hashlib
import itertools
import math
from collections import namedtuple
from dataclasses import replace

import numpy as np
import pytest
import torch

import fa4
from fa4 import determinism
from fa4.determinism import check, fingerprint
from fa4.kernels.common.dq_layout import dq_element, dq_offset
from fa4.runtime import virtual
from fa4.testing import AttentionShape, make_inputs

# Fingerprints


def recomputed(dtype, shape, data):
    """The documented algorithm, from numpy's little-endian bytes."""
    text = f"fa4-fingerprint-1\0{dtype}\0{','.join(map(str, shape))}\0".encode()
    return hashlib.sha256(text + data).hexdigest()[:32]


def test_known_fingerprints():
    """Recorded: they must stay the same for ever."""
    assert fingerprint(torch.arange(6, dtype=torch.float32).reshape(2, 3)) == "d92bec3482a3a7e28cf22a3c0fefbe74"
    assert fingerprint(torch.tensor(1.5, dtype=torch.bfloat16)) == "f6fa77aaeb00a034469f8285d8cb6af7"
    assert fingerprint(torch.empty(0, 4, dtype=torch.float16)) == "a3bb465e0896850721c58434a32753f2"


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "int64", "uint8", "complex64", "bool"])
def test_fingerprint_is_the_documented_one(dtype):
    array = np.arange(24).reshape(2, 3, 4).astype(dtype)
    assert fingerprint(torch.from_numpy(array)) == recomputed(dtype, (2, 3, 4), array.tobytes())


def test_strides_storage_and_gradients_do_not_matter(monkeypatch):
    x = torch.randn(5, 6, 7)
    expected = fingerprint(x)
    padded = torch.full((7, 9, 8), math.nan)
    padded[1:6, 2:8, :7] = x
    views = [x.transpose(0, 2).contiguous().transpose(0, 2), padded[1:6, 2:8, :7], x.clone().requires_grad_(), x.flip(1).flip(1)]
    assert [fingerprint(view) for view in views] == [expected] * 4
    for size in (1, 4, 28, 100, 169):
        monkeypatch.setattr(determinism, "CHUNK_BYTES", size)
        assert [fingerprint(view) for view in (x, *views)] == [expected] * 5
    assert fingerprint(torch.ones((), dtype=torch.bfloat16).expand(3, 4)) == fingerprint(torch.ones(3, 4, dtype=torch.bfloat16))


def test_dtype_shape_and_every_bit_matter():
    x = torch.zeros(4, 4)
    flipped = x.clone()
    flipped.view(torch.int32)[3, 3] = 1
    others = [x.half(), x.reshape(2, 8), x.reshape(16), -x, flipped, x.to(torch.int32)]
    quiet, other = torch.tensor([0x7FC00000, 0x7FC00001], dtype=torch.int32).view(torch.float32).split(1)
    found = [fingerprint(y) for y in (x, *others, quiet, other)]
    assert len(set(found)) == len(found)


def test_fingerprint_refuses_what_has_no_elements_in_order():
    for bad in (torch.zeros(3, 3).to_sparse(), [1.0], np.zeros(3)):
        with pytest.raises(fa4.DtypeError, match="dense"):
            fingerprint(bad)


# Checks without a virtual GPU


def changing(*results):
    """A function that gives one result after the other."""
    found = itertools.cycle(results)
    return lambda *_: next(found)


def test_equal_runs():
    found = check(lambda x: {"out": 2 * x}, (torch.randn(3),), runs=3)
    assert found
    assert (found.runs, found.outputs, str(found)) == (3, ("out",), "3 runs gave the same bits in out")


def test_the_first_difference_is_named():
    a = torch.zeros(2, 3, dtype=torch.bfloat16)
    b = a.clone()
    b[1, 2] = -0.0
    Pair = namedtuple("Pair", ["out", "grads"])
    found = check(changing(*(Pair(a, {"q": a}),) * 2, Pair(a, {"q": b})), (), runs=3)
    assert not found
    difference = found.difference
    assert (difference.output, difference.index, difference.bits, difference.elements) == ("grads.q", (1, 2), ("0000", "8000"), 1)
    assert [run.number for run in difference.runs] == [0, 2]
    assert str(found).startswith("grads.q differs in 1 elements, first at (1, 2):")
    assert "0x8000" in str(found)


def test_equal_nan_are_no_difference_and_other_nan_are():
    quiet, other = torch.tensor([0x7FC00000, 0x7FC00001], dtype=torch.int32).view(torch.float32).split(1)
    assert check(changing(quiet, quiet.clone()), ())
    assert check(changing(quiet, other), ()).difference.bits == ("7fc00000", "7fc00001")


def test_shapes_and_missing_outputs_differ_as_a_whole():
    assert "(3,)" in str(check(changing([torch.zeros(2)], [torch.zeros(3)]), ()))
    assert "absent" in str(check(changing({"a": torch.zeros(2)}, {}), ()))
    assert check(changing(torch.zeros(0), torch.zeros(0)), ())


@pytest.mark.parametrize(
    ("options", "argument"), [({"runs": 1}, "runs"), ({"seeds": []}, "seeds"), ({"streams": 2}, "streams"), ({"streams": 0}, "streams")]
)
def test_bad_arguments(options, argument):
    with pytest.raises(fa4.ArgumentError) as caught:
        check(lambda x: x, (torch.zeros(1),), **options)
    assert caught.value.argument == argument
    with pytest.raises(fa4.DtypeError, match="must return tensors"):
        check(lambda: 3, ())


def test_each_run_has_its_own_seed_and_schedule():
    seen = []

    def look():
        settings = fa4._settings.current()
        seen.append((settings.vgpu_seed, settings.vgpu_schedule))
        return torch.zeros(1)

    check(look, (), runs=3)
    check(look, (), seeds=[7, 9])
    assert seen == [(seed, "priority") for seed in (0, 1, 2, 7, 9)]


def test_layout_of_sums_has_an_inverse():
    for columns in (16, 48, 128):
        for row, column in itertools.product((0, 31, 32, 200), (0, 5, columns - 1)):
            assert dq_element(dq_offset(row, column, columns), columns) == (row, column)


# On the virtual GPU

CAUSAL = {"causal": True}  # the kernels that other tests compile; every query sees keys of all tiles


def cancelling(tiles=3, **shape):
    """Contributions of two key tiles to dq that nearly cancel, so that in which order the third comes between shows in dq."""
    inputs = make_inputs(AttentionShape(**{"seqlen_q": 40, "seqlen_k": 128 * tiles, **shape}))
    k, v = inputs.k.clone(), inputs.v.clone()
    k[:, 128:256], v[:, 128:256] = k[:, :128], -v[:, :128]
    v[:, 256:] *= 0.01
    return replace(inputs, k=k, v=v)


def gradients(inputs, deterministic, **options):
    leaves = inputs.leaves()
    out = fa4.attention(*leaves, softmax_scale=0.01, deterministic=deterministic, backend="vgpu", arch="sm_100a", **options)
    return dict(zip(("dq", "dk", "dv"), torch.autograd.grad(out, leaves, inputs.dout), strict=True))


@pytest.mark.compile
@pytest.mark.vgpu
class TestBackward:
    def test_the_fast_mode_differs_and_the_order_of_tiles_says_why(self):
        inputs = cancelling()
        found = check(lambda: gradients(inputs, False, **CAUSAL), (), seeds=range(8))
        difference = found.difference
        assert difference.output == "dq"
        first, second = difference.orders
        b, i, h, d = difference.index
        assert first.place == second.place == f"dq[{b}, {i}, {h}, {d}]"
        assert first.kernel.startswith("fa4_blackwell_backward_bf16_d64")
        tiles = [[step.tile for step in order.steps] for order in (first, second)]
        assert tiles[0] != tiles[1]
        assert sorted(tiles[0]) == sorted(tiles[1])
        assert {tile.split(" (")[0] for tile in tiles[0]} == {f"key tile {n}" for n in range(3)}
        scale = 0.01
        for order, value in zip((first, second), difference.values, strict=True):
            assert float(torch.tensor(order.steps[-1].total * scale).bfloat16()) == value
        assert {step.added for step in first.steps} == {step.added for step in second.steps}
        assert "after" in str(found)

    def test_the_deterministic_mode_does_not(self):
        """Under seeds that show it in the fast one; of the kernels under more schedules: kernels/blackwell/test_blackwell_backward.py."""
        inputs = cancelling()
        assert check(lambda: gradients(inputs, True, **CAUSAL), (), seeds=range(2))

    @pytest.mark.parametrize("head_dim", [64, pytest.param(128, marks=pytest.mark.slow)])
    def test_the_order_is_enforced_and_a_missing_acquire_is_noticed(self, monkeypatch, head_dim):
        """In whatever order the tiles came: one schedule says it. The fault: the semaphore is waited for, but read without acquire."""
        inputs = cancelling(head_dim=head_dim)
        assert check(lambda: gradients(inputs, True, **CAUSAL), (), seeds=[1, 1]).unordered is None
        fast = check(lambda: gradients(inputs, False, **CAUSAL), (), seeds=[1, 1])
        assert fast
        assert "nothing orders the addition of key tile" in str(fast)
        parsed = virtual.parsed
        monkeypatch.setattr(virtual, "parsed", lambda ptx, *more: parsed(ptx.replace("ld.acquire.gpu", "ld.relaxed.gpu"), *more))
        faulty = check(lambda: gradients(inputs, True, **CAUSAL), (), seeds=[1, 1])
        assert faulty.unordered.place.startswith("dq[0, ")
        assert faulty.unordered.before != faulty.unordered.after

    def test_a_sequence_has_the_same_bits_alone_and_in_any_batch(self):
        inputs = cancelling(batch=2, heads_q=2, heads_kv=2)
        together = gradients(inputs, True, **CAUSAL)
        for b in range(2):
            one = slice(b, b + 1)
            alone = gradients(replace(inputs, **{n: getattr(inputs, n)[one] for n in ("q", "k", "v", "dout")}), True, **CAUSAL)
            assert {n: fingerprint(x) for n, x in alone.items()} == {n: fingerprint(x[one]) for n, x in together.items()}

    @pytest.mark.slow
    @pytest.mark.parametrize("options", [{}, {"causal": True}, {"window_size": (200, 60)}, {"causal": True, "softcap": 10.0}], ids=str)
    def test_39_fifty_schedules(self, options):
        inputs = cancelling(tiles=4, seqlen_q=512, heads_q=2, heads_kv=1)
        assert check(lambda: gradients(inputs, True, **options), (), seeds=range(50))
