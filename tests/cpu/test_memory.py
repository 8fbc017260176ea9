"""Peak memory, in fresh processes."""

from __future__ import annotations

import subprocess
import sys

import pytest

LIMIT = 64 << 20
MEASURE = """
import torch
from fa4.cpu.backward import attention_backward
from fa4.cpu.forward import attention_forward
from fa4.problem import AttentionOptions
from fa4.testing.memory import measure_peak_memory
torch.set_num_threads(1)
shape_q, shape_k, dtype, options = {arguments}
q, k, v, dout = (torch.empty(s, dtype=dtype).normal_() for s in (shape_q, shape_k, shape_k, shape_q))
small = [x[:, :300].contiguous() for x in (q, k, v, dout)]
def run(q, k, v, dout):
    with measure_peak_memory() as forward:
        out, lse = attention_forward(q, k, v, options)
    with measure_peak_memory() as backward:
        grads = attention_backward(dout, None, q, k, v, out, lse, options, needed=(True,) * 3)
    size = lambda *xs: sum(x.numel() * x.element_size() for x in xs)
    return forward.extra_bytes - size(out, lse), backward.extra_bytes - size(*grads)
run(*small)  # libraries set up their threads' buffers
print(*run(q, k, v, dout))
"""


def extra_bytes(*arguments: str) -> list[int]:
    """Peak above inputs and outputs, of the forward and of the backward."""
    code = MEASURE.replace("{arguments}", ", ".join(arguments))
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert output.returncode == 0, output.stderr
    return [int(x) for x in output.stdout.split()]


@pytest.mark.parametrize(
    "arguments",
    [
        ("(1, 5000, 1, 8)", "(1, 5000, 1, 8)", "torch.float32", "AttentionOptions(0.3)"),
        pytest.param(
            ("(1, 5000, 2, 8)", "(1, 5000, 2, 8)", "torch.float32", "AttentionOptions(0.3, None, 0, 5.0)"), marks=pytest.mark.slow
        ),
        pytest.param(("(1, 8192, 2, 64)", "(1, 8192, 1, 64)", "torch.bfloat16", "AttentionOptions(0.3, 100, 0)"), marks=pytest.mark.slow),
        pytest.param(
            ("(20000, 4, 8, 16)", "(20000, 4, 2, 16)", "torch.bfloat16", "AttentionOptions(0.3, None, 0)"), marks=pytest.mark.slow
        ),
        pytest.param(("(20000, 4, 8, 16)", "(20000, 4, 2, 16)", "torch.bfloat16", "AttentionOptions(0.3, 2, 0)"), marks=pytest.mark.slow),
    ],
    ids=["flash", "softcap", "window", "batches", "batches_window"],
)
def test_bounded(arguments):
    assert max(extra_bytes(*arguments)) <= LIMIT


def test_measurement_sees_the_scores(monkeypatch):
    """The same measurement over plain torch attention, whose scores alone take 100 MB, must show them."""
    plain = MEASURE.replace("from fa4.cpu.forward import attention_forward", "from fa4.testing import torch_attention")
    plain = plain.replace("attention_forward(q, k, v, options)", "torch_attention(q, k, v)").replace("run(*small)", "")
    monkeypatch.setattr(sys.modules[__name__], "MEASURE", plain)
    assert extra_bytes("(1, 5000, 1, 8)", "(1, 5000, 1, 8)", "torch.float32", "AttentionOptions(0.3)")[0] > 100_000_000 > LIMIT
