"""The mathematics: knots, basis functions, least squares. Knows nothing of tokens or networks.

One signature (`spec`), several backends: `reference` (numpy, the oracle), `cpu` (numba), `autograd` (torch, any
device). A kernel for GPUs will be one more; `choose` is the only place that has to know of it.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

from .spec import DEGREES, FEATURES, LARGEST, PLACEMENTS, SplineFit, SplineSpec

__all__ = ["DEGREES", "FEATURES", "LARGEST", "PLACEMENTS", "SplineFit", "SplineSpec", "choose", "is_tensor"]


def is_tensor(a: Any) -> bool:
    """Whether this is a torch tensor, without importing torch to find out."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(a, torch.Tensor)


def choose(y: Any) -> Any:
    """The backend for these samples: `cpu` for numpy arrays, `autograd` for tensors (what stays on the CPU and needs no
    gradient should come as an array)."""
    return import_module(".autograd" if is_tensor(y) else ".cpu", __name__)
