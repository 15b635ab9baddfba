"""Series: named in the catalog, read from files, shipped with the package, and described."""

from .catalog import CATALOG, Dataset, find_dataset, load
from .download import DownloadError
from .files import read_frame, read_series, read_table
from .season import season_of
from .shipped import SHIPPED, load_shipped
from .statistics import curvature_norm, permutation_entropy, total_variation

__all__ = [
    "CATALOG",
    "SHIPPED",
    "Dataset",
    "DownloadError",
    "curvature_norm",
    "find_dataset",
    "load",
    "load_shipped",
    "permutation_entropy",
    "read_frame",
    "read_series",
    "read_table",
    "season_of",
    "total_variation",
]
