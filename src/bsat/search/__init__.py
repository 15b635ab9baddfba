"""Search for hyperparameters: the paper's space, a study that outlives its process, and engines that train its trials.

`study` needs Optuna (``pip install 'bsat[search]'``), and only when a search begins; everything imports without it.
"""

from .engines import Data, Desk, Engine, Failed, Local, Population
from .space import Categorical, Point, Real, Space, Whole
from .study import Interrupted, Outcome, Record, Sampler, SearchProgress, read_records, run_search

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
    "Real",
    "Record",
    "Sampler",
    "SearchProgress",
    "Space",
    "Whole",
    "read_records",
    "run_search",
]
