"""The public functions: normalise and validate a request, choose a backend, hand it to the torch op."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Literal, overload

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad

from fa4 import dispatch, ops
from fa4.arch import get_arch
from fa4.dispatch import Support
from fa4.errors import BackendError, DeviceError, DtypeError, ShapeError, UnsupportedError
from fa4.modifier import MaskMod, Modifiers, ScoreMod, order_aux
from fa4.problem import (
    AttentionProblem,
    Direction,
    WindowSize,
    dtype_name,
    normalise_window,
    problem_class,
    real_number,
    softcap_number,
)
from fa4.runtime import cuda


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    softmax_scale: float | None = ...,
    causal: bool = ...,
    window_size: WindowSize = ...,
    softcap: float = ...,
    dropout_p: float = ...,
    return_lse: Literal[False] = ...,
    deterministic: bool = ...,
    score_mod: ScoreMod | str | None = ...,
    mask_mod: MaskMod | str | None = ...,
    aux: Mapping[str, Tensor] | None = ...,
    backend: str | None = ...,
    arch: str | None = ...,
) -> Tensor: ...


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    softmax_scale: float | None = ...,
    causal: bool = ...,
    window_size: WindowSize = ...,
    softcap: float = ...,
    dropout_p: float = ...,
    return_lse: Literal[True],
    deterministic: bool = ...,
    score_mod: ScoreMod | str | None = ...,
    mask_mod: MaskMod | str | None = ...,
    aux: Mapping[str, Tensor] | None = ...,
    backend: str | None = ...,
    arch: str | None = ...,
) -> tuple[Tensor, Tensor]: ...


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (None, None),
    softcap: float = 0.0,
    dropout_p: float = 0.0,
    return_lse: bool = False,
    deterministic: bool = False,
    score_mod: ScoreMod | str | None = None,
    mask_mod: MaskMod | str | None = None,
    aux: Mapping[str, Tensor] | None = None,
    backend: str | None = None,
    arch: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of q with k and v: ``softmax(scores) @ v`` per head, differentiable once.

    Args:
        q: ``(B, Sq, Hq, D)``, float16, bfloat16 or, on the CPU backend, float32. Any strides.
        k: ``(B, Sk, Hkv, D)`` in q's dtype. Query head h uses key head ``h // (Hq / Hkv)``.
        v: ``(B, Sk, Hkv, Dv)`` in q's dtype. Dv may differ from D.
        softmax_scale: factor of ``q @ k``, finite in float32; ``D ** -0.5`` by default. Negative values and zero are allowed.
        causal: query i sees keys ``j <= i + Sk - Sq`` (aligned bottom-right).
        window_size: ``(left, right)``: query i sees keys from ``i + Sk - Sq - left`` to ``i + Sk - Sq + right``. ``None`` and -1 mean
            open on that side; every other value, negative ones included, is an offset. ``causal`` clamps right to at most 0.
        softcap: where c > 0, scaled scores s become ``c * tanh(s / c)`` before the mask.
        dropout_p: must be 0; here so that a call ported from another library fails with a clear message.
        return_lse: also return the natural logarithm of the softmax denominator; its gradient is supported.
        deterministic: results and gradients are bitwise reproducible, alone or in any batch; on the CPU for a given number of
            torch threads. Also set by ``torch.use_deterministic_algorithms(True)``.
        score_mod: a function on scores, registered with ``fa4.score_mod``, or its name; applied after softcap, before the masks.
        mask_mod: a function that hides keys, registered with ``fa4.mask_mod``, or its name; hides beside what causal and window hide.
        aux: name to tensor: what these functions read, on q's device, in the element types and shapes they were registered with.
        backend: "cpu", "cuda" or "vgpu" (the GPU kernel, executed on the CPU); by default what the tensors' device says.
        arch: architecture for the "vgpu" backend, for example "sm_100a"; on CUDA tensors it can only be their device's own.

    Returns:
        out ``(B, Sq, Hq, Dv)`` in q's dtype, contiguous; with ``return_lse`` the pair (out, lse), lse ``(B, Hq, Sq)`` float32. Rows
        that see no key have out 0, lse -inf and gradient 0. Under autocast inputs are first cast to the autocast dtype.

    Raises:
        Fa4Error: one of its children, before any work is done, naming the argument, its value, the rule and what would work; later only
            CompileError and CudaError.
    """
    if (
        (score_mod, mask_mod, aux, backend, arch) == (None,) * 5
        and (return_lse is deterministic is False)
        and type(window_size) is tuple
        and len(window_size) == 2
        and window_size[0] is window_size[1] is None
        and type(softcap) is type(dropout_p) is float
        and softcap == dropout_p == 0.0
    ):
        again = ops.attention_again(q, k, v, causal, softmax_scale)
        if again is not None:
            return again
    _check_tensors(q, k, v)
    for name, flag in (("causal", causal), ("return_lse", return_lse), ("deterministic", deterministic)):
        if not isinstance(flag, bool):
            raise DtypeError(name, flag, "must be True or False", "pass a bool")
    q, k, v = ops.cast_for_autocast(q, k, v)
    if dropout_p != 0:
        raise UnsupportedError("dropout_p", dropout_p, "attention dropout is not implemented", "pass 0.0")
    left, right = normalise_window(window_size, causal)
    scale = None if softmax_scale is None else real_number("softmax_scale", softmax_scale)
    softcap = softcap_number(softcap)
    backend = _choose_backend(backend, arch, q.device)
    _check_operands(q, k, v, backend)
    modifiers = None
    if score_mod is not None or mask_mod is not None or aux is not None:
        modifiers = Modifiers.named(score_mod, mask_mod, backend)
        modifiers = replace(modifiers, aux=_check_aux(modifiers, aux, q, k))
    if backend != "cpu":
        functions = modifiers.functions if modifiers else (None, None)
        problem = AttentionProblem.of("forward", q.dtype, (q.shape[3], v.shape[3]), (left, right), softcap, deterministic, functions)
        _check_kernels(problem, (q, k, v), modifiers, backend, arch)
    options = scale, left, right, softcap, deterministic, backend, arch
    if modifiers is None:
        out, lse = ops.attention_forward(q, k, v, *options, lse=return_lse)
    else:
        names = [None if each is None else each.name for each in (modifiers.score, modifiers.mask)]
        out, lse = ops.modified_attention_forward(q, k, v, *names, list(modifiers.aux), *options)
    return (out, lse) if return_lse else out


