"""Launches on CUDA tensors, up to the functions of the CUDA runtime: devices that are not there, everything else as it ships."""

from __future__ import annotations

import ctypes
import logging
import struct
import threading
from functools import partial

import attention_modifiers as examples
import pytest
import torch
from host_cuda import Devices, on_cuda, on_host
from score_functions import BENT
from torch._subclasses.fake_tensor import FakeTensorMode

import fa4
import fa4.ops  # registers the ops
from fa4 import tuning
from fa4.arch import get_arch
from fa4.compiler import get
from fa4.compiler.load import load_function
from fa4.modifier import Modifiers
from fa4.problem import AttentionProblem
from fa4.runtime import cuda, virtual
from fa4.testing import AttentionShape, check_attention, make_inputs
from fa4.vgpu import Gpu

pytestmark = pytest.mark.compile

SHAPE = AttentionShape(2, 70, 90, 4, 2, 64)
A100, H100 = (8, 0), (9, 0)
# What a call may do while a CUDA graph is captured, beside asking which device is current.
CAPTURED = {"_cudaGetDevice", "_cudaSetDevice", "_cudaLaunchKernelEx"}


@pytest.fixture
def devices(monkeypatch):
    with Devices(A100, H100).installed(monkeypatch) as installed:
        yield installed


def inputs_on(index, shape=SHAPE, dtype=torch.bfloat16):
    inputs = make_inputs(shape, dtype)
    return [on_cuda(x, index) for x in (inputs.q, inputs.k, inputs.v)]


def artifact_for(arch):
    problem = AttentionProblem("forward", "bfloat16", 64, 64, causal=True)
    return get(problem, tuning.config(problem, get_arch(arch)), arch)


def watch_parameters(devices, arch="sm_80"):
    """The parameters of each launch, as bytes; they live no longer than the launch."""
    (kernel,) = artifact_for(arch).kernels
    sizes = [parameter.size for parameter in kernel.resources.parameters]
    seen = []
    devices.on_launch = lambda request: seen.append(request.parameters(sizes))
    return seen


