"""Which configuration a request gets on an architecture: pure functions and tables, each row with where it comes from."""

from __future__ import annotations

from fa4.arch import Arch
from fa4.config import AmpereForwardConfig, check_ampere_forward, padded_head_dim
from fa4.errors import UnsupportedError
from fa4.problem import AttentionProblem

# (largest padded head dim, configurations, the preferred first). Tile shapes are those that FlashAttention-2 (arXiv 2307.08691,
# section 3.3) tunes among, {64, 128} x {64, 128}, and smaller ones where shared memory is small; not yet measured on a GPU.
_AMPERE_FORWARD = (
    (64, (AmpereForwardConfig(128, 64, 1, 128), AmpereForwardConfig(64, 64, 1, 128))),
    (128, (AmpereForwardConfig(128, 64, 1, 256), AmpereForwardConfig(64, 64, 1, 128))),
    (256, (AmpereForwardConfig(128, 32, 1, 256), AmpereForwardConfig(64, 32, 1, 128))),
)


def config(problem: AttentionProblem, arch: Arch) -> AmpereForwardConfig:
    """The configuration of the kernel that ``dispatch`` names for a request.

    Raises:
        UnsupportedError: none fits the shared memory of ``arch``.
    """
    widest = max(padded_head_dim(problem.head_dim), padded_head_dim(problem.head_dim_v))
    for limit, candidates in _AMPERE_FORWARD:
        for candidate in candidates:
            if widest <= limit and _fits(candidate, problem, arch):
                return candidate
    raise UnsupportedError(
        "head_dim", problem.head_dim, f"no configuration fits the shared memory of {arch.name}", "use a smaller head dim"
    )


def _fits(candidate: AmpereForwardConfig, problem: AttentionProblem, arch: Arch) -> bool:
    try:
        check_ampere_forward(candidate, problem.head_dim, problem.head_dim_v, arch)
    except UnsupportedError:
        return False
    return True
