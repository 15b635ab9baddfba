"""How many samples a season has, for the seasonal naive forecast."""

from __future__ import annotations

import pandas as pd
from pandas.tseries.frequencies import to_offset

DAY, WEEK = pd.Timedelta(days=1), pd.Timedelta(days=7)
CALENDAR = {"W": 52, "B": 5, "ME": 12, "MS": 12, "WOM": 12, "LWOM": 12, "QE": 4, "QS": 4}
"""Steps in a year (a week, for business days), by pandas' alias."""


def season_of(freq: str | int) -> int | None:
    """Samples in a day for steps shorter than one, in a week for days, in a year for weeks, months and quarters.

    None where nothing of the kind is known: integer stamps, years, steps that do not divide a day.
    """
    if not isinstance(freq, str):
        return None
    offset = to_offset(freq)
    if offset is None:
        return None
    if isinstance(offset, (pd.offsets.Day, pd.offsets.Tick)):
        step = pd.Timedelta(days=offset.n) if isinstance(offset, pd.offsets.Day) else pd.Timedelta(offset)
        if step % DAY:
            return DAY // step if not DAY % step else None
        unit, season = (WEEK, CALENDAR["W"]) if not step % WEEK else (DAY, 7)  # weeks may come as "7D"
        steps = step // unit
    else:
        alias = offset.freqstr.lstrip("0123456789").split("-")[0]
        # BME, BQS: the business days that end or begin months and quarters
        season, steps = CALENDAR.get(alias) or CALENDAR.get(alias.removeprefix("B"), 0), offset.n
    return season // steps if season % steps == 0 and season > steps else None
