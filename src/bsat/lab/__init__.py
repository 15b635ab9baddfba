"""The paper's experiments, beside what the paper prints of them."""

from .stats import PAPER, Statistics, dataset_table, format_statistics, measure

__all__ = ["PAPER", "Statistics", "dataset_table", "format_statistics", "measure"]
