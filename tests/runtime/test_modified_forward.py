"""Functions on scores in the forward kernels, on the virtual GPU with hazard checks on, against float64."""

from __future__ import annotations

import attention_modifiers as examples
import cutlass.cute as cute
import pytest
import torch
from cutlass import Float32
from forward_check import check, on_virtual_gpu

import fa4
from fa4.testing import AttentionShape, make_inputs

pytestmark = [pytest.mark.compile, pytest.mark.vgpu]


def documents(boundaries, length, batch):
    """Numbers of documents, int32 (batch, length), the same for each batch but for where the first one ends."""
    rows = [torch.bucketize(torch.arange(length), torch.tensor(boundaries) + b, right=True) for b in range(batch)]
    return torch.stack(rows).to(torch.int32)


def options(shape, *handles, q_ends=(40,), k_ends=(60,), **others):
    everything = {
        "slopes": examples.alibi_slopes(shape.heads_q),
        "q_document": documents(q_ends, shape.seqlen_q, shape.batch),
        "k_document": documents(k_ends, shape.seqlen_k, shape.batch),
        "prefix": torch.arange(17, 17 + shape.batch, dtype=torch.int32),
    }
    named = {"score_mod" if isinstance(handle, fa4.ScoreMod) else "mask_mod": handle for handle in handles}
    return {**named, "aux": {aux.name: everything[aux.name] for handle in handles for aux in handle.aux}, **others}


def run(arch, shape, dtype, **arguments):
    with fa4.settings(vgpu_checks="hazards"):
        check(on_virtual_gpu(arch), shape, dtype, **arguments)


@pytest.mark.parametrize(
    "shape",
    [
        AttentionShape(2, 20, 45, 6, 2, 64),
        *(pytest.param(AttentionShape(*slow, 64), marks=pytest.mark.slow) for slow in ((2, 37, 45, 6, 2), (1, 130, 141, 3, 1))),
    ],
    ids=str,
)
def test_alibi_causal(shape):
    """Heads packed into one tile, into two, and not, odd lengths; functions are not asked about rows, heads and keys that do not exist."""
    run("sm_100a", shape, torch.bfloat16, **options(shape, examples.alibi, causal=True))


@pytest.mark.parametrize(
    ("lengths", "ends"),
    [
        ((60, 90), {}),
        ((33, 300), {"q_ends": (11, 20), "k_ends": (5, 270)}),  # rows that see keys of the first, of all, or of the last tile only
        ((20, 270), {"q_ends": (7,), "k_ends": (0,)}),  # the first rows see nothing at all: no document 0 among the keys
    ],
    ids=str,
)
def test_documents(lengths, ends):
    """Whole tiles and whole rows that the function hides; heads are not packed."""
    shape = AttentionShape(1, *lengths, 2, 2, 64)
    run("sm_100a", shape, torch.float16, **options(shape, examples.same_document, **ends))


def test_rows_that_see_nothing():
    """Exact zeros and -inf, also where V has a number that 0 times it would show."""
    shape = AttentionShape(1, 20, 150, 2, 2, 64)
    x = make_inputs(shape, torch.float16)
    chosen = options(shape, examples.same_document, q_ends=(7,), k_ends=(0,))
    out, lse = fa4.attention(x.q, x.k, x.v, return_lse=True, backend="vgpu", arch="sm_100a", **chosen)
    assert (out[:, :7] == 0).all()
    assert (lse[:, :, :7] == -torch.inf).all()
    assert (out[:, 7:] != 0).any()
    assert lse[:, :, 7:].isfinite().all()


def test_the_ampere_kernel_takes_them_too():
    shape = AttentionShape(1, 70, 137, 3, 1, 64)
    handles = examples.alibi, examples.same_document
    run("sm_80", shape, torch.bfloat16, **options(shape, *handles, q_ends=(9, 50), k_ends=(0, 40), causal=True))


def test_aux_of_any_strides():
    """Read where it lies, or copied once where the last stride is not 1."""
    shape = AttentionShape(1, 20, 45, 3, 1, 64)
    expanded = torch.tensor([0.25]).expand(3)
    assert expanded.stride(-1) == 0
    run("sm_100a", shape, torch.bfloat16, causal=True, score_mod="alibi", aux={"slopes": expanded})


