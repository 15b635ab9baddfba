"""Series: read from files, shipped with the package, and described."""

from .files import read_series
from .shipped import SHIPPED, load_shipped
from .statistics import curvature_norm, permutation_entropy, total_variation

__all__ = ["SHIPPED", "curvature_norm", "load_shipped", "permutation_entropy", "read_series", "total_variation"]
