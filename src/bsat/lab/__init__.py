"""The paper's experiments, beside what the paper prints of them."""

from .protocol import Experiment, Protocol
from .runs import Run, Store, StoreError, read, read_protocol, select
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
    "read",
    "read_protocol",
    "select",
    "write_tables",
]
