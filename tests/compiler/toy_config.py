"""The toy kernel's config and place in the table, apart from it so that a process served by the cache never imports cutlass."""

from __future__ import annotations

from dataclasses import dataclass

from fa4 import dispatch
from fa4.problem import AttentionProblem

# A direction of its own: no real request is affected.
dispatch.IMPLEMENTATIONS["toy", "ampere"] = "toy_kernel:Toy"


@dataclass(frozen=True)
class ToyConfig:
    threads: int = 128
    factor: float = 2.0
    broken: bool = False


def toy_problem(head_dim: int = 64) -> AttentionProblem:
    return AttentionProblem("toy", "bfloat16", head_dim, head_dim)  # type: ignore[arg-type]