@pytest.mark.parametrize("modified", [True, False])
def test_compile_fullgraph(modified):
    def attention(q, k, v, slopes):
        options = {"score_mod": examples.alibi, "aux": {"slopes": slopes}} if modified else {}
        return fa4.attention(q, k, v, causal=True, backend="vgpu", arch="sm_100a", **options)

    heads = 3 if modified else 1  # so that other tests have compiled the kernel
    x = make_inputs(AttentionShape(1, 20, 45, heads, 1, 64), torch.bfloat16)
    slopes = examples.alibi_slopes(heads)
    compiled = torch.compile(attention, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x.q, x.k, x.v, slopes), attention(x.q, x.k, x.v, slopes))


@pytest.mark.parametrize("slot", ["score_mod", "mask_mod"])
def test_a_device_function_that_cannot_be_traced(slot):
    def broken(*arguments):
        raise RuntimeError("traced")

    handle = getattr(fa4, slot)(f"broken {slot}", device=broken)
    x = make_inputs(AttentionShape(1, 4, 4, 1, 1, 64), torch.bfloat16)
    with pytest.raises(fa4.CompileError, match="traced"):
        fa4.attention(x.q, x.k, x.v, backend="vgpu", arch="sm_80", **{slot: handle})


# All forms of aux, all masks, both dtypes, and more than one head dim.


@cute.jit
def _weighted(score, batch, head, q_index, k_index, weight, offset, table):
    product = Float32(table[0, batch, q_index % 2, 1]) * Float32(offset[k_index])
    return score * Float32(weight[batch, head]) - product


def _weighted_twin(score, batch, head, q_index, k_index, weight, offset, table):
    return score * weight[batch, head] - table[0, batch, q_index % 2, 1] * offset[k_index].to(score.dtype)


@cute.jit
def _windowed(batch, head, q_index, k_index, first, last):
    visible = k_index <= last[batch]
    if head == 0:
        visible = visible & (k_index >= first[q_index])
    return visible


def _windowed_twin(batch, head, q_index, k_index, first, last):
    return (k_index <= last[batch]) & ((head != 0) | (k_index >= first[q_index]))


WEIGHTED = fa4.score_mod(
    "weighted",
    device=_weighted,
    torch=_weighted_twin,
    aux={"weight": "float16[B, Hq]", "offset": "int64[Sk]", "table": "bfloat16[?, B, 2, 3]"},
)
WINDOWED = fa4.mask_mod("windowed", device=_windowed, torch=_windowed_twin, aux={"first": "float32[Sq]", "last": "int32[B]"})


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_100a", "sm_103a", "sm_80"])
def test_every_kind_of_aux(arch):
    shape = AttentionShape(2, 37, 150, 4, 2, 64)
    aux = {
        "weight": torch.randn(2, 4).to(torch.float16),
        "offset": torch.arange(150) % 7,
        "table": torch.randn(1, 2, 2, 3).to(torch.bfloat16),
        "first": torch.arange(37) * 3.5,
        "last": torch.tensor([149, 100], dtype=torch.int32),
    }
    run(arch, shape, torch.bfloat16, score_mod=WEIGHTED, mask_mod=WINDOWED, aux=aux)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_100a", "sm_80"])
@pytest.mark.parametrize("dim", [64, 128, (192, 128)], ids=str)
@pytest.mark.parametrize(
    "mask", [{}, {"causal": True}, {"window_size": (70, 9)}, {"softcap": 10.0, "causal": True}, {"softmax_scale": -0.2}], ids=str
)
@pytest.mark.parametrize("handles", [(examples.alibi,), (examples.prefix,), (examples.alibi, examples.same_document)], ids=str)
def test_matrix(arch, dim, mask, handles):
    dim, dim_v = dim if isinstance(dim, tuple) else (dim, 0)
    """Two query tiles, packed heads, one query; at (192, 128) without a mask a pair of CTAs."""
    for lengths, heads, dtype in (((129, 141), 1, torch.bfloat16), ((40, 300), 3, torch.float16), ((260, 130), 1, torch.bfloat16)):
        shape = AttentionShape(1, *lengths, heads, 1, dim, dim_v)
        run(arch, shape, dtype, **options(shape, *handles, **mask))
