"""Functions on scores on the CPU backend: out, lse and gradients against float64, rows that see nothing, and what twins get and return."""

from __future__ import annotations

from functools import partial

import attention_modifiers as examples
import pytest
import torch

import fa4
from fa4.testing import AttentionShape, check_attention, make_inputs

SHAPE = AttentionShape(batch=2, seqlen_q=37, seqlen_k=45, heads_q=6, heads_kv=2, head_dim=16, head_dim_v=24)


def bent(score, batch, head, q_index, k_index, weight):
    return score + 0.1 * weight[head, q_index % 3] * score * score


def parity(batch, head, q_index, k_index):
    """Rows whose number is a multiple of 5 see nothing."""
    return (q_index % 5 != 0) & ((q_index + k_index + head) % 2 == 0)


def cut_off(score, batch, head, q_index, k_index):
    return torch.where(k_index > q_index, score, -torch.inf)


BENT = fa4.score_mod("cpu bent", torch=bent, aux={"weight": "float32[Hq, 3]"})
PARITY = fa4.mask_mod("cpu parity", torch=parity)
CUT_OFF = fa4.score_mod("cpu cut off", torch=cut_off)


def tensors(shape, *handles):
    documents = [(torch.arange(n, dtype=torch.int32) // 11).expand(shape.batch, n) for n in (shape.seqlen_q, shape.seqlen_k)]
    everything = {
        "slopes": examples.alibi_slopes(shape.heads_q),
        "q_document": documents[0],
        "k_document": documents[1] + 1,  # the first documents of queries have no keys
        "prefix": torch.arange(1, shape.batch + 1, dtype=torch.int32),
        "weight": torch.randn(shape.heads_q, 3, generator=torch.Generator().manual_seed(1)),
    }
    return {aux.name: everything[aux.name] for handle in handles for aux in handle.aux}


def attention(q, k, v, **options):
    return fa4.attention(q, k, v, return_lse=True, **options)


CASES = {
    "alibi": (examples.alibi, None, {"causal": True}),
    "documents": (None, examples.same_document, {}),
    "documents, causal": (examples.alibi, examples.same_document, {"causal": True}),
    "prefix": (None, examples.prefix, {"window_size": (20, 30)}),
    "bent": (BENT, PARITY, {"softcap": 2.0, "softmax_scale": -0.4}),
    "cut off": (CUT_OFF, None, {"window_size": (None, 3)}),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_results_and_gradients(case, dtype):
    score, mask, options = CASES[case]
    handles = [handle for handle in (score, mask) if handle]
    options = options | {"score_mod": score, "mask_mod": mask, "aux": tensors(SHAPE, *handles)}
    check_attention(attention, make_inputs(SHAPE, dtype), use_dlse=True, **options)


def test_tiles(monkeypatch):
    """Indices are those of the whole tensors in every tile."""
    from fa4.cpu import tiles

    monkeypatch.setattr(tiles, "TILE_ROWS", 12)
    monkeypatch.setattr(tiles, "TILE_KEYS", 7)
    monkeypatch.setattr(tiles, "TILE_ELEMENTS", 600)
    options = {"score_mod": BENT, "mask_mod": PARITY, "aux": tensors(SHAPE, BENT)}
    for deterministic in (False, True):
        function = partial(attention, deterministic=deterministic)
        check_attention(function, make_inputs(SHAPE, torch.float32), use_dlse=True, **options)


def test_rows_that_a_function_hides():
    """Out 0, lse -inf, and gradients 0 whatever flows into them."""
    inputs = make_inputs(SHAPE, torch.float32)
    leaves = inputs.leaves()
    out, lse = attention(*leaves, mask_mod=PARITY)
    dead = torch.arange(SHAPE.seqlen_q) % 5 == 0
    assert (out[:, dead] == 0).all()
    assert (lse[:, :, dead] == -torch.inf).all()
    assert lse[:, :, ~dead].isfinite().all()
    dout, dlse = inputs.dout.clone(), inputs.dlse.clone()
    expected = torch.autograd.grad((out, lse), leaves, (dout, dlse), retain_graph=True)
    dout[:, dead], dlse[:, :, dead] = torch.nan, torch.inf
    found = torch.autograd.grad((out, lse), leaves, (dout, dlse))
    assert (found[0][:, dead] == 0).all()
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_everything_hidden_and_empty_inputs():
    nothing = fa4.mask_mod("cpu nothing", torch=lambda b, h, i, j: (i < 0) & (j < 0))
    for lengths in ((5, 7), (0, 7), (5, 0)):
        leaves = make_inputs(AttentionShape(2, *lengths, 2, 1, 8), torch.float32).leaves()
        out, lse = attention(*leaves, mask_mod=nothing)
        assert (out == 0).all()
        assert (lse == -torch.inf).all()
        assert all((gradient == 0).all() for gradient in torch.autograd.grad(out.sum(), leaves))


def test_a_constant_score_gives_a_mean_and_no_gradient():
    constant = fa4.score_mod("cpu constant", torch=lambda s, b, h, i, j: torch.zeros(()))
    q, k, v = make_inputs(SHAPE, torch.float32).leaves()
    out = fa4.attention(q, k, v, score_mod=constant)
    torch.testing.assert_close(out, v.mean(1, keepdim=True).repeat_interleave(3, 2).expand_as(out))
    dq, dk, dv = torch.autograd.grad(out.sum(), (q, k, v))
    assert (dq == 0).all()
    assert (dk == 0).all()
    torch.testing.assert_close(dv, torch.full_like(dv, 3 * SHAPE.seqlen_q / SHAPE.seqlen_k))


@pytest.mark.parametrize(
    ("kind", "twin", "error", "parts"),
    [
        ("score", lambda s, *_: s > 0, fa4.DtypeError, ["torch.bool", "floating-point"]),
        ("score", lambda s, *_: 1.0, fa4.DtypeError, ["float", "floating-point"]),
        ("score", lambda s, *_: s[..., :-1], fa4.ShapeError, ["broadcasts to"]),
        ("mask", lambda *_: torch.ones(()), fa4.DtypeError, ["torch.float32", "bool"]),
    ],
)
def test_what_a_twin_must_not_return(kind, twin, error, parts):
    register = fa4.score_mod if kind == "score" else fa4.mask_mod
    handle = register(f"cpu bad {kind} {parts}", torch=twin)
    x = make_inputs(SHAPE, torch.float32)
    with pytest.raises(error) as caught:
        fa4.attention(x.q, x.k, x.v, **{f"{kind}_mod": handle})
    assert caught.value.argument == f"{kind}_mod"
    assert all(part in str(caught.value) for part in parts)
