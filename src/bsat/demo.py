"""The main job on a shipped series: tokenize, train, forecast, score, draw, save. Offline, on a CPU, in minutes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from .data import SHIPPED, load_shipped
from .forecaster import Forecaster
from .pictures import draw_bases
from .report import draw_last_window, format_scores, scores_dict
from .tokens import BSplineTokenizer, DownsampleTokenizer, PatchTokenizer

LOOKBACK, HORIZON, TOKENS = 720, 192, 45
SETTINGS: dict[str, Any] = {"head": "spline", "max_epochs": 12, "epoch_windows": 2_000, "device": "cpu"}
"""The same for every tokenizer: the head that suits adaptive tokens, and a budget of a minute each."""


def run_demo(folder: Path, *, quiet: bool = False) -> dict[str, Any]:
    """Train BSAT, PatchTST and UDS on the solar series; returns the scores."""

    def say(text: str) -> None:
        if not quiet:
            print(text, flush=True)

    began = time.perf_counter()
    about, frame = SHIPPED["solar"], load_shipped("solar")
    say(f"solar: {about.about}, {about.unit}, every {about.cadence}, {len(frame):,} samples\n({about.credit})\n")
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = BSplineTokenizer(TOKENS)
    window = frame["y"].to_numpy()[-LOOKBACK:]
    tokenizer.plot(window, folder / "tokens.png", title=f"{LOOKBACK} samples of solar irradiance as {TOKENS} tokens")

    forecasters = {}
    with one_thread():
        for each in (tokenizer, PatchTokenizer(TOKENS), DownsampleTokenizer(TOKENS)):
            forecaster = Forecaster(HORIZON, LOOKBACK, each, verbose=not quiet, **SETTINGS)
            forecasters[forecaster.name] = forecaster.fit(frame)
            if forecaster.history_.stopped == "interrupted":
                raise KeyboardInterrupt
    bsat = forecasters["BSAT"]
    bsat.save(folder / "model")
    draw_last_window(bsat, frame, folder / "forecast.png", unit=about.unit)
    draw_bases(folder / "bases.png", bsat.history_, "L-RoPE: the rotary base that each layer learned")
    say(f"\n{format_scores(forecasters)}")
    names = ", ".join(str(folder / name) for name in ("forecast.png", "tokens.png", "bases.png"))
    say(f"\ndrew {names}\nsaved {folder / 'model'}: bsat predict {folder / 'model'} --level 80 --plot next.png")
    say(f"{time.perf_counter() - began:.0f} s")
    return {name: scores_dict(forecaster) for name, forecaster in forecasters.items()}


@contextmanager
def one_thread() -> Iterator[None]:
    """A second thread makes networks this small half as fast again, but ten times slower on a machine that is busy:
    every operation then waits for a thread that is not running."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
