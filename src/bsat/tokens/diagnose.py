"""Is this tokenizer good for this series? Figures, a report in words, and a picture."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ..data.statistics import curvature_norm, permutation_entropy, total_variation
from ..spline import SplineFit, SplineSpec
from .contract import sliding
from .downsample import DownsampleTokenizer

if TYPE_CHECKING:
    from os import PathLike

WINDOWS = 2000
"""Without a stride, about so many windows are looked at."""

WORST = 5


@dataclass(frozen=True, eq=False)
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
        """Error along the series, error against uniform knots, condition numbers: as a PNG, SVG or PDF."""
        from .pictures import ACCENT, CURVE, QUIET, add_legend, new_figure, save

        w = self.per_window
        figure = new_figure(10, 6.4)
        grid = figure.add_gridspec(2, 3)
        along = figure.add_subplot(grid[0, :])
        along.plot(w["start"], w["rmse_uniform"], color=QUIET, lw=0.9, label="uniform knots")
        along.plot(w["start"], w["rmse"], color=CURVE, lw=0.9, label="these tokens")
        worst = np.array(self.worst)
        along.plot(worst[:, 0], worst[:, 1], "v", color=ACCENT, label="worst windows")
        along.set_xlabel("first sample of the window")
        along.set_ylabel("RMSE")
        along.set_ylim(bottom=0)
        along.margins(x=0.01)
        add_legend(along)

        against = figure.add_subplot(grid[1, 0])
        top = 1.05 * max(w["rmse"].max(), w["rmse_uniform"].max(), 1e-300)
        against.plot(w["rmse_uniform"], w["rmse"], ".", color=CURVE, ms=3, alpha=0.5)
        against.plot([0, top], [0, top], color=QUIET, lw=0.8)
        against.set(xlabel="RMSE, uniform knots", ylabel="RMSE, these tokens", xlim=(0, top), ylim=(0, top))

        kappa = figure.add_subplot(grid[1, 1])
        kappa.hist(np.log10(np.clip(w["condition"], 1, 1e20)), bins=40, color=CURVE)
        kappa.set(xlabel="log10 of the condition number", ylabel="windows")

        ratio = figure.add_subplot(grid[1, 2])
        ratio.hist(w["ratio"], bins=40, color=CURVE)
        ratio.set(xlabel="largest |c| / max|y|", ylabel="windows")
        figure.suptitle(
            f"{self.tokenizer}\nRMSE {self.rmse:.4g} beside {self.rmse_uniform:.4g} with uniform knots; "
            f"{self.fallback_rate:.2%} of {self.windows:,} windows needed the ridge",
            fontsize=10,
        )
        save(figure, path)


def _share(ours: float, theirs: float) -> str:
    return f"(ours is {ours / theirs:.2f} of it)" if theirs > 0 else ""


def diagnose(
    name: str, spec: SplineSpec, max_coefficient: float | None, y: np.ndarray, lookback: int, stride: int | None
) -> Diagnosis:
    """Of a (T,) series; see `BSplineTokenizer.diagnose`."""
    from ..spline import cpu

    if stride is None:
        stride = max(1, (len(y) - lookback) // WINDOWS)
    windows = np.ascontiguousarray(sliding(y, lookback, stride))
    at = np.arange(lookback, dtype=np.float64)

    limit = np.inf if max_coefficient is None else max_coefficient

    def error_of(fit: SplineFit) -> np.ndarray:
        kept = np.clip(fit.coefficients, -limit, limit)
        return _rmse(cpu.evaluate(fit.knots, kept, spec.degree, at) - windows)

    fit = cpu.tokenize(windows, spec, exact_condition=True)
    error = error_of(fit)
    error_uniform = error_of(cpu.tokenize(windows, replace(spec, feature="uniform", recency=1.0)))
    sampler = DownsampleTokenizer(spec.n)
    error_downsample = _rmse(sampler.inverse_transform(sampler.transform(windows)) - windows)

    largest = np.abs(fit.coefficients).max(1)
    ratio = largest / np.maximum(np.abs(windows).max(1), np.finfo(float).tiny)
    starts = np.arange(len(windows)) * stride
    quantiles = {f"{q}%": float(np.quantile(fit.condition, q / 100, method="higher")) for q in (50, 90, 99, 100)}
    return Diagnosis(
        tokenizer=name,
        samples=len(y),
        windows=len(windows),
        lookback=int(lookback),
        stride=int(stride),
        fallback_rate=float(fit.fallback.mean()),
        clip_rate=float((largest > limit).mean()),
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
