import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fa4.errors import ArgumentError, DtypeError, ShapeError
from fa4.reference import standard_attention, standard_attention_backward

from .support import assert_close, naive_attention, operands

OPTIONS = [
    {},
    {"softmax_scale": -0.7},
    {"softmax_scale": 0},
    {"causal": True},
    {"window_size": (2, -1)},
    {"window_size": (1, 1), "causal": True},
    {"softcap": 0.8},
    {"softcap": 1.5, "softmax_scale": 2.0, "window_size": (3, 0)},
]


@settings(deadline=None, max_examples=40)
@given(
    sq=st.integers(0, 5), sk=st.integers(0, 5), hkv=st.integers(1, 2), group=st.integers(1, 3), d=st.integers(1, 5),
    options=st.sampled_from(OPTIONS), seed=st.integers(0, 99),
)  # fmt: skip
def test_against_scalar_loops(sq, sk, hkv, group, d, options, seed):
    q, k, v = operands(seed, batch=2, sq=sq, sk=sk, hq=hkv * group, hkv=hkv, d=d)
    result = standard_attention(q, k, v, **options)
    out, lse = naive_attention(q, k, v, **options)
    assert_close(result.out, out)
    assert_close(result.lse, lse)


def numeric_gradient(loss, x, step=1e-5):
    gradient = np.zeros(x.shape)
    for index in np.ndindex(x.shape):
        values = []
        for sign in (1, -1):
            moved = x.copy()
            moved[index] += sign * step
            values.append(loss(moved))
        gradient[index] = (values[0] - values[1]) / (2 * step)
    return gradient


@pytest.mark.parametrize("use", ["dout", "dlse", "both"])
@pytest.mark.parametrize("options", OPTIONS)
def test_gradients_against_finite_differences(options, use):
    tensors = dict(zip("qkv", operands(3, batch=1, sq=4, sk=5, hq=2, hkv=1, d=3, dv=2), strict=True))
    rng = np.random.default_rng(4)
    dout = rng.standard_normal((1, 4, 2, 2)) if use != "dlse" else None
    dlse = rng.standard_normal((1, 2, 4)) if use != "dout" else None

    def loss(**changed):
        result = standard_attention(**{**tensors, **changed}, **options)
        lse = np.where(result.lse == -np.inf, 0.0, result.lse)
        return (0.0 if dout is None else (result.out * dout).sum()) + (0.0 if dlse is None else (lse * dlse).sum())

    gradients = standard_attention_backward(*tensors.values(), dout, dlse, **options)
    for name, tensor in tensors.items():
        expected = numeric_gradient(lambda x, name=name: loss(**{name: x}), tensor)
        assert_close(getattr(gradients, "d" + name), expected, relative=1e-8)


@pytest.mark.parametrize("forgotten", ["dlse", "softcap"])
def test_the_gradient_check_can_fail(forgotten):
    """Leave one term out of the gradient: the same comparison must object."""
    q, k, v = operands(5, sq=3, sk=4, hq=1)
    dlse = np.random.default_rng(6).standard_normal((1, 1, 3))
    dout = np.ones((1, 3, 1, 3))

    def loss(x):
        result = standard_attention(x, k, v, softcap=0.5)
        return (result.out * dout).sum() + (result.lse * dlse).sum()

    faulty = standard_attention_backward(
        q, k, v, dout, None if forgotten == "dlse" else dlse, softcap=0.0 if forgotten == "softcap" else 0.5
    )
    with pytest.raises(AssertionError):
        assert_close(faulty.dq, numeric_gradient(loss, q), relative=1e-8)


def test_rows_without_keys_when_queries_outnumber_keys():
    q, k, v = operands(7, sq=5, sk=2)
    result = standard_attention(q, k, v, causal=True)
    assert (result.out[:, :3] == 0).all()
    assert (result.lse[..., :3] == -np.inf).all()
    assert np.isfinite(result.lse[..., 3:]).all()
    gradients = standard_attention_backward(q, k, v, np.ones(result.out.shape), np.ones(result.lse.shape), causal=True)
    assert (gradients.dq[:, :3] == 0).all()
    assert all(np.isfinite(g).all() for g in (gradients.dq, gradients.dk, gradients.dv))


