"""The forward and backward op of attention: schema, implementations, fakes, autograd."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from fa4 import dispatch
from fa4.cpu import torch_flash
from fa4.errors import UnsupportedError
from fa4.ops.repeated import Call, known, recorded, remember, usual, watched
from fa4.problem import AttentionOptions
from fa4.runtime import cuda
from fa4.runtime.backward import Saved

# The arguments after the tensors are the same in both ops and in this order. An absent softmax_scale means head_dim ** -0.5, worked
# out when the op runs: under torch.compile with dynamic shapes it would otherwise be a symbolic float.
OPTIONS = "float? softmax_scale, SymInt? window_left, SymInt? window_right, float softcap, bool deterministic, str backend, str? arch"
library = torch.library.Library("fa4", "DEF")
library.define(f"attention_forward(Tensor q, Tensor k, Tensor v, {OPTIONS}) -> (Tensor out, Tensor lse)")
library.define(
    "attention_backward(Tensor? dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, bool[] needed, "
    f"{OPTIONS}) -> (Tensor dq, Tensor dk, Tensor dv)"
)


def options_of(
    q: Tensor,
    softmax_scale: float | None,
    window_left: int | None,
    window_right: int | None,
    softcap: float,
    deterministic: bool,
) -> AttentionOptions:
    """The arguments of an op as what implementations take."""
    return AttentionOptions(
        softmax_scale=q.shape[3] ** -0.5 if softmax_scale is None else softmax_scale,
        window_left=window_left,
        window_right=window_right,
        softcap=softcap,
        deterministic=deterministic or torch.are_deterministic_algorithms_enabled(),
    )


def _own(x: Tensor) -> Tensor:
    """``x`` contiguous, and not a view: autograd would refuse to modify a view that an op returns in place."""
    return x.contiguous().detach()


def forward_cpu(q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions, backend: str, arch: str | None) -> tuple[Tensor, Tensor]:
    """On CPU tensors: the CPU backend, or a kernel on the virtual GPU."""
    if torch.is_autocast_enabled("cpu"):  # inputs are cast already; what is computed from them here must not be
        with torch.autocast("cpu", enabled=False):
            return forward_cpu(q, k, v, options, backend, arch)
    if backend == "vgpu":
        from fa4.runtime import virtual

        return virtual.attention_forward(q, k, v, options, virtual.gpu_from_settings(str(arch)))
    return _on_cpu(q, k, v, options)


def _on_cpu(q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions, lse: bool = True) -> tuple[Tensor, Tensor]:
    """The CPU backend's results; without ``lse`` the second one may have any strides."""
    out, total = dispatch.load("forward", "cpu")(q, k, v, options)
    return _own(out), _own(total) if lse else total


def backward_cpu(saved: Saved, options: AttentionOptions, backend: str, arch: str | None) -> tuple[Tensor, Tensor, Tensor]:
    """On CPU tensors: the CPU backend, or kernels on the virtual GPU. A gradient that is not needed is empty."""
    if torch.is_autocast_enabled("cpu"):
        with torch.autocast("cpu", enabled=False):
            return backward_cpu(saved, options, backend, arch)
    if backend == "vgpu":
        from fa4.runtime import virtual

        return _present(saved.q, virtual.attention_backward(saved, options, virtual.gpu_from_settings(str(arch))))
    tensors = saved.dout, saved.dlse, saved.q, saved.k, saved.v, saved.out, saved.lse
    gradients = dispatch.load("backward", "cpu")(*tensors, options, needed=saved.needed)
    return _present(saved.q, (None if gradient is None else _own(gradient) for gradient in gradients))


def backward_cuda(saved: Saved, options: AttentionOptions, arch: str | None) -> tuple[Tensor, Tensor, Tensor]:
    """On CUDA tensors. A gradient that is not needed is empty."""
    return _present(saved.q, cuda.attention_backward(saved, options, arch))


