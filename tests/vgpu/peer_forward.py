"""flash-attn-4's forward under ``attach``: run as a program, since importing flash-attn-4 changes the DSL's frontend for the whole process.

    python tests/vgpu/peer_forward.py ARCH [ARCH ...]

Reads cases as JSON from standard input, one a line: [Sq, Sk, query heads, key heads, D, causal]. Prints for each a line of JSON: the
comparisons of out and lse with float64.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict

import torch

from fa4.arch import get_arch
from fa4.testing import AttentionShape, compare_attention, make_inputs
from fa4.vgpu import attach


class DeviceTensor(torch.Tensor):
    """A CPU tensor of which flash-attn-4 believes that it lies on a GPU."""

    is_cuda = True


def main(arch: str) -> None:
    os.environ["FLASH_ATTENTION_ARCH"] = arch.rstrip("a")
    os.environ["FLASH_ATTENTION_NUM_SMS"] = str(int(get_arch(arch).sm_count))
    from flash_attn.cute import flash_attn_func

    def attention(q, k, v, causal):
        q, k, v = (t.as_subclass(DeviceTensor) for t in (q, k, v))
        out, lse = flash_attn_func(q, k, v, causal=causal, return_lse=True)[:2]
        return out.as_subclass(torch.Tensor), lse.as_subclass(torch.Tensor)

    with attach(arch, schedule="priority", seed=1, unwritten="nan", line_info=False) as gpu:
        for line in sys.stdin:
            seqlen_q, seqlen_k, heads_q, heads_kv, dim, causal = json.loads(line)
            inputs = make_inputs(AttentionShape(1, seqlen_q, seqlen_k, heads_q, heads_kv, dim), torch.bfloat16)
            before = len(gpu.reports)
            results = compare_attention(attention, inputs, backward=False, causal=causal)
            print(json.dumps({"kernels": [r.kernel for r in gpu.reports[before:]], "results": [asdict(r) for r in results]}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
