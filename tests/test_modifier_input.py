"""Bad input to attention with functions on scores: a typed error before any work, on every backend."""

from __future__ import annotations

import attention_modifiers as examples
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import fa4
from fa4 import ops

ONLY_DEVICE = fa4.score_mod("only device", device=lambda score, batch, head, q_index, k_index: score + 1.0)
ONLY_TWIN = fa4.mask_mod("only twin", torch=lambda batch, head, q_index, k_index: q_index >= k_index)
VGPU = {"backend": "vgpu", "arch": "sm_100a"}


def slopes(*shape, **options):
    return {"slopes": torch.zeros(*(shape or (2,)), **options)}


def documents(q_document=None, k_document=None):
    return {
        "q_document": torch.zeros(1, 4, dtype=torch.int32) if q_document is None else q_document,
        "k_document": torch.zeros(1, 6, dtype=torch.int32) if k_document is None else k_document,
    }


# (options, error, argument it names, parts of the message: value, rule, remedy)
TABLE = [
    ({"score_mod": "nobody"}, fa4.ArgumentError, "score_mod", ["'nobody'", "no score_mod is registered", "fa4.score_mod('nobody', ...)"]),
    ({"mask_mod": "nobody"}, fa4.ArgumentError, "mask_mod", ["'nobody'", "no mask_mod is registered"]),
    ({"score_mod": "prefix"}, fa4.ArgumentError, "score_mod", ["'prefix'", "no score_mod is registered"]),
    ({"score_mod": examples.prefix}, fa4.DtypeError, "score_mod", ["fa4.MaskMod('prefix')", "what fa4.score_mod returned"]),
    ({"mask_mod": examples.alibi}, fa4.DtypeError, "mask_mod", ["fa4.ScoreMod('alibi')", "what fa4.mask_mod returned"]),
    ({"mask_mod": lambda b, h, i, j: i > j}, fa4.DtypeError, "mask_mod", ["register the function with fa4.mask_mod"]),
    ({"mask_mod": "only twin", **VGPU}, fa4.UnsupportedError, "mask_mod", ["'only twin'", "no device function", "'vgpu'", "device=..."]),
    ({"score_mod": "alibi"}, fa4.ArgumentError, "aux", ["has no 'slopes'", "aux={'slopes': tensor"]),
    ({"score_mod": "alibi", "aux": {"slope": torch.zeros(2)}}, fa4.ArgumentError, "aux", ["['slope']", "has no 'slopes'"]),
    ({"score_mod": "alibi", "aux": slopes() | {"more": torch.zeros(2)}}, fa4.ArgumentError, "aux", ["'more' is read by neither"]),
    ({"aux": slopes()}, fa4.ArgumentError, "aux", ["'slopes' is read by neither score_mod nor mask_mod", "leave it out"]),
    ({"score_mod": "alibi", "aux": [torch.zeros(2)]}, fa4.DtypeError, "aux", ["list", "must map names to tensors"]),
    ({"score_mod": "alibi", "aux": {"slopes": [0.0, 0.0]}}, fa4.DtypeError, "aux['slopes']", ["list", "dense torch.Tensor"]),
    (
        {"score_mod": "alibi", "aux": slopes(dtype=torch.float64)},
        fa4.DtypeError,
        "aux['slopes']",
        ["float64", "float32[Hq]"],
    ),
    ({"score_mod": "alibi", "aux": slopes(3)}, fa4.ShapeError, "aux['slopes']", ["(3,)", "float32[Hq], here (2)"]),
    ({"score_mod": "alibi", "aux": slopes(2, 1)}, fa4.ShapeError, "aux['slopes']", ["(2, 1)", "here (2)"]),
    ({"score_mod": "alibi", "aux": slopes(device="meta")}, fa4.DeviceError, "aux['slopes']", ["meta", "q's device cpu", ".to(q.device)"]),
    ({"score_mod": "alibi", "aux": slopes(requires_grad=True)}, fa4.UnsupportedError, "aux['slopes']", ["not computed", ".detach()"]),
    (
        {"mask_mod": "same_document", "aux": documents(k_document=torch.zeros(1, 4, dtype=torch.int32))},
        fa4.ShapeError,
        "aux['k_document']",
        ["(1, 4)", "int32[B, Sk], here (1, 6)"],
    ),
    (
        {"mask_mod": "same_document", "aux": documents(q_document=torch.zeros(4, dtype=torch.int32))},
        fa4.ShapeError,
        "aux['q_document']",
        ["(4,)", "int32[B, Sq], here (1, 4)"],
    ),
]