def _forward_cpu(q: Tensor, k: Tensor, v: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    *options, backend, arch = arguments
    return forward_cpu(q, k, v, options_of(q, *options), backend, arch)


def _forward_cuda(q: Tensor, k: Tensor, v: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    *options, _backend, arch = arguments
    return cuda.attention_forward(q, k, v, options_of(q, *options), arch)


def _backward_cpu(
    dout: Tensor | None,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *rest: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    out, lse, needed, *options, backend, arch = rest
    saved = Saved(q, k, v, out, lse, dout, dlse, tuple(needed))
    return backward_cpu(saved, options_of(q, *options), backend, arch)


def _backward_cuda(
    dout: Tensor | None,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *rest: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    out, lse, needed, *options, _backend, arch = rest
    saved = Saved(q, k, v, out, lse, dout, dlse, tuple(needed))
    return backward_cuda(saved, options_of(q, *options), arch)


def _present(q: Tensor, gradients: Iterable[Tensor | None]) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients with an empty tensor in the place of one that is not needed."""
    dq, dk, dv = (q.new_empty(0) if gradient is None else gradient for gradient in gradients)
    return dq, dk, dv


def _forward_fake(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    batch, seqlen_q, heads = q.shape[:3]
    out = q.new_empty((batch, seqlen_q, heads, v.shape[3]))
    return out, q.new_empty((batch, heads, seqlen_q), dtype=torch.float32)


def _backward_fake(_dout: Tensor | None, _dlse: Tensor | None, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    inputs, needed = rest[:3], rest[5]
    dq, dk, dv = (x.new_empty(x.shape if need else (0,)) for x, need in zip(inputs, needed, strict=True))
    return dq, dk, dv


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, *ctx.arguments = inputs
    ctx.save_for_backward(q, k, v, *output)
    ctx.set_materialize_grads(False)  # an absent dout or dlse stays absent, so that its half of the work is skipped


def _differentiate(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    needed = list(ctx.needs_input_grad[:3])
    nothing = (None,) * len(ctx.arguments)
    if dout is None and dlse is None:
        return (None, None, None, *nothing)
    gradients = torch.ops.fa4.attention_backward(dout, dlse, *ctx.saved_tensors, needed, *ctx.arguments)
    return (*(gradient if need else None for gradient, need in zip(gradients, needed, strict=True)), *nothing)


def _refuse_double_backward(_ctx: Any, *_gradients: Tensor | None) -> None:
    raise UnsupportedError(
        "create_graph",
        True,
        "attention is differentiable once: its backward has no derivative",
        "for second derivatives use torch's scaled_dot_product_attention with the math backend",
    )


def register(name: str, implementations: tuple[Any, ...], autograd: tuple[Any, Any]) -> None:
    """Give a pair of ops its implementations, fakes, and (derivative, what to save for it).

    ``implementations`` are the forward on CPU and CUDA, and the backward on CPU and CUDA.
    """
    forward, backward = f"{name}_forward", f"{name}_backward"
    ops, keys = (forward, forward, backward, backward), ("CPU", "CUDA", "CPU", "CUDA")
    for op, implementation, key in zip(ops, implementations, keys, strict=True):
        library.impl(op, implementation, key)
    torch.library.register_fake(f"fa4::{forward}", _forward_fake, lib=library)
    torch.library.register_fake(f"fa4::{backward}", _backward_fake, lib=library)
    torch.library.register_autograd(f"fa4::{forward}", autograd[0], setup_context=autograd[1], lib=library)
    torch.library.register_autograd(f"fa4::{backward}", _refuse_double_backward, lib=library)


register("attention", (_forward_cpu, _forward_cuda, _backward_cpu, _backward_cuda), (_differentiate, _save))

_forward_op = torch.ops.fa4.attention_forward.default


class _Again(torch.autograd.Function):
    """``attention_again`` for autograd: q, k, v and the ``Call`` to out. What the library makes of an op takes 0.3 ms more."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        out, lse = torch_flash.at_once(q, k, v, call.causal, call.softmax_scale)
        out = _own(out)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.call = call
        ctx.set_materialize_grads(False)
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None) -> tuple[Tensor | None, ...]:
        call, needed = ctx.call, ctx.needs_input_grad[:3]
        if dout is None:
            return None, None, None, None
        at_once = not torch.is_grad_enabled() and not watched(dout, dout, dout)
        if at_once and call.backward_at_once and usual() and dout.is_contiguous() and all(needed):
            gradients = torch_flash.backward_at_once(dout, ctx.saved_tensors, call.causal, call.softmax_scale)
            return *(gradient.detach() for gradient in gradients), None
        op = _backward_cpu if at_once else torch.ops.fa4.attention_backward
        gradients = op(dout, None, *ctx.saved_tensors, list(needed), *call.arguments)
        return *(gradient if need else None for gradient, need in zip(gradients, needed, strict=True)), None


_again: Callable[[Tensor, Tensor, Tensor, Call], Tensor] = _Again.apply


def attention_forward(q: Tensor, k: Tensor, v: Tensor, *arguments: Any, lse: bool = True) -> tuple[Tensor, Tensor]:
    """The forward op; the CPU backend at once where nothing could tell, since the dispatcher alone takes 3% of a call of 4 ms.

    Without ``lse`` the second result may have any strides: nobody reads it.
    """
    *options, backend, _ = arguments
    if backend == "cpu" and not watched(q, k, v):
        every = options_of(q, *options)
        remember(q, k, v, options[0], every)
        if not recorded(q, k, v):
            with torch._C._AutoDispatchBelowAutograd():  # as within the op
                return _on_cpu(q, k, v, every, lse)
    out_lse: tuple[Tensor, Tensor] = _forward_op(q, k, v, *arguments)
    return out_lse


def attention_again(q: Tensor, k: Tensor, v: Tensor, causal: bool, softmax_scale: float | None) -> Tensor | None:
    """Out (B, Sq, Hq, Dv) of a call without other options, unchecked, if it is like one before on the CPU; else None."""
    call = known(q, k, v, causal, softmax_scale)
    if call is None:
        return None
    if recorded(q, k, v):
        return _again(q, k, v, call)
    with torch._C._AutoDispatchBelowAutograd():
        return _own(torch_flash.at_once(q, k, v, causal, call.softmax_scale)[0])
