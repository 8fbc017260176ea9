"""Every kind of bad input raises its error before any work is done, naming argument, value, rule and remedy."""

from __future__ import annotations

import math
import pickle

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import fa4
from fa4 import ops
from fa4.cpu import torch_flash
from fa4.ops import repeated


def tensors(sq=4, sk=4, hq=2, hkv=2, d=8, dv=8, dtype=torch.bfloat16, device="cpu"):
    return {
        "q": torch.zeros(1, sq, hq, d, dtype=dtype, device=device),
        "k": torch.zeros(1, sk, hkv, d, dtype=dtype, device=device),
        "v": torch.zeros(1, sk, hkv, dv, dtype=dtype, device=device),
    }


def changed(**changes):
    return lambda: tensors() | {name: change(tensors()[name]) for name, change in changes.items()}


def with_options(**options):
    return lambda: tensors() | options


def fake(device, **options):
    """Tensors on a device that is not here: fake ones carry device and shape only."""

    def build():
        with FakeTensorMode():
            return tensors(**options, device=device)

    return build


def fake_cuda(**options):
    return fake("cuda", **options)


def all_of_dtype(dtype, **options):
    return lambda: tensors(dtype=dtype) | options


# (what is wrong, arguments, error, argument it names, parts of the message: value, rule, remedy)
TABLE = [
    ("not a tensor", changed(q=lambda x: x.float().numpy()), fa4.DtypeError, "q", ["ndarray", "torch.Tensor", "as_tensor"]),
    ("rank 3", changed(q=lambda x: x[0]), fa4.ShapeError, "q", ["(4, 2, 8)", "4 dimensions", "(batch, seqlen, heads, head_dim)"]),
    ("rank 5", changed(v=lambda x: x[None]), fa4.ShapeError, "v", ["(1, 1, 4, 2, 8)", "4 dimensions"]),
    ("batch differs", changed(k=lambda x: x.repeat(3, 1, 1, 1)), fa4.ShapeError, "k", ["(3, 4, 2, 8)", "batch size 1"]),
    ("seqlen of v differs", changed(v=lambda x: x[:, :3]), fa4.ShapeError, "v", ["(1, 3, 2, 8)", "seqlen and heads (4, 2)"]),
    ("heads of v differ", changed(v=lambda x: x[:, :, :1]), fa4.ShapeError, "v", ["(1, 4, 1, 8)", "(4, 2)", "order"]),
    ("heads do not divide", lambda: tensors(hq=4, hkv=3), fa4.ShapeError, "k", ["3 heads", "4 heads", "equal group"]),
    ("fewer query heads", lambda: tensors(hq=2, hkv=4), fa4.ShapeError, "k", ["4 heads", "2 heads"]),
    ("no heads", lambda: tensors(hq=0, hkv=0), fa4.ShapeError, "k", ["0 heads"]),
    ("no key heads", lambda: tensors(hq=2, hkv=0), fa4.ShapeError, "k", ["0 heads"]),
    ("head_dim of k differs", changed(k=lambda x: x[..., :4]), fa4.ShapeError, "k", ["head_dim 8", "only v"]),
    ("dtype of k differs", changed(k=lambda x: x.float()), fa4.DtypeError, "k", ["torch.float32", "torch.bfloat16", ".to(q.dtype)"]),
    ("float64", all_of_dtype(torch.float64), fa4.DtypeError, "q", ["torch.float64", "'cpu'", "float16, bfloat16, float32"]),
    ("integers", all_of_dtype(torch.int32), fa4.DtypeError, "q", ["torch.int32", "float16, bfloat16, float32"]),
    ("float32 on a GPU", fake_cuda(dtype=torch.float32), fa4.DtypeError, "q", ["torch.float32", "'cuda'", "float16, bfloat16"]),
    (
        "float32 on the virtual GPU",
        all_of_dtype(torch.float32, backend="vgpu", arch="sm_100a"),
        fa4.DtypeError,
        "q",
        ["torch.float32", "'vgpu'", "float16, bfloat16"],
    ),
    ("devices differ", changed(v=lambda x: x.to("meta")), fa4.DeviceError, "v", ["meta", "q's device cpu", ".to(q.device)"]),
    ("head_dim 0", lambda: tensors(d=0), fa4.UnsupportedError, "q", ["head_dim 0", "at least 1"]),
    ("head_dim_v 0", lambda: tensors(dv=0), fa4.UnsupportedError, "v", ["head_dim 0", "at least 1"]),
    ("head_dim 12 on a GPU", fake_cuda(d=12), fa4.UnsupportedError, "q", ["head_dim 12", "multiple of 8 from 8 to 256", "pad"]),
    ("head_dim 512 on a GPU", fake_cuda(d=512), fa4.UnsupportedError, "q", ["head_dim 512", "from 8 to 256"]),
    ("head_dim_v 260 on a GPU", fake_cuda(dv=260), fa4.UnsupportedError, "v", ["head_dim 260", "from 8 to 256"]),
    ("NaN scale", with_options(softmax_scale=math.nan), fa4.ArgumentError, "softmax_scale", ["nan", "finite"]),
    ("infinite scale", with_options(softmax_scale=-math.inf), fa4.ArgumentError, "softmax_scale", ["-inf", "finite"]),
    ("scale beyond float32", with_options(softmax_scale=1e39), fa4.ArgumentError, "softmax_scale", ["1e+39", "finite in float32"]),
    ("scale beyond float64", with_options(softmax_scale=-(10**400)), fa4.ArgumentError, "softmax_scale", ["finite in float32"]),
    ("tiny softcap", with_options(softcap=1e-50), fa4.ArgumentError, "softcap", ["1e-50", "too small", "30.0"]),
    ("causal is text", with_options(causal="no"), fa4.DtypeError, "causal", ["'no'", "True or False"]),
    ("deterministic is a number", with_options(deterministic=1), fa4.DtypeError, "deterministic", ["1", "True or False"]),
    ("return_lse is None", with_options(return_lse=None), fa4.DtypeError, "return_lse", ["None", "True or False"]),
    ("sparse", changed(q=lambda x: x.to_sparse()), fa4.DtypeError, "q", ["sparse", "dense tensor", "to_dense"]),
    ("scale is text", with_options(softmax_scale="1"), fa4.DtypeError, "softmax_scale", ["'1'", "real number", "float"]),
    ("scale is a tensor", with_options(softmax_scale=torch.ones(())), fa4.DtypeError, "softmax_scale", ["tensor", "real number"]),
    ("scale is a bool", with_options(softmax_scale=True), fa4.DtypeError, "softmax_scale", ["True", "real number"]),
    ("negative softcap", with_options(softcap=-1.0), fa4.ArgumentError, "softcap", ["-1.0", "not be negative", "0.0"]),
    ("NaN softcap", with_options(softcap=math.nan), fa4.ArgumentError, "softcap", ["nan", "finite"]),
    ("softcap None", with_options(softcap=None), fa4.DtypeError, "softcap", ["None", "real number"]),
    ("window of one", with_options(window_size=(1,)), fa4.ArgumentError, "window_size", ["(1,)", "(left, right)", "(128, 0)"]),
    ("window of three", with_options(window_size=(1, 2, 3)), fa4.ArgumentError, "window_size", ["(1, 2, 3)", "(left, right)"]),
    ("window is a number", with_options(window_size=5), fa4.DtypeError, "window_size", ["5", "(left, right)"]),
    ("window is text", with_options(window_size="10"), fa4.DtypeError, "window_size", ["'10'", "(left, right)"]),
    ("window of floats", with_options(window_size=(1.0, 0)), fa4.DtypeError, "window_size", ["1.0 is not an integer", "None"]),
    ("window of bools", with_options(window_size=(True, 0)), fa4.DtypeError, "window_size", ["True is not an integer"]),
    ("dropout", with_options(dropout_p=0.1), fa4.UnsupportedError, "dropout_p", ["0.1", "dropout", "0.0"]),
    ("unknown backend", with_options(backend="tpu"), fa4.BackendError, "backend", ["'tpu'", "unknown", "'cpu', 'cuda', 'vgpu'"]),
    ("cuda backend, CPU tensors", with_options(backend="cuda"), fa4.BackendError, "backend", ["'cuda'", "on cpu", "'cpu' or 'vgpu'"]),
    (
        "cpu backend, CUDA tensors",
        lambda: fake_cuda()() | {"backend": "cpu"},
        fa4.BackendError,
        "backend",
        ["'cpu'", "on cuda:0", "backend='cuda'"],
    ),
    (
        "vgpu backend, CUDA tensors",
        lambda: fake_cuda()() | {"backend": "vgpu", "arch": "sm_80"},
        fa4.BackendError,
        "backend",
        ["'vgpu'", "on cuda:0"],
    ),
    ("arch without backend", with_options(arch="sm_80"), fa4.BackendError, "arch", ["'sm_80'", "no meaning on backend 'cpu'", "vgpu"]),
    ("arch on cpu", with_options(arch="sm_80", backend="cpu"), fa4.BackendError, "arch", ["'sm_80'", "no meaning", "vgpu"]),
    ("vgpu without arch", with_options(backend="vgpu"), fa4.BackendError, "arch", ["None", "needs an architecture", "sm_100a"]),
    ("unknown arch", with_options(backend="vgpu", arch="sm_42"), fa4.BackendError, "arch", ["'sm_42'", "sm_80"]),
    ("arch without suffix", with_options(backend="vgpu", arch="sm_100"), fa4.BackendError, "arch", ["'sm_100'", "sm_100a"]),
    ("device of no backend", fake("xpu"), fa4.DeviceError, "q", ["xpu", "no backend serves", "CPU or CUDA"]),
    (
        "no backward kernel for an architecture",
        lambda: {name: x.requires_grad_() for name, x in fake_cuda()().items()} | {"arch": "sm_80"},
        fa4.UnsupportedError,
        "backend",
        ["'cuda'", "no backward kernel for sm_80 yet", "backend 'cpu' serves", "torch.no_grad()"],
    ),
    (
        "no backward kernel for head dims",
        lambda: {name: x.requires_grad_() for name, x in tensors(d=256, dv=256).items()} | {"backend": "vgpu", "arch": "sm_100a"},
        fa4.UnsupportedError,
        "backend",
        ["'vgpu'", "columns of tensor memory", "backend 'cpu' serves", "torch.no_grad()"],
    ),
]