@pytest.mark.parametrize("backend", ["cpu", "vgpu"])
@pytest.mark.parametrize(("options", "error", "argument", "parts"), TABLE)
def test_bad_input(options, error, argument, parts, backend, monkeypatch):
    monkeypatch.setattr(ops, "modified_attention_forward", None)  # an error that came later would be another one
    if backend == "vgpu":
        options = options | VGPU
    q, k = torch.zeros(1, 4, 2, 8, dtype=torch.bfloat16), torch.zeros(1, 6, 2, 8, dtype=torch.bfloat16)
    with pytest.raises(error) as caught:
        fa4.attention(q, k, k, **options)
    assert caught.value.argument == argument
    assert all(part in str(caught.value) for part in parts), str(caught.value)


def test_the_cpu_backend_wants_a_twin():
    q = torch.zeros(1, 4, 2, 8)
    with pytest.raises(fa4.UnsupportedError, match="no torch twin, which backend 'cpu' needs; register it with") as caught:
        fa4.attention(q, q, q, score_mod=ONLY_DEVICE)
    assert (caught.value.argument, caught.value.value) == ("score_mod", "only device")


def test_good_input_reaches_the_op(monkeypatch):
    monkeypatch.setattr(ops, "modified_attention_forward", None)
    q = torch.zeros(1, 4, 2, 8, dtype=torch.bfloat16)
    for backend in ({}, VGPU):
        with pytest.raises(TypeError, match="NoneType"):
            fa4.attention(q, q, q, score_mod="alibi", aux=slopes(), **backend)


def test_aux_may_require_a_gradient_where_none_is_recorded():
    q = torch.randn(1, 4, 2, 8)
    with torch.no_grad():
        fa4.attention(q, q, q, score_mod="alibi", aux=slopes(requires_grad=True))


def test_gpu_tensors_want_a_device_function():
    with FakeTensorMode():
        q = torch.zeros(1, 4, 2, 8, dtype=torch.bfloat16, device="cuda")
    with pytest.raises(fa4.UnsupportedError, match="no device function, which backend 'cuda' needs"):
        fa4.attention(q, q, q, mask_mod=ONLY_TWIN)


def test_gradients_by_a_kernel_want_a_derivative(monkeypatch):
    q = torch.zeros(1, 4, 2, 8, dtype=torch.bfloat16, requires_grad=True)
    rule = r"score_mod='only device': has no derivative.* register it with grad=.*torch.no_grad\(\)"
    for options in ({}, {"mask_mod": examples.prefix, "aux": {"prefix": torch.zeros(1, dtype=torch.int32)}}):
        with monkeypatch.context() as patch:
            patch.setattr(ops, "modified_attention_forward", None)  # an error that came later would be another one
            with pytest.raises(fa4.UnsupportedError, match=rule) as caught:
                fa4.attention(q, q, q, score_mod=ONLY_DEVICE, **options, **VGPU)
        assert (caught.value.argument, caught.value.value) == ("score_mod", "only device")
    saved = (q.detach(),) * 4
    with pytest.raises(fa4.UnsupportedError, match=rule):  # by the op itself, too
        torch.ops.fa4.modified_attention_backward(
            saved[0], None, *saved, torch.zeros(1, 2, 4), [True] * 3, "only device", None, [], None, None, None, 0.0, False, *VGPU.values()
        )


def test_gradients_where_there_is_no_backward_kernel():
    q = torch.zeros(1, 4, 2, 8, dtype=torch.bfloat16, requires_grad=True)
    with pytest.raises(fa4.UnsupportedError, match="no backward kernel for sm_80 yet"):
        fa4.attention(q, q, q, score_mod="alibi", aux=slopes(), backend="vgpu", arch="sm_80")


def test_supports():
    assert fa4.supports(head_dim=64, score_mod="alibi", mask_mod=examples.prefix)
    assert fa4.supports(head_dim=64, score_mod="alibi", direction="backward")
    assert fa4.supports(head_dim=64, score_mod=ONLY_DEVICE, mask_mod=examples.prefix, arch="sm_100a").native
    assert fa4.supports(head_dim=64, score_mod="alibi", mask_mod=examples.prefix, arch="sm_100a", direction="backward").native
    for request, reason in (
        ({"score_mod": ONLY_DEVICE}, "score_mod 'only device' has no torch twin"),
        ({"mask_mod": ONLY_TWIN, "arch": "sm_80"}, "mask_mod 'only twin' has no device function"),
        ({"score_mod": ONLY_DEVICE, "arch": "sm_100a", "direction": "backward"}, "score_mod 'only device' has no derivative"),
        ({"score_mod": "alibi", "arch": "sm_80", "direction": "backward"}, "no backward kernel for sm_80 yet"),
    ):
        support = fa4.supports(head_dim=64, **request)
        assert not support
        assert reason in support.reason
    with pytest.raises(fa4.ArgumentError, match="no mask_mod is registered"):
        fa4.supports(head_dim=64, mask_mod="nobody")
