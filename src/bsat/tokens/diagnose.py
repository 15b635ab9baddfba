"""Is this tokenizer good for this series? Figures, a report in words, and a picture."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ..data.statistics import curvature_norm, permutation_entropy, total_variation
from ..spline import is_tensor
from .contract import sliding
from .door import check_finite, check_whole, to_series

if TYPE_CHECKING:
    from os import PathLike

    from .bspline import BSplineTokenizer

WINDOWS = 2000
"""Without a stride, about so many windows are looked at."""

WORST = 5


@dataclass(frozen=True)
class Diagnosis:
    """Rates are shares of windows. RMSE is over all samples of all windows, in the unit of the series."""

    tokenizer: str
    samples: int
    windows: int
    lookback: int
    stride: int
    fallback_rate: float
    clip_rate: float
    """Windows with a coefficient beyond `max_coefficient`; 0 if there is none"""
    condition: dict[str, float]
    """Quantiles of the condition number of the Gram matrix"""
    coefficient_ratio: float
    """The largest |c| / max|y| of a window"""
    rmse: float
    rmse_uniform: float
    """With uniform knots"""
    rmse_downsample: float
    """With straight lines between n evenly spaced samples"""
    total_variation: float
    curvature_norm: float
    permutation_entropy: float
    worst: list[tuple[int, float]]
    """First sample and RMSE of the windows that are fitted worst, none overlapping another"""
    per_window: dict[str, np.ndarray]
    """start, rmse, rmse_uniform, condition, ratio: for drawing"""

    def to_dict(self) -> dict[str, Any]:
        """All figures, without the arrays."""
        return {k: v for k, v in asdict(self).items() if k != "per_window"}

    def __str__(self) -> str:
        k = self.condition
        lines = [
            self.tokenizer,
            f"{self.windows:,} windows of {self.lookback} samples, {self.stride} apart, of {self.samples:,} samples",
            "",
            "stability",
            f"  ridge fallback       {self.fallback_rate:10.2%} of windows",
            f"  coefficients clipped {self.clip_rate:10.2%} of windows",
            f"  condition number     {k['50%']:10.3g} median, {k['99%']:.3g} at 99 %, {k['100%']:.3g} largest",
            f"  largest |c| / max|y| {self.coefficient_ratio:10.3g}",
            "reconstruction RMSE",
            f"  these tokens         {self.rmse:10.4g}",
            f"  uniform knots        {self.rmse_uniform:10.4g}   {_share(self.rmse, self.rmse_uniform)}",
            f"  down-sampling        {self.rmse_downsample:10.4g}   {_share(self.rmse, self.rmse_downsample)}",
            "series",
            f"  total variation      {self.total_variation:10,.1f}",
            f"  curvature norm       {self.curvature_norm:10,.1f}",
            f"  permutation entropy  {self.permutation_entropy:10.3f}",
            "worst windows (first sample: RMSE)",
            "  " + ", ".join(f"{start:,}: {rmse:.4g}" for start, rmse in self.worst),
        ]
        return "\n".join(lines)

    def plot(self, path: PathLike[str] | str) -> None:
        """Draw it into a PNG, SVG or PDF."""
        from .pictures import draw_diagnosis

        draw_diagnosis(self, path)


def _share(ours: float, theirs: float) -> str:
    return f"(ours is {ours / theirs:.2f} of it)" if theirs > 0 else ""


def diagnose(tokenizer: BSplineTokenizer, series: Any, lookback: int, stride: int | None) -> Diagnosis:
    """See `BSplineTokenizer.diagnose`."""
    from ..spline import cpu
    from .bspline import BSplineTokenizer
    from .downsample import DownsampleTokenizer

    series = to_series(series, lookback)
    if series.ndim != 1:
        raise ValueError(f"`series` must have shape (T,); got {tuple(series.shape)}. Diagnose one channel at a time.")
    check_finite(series, "series")
    tokenizer._check_length(lookback)
    y = np.asarray(series.detach().cpu() if is_tensor(series) else series, np.float64)
    if stride is None:
        stride = max(1, (len(y) - lookback) // WINDOWS)
    check_whole(stride, "stride", 1)
    windows = np.ascontiguousarray(sliding(y, lookback, stride))
    at = np.arange(lookback, dtype=np.float64)

    fit = cpu.tokenize(windows, tokenizer.spec, exact_condition=True)
    error = _rmse(cpu.evaluate(fit.knots, fit.coefficients, tokenizer.degree, at) - windows)
    plain = BSplineTokenizer(tokenizer.n_tokens, tokenizer.degree, feature="uniform", placement=tokenizer.placement)
    error_uniform = _rmse(plain.inverse_transform(plain.transform(windows)) - windows)
    sampler = DownsampleTokenizer(tokenizer.n_tokens)
    error_downsample = _rmse(sampler.inverse_transform(sampler.transform(windows)) - windows)

    largest = np.abs(fit.coefficients).max(1)
    ratio = largest / np.maximum(np.abs(windows).max(1), np.finfo(float).tiny)
    limit = tokenizer.max_coefficient
    starts = np.arange(len(windows)) * stride
    quantiles = {f"{q}%": float(np.quantile(fit.condition, q / 100, method="higher")) for q in (50, 90, 99, 100)}
    return Diagnosis(
        tokenizer=repr(tokenizer),
        samples=len(y),
        windows=len(windows),
        lookback=int(lookback),
        stride=int(stride),
        fallback_rate=float(fit.fallback.mean()),
        clip_rate=0.0 if limit is None else float((largest > limit).mean()),
        condition=quantiles,
        coefficient_ratio=float(ratio.max()),
        rmse=_overall(error),
        rmse_uniform=_overall(error_uniform),
        rmse_downsample=_overall(error_downsample),
        total_variation=total_variation(y),
        curvature_norm=curvature_norm(y),
        permutation_entropy=permutation_entropy(y),
        worst=_worst(starts, error, lookback),
        per_window={
            "start": starts,
            "rmse": error,
            "rmse_uniform": error_uniform,
            "condition": fit.condition,
            "ratio": ratio,
        },
    )


def _worst(starts: np.ndarray, error: np.ndarray, lookback: int) -> list[tuple[int, float]]:
    """The windows with the largest errors that do not overlap one another."""
    worst: list[tuple[int, float]] = []
    for i in np.argsort(-error, kind="stable"):
        if len(worst) < WORST and all(abs(int(starts[i]) - start) >= lookback for start, _ in worst):
            worst.append((int(starts[i]), float(error[i])))
    return worst


def _rmse(residual: np.ndarray) -> np.ndarray:
    """Of each window."""
    return np.sqrt((residual**2).mean(1))


def _overall(rmse: np.ndarray) -> float:
    """Over all samples, from that of equally long windows."""
    return float(np.sqrt((rmse**2).mean()))
