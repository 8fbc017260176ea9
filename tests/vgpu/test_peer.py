"""flash-attn-4's own forward, host code and kernel unchanged, on the virtual GPU: a kernel that others wrote is right there too."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

import fa4
from fa4.arch import get_arch


def installed() -> bool:
    """By its own name: another package gives an importable flash_attn too."""
    try:
        return bool(metadata.version("flash-attn-4"))
    except metadata.PackageNotFoundError:
        return False


pytestmark = [
    pytest.mark.compile,
    pytest.mark.vgpu,
    pytest.mark.skipif(not installed(), reason="flash-attn-4 is not installed: pip install '.[peer]'"),
]

ARCHES = ["sm_80"]
LENGTHS = [(128, 256), (65, 129), (200, 77), (1, 300)]


def check(arch, cases):
    """Cases are (Sq, Sk, query heads, key heads, D, causal)."""
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("peer_forward.py")), arch],
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
        assert f"FlashAttentionForwardSm{get_arch(arch).capability[0]}0" in kernel
        assert [result["name"] for result in answer["results"]] == ["out", "lse"]
        wrong += [(case, r) for r in answer["results"] if r["mismatches"] or r["error"] > r["bound"]]
    assert wrong == []


@pytest.mark.parametrize("arch", ARCHES)
def test_forward(arch):
    """Two kernels; the slow matrix has the others."""
    check(
        arch,
        [
            (*lengths, 2, heads_kv, dim, causal)
            for lengths, (heads_kv, dim, causal) in zip(LENGTHS, 2 * [(1, 64, True), (2, 128, False)], strict=True)
        ],
    )


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("dim", [64, 128])
def test_matrix(arch, dim):
    check(
        arch,
        [
            (*lengths, 4, 4 // ratio, dim, causal)
            for lengths, causal, ratio in itertools.product([*LENGTHS, (300, 512)], [False, True], [1, 2])
        ],
    )
