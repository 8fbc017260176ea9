"""``fa4 demo``: attention over a real text, checked against float64, with time and memory; and a GPU kernel, compiled and measured."""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fa4._table import format_table
from fa4.errors import ArgumentError

if TYPE_CHECKING:
    from fa4.testing import AttentionInputs, AttentionShape

_VARIANTS: list[tuple[str, str, int, dict[str, Any]]] = [
    ("causal", "bfloat16", 4, {"causal": True}),
    ("causal, window (64, 0), grouped heads", "float16", 2, {"causal": True, "window_size": (64, 0)}),
    ("softcap 20, one key head", "float32", 1, {"softcap": 20.0}),
]
_HEADS, _HEAD_DIM = 4, 64
_ARCH = "sm_80"
_SASS_LINES = 6
_VIRTUAL_SEQLEN = 192


def add_command(commands: Any) -> None:
    """Add ``fa4 demo``."""
    parser = commands.add_parser("demo", help="run attention on a real text, check it against float64, time it")
    parser.add_argument("--text", type=Path, help="a file whose bytes are the tokens (default: the source of fa4's own API)")
    parser.add_argument("--seqlen", type=positive, default=384, help="tokens in the error table (default: %(default)s)")
    parser.add_argument("--long-seqlen", type=positive, default=8192, help="tokens in the timing (default: %(default)s)")
    parser.set_defaults(run=run)


