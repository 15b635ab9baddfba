"""The mathematics: knots, basis functions, least squares. Knows nothing of tokens or networks.

One signature (`spec`), several backends: `reference` (numpy, the oracle), `cpu` (numba), `gpu` (CUDA C), `autograd`
(torch, any device). `choose` knows which of them a caller wants.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

from .spec import DEGREES, FEATURES, LARGEST, PLACEMENTS, SplineFit, SplineSpec

__all__ = ["DEGREES", "FEATURES", "LARGEST", "PLACEMENTS", "SplineFit", "SplineSpec", "choose", "is_tensor", "on_gpu"]


def is_tensor(a: Any) -> bool:
    """Whether this is a torch tensor, without importing torch to find out."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(a, torch.Tensor)


def on_gpu(y: Any) -> bool:
    """Whether the `gpu` backend can answer for these samples: on an NVIDIA GPU, with no gradient asked for."""
    return is_tensor(y) and y.device.type == "cuda" and bool(import_module(".gpu", __name__).usable(y))


def choose(y: Any) -> Any:
    """The backend for these samples: `cpu` for numpy arrays, `gpu` for tensors that it can answer for, `autograd` for
    all others (what stays on the CPU and needs no gradient should come as an array)."""
    name = ".cpu" if not is_tensor(y) else ".gpu" if on_gpu(y) else ".autograd"
    return import_module(name, __name__)
