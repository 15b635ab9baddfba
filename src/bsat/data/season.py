"""How many samples a season has, for the seasonal naive forecast."""

from __future__ import annotations

import pandas as pd
from pandas.tseries.frequencies import to_offset

CALENDAR = {"W": 52, "B": 5, "M": 12, "Q": 4}
"""Steps in a year (a week, for business days), by the first letter of the frequency."""


def season_of(freq: str | int) -> int | None:
    """Samples in a day for steps shorter than one, in a week for days, in a year for weeks, months and quarters.

    None where nothing of the kind is known: integer stamps, years, steps that do not divide a day.
    """
    if not isinstance(freq, str):
        return None
    offset = to_offset(freq)
    if offset is None:
        return None
    if isinstance(offset, pd.offsets.Day):
        return 7 if offset.n == 1 else None
    if isinstance(offset, pd.offsets.Tick):
        step, day = pd.Timedelta(offset), pd.Timedelta(days=1)
        return int(day / step) if day % step == pd.Timedelta(0) and step < day else None
    letters = offset.freqstr.lstrip("0123456789")
    season = CALENDAR.get("B" if letters == "B" else letters[:1]) if not letters.startswith("BH") else None
    if letters.startswith("B") and letters != "B":
        season = CALENDAR.get(letters[1:2])  # BME, BQS: the business days that end or begin months and quarters
    return season // offset.n if season is not None and season % offset.n == 0 and season > offset.n else None
