"""flash-attn-4's own sm_80 forward, host code and kernel unchanged, on the virtual GPU: a kernel that others wrote is right there too."""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import fa4

pytestmark = [
    pytest.mark.compile,
    pytest.mark.vgpu,
    pytest.mark.skipif(importlib.util.find_spec("flash_attn") is None, reason="flash-attn-4 is not installed: pip install '.[peer]'"),
]

LENGTHS = [(128, 256), (65, 129), (200, 77), (1, 300)]


def check(cases):
    """Cases are (Sq, Sk, query heads, key heads, D, causal)."""
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("peer_forward.py")), "sm_80"],
        input="\n".join(map(json.dumps, cases)),
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(fa4.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])},
    )
    assert done.returncode == 0, done.stderr
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(answers) == len(cases)
    wrong = []
    for case, answer in zip(cases, answers, strict=True):
        (kernel,) = answer["kernels"]
        assert "FlashAttentionForwardSm80" in kernel
        assert [result["name"] for result in answer["results"]] == ["out", "lse"]
        wrong += [(case, r) for r in answer["results"] if r["mismatches"] or r["error"] > r["bound"]]
    assert wrong == []


def test_forward():
    """Two kernels; the slow matrix has the others."""
    check(
        [
            (*lengths, 2, heads_kv, dim, causal)
            for lengths, (heads_kv, dim, causal) in zip(LENGTHS, 2 * [(1, 64, True), (2, 128, False)], strict=True)
        ]
    )


@pytest.mark.slow
@pytest.mark.parametrize("dim", [64, 128])
def test_matrix(dim):
    check(
        [
            (*lengths, 4, 4 // ratio, dim, causal)
            for lengths, causal, ratio in itertools.product([*LENGTHS, (300, 512)], [False, True], [1, 2])
        ]
    )
