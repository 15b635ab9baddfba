"""Search for hyperparameters: the paper's space, a study that outlives its process, and engines that train its trials.

`study` needs Optuna (``pip install 'bsat[search]'``), and only when a search begins; everything imports without it.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .space import Categorical, Point, Real, Space, Whole

if TYPE_CHECKING:
    from .cluster import Ray
    from .contract import Interrupted, Outcome, Record, Sampler, Search, SearchProgress, Watch
    from .engines import Data, Desk, Engine, Failed, Local, Population
    from .study import read_records, run_search, run_searches
    from .tuning import tune

_HOMES = {
    "cluster": ("Ray",),
    "engines": ("Data", "Desk", "Engine", "Failed", "Local", "Population"),
    "contract": ("Interrupted", "Outcome", "Record", "Sampler", "Search", "SearchProgress", "Watch"),
    "study": ("read_records", "run_search", "run_searches"),
    "tuning": ("tune",),
}

__all__ = [
    "Categorical",
    "Data",
    "Desk",
    "Engine",
    "Failed",
    "Interrupted",
    "Local",
    "Outcome",
    "Point",
    "Population",
    "Ray",
    "Real",
    "Record",
    "Sampler",
    "Search",
    "SearchProgress",
    "Space",
    "Watch",
    "Whole",
    "read_records",
    "run_search",
    "run_searches",
    "tune",
]


def __getattr__(name: str) -> Any:
    """A space is a description, which needs no torch; the rest is loaded when it is asked for."""
    for home, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f".{home}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