def supports(
    *,
    head_dim: int,
    head_dim_v: int | None = None,
    dtype: str | torch.dtype = "bfloat16",
    causal: bool = False,
    window_size: WindowSize = (None, None),
    softcap: float = 0.0,
    deterministic: bool = False,
    direction: Direction = "forward",
    score_mod: ScoreMod | str | None = None,
    mask_mod: MaskMod | str | None = None,
    backend: str | None = None,
    arch: str | None = None,
) -> Support:
    """Whether a class of requests is served, and if not why: ``Support(ok, reason)``, true where it is.

    Without ``arch`` the CPU backend is asked, with it the kernel of that architecture on the virtual GPU; ``backend`` asks another. No
    GPU is looked for.
    Arguments are as in ``attention``.

    Raises:
        Fa4Error: an argument is malformed (an unknown backend, arch or direction, a window of wrong arity), as opposed to unserved.
    """
    if backend is None:
        backend = "cpu" if arch is None else "vgpu"
    _check_backend_name(backend)
    _check_arch(backend, arch)
    try:
        modifiers = Modifiers.named(score_mod, mask_mod, backend, direction)
    except UnsupportedError as error:
        return Support(False, f"{error.argument} {error.value!r} {error.rule}")
    problem = problem_class(
        direction=direction,
        dtype=dtype,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        deterministic=deterministic,
        functions=modifiers.functions_for(direction),
    )
    return dispatch.support(problem, backend, arch)


