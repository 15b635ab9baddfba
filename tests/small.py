"""Series and forecasters so small that every test can fit its own."""

import numpy as np
import pandas as pd

from bsat import BSplineTokenizer, Forecaster

L, H = 48, 12


def make_values(length, seed=0):
    """A day, some noise and a level that wanders."""
    rng = np.random.default_rng(seed)
    day = np.sin(2 * np.pi * (np.arange(length) + rng.uniform(0, 24)) / 24)
    return 10 + 4 * day + 0.1 * rng.normal(size=length).cumsum() + 0.3 * rng.normal(size=length)


def make_long(start="2024-01-01", freq="h", tz=None, **lengths):
    """A long frame of series with these names and lengths."""
    parts = [
        pd.DataFrame(
            {
                "unique_id": name,
                "ds": pd.date_range(start, periods=length, freq=freq, tz=tz),
                "y": make_values(length, seed),
            }
        )
        for seed, (name, length) in enumerate(lengths.items())
    ]
    return pd.concat(parts, ignore_index=True)


def make_forecaster(**changes):
    """Fitted to `make_long` in some 40 ms, with one thread."""
    small = {
        "horizon": H,
        "lookback": L,
        "tokenizer": BSplineTokenizer(10),
        "d_model": 8,
        "n_heads": 2,
        "n_layers": 1,
        "max_epochs": 2,
        "epoch_windows": 200,
        "device": "cpu",
        "verbose": False,
    }
    return Forecaster(**{**small, **changes})


def weights_of(forecaster):
    return {name: a.numpy() for name, a in forecaster.network_.state_dict().items()}
