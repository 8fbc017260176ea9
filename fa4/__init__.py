"""fa4: FlashAttention-4 as a Python CuTe-DSL kernel framework.

Public names load on first use, so that ``import fa4`` pulls in neither torch nor cutlass.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fa4._settings import Settings as Settings
    from fa4._settings import settings as settings
    from fa4.api import attention as attention
    from fa4.api import supports as supports
    from fa4.dispatch import Support as Support
    from fa4.errors import ArgumentError as ArgumentError
    from fa4.errors import BackendError as BackendError
    from fa4.errors import CompileError as CompileError
    from fa4.errors import CudaError as CudaError
    from fa4.errors import DeviceError as DeviceError
    from fa4.errors import DtypeError as DtypeError
    from fa4.errors import Fa4Error as Fa4Error
    from fa4.errors import InspectionError as InspectionError
    from fa4.errors import ShapeError as ShapeError
    from fa4.errors import UnsupportedError as UnsupportedError
    from fa4.inspection.report import inspect as inspect
    from fa4.modifier import MaskMod as MaskMod
    from fa4.modifier import ScoreMod as ScoreMod
    from fa4.registration import mask_mod as mask_mod
    from fa4.registration import score_mod as score_mod

__version__ = "0.1.0"

# No submodule may share one of these names: importing it would replace the public name.
_HOME = {
    "attention": "fa4.api",
    "supports": "fa4.api",
    "inspect": "fa4.inspection.report",
    "score_mod": "fa4.registration",
    "mask_mod": "fa4.registration",
    "ScoreMod": "fa4.modifier",
    "MaskMod": "fa4.modifier",
    "Support": "fa4.dispatch",
    "Settings": "fa4._settings",
    "settings": "fa4._settings",
} | dict.fromkeys(
    (
        "Fa4Error",
        "ArgumentError",
        "BackendError",
        "CompileError",
        "CudaError",
        "DeviceError",
        "DtypeError",
        "InspectionError",
        "ShapeError",
        "UnsupportedError",
    ),
    "fa4.errors",
)

__all__ = [*_HOME, "__version__"]  # noqa: PLE0604 -- every key is a string


def __getattr__(name: str) -> Any:
    """Import a public name on first use."""
    if name not in _HOME:
        raise AttributeError(f"module 'fa4' has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
