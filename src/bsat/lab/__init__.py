"""The paper's experiments, beside what the paper prints of them."""

from .figures import write_figures
from .protocol import Experiment, Protocol
from .runs import Run, Store, StoreError, pack, read, read_protocol, select
from .stats import PAPER, Statistics, dataset_table, format_statistics, measure
from .tables import make_tables, write_tables

__all__ = [
    "PAPER",
    "Experiment",
    "Protocol",
    "Run",
    "Statistics",
    "Store",
    "StoreError",
    "dataset_table",
    "format_statistics",
    "make_tables",
    "measure",
    "pack",
    "read",
    "read_protocol",
    "select",
    "write_figures",
    "write_tables",
]
