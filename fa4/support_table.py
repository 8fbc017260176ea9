"""Feature by architecture, asked of ``supports()`` itself, so that the table cannot disagree with the code."""

from __future__ import annotations

from typing import Any

from fa4.api import supports
from fa4.arch import ARCHS
from fa4.dispatch import Support
from fa4.registration import mask_mod, score_mod


def _same(score: Any, batch: Any, head: Any, q_index: Any, k_index: Any) -> Any:
    return score


def _gradient(dscore: Any, score: Any, batch: Any, head: Any, q_index: Any, k_index: Any) -> Any:
    return dscore


def _all(batch: Any, head: Any, q_index: Any, k_index: Any) -> Any:
    return k_index >= 0


# Functions that change nothing, in both forms: what is asked is whether any function is served.
_SCORE = score_mod("fa4.support_table score", device=_same, torch=_same, grad=_gradient)
_MASK = mask_mod("fa4.support_table mask", device=_all, torch=_all)

FEATURES: dict[str, dict[str, Any]] = {
    "forward": {},
    "backward": {"direction": "backward"},
    "float16": {"dtype": "float16"},
    "bfloat16": {"dtype": "bfloat16"},
    "float32": {"dtype": "float32"},
    "causal": {"causal": True},
    "window": {"window_size": (128, 0)},
    "softcap": {"softcap": 30.0},
    "score_mod, mask_mod": {"score_mod": _SCORE, "mask_mod": _MASK},
    "backward with score_mod, mask_mod": {"score_mod": _SCORE, "mask_mod": _MASK, "direction": "backward"},
    "deterministic backward": {"deterministic": True, "direction": "backward"},
    "head dim 64": {"head_dim": 64},
    "head dim 128": {"head_dim": 128},
    "head dims (192, 128)": {"head_dim": 192, "head_dim_v": 128},
    "head dim 256": {"head_dim": 256},
    "head dim 512": {"head_dim": 512},
}


def support_table() -> tuple[list[str], list[list[str]]]:
    """``(header, rows)``: a row a feature, a column for the CPU backend and each architecture, "yes", "Ampere" or "-"."""
    targets: dict[str, dict[str, Any]] = {"cpu": {}} | {name: {"arch": name, "backend": "vgpu"} for name in ARCHS}
    rows = [
        [feature, *(_cell(supports(**({"head_dim": 128} | request | target))) for target in targets.values())]
        for feature, request in FEATURES.items()
    ]
    return ["feature", *targets], rows


def _cell(support: Support) -> str:
    return ("yes" if support.native else "Ampere") if support else "-"


def support_page() -> str:
    """The table as a Markdown page."""
    header, rows = support_table()
    lines = ["| " + " | ".join(row) + " |" for row in [header, ["---"] * len(header), *rows]]
    return "\n".join(
        [
            "# What works where",
            "",
            "Generated from `fa4.supports()`; `fa4 support` prints the same table. A column is the CPU backend, or the GPU kernel of an",
            'architecture: on CUDA tensors (`backend="cuda"`), and on the virtual GPU (`backend="vgpu"`). `-` means that a request raises',
            "`UnsupportedError` before any work is done. So far kernels have run on the virtual GPU only: launches on CUDA tensors are",
            "tested up to the CUDA runtime, on machines without a GPU. `Ampere` means by the Ampere kernel, compiled for the",
            "architecture; `fa4.supports(...).reason` says why not by a kernel of its own.",
            "",
            *lines,
            "",
        ]
    )
