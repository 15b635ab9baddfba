"""Series, forecasters and a space of networks so small that every test can fit its own."""

import time

import numpy as np
import pandas as pd

from bsat import BSplineTokenizer, Forecaster
from bsat.search import Categorical, Real, Space, Whole

L, H = 48, 12
SPACE = Space(
    n_layers=Whole(1, 1),
    d_model=Categorical((8,)),
    n_heads=Categorical((2,)),
    ff_factor=Categorical((1, 2)),
    dropout=Real(0.0, 0.2),
    ff_dropout=Real(0.0, 0.2),
    attention_dropout=Real(0.0, 0.2),
    learning_rate=Real(1e-5, 3e-2, log=True),
    weight_decay=Real(1e-6, 1e-2, log=True),
    degree=Whole(1, 3),
)


def wait_until(condition, *args, seconds=600):
    """Far longer than it takes on a busy machine, but not for ever."""
    end = time.monotonic() + seconds
    while not condition(*args):
        assert time.monotonic() < end, f"waited for {seconds} seconds in vain"
        time.sleep(0.005)


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