def test_a_request_becomes_one_launch(devices):
    parameters = watch_parameters(devices)
    q, k, v = inputs_on(0)
    out, lse = fa4.attention(q, k, v, causal=True, return_lse=True)
    ((request, device, stream),) = devices.launches
    tiles, config = -(-SHAPE.seqlen_q // 128), tuning.config(AttentionProblem("forward", "bfloat16", 64, 64), get_arch("sm_80"))
    assert request.kernel.startswith("fa4_ampere_forward_bf16_d64_causal")
    assert (request.grid, request.block) == ((tiles * SHAPE.heads_q * SHAPE.batch, 1, 1), (config.threads, 1, 1))
    assert (device, stream) == (0, devices.streams[0])
    pointers = [struct.unpack("<Q", data[:8])[0] for data in parameters[0][:5]]
    assert pointers == [x.data_ptr() for x in (q, k, v, out, lse)]
    assert struct.unpack("<3i", parameters[0][0][8:20]) == (2, 70, 4)
    assert (out.device, out.shape, out.dtype) == (q.device, (2, 70, 4, 64), torch.bfloat16)
    assert (lse.device, lse.shape, lse.dtype) == (q.device, (2, 4, 70), torch.float32)
    assert [x.data_ptr() for x in devices.allocated] == [out.data_ptr(), lse.data_ptr()]


def test_tensors_of_functions_on_scores_reach_the_kernel(devices):
    """One launch, with their addresses after everything else; a copy of the one whose last stride is not 1."""
    seen = []
    modifiers = Modifiers(examples.alibi, examples.same_document)
    problem = AttentionProblem.of("forward", torch.bfloat16, (64, 64), (None, 0), 0.0, False, modifiers.functions)
    (kernel,) = get(problem, tuning.config(problem, get_arch("sm_80")), "sm_80").kernels
    sizes = [parameter.size for parameter in kernel.resources.parameters]
    devices.on_launch = lambda request: seen.extend(request.parameters(sizes))
    slopes, documents = examples.alibi_slopes(4), [torch.zeros(2, n, dtype=torch.int32) for n in (70, 90)]
    slopes = slopes.repeat_interleave(2)[::2]
    aux = dict(zip(("slopes", "q_document", "k_document"), (on_cuda(x, 0) for x in (slopes, *documents)), strict=True))
    fa4.attention(*inputs_on(0), causal=True, score_mod="alibi", mask_mod="same_document", aux=aux)
    assert [request.kernel.startswith("fa4_ampere_forward_bf16_d64_causal_scoremod_maskmod") for request, *_ in devices.launches] == [True]
    (copy,) = (x for x in devices.allocated if x.shape == (4,))
    addresses = [struct.unpack("<Q", data[:8])[0] for data in seen if len(data) >= 8]
    assert {x.data_ptr() for x in (copy, aux["q_document"], aux["k_document"])} <= set(addresses)
    assert torch.equal(on_host(copy), slopes)


def test_46_a_tensor_on_another_device_launches_there(devices):
    fa4.attention(*inputs_on(1), causal=True)
    ((_, device, stream),) = devices.launches
    assert (device, stream) == (1, devices.streams[1])
    assert devices.current == 0


def test_46_each_device_gets_the_code_of_its_architecture(devices):
    for index in (1, 0, 1):
        fa4.attention(*inputs_on(index), causal=True)
    assert [device for _, device, _ in devices.launches] == [1, 0, 1]
    for (device, image), (expected, arch) in zip(devices.images, ((1, "sm_90a"), (0, "sm_80")), strict=True):
        cubin = artifact_for(arch).cubin
        assert device == expected
        assert ctypes.string_at(image, len(cubin) + 4096).find(cubin) >= 0, f"the machine code loaded to cuda:{device} is not {arch}'s"
    assert artifact_for("sm_80").cubin != artifact_for("sm_90a").cubin


def test_46_devices_of_one_architecture_are_loaded_one_by_one(monkeypatch):
    with Devices(A100, A100).installed(monkeypatch) as devices:
        for index, prepared in ((1, {1}), (0, {0, 1}), (1, {0, 1})):
            fa4.attention(*inputs_on(index), causal=True)
            assert devices.prepared == prepared
        assert [device for device, _ in devices.images] == [1, 0]


def test_the_device_is_restored_after_a_launch_that_fails(devices):
    fa4.attention(*inputs_on(1), causal=True)
    devices.failing["_cudaLaunchKernelEx"] = 701
    with pytest.raises(
        fa4.CudaError, match=r"fa4_ampere_forward_bf16_d64_causal\S* on cuda:1: cudaErrorLaunchOutOfResources \(701\)$"
    ) as caught:
        fa4.attention(*inputs_on(1), causal=True)
    assert caught.value.__cause__ is not None
    assert devices.current == 0
    devices.failing.clear()
    fa4.attention(*inputs_on(1), causal=True)
    assert len(devices.launches) == 2


def test_what_host_code_says_of_cuda_is_named():
    """tvm-ffi's message, and that of cutlass where a compile has imported it."""
    for text in ("CUDA Error Code: 701", "\nerror: cudaErrorLaunchOutOfResources (error code: 701)\n note: error code 701\n"):
        assert cuda._reason(RuntimeError(text)) == "cudaErrorLaunchOutOfResources (701)"
    assert cuda._reason(ValueError("Mismatched type on argument #0")) == "Mismatched type on argument #0"


@pytest.mark.parametrize("function", ["_cudaLibraryLoadData", "_cudaLibraryGetKernel", "_cudaKernelSetAttributeForDevice"])
def test_code_that_cannot_be_loaded(devices, function):
    devices.failing[function] = 209
    with pytest.raises(fa4.CompileError, match=r"compiled for sm_90a, cannot be loaded to cuda:1: cudaErrorNoKernelImageForDevice \(209\)"):
        fa4.attention(*inputs_on(1), causal=True)
    assert devices.current == 0
    assert devices.launches == []
    devices.failing.clear()
    fa4.attention(*inputs_on(1), causal=True)
    assert len(devices.launches) == 1, "a failure is not remembered"


def test_without_a_stand_in_the_dsl_s_own_library_is_called():
    """It finds no driver here, or no such device."""
    with pytest.raises(fa4.CompileError, match=r"cannot be loaded to cuda:1000: cudaError"):
        load_function(artifact_for("sm_80"), device=1000)


def test_loading_happens_once_for_each_device_and_before_the_first_launch(devices):
    fa4.attention(*inputs_on(1), causal=True)
    first = [name for name, _ in devices.take_calls()]
    assert first.index("_cudaKernelSetAttributeForDevice") < first.index("_cudaLaunchKernelEx")
    assert first.count("_cudaLibraryLoadData") == 1
    fa4.attention(*inputs_on(0), causal=True)
    calls = devices.take_calls()
    assert [call for call in calls if call[0] == "_cudaLibraryLoadData"] == [("_cudaLibraryLoadData", 0)]
    # Lengths, strides, heads and numbers are arguments: nothing is loaded for them.
    for shape, options in ((AttentionShape(1, 9, 700, 6, 1, 64), {"softmax_scale": -0.3}), (AttentionShape(3, 257, 1, 1, 1, 64), {})):
        fa4.attention(*inputs_on(1, shape), causal=True, **options)
    assert {name for name, _ in devices.take_calls()} == CAPTURED


def test_a_call_that_a_graph_captures_is_one_launch(devices):
    """After a warm-up call: no load, no wait, no event, no memory but torch's, and nothing asked of torch but the stream."""
    inputs = inputs_on(1)
    fa4.attention(*inputs, causal=True)
    devices.take_calls()
    for record in (devices.asked, devices.allocated, devices.launches):
        record.clear()
    devices.streams[1] = 0xCA97
    out, lse = fa4.attention(*inputs, causal=True, return_lse=True)
    calls = devices.take_calls()
    assert [name for name, _ in calls] == ["_cudaGetDevice", "_cudaSetDevice", "_cudaLaunchKernelEx", "_cudaSetDevice"]
    assert [stream for _, _, stream in devices.launches] == [0xCA97]
    assert devices.asked == [("stream", 1)]
    assert [x.data_ptr() for x in devices.allocated] == [out.data_ptr(), lse.data_ptr()]
    devices.current = 1
    fa4.attention(*inputs, causal=True)
    assert [name for name, _ in devices.take_calls()] == ["_cudaGetDevice", "_cudaLaunchKernelEx"]


def test_the_capture_test_would_see_a_load(devices):
    """Its fault: the first call is no such call."""
    fa4.attention(*inputs_on(1), causal=True)
    assert {name for name, _ in devices.take_calls()} - CAPTURED == {
        "_cudaLibraryLoadData",
        "_cudaLibraryGetKernel",
        "_cudaDeviceGetAttribute",
        "_cuKernelGetAttribute",
        "_cudaKernelSetAttributeForDevice",
    }


def test_a_device_is_asked_for_its_capability_once(devices):
    for seqlen in (9, 130, 9):
        for index in (0, 1):
            fa4.attention(*inputs_on(index, AttentionShape(1, seqlen, 70, 1, 1, 64)), causal=True)
    assert sorted(question for question in devices.asked if question[0] == "capability") == [("capability", 0), ("capability", 1)]


def test_the_ampere_kernel_on_a_newer_gpu_is_announced_once(monkeypatch, caplog):
    with caplog.at_level(logging.WARNING, "fa4"), Devices(A100, A100, H100, H100).installed(monkeypatch):
        for index in (0, 1, 2, 3, 2):
            fa4.attention(*inputs_on(index), causal=True)
    assert [record.getMessage() for record in caplog.records] == [
        "sm_90a has no forward kernel of its own yet; the Ampere kernel serves this request (compiled for sm_90a)"
    ]


@pytest.mark.parametrize(("capability", "rule"), [((7, 5), "8.0 or higher"), ((11, 0), "no compile target")])
def test_a_device_without_kernels_is_refused(monkeypatch, capability, rule):
    with Devices(capability).installed(monkeypatch) as devices:
        with pytest.raises(fa4.BackendError, match=rule):
            fa4.attention(*inputs_on(0))
        assert (devices.calls, devices.allocated) == ([], [])


def test_an_architecture_that_is_not_the_device_s_is_refused(devices):
    fa4.attention(*inputs_on(1), causal=True, arch="sm_90a")
    devices.take_calls()
    with pytest.raises(fa4.BackendError, match=r"arch='sm_80': is not the architecture of cuda:1, sm_90a; leave arch out"):
        fa4.attention(*inputs_on(1), causal=True, arch="sm_80")
    assert devices.calls == []


def test_a_gradient_is_refused_before_anything_happens(devices):
    q, k, v = inputs_on(0)
    q.requires_grad_()
    with pytest.raises(
        fa4.UnsupportedError, match=r"backend='cuda': no backward kernel for sm_80 .*backend 'cpu' serves this.*torch.no_grad"
    ):
        fa4.attention(q, k, v)
    assert (devices.calls, devices.asked, devices.allocated) == ([], [("capability", 0)], [])
    with torch.no_grad():
        assert not fa4.attention(q, k, v, causal=True).requires_grad
    assert len(devices.launches) == 1


def test_float32_is_refused(devices):
    with pytest.raises(fa4.DtypeError, match=r"torch.float32.*backend 'cuda'.*float16, bfloat16"):
        fa4.attention(*inputs_on(0, dtype=torch.float32))
    assert devices.calls == []


@pytest.mark.parametrize("shape", [AttentionShape(2, 0, 9, 2, 1, 64), AttentionShape(0, 7, 9, 2, 1, 64)], ids=str)
def test_nothing_is_launched_where_there_is_no_query(devices, shape):
    out, lse = fa4.attention(*inputs_on(0, shape), return_lse=True)
    assert (out.shape, lse.shape) == ((shape.batch, shape.seqlen_q, 2, 64), (shape.batch, 2, shape.seqlen_q))
    assert devices.calls == []


def test_an_operand_that_a_kernel_cannot_read_is_copied_by_torch(devices):
    parameters = watch_parameters(devices)
    q, k, v = (torch.randn(1, 17, 2, 65).to(torch.bfloat16)[..., 1:] for _ in range(3))
    out = fa4.attention(*(on_cuda(x) for x in (q, k, v)), causal=True)
    pointers = [struct.unpack("<Q", data[:8])[0] for data in parameters[0][:4]]
    copies = {x.data_ptr(): x for x in devices.allocated}
    assert pointers[3] == out.data_ptr()
    for pointer, original in zip(pointers[:3], (q, k, v), strict=True):
        assert pointer != original.data_ptr()
        assert torch.equal(on_host(copies[pointer]), original)


def test_threads_load_a_kernel_once(devices):
    barrier = threading.Barrier(4)
    inputs = inputs_on(1)
    artifact_for("sm_90a")
    devices.load_seconds = 0.2

    def call():
        barrier.wait()
        fa4.attention(*inputs, causal=True)

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [name for name, _ in devices.calls].count("_cudaLibraryLoadData") == 1
    assert len(devices.launches) == 4


def test_fake_tensors_are_not_launched(devices):
    """As torch.compile sees them."""
    with FakeTensorMode():
        q = torch.empty(2, 70, 4, 64, dtype=torch.bfloat16, device="cuda")
        out, lse = fa4.attention(q, q, q, causal=True, return_lse=True)
    assert (out.shape, out.dtype, lse.shape, lse.dtype) == (q.shape, q.dtype, (2, 4, 70), torch.float32)
    assert out.device.type == lse.device.type == "cuda"
    assert (devices.calls, devices.asked, devices.allocated) == ([], [], [])


@pytest.mark.vgpu
@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        (torch.bfloat16, {"causal": True}),
        (torch.bfloat16, {"window_size": (40, 9), "softmax_scale": -0.3}),
        (torch.float16, {"softcap": 10.0}),
    ],
    ids=str,
)
def test_results_where_the_virtual_gpu_takes_the_launches(devices, dtype, options):
    """The whole way of a CUDA tensor, the kernel itself included."""
    gpu = Gpu("sm_80")
    devices.capabilities = (H100, A100)

    def execute(artifact, tensors, request):
        with virtual.registered(gpu, [virtual.region(on_host(x).__dlpack__(), "tensors", True) for x in tensors]):
            virtual.launch(gpu, virtual.parsed(artifact.ptx, artifact.cubin), request)

    def on_device_1(q, k, v, **keywords):
        tensors = [on_cuda(x, 1) for x in (q, k, v)]
        original = cuda.run

        def run(index, artifact, inputs, outputs, *rest):
            devices.on_launch = partial(execute, artifact, (*inputs, *outputs))
            original(index, artifact, inputs, outputs, *rest)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(cuda, "run", run)
            return tuple(on_host(x) for x in fa4.attention(*tensors, return_lse=True, **keywords))

    check_attention(on_device_1, make_inputs(AttentionShape(1, 65, 129, 2, 1, 64), dtype), backward=False, **options)
    assert devices.driver.error is None


