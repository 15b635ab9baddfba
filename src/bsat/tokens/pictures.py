"""Pictures of tokens: the paper's pipeline figure for any window, and that of a diagnosis."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..atomic import replacing
from ..spline import reference
from .door import check_finite, to_array, to_missing

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from .bspline import BSplineTokenizer
    from .diagnose import Diagnosis

FORMATS = (".png", ".svg", ".pdf")
INK, CURVE, ACCENT, QUIET = "#1b1b1b", "#1f5fa8", "#c8502d", "#9a9a9a"


def check_format(path: os.PathLike[str] | str) -> Path:
    """A path that a picture can be saved to."""
    path = Path(path)
    if path.suffix.lower() not in FORMATS:
        raise ValueError(f"a picture must end in {', '.join(FORMATS)}; got {path.name!r}. Rename it.")
    if not path.parent.is_dir():
        raise ValueError(f"a picture needs an existing folder; {path.parent} is none. Create it first.")
    return path


def draw_pipeline(
    tokenizer: BSplineTokenizer, window: Any, path: os.PathLike[str] | str, *, mask: Any, title: str | None
) -> None:
    """Series and feature function; cumulative mass, quantiles and knots; curve, basis functions and tokens."""
    path = check_format(path)
    y = np.asarray(to_array(window, "window"), np.float64)
    if y.ndim != 1:
        raise ValueError(f"`window` must have shape (L,); got {y.shape}. Draw one window at a time.")
    missing = np.zeros(y.shape, bool) if mask is None else to_missing(mask, y)
    check_finite(y, "window", missing)
    tokens = tokenizer.transform(y[None], mask=missing[None])
    p, n, L = tokenizer.degree, tokenizer.n_tokens, len(y)
    knots, x, y = tokens.knots[0], np.flatnonzero(~missing).astype(float), y[~missing]
    interior = knots[p + 1 : n]
    phi, F = reference.feature_and_mass(y, x, tokenizer.spec)

    fine = np.linspace(0, L - 1, 8 * L)
    N = reference.basis(knots[None], p, fine)[0]
    curve = tokenizer.inverse_transform(tokens, length=len(fine))[0]
    c, mu = tokens.coefficients[0], tokens.centers[0]

    figure = _figure(9, 8.2)
    top, middle, bottom = figure.subplots(3, 1, sharex=True, height_ratios=(1, 1, 1.35))
    top.plot(x, y, color=INK, lw=1.1, label="samples")
    right = top.twinx()
    right.plot(x, phi, color=ACCENT, lw=0.9, label="feature")
    right.set_ylabel("feature", color=ACCENT)
    right.tick_params(axis="y", colors=ACCENT)
    top.set_ylabel("value")
    _legend(top, right)

    q = np.arange(1, len(interior) + 1) / (len(interior) + 1)
    middle.plot(x, F, color=CURVE, lw=1.4, label="cumulative mass")
    if len(q) <= 120:
        middle.hlines(q, 0, np.interp(q, F, x), color=QUIET, lw=0.4, label="quantiles")
        middle.vlines(interior, -0.03, q, color=QUIET, lw=0.4, ls=":")
    middle.plot(interior, np.full(len(interior), -0.03), "^", color=CURVE, ms=5, clip_on=False, label="knots")
    middle.set_ylim(-0.06, 1.03)
    middle.set_ylabel("share of mass")
    _legend(middle)

    bottom.plot(x, y, ".", color=QUIET, ms=3, label="samples")
    bottom.plot(fine, curve, color=CURVE, lw=1.4, label="spline")
    bottom.plot(mu, c, "o", mfc="white", mec=ACCENT, ms=5, label=r"tokens $(c_i, \mu_i)$")
    span = np.ptp(np.concatenate([y, c])) or 1.0
    floor = min(y.min(), c.min()) - 0.42 * span
    for i in range(n):
        live = N[:, i] > 0
        bottom.plot(fine[live], floor + 0.3 * span * N[live, i], color=QUIET, lw=0.7, label="basis" if i == 0 else None)
    bottom.set_xlabel("sample")
    bottom.set_ylabel("value")
    _legend(bottom)
    bottom.set_xlim(0, L - 1)
    figure.suptitle(title or f"{L} samples as {n} tokens (degree {p}, {tokenizer.placement} placement)")
    _save(figure, path)


def draw_diagnosis(diagnosis: Diagnosis, path: os.PathLike[str] | str) -> None:
    """Error along the series, error against uniform knots, condition numbers."""
    path = check_format(path)
    w = diagnosis.per_window
    figure = _figure(10, 6.4)
    grid = figure.add_gridspec(2, 3)
    along = figure.add_subplot(grid[0, :])
    along.plot(w["start"], w["rmse_uniform"], color=QUIET, lw=0.9, label="uniform knots")
    along.plot(w["start"], w["rmse"], color=CURVE, lw=0.9, label="these tokens")
    worst = np.array(diagnosis.worst)
    along.plot(worst[:, 0], worst[:, 1], "v", color=ACCENT, label="worst windows")
    along.set_xlabel("first sample of the window")
    along.set_ylabel("RMSE")
    along.set_ylim(bottom=0)
    along.margins(x=0.01)
    _legend(along)

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
        f"{diagnosis.tokenizer}\nRMSE {diagnosis.rmse:.4g} beside {diagnosis.rmse_uniform:.4g} with uniform knots; "
        f"{diagnosis.fallback_rate:.2%} of {diagnosis.windows:,} windows needed the ridge",
        fontsize=10,
    )
    _save(figure, path)


def _figure(width: float, height: float) -> Figure:
    """A figure without pyplot: nothing global, no display needed."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure((width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _legend(axes: Any, other: Any = None) -> None:
    """Outside the axes on the right, where it hides nothing."""
    handles, labels = axes.get_legend_handles_labels()
    if other is not None:
        more = other.get_legend_handles_labels()
        handles, labels = handles + more[0], labels + more[1]
    axes.legend(
        handles, labels, loc="lower right", bbox_to_anchor=(1, 1), ncols=len(handles), frameon=False, fontsize=8
    )


def _save(figure: Figure, path: Path) -> None:
    with replacing(path) as temporary:
        figure.savefig(temporary, dpi=150)
