"""Handles of functions on scores: what a name may mean, what is refused, pickling, and what decides a kernel's key."""

from __future__ import annotations

import copy
import dataclasses
import importlib.util
import os
import pickle
import subprocess
import sys
from functools import partial
from pathlib import Path

import attention_modifiers as examples
import pytest
import torch

import fa4
from fa4.arch import get_arch
from fa4.compiler.key import kernel_key
from fa4.modifier import Modifiers
from fa4.problem import AttentionProblem
from fa4.tuning import config


def key(score=None, mask=None, arch="sm_100a", direction="forward"):
    modifiers = Modifiers(score, mask)
    functions = modifiers.functions_for(direction)
    problem = AttentionProblem.of(direction, "bfloat16", (64, 64), (None, 0), 0.0, False, functions)
    return kernel_key(problem, config(problem, get_arch(arch)), arch)


def shifted(by):
    return lambda score, batch, head, q_index, k_index: score + by


SLOPE = 0.5


def uses_global(score, batch, head, q_index, k_index):
    return score - SLOPE * (q_index - k_index)


# Names


def test_a_name_means_one_thing():
    first = fa4.score_mod("registered twice", torch=shifted(1.0))
    assert fa4.score_mod("registered twice", torch=shifted(1.0)) is first
    for other in (
        {"torch": shifted(2.0)},
        {"torch": shifted(1.0), "device": shifted(1.0)},
        {"device": shifted(1.0)},
        {"torch": lambda score, batch, head, q_index, k_index, t: score, "aux": {"t": "float32[B]"}},
        {"torch": shifted(1.0), "grad": lambda d, s, b, h, i, j: d},
    ):
        with pytest.raises(fa4.ArgumentError, match="is registered with other content") as caught:
            fa4.score_mod("registered twice", **other)
        assert caught.value.argument == "name"
    with pytest.raises(fa4.ArgumentError, match="is registered with other content"):
        fa4.mask_mod("registered twice", torch=lambda b, h, i, j: i > j)


def test_a_changed_size_of_aux_is_other_content():
    def twin(score, batch, head, q_index, k_index, t):
        return score

    first = fa4.score_mod("with aux", torch=twin, aux={"t": "float32[B, 2]"})
    assert fa4.score_mod("with aux", torch=twin, aux={"t": " float32[B,2] "}) is first
    for aux in ("float32[B, 3]", "float32[?, 2]", "float16[B, 2]"):
        with pytest.raises(fa4.ArgumentError, match="other content"):
            fa4.score_mod("with aux", torch=twin, aux={"t": aux})


def test_a_module_that_is_executed_twice_registers_the_same():
    specification = importlib.util.spec_from_file_location("attention_modifiers_again", examples.__file__)
    again = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(again)
    assert (again.alibi, again.same_document, again.prefix) == (examples.alibi, examples.same_document, examples.prefix)


def test_copies_and_pickles_are_the_handle_itself():
    for handle in (examples.alibi, examples.prefix):
        assert pickle.loads(pickle.dumps(handle)) is handle
        assert copy.deepcopy(handle) is copy.copy(handle) is handle
    assert repr(examples.alibi) == "fa4.ScoreMod('alibi')"


UNPICKLE = """
try:
    print(pickle.loads({data!r}))
except Exception as error:
    print(repr(error))
"""


def unpickled_elsewhere(handle, registration):
    """What a fresh process says that unpickles a handle after it ran ``registration``."""
    code = f"import pickle, fa4\n{registration}\n" + UNPICKLE.format(data=pickle.dumps(handle))
    paths = (Path(fa4.__file__).parents[1], Path(examples.__file__).parent)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True).stdout


def test_another_process_must_have_registered_it():
    assert unpickled_elsewhere(examples.alibi, "import attention_modifiers") == "fa4.ScoreMod('alibi')\n"
    missing = unpickled_elsewhere(examples.alibi, "")
    assert "ArgumentError" in missing
    assert "is not registered in this process; import the module" in missing
    other = "fa4.score_mod('alibi', torch=lambda s, b, h, i, j: s)"
    assert "is registered with other content in this process" in unpickled_elsewhere(examples.alibi, other)


# What is refused


def two(a, b):
    return a