def _check_tensors(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Types, ranks, devices and sizes.

    Raises:
        DtypeError: not a tensor.
        ShapeError: a rank or size does not fit.
        DeviceError: tensors on different devices.
    """
    dual_level, device = forward_ad._current_level >= 0, getattr(q, "device", None)  # attributes of tensors are read once: each costs
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor):
            raise DtypeError(name, type(x).__name__, "must be a torch.Tensor", "convert with torch.as_tensor")
        if x.layout != torch.strided or x.is_nested:
            raise DtypeError(name, str(x.layout), "must be a dense tensor", "convert with .to_dense(), or pad nested tensors")
        if x.dim() != 4:
            raise ShapeError(name, tuple(x.shape), "must have 4 dimensions", "use (batch, seqlen, heads, head_dim)")
        if dual_level and forward_ad.unpack_dual(x).tangent is not None:
            raise UnsupportedError(name, "a dual tensor", "forward-mode differentiation is not implemented", "use backward mode")
        if x.device != device:
            raise DeviceError(name, str(x.device), f"must be on q's device {device}", "move it there with .to(q.device)")
    (batch, _, heads_q, head_dim), k_shape, v_shape = q.shape, k.shape, v.shape
    for name, shape in (("k", k_shape), ("v", v_shape)):
        if shape[0] != batch:
            raise ShapeError(name, tuple(shape), f"must have q's batch size {batch}", "expand or slice it")
    _, seqlen_k, heads_kv, head_dim_k = k_shape
    if v_shape[1] != seqlen_k or v_shape[2] != heads_kv:
        raise ShapeError("v", tuple(v_shape), f"must have k's seqlen and heads {(seqlen_k, heads_kv)}", "check the order (B, S, H, D)")
    if head_dim_k != head_dim:
        raise ShapeError("k", tuple(k_shape), f"must have q's head_dim {head_dim}", "only v may have a head_dim of its own")
    if heads_kv == 0 or heads_q == 0 or heads_q % heads_kv:
        rule = f"its {heads_kv} heads must divide q's {heads_q} heads"
        raise ShapeError("k", tuple(k_shape), rule, "each key head serves an equal group of query heads")


def _check_backend_name(backend: str) -> None:
    if backend not in dispatch.BACKENDS:
        raise BackendError("backend", backend, "is unknown", f"use one of {', '.join(map(repr, dispatch.BACKENDS))}")


def _check_arch(backend: str, arch: str | None) -> None:
    """An arch is known, and asked for where it means something.

    Raises:
        BackendError: unknown, missing on "vgpu", or given with backend "cpu".
    """
    if arch is not None:
        get_arch(arch)
        if backend == "cpu":
            raise BackendError("arch", arch, "has no meaning on backend 'cpu'", "pass backend='vgpu' to run the GPU kernel on the CPU")
    elif backend == "vgpu":
        raise BackendError("arch", arch, "backend 'vgpu' needs an architecture", "for example arch='sm_100a'")


def _choose_backend(backend: str | None, arch: str | None, device: torch.device) -> str:
    """The backend for tensors on ``device``: an explicit one is honoured or refused, never replaced.

    Raises:
        BackendError: unknown, or at odds with the tensors' device or with ``arch``.
        DeviceError: a kind of device that no backend serves.
    """
    if device.type not in ("cpu", "cuda", "meta"):
        raise DeviceError("q", str(device), "no backend serves this kind of device", "use CPU or CUDA tensors")
    on_gpu = device.type == "cuda"
    if backend is None:
        backend = "cuda" if on_gpu else "cpu"
    _check_backend_name(backend)
    _check_arch(backend, arch)
    if on_gpu != (backend == "cuda"):
        remedy = "use backend='cuda' (or none)" if on_gpu else "move the tensors to a GPU, or use backend='cpu' or 'vgpu'"
        raise BackendError("backend", backend, f"cannot use tensors on {device}", remedy)
    return backend


def _check_operands(q: Tensor, k: Tensor, v: Tensor, backend: str) -> None:
    """Dtypes and head dims that the backend takes.

    Raises:
        DtypeError: dtypes differ or are not served.
        UnsupportedError: head dims are not served.
    """
    allowed, dtype = dispatch.allowed_dtypes(backend), q.dtype
    if dtype_name(dtype) not in allowed:
        raise DtypeError("q", str(dtype), f"is not served by backend {backend!r}", f"use one of {', '.join(allowed)}")
    for name, x in (("k", k), ("v", v)):
        if x.dtype != dtype:
            raise DtypeError(name, str(x.dtype), f"must have q's dtype {dtype}", "cast it with .to(q.dtype)")
    for name, x in (("q", q), ("v", v)):
        rule = dispatch.head_dim_rule(backend, x.shape[3])
        if rule:
            raise UnsupportedError(name, (f"head_dim {x.shape[3]}",), rule, "pad the last dimension with zeros")


def _check_aux(modifiers: Modifiers, aux: Mapping[str, Tensor] | None, q: Tensor, k: Tensor) -> tuple[Tensor, ...]:
    """The tensors that user functions read, in their order, as they were declared.

    Raises:
        ArgumentError: a name is missing, or nobody asks for it.
        DtypeError, ShapeError, DeviceError: a tensor is not what was declared.
        UnsupportedError: a tensor requires a gradient.
    """
    tensors = order_aux(modifiers, aux)
    sizes = {"B": q.shape[0], "Sq": q.shape[1], "Hq": q.shape[2], "Sk": k.shape[1], "Hkv": k.shape[2]}
    for declared, x in zip(modifiers.declared, tensors, strict=True):
        name = f"aux[{declared.name!r}]"
        if not isinstance(x, Tensor) or x.layout != torch.strided or x.is_nested:
            raise DtypeError(name, type(x).__name__, "must be a dense torch.Tensor", "convert with torch.as_tensor")
        if dtype_name(x.dtype) != declared.dtype:
            raise DtypeError(name, str(x.dtype), f"is declared as {declared}", f"cast it with .to(torch.{declared.dtype})")
        if x.device != q.device:
            raise DeviceError(name, str(x.device), f"must be on q's device {q.device}", "move it there with .to(q.device)")
        wanted = tuple(sizes.get(size, size) if isinstance(size, str) else size for size in declared.shape)
        if x.dim() != len(wanted) or any(size is not None and x.shape[i] != size for i, size in enumerate(wanted)):
            rule = f"is declared as {declared}, here ({', '.join('?' if size is None else str(size) for size in wanted)})"
            raise ShapeError(name, tuple(x.shape), rule, "expand or slice it")
        if x.requires_grad and torch.is_grad_enabled():
            raise UnsupportedError(name, "requires_grad=True", "gradients of aux tensors are not computed", "pass it with .detach()")
    return tensors


def _check_kernels(
    problem: AttentionProblem, operands: tuple[Tensor, ...], modifiers: Modifiers | None, backend: str, arch: str | None
) -> None:
    """There is a forward kernel and, where a gradient may be asked for, a backward kernel.

    Raises:
        UnsupportedError: there is not.
    """
    support = dispatch.support(problem, backend, arch)
    if not support:
        raise UnsupportedError("backend", backend, support.reason, "fa4.supports(...) says what is served")
    if torch.is_grad_enabled() and any(x.requires_grad for x in operands):
        if backend == "cuda" and arch is None and not torch.compiler.is_compiling() and not isinstance(operands[0], FakeTensor):
            arch = cuda.target(operands[0].get_device())  # of tensors that are not there the device cannot be asked
        support = dispatch.support(replace(problem, direction="backward"), backend, arch)
        if not support:
            raise UnsupportedError("backend", backend, support.reason, "for the forward alone use torch.no_grad()")
        if modifiers is not None:
            modifiers.check_derivative()
