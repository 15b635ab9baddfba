"""Where to train."""

from __future__ import annotations

import os

import torch


def find_device(name: str) -> torch.device:
    """A device that is there."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError):
        raise ValueError(f"`device` must be 'auto', 'cpu' or 'cuda'; got {name!r}. Choose one of them.") from None
    if device.type not in ("cpu", "cuda", "mps"):
        raise ValueError(f"`device` must be 'auto', 'cpu', 'cuda' or 'mps'; got {name!r}. Choose one of them.")
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise ValueError("`device` = 'mps' must be there; torch sees none. Use device='auto' or 'cpu'.")
    if device.type == "cuda" and (not torch.cuda.is_available() or (device.index or 0) >= torch.cuda.device_count()):
        raise ValueError(
            f"`device` = {name!r} must be there; torch sees {torch.cuda.device_count()} CUDA devices. "
            f"Use device='auto' or 'cpu', or install a CUDA build of torch."
        )
    return device


def count_cores() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
