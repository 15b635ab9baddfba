"""The paper's pipeline figure for any window, and what all pictures share."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..atomic import replacing
from ..spline import reference

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ..spline import SplineSpec

FORMATS = (".png", ".svg", ".pdf")
DPI = 150
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
    spec: SplineSpec,
    x: np.ndarray,
    y: np.ndarray,
    knots: np.ndarray,
    c: np.ndarray,
    path: os.PathLike[str] | str,
    title: str,
) -> None:
    """Series and feature function; cumulative mass, quantiles and knots; curve, basis functions and tokens.

    For samples y observed at x, (m,), fitted by a spline with the given knots and coefficients.
    """
    p, n = spec.degree, spec.n
    interior = knots[p + 1 : n]
    phi, F = reference.feature_and_mass(y, x, spec)
    fine = np.linspace(x[0], x[-1], 8 * len(x))
    N = reference.basis(knots[None], p, fine)[0]
    mu = (knots[:n] + knots[p + 1 :]) / 2

    figure = new_figure(9, 8.2)
    top, middle, bottom = figure.subplots(3, 1, sharex=True, height_ratios=(1, 1, 1.35))
    top.plot(x, y, color=INK, lw=1.1, label="samples")
    right = top.twinx()
    right.plot(x, phi, color=ACCENT, lw=0.9, label="feature")
    right.set_ylabel("feature", color=ACCENT)
    right.tick_params(axis="y", colors=ACCENT)
    top.set_ylabel("value")
    add_legend(top, right)

    q = np.arange(1, len(interior) + 1) / (len(interior) + 1)
    middle.plot(x, F, color=CURVE, lw=1.4, label="cumulative mass")
    if len(q) <= 120:
        middle.hlines(q, x[0], np.interp(q, F, x), color=QUIET, lw=0.4, label="quantiles")
        middle.vlines(interior, -0.03, q, color=QUIET, lw=0.4, ls=":")
    middle.plot(interior, np.full(len(interior), -0.03), "^", color=CURVE, ms=5, clip_on=False, label="knots")
    middle.set_ylim(-0.06, 1.03)
    middle.set_ylabel("share of mass")
    add_legend(middle)

    bottom.plot(x, y, ".", color=QUIET, ms=3, label="samples")
    bottom.plot(fine, N @ c, color=CURVE, lw=1.4, label="spline")
    bottom.plot(mu, c, "o", mfc="white", mec=ACCENT, ms=5, label=r"tokens $(c_i, \mu_i)$")
    span = np.ptp(np.concatenate([y, c])) or 1.0
    floor = min(y.min(), c.min()) - 0.42 * span
    for i in range(n):
        live = N[:, i] > 0
        bottom.plot(fine[live], floor + 0.3 * span * N[live, i], color=QUIET, lw=0.7, label="basis" if i == 0 else None)
    bottom.set_xlabel("sample")
    bottom.set_ylabel("value")
    add_legend(bottom)
    bottom.set_xlim(x[0], x[-1])
    figure.suptitle(plain(title))
    save(figure, path)


def plain(text: str) -> str:
    """A dollar sign in a name is no formula."""
    return text.replace("$", r"\$")


def new_figure(width: float, height: float) -> Figure:
    """A figure without pyplot: nothing global, no display needed."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure((width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def add_legend(axes: Any, other: Any = None) -> None:
    """Outside the axes on the right, where it hides nothing."""
    handles, labels = axes.get_legend_handles_labels()
    if other is not None:
        more = other.get_legend_handles_labels()
        handles, labels = handles + more[0], labels + more[1]
    axes.legend(
        handles, labels, loc="lower right", bbox_to_anchor=(1, 1), ncols=len(handles), frameon=False, fontsize=8
    )


def save(figure: Figure, path: os.PathLike[str] | str) -> None:
    """Whole or not at all, and the same bytes each time: no date, no random names."""
    from matplotlib import rc_context
    from PIL import Image

    undated: dict[str, dict[str, None]] = {
        ".png": {"Software": None},
        ".svg": {"Date": None},
        ".pdf": {"CreationDate": None},
    }
    with replacing(check_format(path)) as temporary, rc_context({"svg.hashsalt": "bsat"}):
        figure.savefig(temporary, dpi=DPI, metadata=undated[temporary.suffix.lower()])
        if temporary.suffix.lower() == ".png":
            with Image.open(temporary) as image:  # a third of the size with 256 colors, none far from what it was
                method, dither = Image.Quantize.MAXCOVERAGE, Image.Dither.NONE
                few = image.convert("RGB").quantize(256, method=method, kmeans=1, dither=dither)
            few.save(temporary, optimize=True, dpi=(DPI, DPI))
