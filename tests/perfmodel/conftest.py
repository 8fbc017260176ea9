"""One recorded kernel for all tests: the Blackwell forward, D 64, one tile, two key blocks."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fa4 import tuning
from fa4.arch import get_arch
from fa4.compiler import get
from fa4.perfmodel.recording import Request
from fa4.perfmodel.trace import Recorder
from fa4.problem import AttentionProblem
from fa4.runtime import virtual
from fa4.testing import AttentionShape, make_inputs
from fa4.vgpu import Gpu

REQUEST = Request("sm_100a", 64)


@pytest.fixture(scope="session")
def artifact():
    problem = AttentionProblem.of("forward", "bfloat16", (64, 64), (None, None), 0.0, False)
    return get(problem, replace(tuning.config(problem, get_arch("sm_100a")), ctas=1), "sm_100a", line_info=True)


@pytest.fixture(scope="session")
def record(artifact):
    def run(seqlen_q=256, seqlen_k=256, **how):
        inputs = make_inputs(AttentionShape(1, seqlen_q, seqlen_k, 1, 1, 64))
        out, lse = inputs.q.new_empty(inputs.q.shape), inputs.q.new_empty((1, 1, seqlen_q)).float()
        gpu = Gpu("sm_100a", **how)
        gpu.observer = recorder = Recorder()
        virtual.run(gpu, artifact, (inputs.q, inputs.k, inputs.v), (out, lse), (0.125, None, None, None))
        return recorder.traces[-1]

    return run


@pytest.fixture(scope="session")
def trace(record):
    return record()