def test_nothing_in_a_row_without_keys_reaches_a_gradient():
    q, k, v = operands(8, sq=5, sk=2)
    dout, dlse = np.ones((1, 5, 2, 3)), np.ones((1, 2, 5))
    clean = standard_attention_backward(q, k, v, dout, dlse, causal=True)
    q[:, 0], dout[:, 1], dlse[..., 2] = np.nan, np.inf, np.nan
    dirty = standard_attention_backward(q, k, v, dout, dlse, causal=True)
    for name in ("dq", "dk", "dv"):
        np.testing.assert_array_equal(getattr(dirty, name), getattr(clean, name))


def test_nan_in_a_value_does_not_reach_rows_without_keys():
    q, k, v = operands(9, sq=5, sk=2)
    v[:, 0] = np.nan
    result = standard_attention(q, k, v, causal=True)
    assert (result.out[:, :3] == 0).all()
    assert np.isnan(result.out[:, 3:]).all()


@pytest.mark.parametrize("empty", ["batch", "sq", "sk", "heads"])
def test_empty_inputs(empty):
    sizes = {"batch": {"batch": 0}, "sq": {"sq": 0}, "sk": {"sk": 0}, "heads": {"hq": 0, "hkv": 0}}[empty]
    q, k, v = operands(10, **sizes)
    result = standard_attention(q, k, v)
    batch, sq, hq, _ = q.shape
    assert result.out.shape == (batch, sq, hq, 3)
    assert result.lse.shape == (batch, hq, sq)
    assert (result.out == 0).all()
    assert (result.lse == -np.inf).all()
    gradients = standard_attention_backward(q, k, v, np.ones(result.out.shape), np.ones(result.lse.shape))
    assert [g.shape for g in (gradients.dq, gradients.dk, gradients.dv)] == [q.shape, k.shape, v.shape]
    assert not any(g.any() for g in (gradients.dq, gradients.dk, gradients.dv))


def test_large_scores_do_not_overflow():
    q, k, v = operands(11)
    result = standard_attention(q * 1e4, k, v)
    assert np.isfinite(result.out).all()
    assert np.isfinite(result.lse).all()


@pytest.mark.parametrize("dtype", [np.float16, np.float32, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn])
def test_other_floating_types_are_converted_first(dtype):
    tensors = [x.astype(dtype) for x in operands(12)]
    expected = standard_attention(*(x.astype(np.float64) for x in tensors))
    np.testing.assert_array_equal(standard_attention(*tensors).out, expected.out)


def test_arguments_are_checked():
    q, k, v = operands(13, hq=3, hkv=3)
    ones = np.ones((1, 5, 3, 3))
    with pytest.raises(ArgumentError, match="softmax_scale=nan"):
        standard_attention(q, k, v, softmax_scale=float("nan"))
    with pytest.raises(ArgumentError, match="softcap"):
        standard_attention(q, k, v, softcap=-1.0)
    with pytest.raises(ArgumentError, match="window_size"):
        standard_attention(q, k, v, window_size=(1.5, None))
    with pytest.raises(ShapeError, match="rank 4"):
        standard_attention(q[0], k, v)
    with pytest.raises(ShapeError, match="at least one feature"):
        standard_attention(q[..., :0], k[..., :0], v)
    with pytest.raises(ShapeError, match="must divide"):
        standard_attention(q, k[:, :, :2], v[:, :, :2])
    with pytest.raises(ShapeError, match="those of q"):
        standard_attention(q, k[..., :2], v)
    with pytest.raises(ShapeError, match="those of k"):
        standard_attention(q, k, v[:, :2])
    with pytest.raises(DtypeError):
        standard_attention(q.astype(int), k, v)
    with pytest.raises(ArgumentError, match="both"):
        standard_attention_backward(q, k, v, None, None)
    with pytest.raises(ShapeError, match="dout"):
        standard_attention_backward(q, k, v, ones[:, :2])
    with pytest.raises(ShapeError, match="dlse"):
        standard_attention_backward(q, k, v, ones, np.ones((1, 5, 3)))
