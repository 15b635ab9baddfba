"""Signals that the tests share: windows like those of real series, and windows made to hurt."""

import numpy as np
import torch

# Networks this small gain nothing from a second thread, and on a busy machine every operation would wait for it.
torch.set_num_threads(1)

L = 240


def make_signals(length: int = L, count: int = 3, seed: int = 7) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    i = np.arange(length)[None]
    at = rng.integers(5, length - 5, (count, 1))
    noise = rng.normal(size=(count, length))
    day = np.sin(2 * np.pi * (i + rng.uniform(0, 24, (count, 1))) / 24)
    return {
        "transformer": 15 + 4 * day + 0.3 * noise.cumsum(1),  # like ETTh1's oil temperature
        "noisy": noise,
        "spiky": 0.01 * noise + np.where(i == at, 50.0, 0.0),
        "flat": np.full((count, length), 3.25),
        "flat with a step": np.where(i > at, 1.0, 0.0),
        "solar": np.maximum(0, np.sin(2 * np.pi * (i + at) / 96)) * rng.uniform(0.5, 1, (count, length)) ** 0.3,
        "burst": noise * (np.abs(i - at) < 8),
        "ramp": 0.1 * i + np.zeros((count, 1)),
    }


SIGNALS = make_signals()