@pytest.mark.vgpu
@pytest.mark.parametrize(("deterministic", "modified"), [(False, False), (True, False), pytest.param(True, True, marks=pytest.mark.slow)])
def test_gradients_where_the_virtual_gpu_takes_the_launches(devices, deterministic, modified):
    """The whole way of the backward op on CUDA tensors: three launches on their device's stream, workspace from torch, nothing else."""
    gpu = Gpu("sm_100a")
    devices.capabilities = (A100, (10, 0))
    # Kernels that other tests compile too.
    inputs = make_inputs(AttentionShape(1, 65, 129, 1 if modified else 2, 1, 64), torch.float16 if modified else torch.bfloat16)
    options = (None, None, None if modified else 0, 3.0 if modified else 0.0, deterministic)
    names, aux = [BENT.name, "same_document"], [torch.rand(1, 3), *(torch.arange(n, dtype=torch.int32)[None] // 40 for n in (65, 129))]
    functions, on_device = ((*names, aux), (*names, [on_cuda(x, 1) for x in aux])) if modified else ((), ())
    kind = "modified_attention" if modified else "attention"
    forward, backward = (getattr(torch.ops.fa4, f"{kind}_{direction}") for direction in ("forward", "backward"))
    out, lse = forward(inputs.q, inputs.k, inputs.v, *functions, *options, "vgpu", "sm_100a")
    saved = inputs.q, inputs.k, inputs.v, out, lse
    needed = [True] * 3
    expected = backward(inputs.dout, inputs.dlse, *saved, needed, *functions, *options, "vgpu", "sm_100a")
    arguments = [on_cuda(x, 1) for x in (inputs.dout, inputs.dlse, *saved)]
    original = cuda.run

    def run(index, artifact, read, written, scalars, aux=(), *, updated=()):
        tensors = [on_host(x) for x in (*read, *updated, *written, *aux) if x is not None]

        def execute(request):
            with virtual.registered(gpu, [virtual.region(x.__dlpack__(), "tensors", True) for x in tensors]):
                virtual.launch(gpu, virtual.parsed(artifact.ptx, artifact.cubin), request)

        devices.on_launch = execute
        original(index, artifact, read, written, scalars, aux, updated=updated)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda, "run", run)
        for _ in range(2):  # the second time everything is loaded
            for record in (devices.launches, devices.calls, devices.allocated, devices.asked):
                record.clear()
            found = [on_host(x) for x in backward(*arguments, needed, *on_device, *options, "cuda", None)]
    assert devices.driver.error is None
    assert [request.kernel.split("_")[2] for request, *_ in devices.launches] == ["preprocess", "backward", "postprocess"]
    assert {(index, stream) for _, index, stream in devices.launches} == {(1, devices.streams[1])}
    assert {name for name, _ in devices.calls} == CAPTURED
    assert len(devices.allocated) == 5  # statistics, sums with semaphores; dk, dv; dq
    assert devices.asked == [("stream", 1)] * 3
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