@pytest.mark.parametrize(
    ("arguments", "error", "argument", "parts"),
    [
        ({"name": 3, "torch": shifted(1)}, fa4.DtypeError, "name", ["must be a string"]),
        ({"name": "", "torch": shifted(1)}, fa4.ArgumentError, "name", ["must not be empty"]),
        ({}, fa4.ArgumentError, "device", ["neither device nor torch"]),
        ({"torch": 3}, fa4.DtypeError, "torch", ["must be a function"]),
        ({"torch": two}, fa4.ArgumentError, "torch", ["two(a, b)", "(score, batch, head, q_index, k_index)", "too many positional"]),
        ({"device": two}, fa4.ArgumentError, "device", ["must take (score, batch, head, q_index, k_index)"]),
        ({"torch": shifted(1), "grad": two}, fa4.ArgumentError, "grad", ["(dscore, score, batch, head, q_index, k_index)"]),
        ({"torch": shifted(1), "aux": {"t": "float32[B]"}}, fa4.ArgumentError, "torch", ["q_index, k_index, t)", "tensors of aux last"]),
        ({"torch": examples._alibi}, fa4.ArgumentError, "torch", ["missing a required argument: 'slopes'"]),
        ({"torch": shifted(torch.ones(3))}, fa4.ArgumentError, "torch", ["closure by is a torch.Tensor", "pass tensors as aux"]),
        ({"device": shifted(torch.ones(3))}, fa4.ArgumentError, "device", ["closure by is a torch.Tensor", "pass tensors as aux"]),
        ({"torch": max}, fa4.DtypeError, "torch", ["parameters cannot be read"]),
        ({"torch": shifted(1), "aux": ["t"]}, fa4.DtypeError, "aux", ["must map names"]),
        ({"torch": shifted(1), "aux": {"t": torch.float32}}, fa4.DtypeError, "aux", ["must map names to strings"]),
        ({"torch": shifted(1), "aux": {"t": "float32"}}, fa4.ArgumentError, "aux", ["must be dtype[sizes]"]),
        ({"torch": shifted(1), "aux": {"t": "float8[B]"}}, fa4.DtypeError, "aux", ["float8 is unknown", "int64"]),
        ({"torch": shifted(1), "aux": {"t": "float32[N]"}}, fa4.ArgumentError, "aux", ["'N' is no size", "Hkv"]),
        ({"torch": shifted(1), "aux": {"t": "float32[]"}}, fa4.ArgumentError, "aux", ["'' is no size"]),
        ({"torch": shifted(1), "aux": {"t": "float32[B, -1]"}}, fa4.ArgumentError, "aux", ["'-1' is no size"]),
        ({"torch": shifted(1), "aux": {"t": "float32[1, 1, 1, 1, 1]"}}, fa4.ArgumentError, "aux", ["more than 4 dimensions"]),
    ],
)
def test_bad_registrations(arguments, error, argument, parts):
    with pytest.raises(error) as caught:
        fa4.score_mod(**{"name": "never registered", **arguments})
    assert caught.value.argument == argument
    assert all(part in str(caught.value) for part in parts), str(caught.value)
    with pytest.raises(fa4.ArgumentError, match="no score_mod is registered"):
        fa4.supports(head_dim=64, score_mod="never registered")


@dataclasses.dataclass
class Shift:
    by: float

    def __call__(self, score, batch, head, q_index, k_index):
        return score + self.by


@dataclasses.dataclass(frozen=True)
class FrozenShift:
    by: float

    __call__ = Shift.__call__


def test_a_callable_must_be_hashable():
    with pytest.raises(fa4.DtypeError, match="must be hashable"):
        fa4.score_mod("unhashable", torch=Shift(1.0))
    q = torch.randn(1, 3, 1, 8)
    handle = fa4.score_mod("hashable", torch=FrozenShift(1.0), device=FrozenShift(1.0))
    torch.testing.assert_close(fa4.attention(q, q, q, score_mod=handle), fa4.attention(q, q, q))
    assert key(handle) != key(fa4.score_mod("hashable too", device=FrozenShift(2.0)))


# Keys


def test_names_twins_and_sizes_do_not_change_a_key():
    base = fa4.score_mod("key base", device=shifted(1.0))
    same = [
        fa4.score_mod("key same", device=shifted(1.0)),
        fa4.score_mod("key twin", device=shifted(1.0), torch=shifted(1.0)),
        fa4.score_mod("key grad", device=shifted(1.0), grad=lambda d, s, b, h, i, j: d),
    ]
    assert {key(handle) for handle in same} == {key(base)}

    def reads(score, batch, head, q_index, k_index, t):
        return score + t[head]

    sizes = [fa4.score_mod(f"key {size}", device=reads, aux={name: f"float32[{size}]"}) for size, name in (("Hq", "t"), ("8", "slopes"))]
    assert key(sizes[0]) == key(sizes[1])


def test_what_changes_a_key():
    def reads(score, batch, head, q_index, k_index, t):
        return score + t[head, 0]

    def visible(batch, head, q_index, k_index):
        return q_index > k_index

    keys = [
        key(),
        key(fa4.score_mod("key one", device=shifted(1.0))),
        key(fa4.score_mod("key two", device=shifted(2.0))),
        key(fa4.score_mod("key text", device=lambda score, batch, head, q_index, k_index: score - 1.0)),
        key(fa4.score_mod("key f32", device=reads, aux={"t": "float32[Hq, 2]"})),
        key(fa4.score_mod("key bf16", device=reads, aux={"t": "bfloat16[Hq, 2]"})),
        key(fa4.score_mod("key rank", device=reads, aux={"t": "float32[Hq, 2, 1]"})),
        key(None, fa4.mask_mod("key mask", device=visible)),
        key(fa4.score_mod("key one", device=shifted(1.0)), fa4.mask_mod("key mask", device=visible)),
        key(examples.alibi),
        key(None, examples.same_document),
        key(None, examples.prefix),
    ]
    assert len(set(keys)) == len(keys)


def test_keys_of_backward_kernels_know_the_derivative():
    def visible(batch, head, q_index, k_index):
        return q_index > k_index

    def gradient(by):
        return lambda dscore, score, batch, head, q_index, k_index: dscore * by

    one, two, three = (
        fa4.score_mod(name, device=shifted(1.0), grad=gradient(by))
        for name, by in (("derived one", 1.0), ("derived two", 2.0), ("derived three", 2.0))
    )
    backward = partial(key, direction="backward")
    mask = fa4.mask_mod("derived mask", device=visible)
    assert len({backward(), backward(one), backward(two), backward(None, mask), backward(one, mask)}) == 5
    assert backward(two) == backward(three)
    assert key(one) == key(two)


def test_a_changed_global_changes_the_key(monkeypatch):
    """Also of a handle that exists: its kernel is compiled anew."""
    handle = fa4.score_mod("key global", device=uses_global)
    before = key(handle)
    monkeypatch.setitem(globals(), "SLOPE", 0.25)
    assert key(handle) != before


def test_problems_of_equal_functions_are_equal():
    problems = [
        AttentionProblem.of("forward", "bfloat16", (64, 64), (None, 0), 0.0, False, Modifiers(examples.alibi).functions) for _ in range(2)
    ]
    assert problems[0] == problems[1]
    assert hash(problems[0]) == hash(problems[1])