@pytest.mark.parametrize(("build", "error", "argument", "parts"), [row[1:] for row in TABLE], ids=[row[0] for row in TABLE])
def test_bad_input_raises_before_any_work(build, error, argument, parts, monkeypatch):
    arguments = build()

    def no_work(*_):
        pytest.fail("the op was called")

    # Good calls with the same tensors come before: what is remembered of them excuses no check.
    monkeypatch.setattr(repeated, "_calls", {})
    monkeypatch.setattr(torch_flash, "MIN_KEYS", 1)
    for options in ({}, {"causal": True}, {"softmax_scale": 1.0}, {"softmax_scale": 0.5, "causal": True}):
        fa4.attention(**tensors(), **options)
    assert len(repeated._calls) == 4
    monkeypatch.setattr(ops, "attention_forward", no_work)
    with pytest.raises(error) as caught:
        fa4.attention(arguments.pop("q"), arguments.pop("k"), arguments.pop("v"), **arguments)
    assert type(caught.value) is error
    assert caught.value.argument == argument
    message = str(caught.value)
    assert message.startswith(f"{argument}=")
    for part in parts:
        assert part in message
    assert caught.value.rule
    assert caught.value.remedy


def test_each_error_is_also_the_builtin_that_callers_expect():
    assert issubclass(fa4.ArgumentError, ValueError)
    assert issubclass(fa4.DtypeError, TypeError)
    assert issubclass(fa4.UnsupportedError, NotImplementedError)
    children = (fa4.ArgumentError, fa4.DtypeError, fa4.ShapeError, fa4.DeviceError, fa4.BackendError, fa4.UnsupportedError)
    assert all(issubclass(child, fa4.Fa4Error) for child in children)


def test_errors_survive_pickling():
    error = fa4.ShapeError("q", (1, 2), "a rule", "a remedy")
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), str(copy), copy.value) == (fa4.ShapeError, str(error), (1, 2))


@pytest.mark.parametrize("scale", [1, np.float32(0.5), np.int64(2), 0, -0.25], ids=repr)
def test_numbers_of_any_real_type_are_calls(scale):
    x = tensors()
    assert fa4.attention(**x, softmax_scale=scale).shape == (1, 4, 2, 8)


@pytest.mark.parametrize("window", [[2, 0], (np.int64(2), 0), (10**30, 0)], ids=repr)
def test_integers_of_any_type_are_window_bounds(window):
    assert fa4.attention(**tensors(), window_size=window).shape == (1, 4, 2, 8)


def test_positional_options_are_refused():
    x = tensors()
    with pytest.raises(TypeError, match="positional"):
        fa4.attention(x["q"], x["k"], x["v"], True)
