"""bsat: forecasting with tokens that go where the signal is.

The public names are loaded on first use, so that `import bsat` stays quick and needs neither torch nor numba.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .forecaster import Forecaster
    from .tokens import BSplineTokenizer, DownsampleTokenizer, PatchTokenizer, TokenCache

__version__ = "0.1.0"

_HOMES = {
    "Forecaster": ".forecaster",
    "BSplineTokenizer": ".tokens",
    "PatchTokenizer": ".tokens",
    "DownsampleTokenizer": ".tokens",
    "TokenCache": ".tokens",
}

__all__ = [
    "BSplineTokenizer",
    "DownsampleTokenizer",
    "Forecaster",
    "PatchTokenizer",
    "TokenCache",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name], __name__), name)
    raise AttributeError(f"module 'bsat' has no attribute {name!r}; it has {', '.join(__all__)}")


def __dir__() -> list[str]:
    return sorted(__all__)
