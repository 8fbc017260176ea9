"""The device code on the virtual GPU gives the bits of its numpy twin."""

from __future__ import annotations

import numpy as np
import pytest
from exp2_helpers import ProbeConfig, on_virtual_gpu, probe

from fa4.emulate_exp import COEFFICIENTS, emulated_exp2
from fa4.emulate_exp.report import numbers
from fa4.errors import ArgumentError, CompileError

pytestmark = [pytest.mark.compile, pytest.mark.vgpu]

ARCHS = ["sm_80", "sm_100a"]  # scalar, packed
EDGES = [-np.inf, -3e38, -1e9, -151, -150, -149.5, -149, -127.5, -127, -126.5, -126, -1, -0.5, -1e-10, -1e-40, -0.0, 0, 1e-40, 8, 63.5]
LOWEST = {"fast": -np.inf, "full": -np.inf, "unclamped": -127.0}


def arguments(form, count=40_000):
    rng = np.random.default_rng(0)
    x = np.concatenate([EDGES, -128 * rng.random(count), 9 * rng.random(count // 10), -rng.random(count // 10)]).astype(np.float32)
    return x[x >= LOWEST[form]]


def assert_same_bits(x, config, arch):
    got, expected = on_virtual_gpu(x, config, arch), emulated_exp2(x, config.degree, config.form, config.continuous)
    different = np.flatnonzero(got.view(np.uint32) != expected.view(np.uint32))
    assert different.size == 0, (different.size, x[different[:3]], got[different[:3]], expected[different[:3]])


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("form", LOWEST)
def test_pairs(form, arch):
    assert_same_bits(arguments(form), ProbeConfig(3, form), arch)


def test_single_elements():
    assert_same_bits(arguments("full"), ProbeConfig(3, "full", pair=False), "sm_100a")


@pytest.mark.parametrize("degree", sorted(set(COEFFICIENTS) - {3}))
def test_other_degrees(degree):
    assert_same_bits(arguments("fast", 10_000), ProbeConfig(degree), "sm_100a")


def test_continuous_coefficients():
    assert_same_bits(arguments("fast", 10_000), ProbeConfig(continuous=True), "sm_100a")


def test_sampled_binade():
    (x,) = numbers(0, stride=257)
    assert_same_bits(x, ProbeConfig(), "sm_100a")


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("form", LOWEST)
@pytest.mark.parametrize("degree", COEFFICIENTS)
def test_exhaustive_binade(degree, form, arch):
    """-2 < x <= -1: every fraction of 23 bits."""
    for x in numbers(0):
        assert_same_bits(x, ProbeConfig(degree, form), arch)


def test_full_form_keeps_nan():
    x = np.array([np.nan, 0, np.nan], np.float32)
    np.testing.assert_array_equal(np.isnan(on_virtual_gpu(x, ProbeConfig(3, "full"), "sm_100a")), [True, False, True])


def test_a_wrong_bit_is_caught(monkeypatch):
    """The comparison sees one last bit of one coefficient of the twin."""
    c = COEFFICIENTS[3]
    monkeypatch.setitem(COEFFICIENTS, 3, (*c[:3], float(np.nextafter(np.float32(c[3]), np.float32(1)))))
    x = arguments("fast", 1000)
    expected = emulated_exp2(x)
    monkeypatch.undo()
    assert (on_virtual_gpu(x, ProbeConfig(), "sm_100a") != expected).any()


def test_an_unknown_form_is_refused_while_tracing():
    with pytest.raises((ArgumentError, CompileError), match="form='quick': is unknown"):
        probe(ProbeConfig(3, "quick"), "sm_100a")