def positive(text: str) -> int:
    """A whole number of at least 1, for argparse."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not at least 1")
    return value


def run(arguments: argparse.Namespace) -> int:
    """Print errors, time and memory, and what to try next."""
    import fa4

    path = arguments.text or Path(fa4.__file__).with_name("api.py")
    text = _read(path)

    import torch  # only now: a wrong path is refused at once

    print(f"fa4 {fa4.__version__}, torch {torch.__version__}, {torch.get_num_threads()} threads, CPU backend")
    print(f"input: the bytes of {path.name} as tokens, embedded and projected to q, k, v; {_HEADS} heads of {_HEAD_DIM}\n")
    _print_errors(text, arguments.seqlen)
    _print_cost(text, arguments.long_seqlen)
    print_kernel()
    _print_virtual(text)
    print(
        "\nWhat to try next\n"
        "  fa4.attention(q, k, v, causal=True)           in your own code; q is (batch, seqlen, heads, head_dim)\n"
        "  fa4 demo --text FILE --seqlen 1024            the same on a text of yours\n"
        "  fa4 inspect --arch sm_80 --head-dim 128       what a request is compiled to, and what it costs\n"
        "  fa4 verify --head-dim 64,128                  GPU kernels on the virtual GPU over a matrix of requests\n"
        "  fa4 support                                   what works on which architecture\n"
        "  fa4 doctor                                    what is installed here, and what is broken\n"
        "  docs/concepts/algorithms.md                   from standard attention to FlashAttention-4, derived"
    )
    return 0


def _read(path: Path) -> bytes:
    try:
        text = path.read_bytes()
    except OSError as error:
        raise ArgumentError("--text", str(path), f"cannot be read ({error.strerror})", "give a file with text") from error
    if not text:
        raise ArgumentError("--text", str(path), "is empty", "give a file with text")
    return text


def _print_errors(text: bytes, seqlen: int) -> None:
    from fa4 import attention
    from fa4.testing import AttentionShape, check_attention

    def with_lse(*tensors: Any, **options: Any) -> Any:
        return attention(*tensors, return_lse=True, **options)

    rows = []
    for name, dtype, heads_kv, options in _VARIANTS:
        shape = AttentionShape(1, seqlen, seqlen, _HEADS, heads_kv, _HEAD_DIM)
        for result in check_attention(with_lse, text_inputs(text, shape, dtype), **options):
            position = ",".join(map(str, result.index))
            rows.append([f"{name} ({dtype})", result.name, f"{result.error:.2e}", f"{result.ulp:.3g}", f"{result.bound:.2e}", position])
    print(f"Errors against float64, {seqlen} tokens (bound: a small multiple of what plain torch in the same dtype gets)")
    print(format_table(["request", "result", "worst error", "ulp", "bound", "at"], rows))


def _print_cost(text: bytes, seqlen: int) -> None:
    import torch

    from fa4 import attention
    from fa4.testing import AttentionShape
    from fa4.testing.memory import measure_peak_memory

    shape = AttentionShape(1, seqlen, seqlen, _HEADS, _HEADS, _HEAD_DIM)
    inputs = text_inputs(text, shape, "float32")
    q, k, v = inputs.leaves()
    warm_up = slice(0, 128)
    attention(q[:, warm_up], k[:, warm_up], v[:, warm_up], causal=True).sum().backward()
    q.grad = k.grad = v.grad = None
    with measure_peak_memory() as memory:
        start = time.perf_counter()
        out = attention(q, k, v, causal=True)
        middle = time.perf_counter()
        torch.autograd.backward(out, inputs.dout)
        end = time.perf_counter()
    results = 4 * out.numel() * out.element_size()
    flops = 4 * seqlen * seqlen * _HEADS * _HEAD_DIM / 2  # two products; half of the scores are masked
    rows = [
        ["forward", f"{(middle - start) * 1e3:.0f} ms", f"{flops / (middle - start) / 1e9:.0f}"],
        ["backward", f"{(end - middle) * 1e3:.0f} ms", f"{2.5 * flops / (end - middle) / 1e9:.0f}"],
    ]
    print(f"\nTime and memory, {seqlen} tokens, float32, causal")
    print(format_table(["pass", "time", "GFLOP/s"], rows))
    print(
        f"peak memory above inputs {memory.extra_bytes / 2**20:.0f} MiB, of which out, dq, dk, dv are {results / 2**20:.0f} MiB; "
        f"the scores alone would take {_HEADS * seqlen * seqlen * 4 / 2**20:.0f} MiB"
    )


@contextmanager
def empty_cache() -> Iterator[None]:
    """Compile into a folder that is removed afterwards."""
    from fa4 import settings

    with tempfile.TemporaryDirectory(prefix="fa4-") as folder, settings(cache=True, cache_dir=folder):
        yield


def print_kernel() -> None:
    """Compile a GPU kernel, cold and from the cache, and show what it costs and what its main loop looks like."""
    from fa4 import tuning
    from fa4.arch import get_arch
    from fa4.compiler import get, lookup
    from fa4.inspection.report import report
    from fa4.inspection.text import resource_table
    from fa4.problem import AttentionProblem

    problem = AttentionProblem("forward", "bfloat16", _HEAD_DIM, _HEAD_DIM, causal=True)
    request = (problem, tuning.config(problem, get_arch(_ARCH)), _ARCH)
    print(f"\nGPU kernel for {_ARCH}, compiled here: forward, bfloat16, head dim {_HEAD_DIM}, causal")
    print("compiling into an empty cache ...", flush=True)
    seconds = []
    with empty_cache():
        for _ in range(2):
            lookup.forget()
            start = time.perf_counter()
            artifact = get(*request)
            seconds.append(time.perf_counter() - start)
    shown = report(artifact)
    print(f"compile time {seconds[0]:.1f} s, with the import of the compiler; from the cache {seconds[1] * 1e3:.0f} ms")
    print(resource_table(shown.resources))
    if shown.code is None:
        print(shown.code_error)
        return
    loop = shown.main_loop
    if loop is not None:
        counts = ", ".join(f"{kind} {number}" for kind, number in loop.histogram.counts.items())
        inside = [instruction for instruction in shown.code.instructions if instruction.address in loop.addresses]
        first = next((i for i, instruction in enumerate(inside) if instruction.kind == "mufu"), 0)
        print(f"one trip of its main loop is {loop.histogram.total} instructions: {counts}\nwhere its softmax begins:")
        print("\n".join(f"  {instruction.text}" for instruction in inside[first : first + _SASS_LINES]))


def _print_virtual(text: bytes) -> None:
    """Execute the compiled kernel on the virtual GPU and compare it with float64."""
    from fa4.problem import AttentionOptions
    from fa4.runtime import virtual
    from fa4.testing import AttentionShape, compare_attention

    gpu = virtual.gpu_from_settings(_ARCH)

    def kernel(q: Any, k: Any, v: Any, causal: bool) -> Any:
        options = AttentionOptions(_HEAD_DIM**-0.5, window_right=0 if causal else None)
        return virtual.attention_forward(q, k, v, options, gpu)

    print(f"\nThe same kernel, executed on a virtual {_ARCH} over the first {_VIRTUAL_SEQLEN} tokens, against float64")
    shape = AttentionShape(1, _VIRTUAL_SEQLEN, _VIRTUAL_SEQLEN, _HEADS, 2, _HEAD_DIM)
    for result in compare_attention(kernel, text_inputs(text, shape, "bfloat16"), backward=False, causal=True):
        print(f"  {result}")
    report = gpu.report()
    print(
        f"  {report.instructions} warp instructions in {report.seconds:.1f} s, {report.bytes.get('global', 0) >> 10} KiB of global memory"
    )


def text_inputs(text: bytes, shape: AttentionShape, dtype: str) -> AttentionInputs:
    """q, k, v of a byte-level text: each byte is embedded together with a fading memory of the bytes before it.

    Repeated phrases get similar queries and keys, so the scores have the structure of language rather than of noise. The text is
    repeated where it is shorter than ``shape.seqlen_q``. Weights are random but fixed.
    """
    import torch

    from fa4.testing import make_inputs

    width = 128
    generator = torch.Generator().manual_seed(0)
    embedding = torch.randn(256, width, generator=generator)
    tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    tokens = tokens.repeat(-(-shape.seqlen_q // len(tokens)))[: shape.seqlen_q]
    states = embedding[tokens]
    for lag, weight in ((1, 0.6), (2, 0.36), (3, 0.22)):
        states[lag:] += weight * embedding[tokens[:-lag]]
    states = states / states.std()

    def project(weights: torch.Tensor) -> torch.Tensor:
        return torch.einsum("sw,hwd->shd", states, weights)[None].to(getattr(torch, dtype))

    query_weights = torch.randn(shape.heads_q, width, shape.head_dim, generator=generator) / width**0.5
    value_weights = torch.randn(shape.heads_kv, width, shape.dim_v, generator=generator) / width**0.5
    group = shape.heads_q // shape.heads_kv
    noise = make_inputs(shape, getattr(torch, dtype))
    # Keys share the projection of a query head: like contexts attend to like.
    return replace(noise, q=project(query_weights), k=project(query_weights[::group]), v=project(value_weights))
