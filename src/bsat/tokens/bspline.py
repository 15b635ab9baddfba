"""BSAT: every token is a basis function of a least-squares B-spline whose knots lie where the signal bends."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np

from ..spline import DEGREES, FEATURES, PLACEMENTS, SplineFit, SplineSpec, choose, is_tensor, on_gpu
from .cache import TokenCache, as_cache, make_key
from .clip_factor import search_clip_factor
from .contract import Tokenizer, Tokens, sliding
from .door import (
    Rows,
    check_choice,
    check_finite,
    check_number,
    to_array,
    to_missing,
    to_numpy,
    to_positions,
    to_rows,
    to_series,
    to_whole,
)

if TYPE_CHECKING:
    from os import PathLike

    from .diagnose import Diagnosis

CHUNK = 1 << 15
"""Windows handled at once where an intermediate result is larger than what is kept of it."""


@dataclass(frozen=True, eq=False)
class BSplineTokens(Tokens):
    """The tuples (c_i, mu_i) of the paper, with the knots they come from."""

    coefficients: Any
    """(B, n[, C]), clipped or asinh-transformed if the tokenizer was asked to"""
    centers: Any
    """(B, n[, C]) mu_i = (tau_i + tau_{i+p+1}) / 2, in samples from 0 to L - 1"""
    knots: Any
    """(B, n + p + 1[, C]), in samples"""
    fallback: Any
    """(B[, C]) bool: the ridge answered, because the fit was ill-conditioned"""
    detail: Any
    """(B, n[, C], k) samples across each token's width, or None"""
    length: int
    """L"""
    coefficient_kind: str = "plain"
    """"plain" or "asinh\""""

    arrays: ClassVar[tuple[str, ...]] = ("coefficients", "centers", "knots", "fallback", "detail")

    @property
    def degree(self) -> int:
        """Of the spline."""
        return self.knots.shape[1] - self.coefficients.shape[1] - 1

    @property
    def positions(self) -> Any:
        """The centers."""
        return self.centers

    @property
    def values(self) -> Any:
        """(B, n[, C], 2 + k): coefficient, center / (L - 1), detail."""
        parts = [self.coefficients[..., None], self.centers[..., None] / (self.length - 1)]
        if self.detail is not None:
            parts.append(self.detail)
        if is_tensor(parts[0]):
            import torch

            return torch.cat(parts, -1)
        return np.concatenate(parts, -1)


class BSplineTokenizer(Tokenizer):
    """The B-Spline Adaptive Tokenizer (paper, section "BSAT" and Algorithms 1 and 2). Nothing in it is trained.

    Args:
        n_tokens: tokens per window, strictly between degree + 1 and the window's length.
        degree: of the spline, 1 to 6.
        clip_factor: g, the most that one sample interval may count, in mean masses of a knot; "auto" lets `fit` run the
            paper's grid search; infinity switches the clipping off.
        placement: "safe" keeps knots far enough apart for every fit to be well conditioned; "paper" is Algorithm 1 as
            it stands, with its ridge fallback.
        feature: what draws knots: "curvature" (the paper's |y^(p)|^(1/p)), "slope" (|y'| at every degree) or "uniform".
        recency: how many times denser the knots are at the newest end than at the oldest; 1 is off.
        max_coefficient: C_max, beyond which coefficients are clipped (the paper's presets use 10 on scaled data).
        coefficients: "plain", or "asinh" for arcsinh of the coefficients, which tames large ones without losing them.
        detail: so many samples of the window, spread evenly across each token's width, join its values.
    """

    label = "BSAT"
    adaptive = True

    def __init__(
        self,
        n_tokens: int = 45,
        degree: int = 3,
        clip_factor: float | str = 0.62,
        placement: str = "safe",
        feature: str = "curvature",
        recency: float = 1.0,
        max_coefficient: float | None = None,
        coefficients: str = "plain",
        detail: int = 0,
    ) -> None:
        degree = to_whole(degree, "degree", DEGREES[0])
        if degree not in DEGREES:
            raise ValueError(f"`degree` must lie between {DEGREES[0]} and {DEGREES[-1]}; got {degree}. Lower it.")
        n_tokens = to_whole(n_tokens, "n_tokens", 1)
        if n_tokens <= degree + 1:
            raise ValueError(
                f"`n_tokens` must be greater than degree + 1 = {degree + 1}; got {n_tokens}. "
                f"Raise `n_tokens` or lower `degree`."
            )
        if isinstance(clip_factor, str):
            check_choice(clip_factor, "clip_factor", ("auto",))
        else:
            check_number(clip_factor, "clip_factor", finite=False)
        check_choice(placement, "placement", PLACEMENTS)
        check_choice(feature, "feature", FEATURES)
        check_number(recency, "recency")
        if not 1e-6 <= recency <= 1e6:
            raise ValueError(f"`recency` must lie between 1e-6 and 1e6; got {recency}. 1 switches it off.")
        check_choice(coefficients, "coefficients", ("plain", "asinh"))
        if max_coefficient is not None:
            check_number(max_coefficient, "max_coefficient")
            if coefficients == "asinh":
                raise ValueError(
                    f"`max_coefficient` must be None with coefficients='asinh', which replaces clipping; "
                    f"got {max_coefficient}. Drop one of the two."
                )
        self.n_tokens = n_tokens
        self.degree = degree
        self.clip_factor = clip_factor if isinstance(clip_factor, str) else float(clip_factor)
        self.placement = placement
        self.feature = feature
        self.recency = float(recency)
        self.max_coefficient = None if max_coefficient is None else float(max_coefficient)
        self.coefficients = coefficients
        self.detail = to_whole(detail, "detail", 0)

    # ------------------------------------------------------------------------------------------------------- fit

    def fit(self, X: Any, y: Any = None, *, lookback: int | None = None) -> Self:
        """Needed only for ``clip_factor="auto"``: the paper's grid search on the train fold, into `clip_factor_`.

        X is a (T,) or (T, C) series if `lookback` is given (windows 100 samples apart are searched), else (B, L) or
        (B, L, C) windows.
        """
        if lookback is None and not hasattr(X, "ndim"):
            X = to_array(X, "X")
        if lookback is None and X.ndim == 1:
            raise ValueError("`lookback` must be given with a series; got None. Pass e.g. lookback=720.")
        if lookback is None:
            rows = to_rows(X, "X").rows
        else:
            lookback = to_whole(lookback, "lookback", 2)
            rows = to_rows(sliding(to_series(X, lookback, "X"), lookback, 100), "X").rows
        check_finite(rows, "X")
        self._check_length(rows.shape[1])
        if self.clip_factor == "auto":
            windows = to_numpy(rows)
            spec = SplineSpec(**{**self._spec_fields(), "clip_factor": 1.0})
            self.clip_factor_, self.clip_search_ = search_clip_factor(windows, spec)
        return self

    def __sklearn_is_fitted__(self) -> bool:
        return self.clip_factor != "auto" or hasattr(self, "clip_factor_")

    @property
    def spec(self) -> SplineSpec:
        """What the spline backends are asked for."""
        if not self.__sklearn_is_fitted__():
            raise ValueError(
                "`clip_factor` is 'auto' and has not been searched yet. "
                "Call fit(train_series, lookback=...) first, or give a number."
            )
        return SplineSpec(**self._spec_fields())

    def _spec_fields(self) -> dict[str, Any]:
        return {
            "n": self.n_tokens,
            "degree": self.degree,
            "clip_factor": getattr(self, "clip_factor_", self.clip_factor),
            "placement": self.placement,
            "feature": self.feature,
            "recency": self.recency,
        }

    def level_features(self, lookback: int) -> list[bool]:
        """Coefficient and detail are, the center is not."""
        self._check_length(lookback)
        return [True, False] + [True] * self.detail

    def _check_length(self, L: int) -> None:
        if self.n_tokens >= L:
            raise ValueError(
                f"`n_tokens` must lie strictly between degree + 1 = {self.degree + 1} and the window's length = {L}; "
                f"got {self.n_tokens}. Lower `n_tokens` or lengthen the lookback."
            )

    def _check_counts(self, counts: Any) -> None:
        """Observed samples of each window (and channel)."""
        counts = to_numpy(counts)
        if counts.min() <= self.n_tokens:
            worst = tuple(int(i) for i in np.unravel_index(counts.argmin(), counts.shape))
            where = f"window {worst[0]}" + (f", channel {worst[1]}," if len(worst) > 1 else "")
            raise ValueError(
                f"every window must have more observed samples than n_tokens = {self.n_tokens}; {where} has "
                f"{counts[worst]} (`mask` is True where a sample is missing). Lower `n_tokens` or drop the window."
            )

    # ------------------------------------------------------------------------------------------------- transform

    def transform(
        self, windows: Any, *, times: Any = None, mask: Any = None, threads: int | None = None
    ) -> BSplineTokens:
        """Tokens of windows (B, L) or (B, L, C).

        Args:
            windows: numpy array, or torch tensor on any device. A tensor that requires gradients passes them on.
            times: when the samples were taken, (L,) or (B, L), strictly increasing numbers or datetime64; None means
                evenly. A window's first time counts as sample 0 and its last as L - 1.
            mask: boolean like the windows, True where a sample is missing. The spline is fitted to the others and
                spans from the first to the last of them.
            threads: how many; by default BSAT_THREADS or as many as there are processors.
        """
        samples = to_array(windows, "windows")
        door = to_rows(samples)
        rows, L = door.rows, door.rows.shape[1]
        self._check_length(L)
        threads = None if threads is None else to_whole(threads, "threads", 1)
        missing = None if mask is None else to_missing(mask, samples)
        quick = _stays_on_cpu(rows)
        tells = missing is None and (quick or on_gpu(rows))  # a kernel says itself if it meets what is not finite
        if not tells:
            check_finite(samples, "windows", missing)
        if missing is not None:
            self._check_counts((~missing).sum(1))
            missing = missing if missing.ndim == 2 else missing.swapaxes(1, 2).reshape(rows.shape)
            missing = missing if bool(missing.any()) else None
        x = None
        if times is not None:
            x = to_positions(times, len(rows) // (door.channels or 1), L, rows)
            x = x if x.ndim == 1 else door.spread(x)
        # Tensors that the kernel can answer for are arrays in between, so that both get the same numbers.
        arrays = [to_numpy(a) if quick else a for a in (rows, x, missing)]
        fit = self._fit_rows(*arrays, threads=threads)
        if tells and bool((fit.condition != fit.condition).any()):
            check_finite(samples, "windows")  # the kernel met it on its way; this finds and names it
        detail = self._details(fit.knots, *arrays) if self.detail else None
        results = (self._tame(fit.coefficients), centers(fit.knots, self.degree), fit.knots, fit.fallback, detail)
        fields = {
            name: None if a is None else door.restore(_in_kind(a, rows))
            for name, a in zip(BSplineTokens.arrays, results, strict=True)
        }
        return BSplineTokens(**fields, length=L, coefficient_kind=self.coefficients)

    def _fit_rows(self, rows: Any, x: Any, missing: Any, *, threads: int | None) -> SplineFit:
        """Fit rows (R, L) at positions x, None or (L,) or (R, L), without the missing samples."""
        backend = choose(rows)
        options = {} if is_tensor(rows) else {"threads": threads}
        if missing is None:
            return backend.tokenize(rows, self.spec, x, **options)

        # Windows with equally many samples are fitted together, so that the backends need not know of gaps.
        observed = ~missing
        counts = to_numpy(observed.sum(1))
        regular = x is None
        if x is None:
            x = np.arange(rows.shape[1], dtype=np.float64)
            x = rows.new_tensor(x, dtype=_float64(rows)) if is_tensor(rows) else x
        x = x.expand(rows.shape) if is_tensor(rows) else np.broadcast_to(x, rows.shape)
        fits, order = [], []
        for count in np.unique(counts):
            index = np.flatnonzero(counts == count)
            keep = observed[index]
            some = rows[index][keep].reshape(len(index), int(count))
            at = x[index][keep].reshape(len(index), int(count))
            # A complete window on the regular grid gets the tokens that it would get alone.
            whole = regular and int(count) == rows.shape[1]
            fits.append(backend.tokenize(some, self.spec, None if whole else at, **options))
            order.append(index)
        back = np.argsort(np.concatenate(order), kind="stable")
        if is_tensor(rows):
            import torch

            return SplineFit(*(torch.cat(parts)[back] for parts in zip(*fits, strict=True)))
        return SplineFit(*(np.concatenate(parts)[back] for parts in zip(*fits, strict=True)))

    def _tame(self, c: Any) -> Any:
        if self.coefficients == "asinh":
            return c.asinh() if is_tensor(c) else np.arcsinh(c)
        if self.max_coefficient is not None:
            limit = float(self.max_coefficient)
            return c.clamp(-limit, limit) if is_tensor(c) else np.clip(c, -limit, limit)
        return c

    # -------------------------------------------------------------------------------------------- other directions

    def transform_series(
        self,
        series: Any,
        lookback: int = 720,
        stride: int = 1,
        *,
        mask: Any = None,
        threads: int | None = None,
        cache: TokenCache | PathLike[str] | str | bool | None = None,
    ) -> BSplineTokens:
        """Tokens of all (T - lookback) // stride + 1 windows of a (T,) or (T, C) series, without copying the windows.

        Args:
            mask: boolean like the series, True where a sample is missing.
            cache: keep the tokens on disk and find them there again: a folder, a `TokenCache`, or True for the default
                folder. Off by default, since computing is about as quick as reading (`benchmarks/tokenizer.py`).
        """
        lookback, stride = to_whole(lookback, "lookback", 2), to_whole(stride, "stride", 1)
        threads = None if threads is None else to_whole(threads, "threads", 1)
        series = to_series(series, lookback)
        self._check_length(lookback)
        missing = None if mask is None else to_missing(mask, series)
        check_finite(series, "series", missing)
        if missing is not None:
            seen = np.concatenate([np.zeros((1, *missing.shape[1:]), int), np.cumsum(~to_numpy(missing), 0)])
            self._check_counts((seen[lookback:] - seen[:-lookback])[::stride])
        if cache is None or cache is False:
            return self._transform_series(series, lookback, stride, missing, threads)
        if is_tensor(series) and series.requires_grad:
            raise ValueError("`cache` must be None for a series that requires gradients, which no file can pass on.")
        store = as_cache(cache)
        settings = {
            **self.get_params(),
            "clip_factor": repr(self.spec.clip_factor),
            "windows": [int(lookback), int(stride)],
        }
        key = make_key(settings, series, missing)
        found = store.load(key)
        if found is not None:
            arrays = {name: found.get(name) for name in BSplineTokens.arrays}
            arrays = {name: None if a is None else _in_kind(a, series) for name, a in arrays.items()}
            return BSplineTokens(**arrays, length=lookback, coefficient_kind=self.coefficients)
        tokens = self._transform_series(series, lookback, stride, missing, threads)
        fields = {name: getattr(tokens, name) for name in tokens.arrays}
        store.store(key, {name: to_numpy(a) for name, a in fields.items() if a is not None})
        return tokens

    def _transform_series(
        self, series: Any, lookback: int, stride: int, missing: Any, threads: int | None
    ) -> BSplineTokens:
        if missing is None and on_gpu(series):
            return self._transform_series_on_gpu(series, lookback, stride)
        if missing is not None or not _stays_on_cpu(series):
            windows = sliding(series, lookback, stride)
            gaps = None if missing is None else sliding(missing, lookback, stride)
            parts = [
                self.transform(
                    windows[i : i + CHUNK // 8],
                    mask=None if gaps is None else gaps[i : i + CHUNK // 8],
                    threads=threads,
                )
                for i in range(0, len(windows), CHUNK // 8)
            ]
            return _join(parts)

        from ..spline import cpu

        array = to_numpy(series)
        columns = array[:, None] if array.ndim == 1 else array
        starts = np.arange(0, len(array) - lookback + 1, stride)
        (W, C), dtype, n, p = (len(starts), columns.shape[1]), array.dtype, self.n_tokens, self.degree
        coefficients, mu = np.empty((C, W, n), dtype), np.empty((C, W, n), dtype)
        knots, fallback = np.empty((C, W, n + p + 1), dtype), np.empty((C, W), bool)
        detail = np.empty((C, W, n, self.detail), dtype) if self.detail else None
        for channel in range(C):
            values = np.ascontiguousarray(columns[:, channel], np.float64)
            windows = np.lib.stride_tricks.sliding_window_view(values, lookback)[::stride]
            for i in range(0, W, CHUNK):
                rows = slice(i, i + CHUNK)
                c, t = coefficients[channel, rows], knots[channel, rows]
                direct = {"knots": t, "coefficients": c} if dtype == np.float64 else {}
                fit = cpu.tokenize_series(values, starts[rows], lookback, self.spec, threads=threads, **direct)
                c[:] = self._tame(fit.coefficients)
                t[:] = fit.knots
                mu[channel, rows] = centers(fit.knots, p)
                fallback[channel, rows] = fit.fallback
                if detail is not None:
                    detail[channel, rows] = self._details(fit.knots, windows[rows], None, None)

        def finish(a: np.ndarray | None) -> Any:
            """(C, W), (C, W, n) or (C, W, n, k) -> (W[, C]), (W, n[, C]) or (W, n[, C], k)"""
            if a is None:
                return None
            return _in_kind(a[0] if array.ndim == 1 else np.moveaxis(a, 0, min(a.ndim - 1, 2)), series)

        arrays = (coefficients, mu, knots, fallback, detail)
        fields = {name: finish(a) for name, a in zip(BSplineTokens.arrays, arrays, strict=True)}
        return BSplineTokens(**fields, length=lookback, coefficient_kind=self.coefficients)

    def _transform_series_on_gpu(self, series: Any, lookback: int, stride: int) -> BSplineTokens:
        """The kernel takes its windows from the series itself."""
        import torch

        from ..spline import gpu

        starts = torch.arange(0, len(series) - lookback + 1, stride, device=series.device)
        channels = []
        for values in series.detach().reshape(len(series), -1).T:
            fit = gpu.tokenize_series(values, starts, lookback, self.spec)
            detail = None
            if self.detail:
                windows = sliding(values, lookback, stride)
                parts = [slice(i, i + CHUNK // 8) for i in range(0, len(starts), CHUNK // 8)]
                detail = torch.cat([self._details(fit.knots[part], windows[part], None, None) for part in parts])
            mu = centers(fit.knots, self.degree)
            channels.append((self._tame(fit.coefficients), mu, fit.knots, fit.fallback, detail))
        fields = {}
        for name, parts_of in zip(BSplineTokens.arrays, zip(*channels, strict=True), strict=True):
            one = parts_of[0]
            whole = one is None or series.ndim == 1
            fields[name] = one if whole else torch.stack(parts_of, min(one.ndim, 2))
        return BSplineTokens(**fields, length=lookback, coefficient_kind=self.coefficients)

    def inverse_transform(self, tokens: BSplineTokens, length: int | None = None) -> Any:  # type: ignore[override]
        """The fitted curve at `length` points spread evenly over the window, (B, length[, C]); by default L.

        Where a window begins or ends with missing samples, the curve keeps its end value.
        """
        if not isinstance(tokens, BSplineTokens):
            raise TypeError(f"`tokens` must come from this tokenizer's transform; got {type(tokens).__name__}.")
        at = np.linspace(0, tokens.length - 1, tokens.length if length is None else to_whole(length, "length", 1))
        c, knots = tokens.coefficients, tokens.knots
        if tokens.coefficient_kind == "asinh":
            c = c.sinh() if is_tensor(c) else np.sinh(c)
        channels = c.shape[2] if c.ndim == 3 else None
        if channels is not None:
            c, knots = (a.swapaxes(1, 2).reshape(-1, a.shape[1]) for a in (c, knots))
        door = Rows(c, channels)
        if is_tensor(c) and not _stays_on_cpu(c):
            return door.restore(choose(c).evaluate(knots, c, tokens.degree, c.new_tensor(at)))
        from ..spline import cpu

        return door.restore(_in_kind(cpu.evaluate(to_numpy(knots), to_numpy(c), tokens.degree, at), c))

    def _details(self, knots: Any, rows: Any, x: Any, missing: Any) -> Any:
        """(R, n, k): the window, linear between its observed samples, at the middles of k equal parts of each token's
        support."""
        shares = (np.arange(self.detail) + 0.5) / self.detail
        n, p = self.n_tokens, self.degree
        left, width = knots[:, :n, None], (knots[:, p + 1 :] - knots[:, :n])[..., None]
        if is_tensor(knots):
            at = (left + width * knots.new_tensor(shares)).reshape(len(knots), -1)
            return _interpolate_tensor(at, rows, x, missing).reshape(len(knots), n, self.detail)
        out = np.empty((len(knots), n, self.detail))
        for i in range(0, len(knots), CHUNK // 8):
            part = slice(i, i + CHUNK // 8)
            at = (left[part] + width[part] * shares).reshape(-1, n * self.detail)
            gaps = None if missing is None else missing[part]
            values = _interpolate(at, rows[part], x if x is None or x.ndim == 1 else x[part], gaps)
            out[part] = values.reshape(-1, n, self.detail)
        return out

    def diagnose(
        self,
        series: Any,
        lookback: int = 720,
        stride: int | None = None,
        *,
        plot: PathLike[str] | str | None = None,
        quiet: bool = False,
    ) -> Diagnosis:
        """How well this tokenizer takes to a series; prints a report and draws it into `plot`."""
        from .diagnose import diagnose

        lookback = to_whole(lookback, "lookback", 2)
        stride = None if stride is None else to_whole(stride, "stride", 1)
        series = to_series(series, lookback)
        if series.ndim != 1:
            raise ValueError(
                f"`series` must have shape (T,); got {tuple(series.shape)}. Diagnose one channel at a time."
            )
        check_finite(series, "series")
        self._check_length(lookback)
        y = np.asarray(to_numpy(series), np.float64)
        result = diagnose(repr(self), self.spec, self.max_coefficient, y, lookback, stride)
        if not quiet:
            print(result)
        if plot is not None:
            result.plot(plot)
        return result

    def plot(self, window: Any, path: PathLike[str] | str, *, mask: Any = None, title: str | None = None) -> None:
        """The paper's pipeline figure for one window of (L,) samples, as a PNG, SVG or PDF."""
        from .pictures import check_format, draw_pipeline

        check_format(path)
        y = np.asarray(to_numpy(to_array(window, "window")), np.float64)
        if y.ndim != 1:
            raise ValueError(f"`window` must have shape (L,); got {y.shape}. Draw one window at a time.")
        missing = np.zeros(y.shape, bool) if mask is None else to_missing(mask, y)
        check_finite(y, "window", missing)
        self._check_length(len(y))
        fit = self._fit_rows(y[None], None, missing[None] if missing.any() else None, threads=1)
        x = np.flatnonzero(~missing).astype(float)
        title = (
            title or f"{len(y)} samples as {self.n_tokens} tokens (degree {self.degree}, {self.placement} placement)"
        )
        c = fit.coefficients[0] if self.coefficients == "asinh" else self._tame(fit.coefficients[0])
        draw_pipeline(self.spec, x, y[~missing], fit.knots[0], c, path, title)


def centers(knots: Any, degree: int) -> Any:
    """mu_i = (tau_i + tau_{i+p+1}) / 2 (Algorithm 2; per channel, since the knots are)."""
    n = knots.shape[1] - degree - 1
    mu = knots[:, :n] + knots[:, degree + 1 :]
    return mu / 2 if is_tensor(mu) else np.multiply(mu, 0.5, out=mu)


def _interpolate(at: np.ndarray, rows: np.ndarray, x: np.ndarray | None, missing: np.ndarray | None) -> np.ndarray:
    """Rows (R, L) at positions (R, q), linear between samples."""
    if x is None and missing is None:
        left = np.minimum(at.astype(np.intp), rows.shape[1] - 2)
        share = at - left
        low = np.take_along_axis(rows, left, 1)
        return low + share * (np.take_along_axis(rows, left + 1, 1) - low)
    grid = np.broadcast_to(np.arange(rows.shape[1], dtype=float) if x is None else x, rows.shape)
    keep = np.ones(rows.shape, bool) if missing is None else ~missing
    out = np.stack([np.interp(a, g[k], r[k]) for a, g, r, k in zip(at, grid, rows, keep, strict=True)])
    whole = keep.all(1)
    if x is None and whole.any():  # a complete window gets the detail that it would get alone
        out[whole] = _interpolate(at[whole], rows[whole], None, None)
    return out


def _interpolate_tensor(at: Any, rows: Any, x: Any, missing: Any) -> Any:
    """The same for tensors. Missing samples take the place of an observed neighbour, at that neighbour's position."""
    import torch

    L = rows.shape[1]
    grid = torch.arange(L, dtype=at.dtype, device=at.device) if x is None else x.to(at.dtype)
    grid = grid.expand(rows.shape)
    if missing is not None:
        index = torch.arange(L, device=at.device).expand(rows.shape)
        before = torch.where(missing, -1, index).cummax(1).values
        first = (~missing).int().argmax(1, keepdim=True)
        source = torch.where(before < 0, first, before)
        rows, grid = rows.gather(1, source), grid.gather(1, source)
    right = torch.searchsorted(grid.contiguous(), at.detach().contiguous(), right=True).clamp(1, L - 1)
    low, high = grid.gather(1, right - 1), grid.gather(1, right)
    gap = high - low
    share = torch.where(gap > 0, (at - low) / torch.where(gap > 0, gap, torch.ones_like(gap)), torch.zeros_like(gap))
    return torch.lerp(rows.gather(1, right - 1), rows.gather(1, right), share.clamp(0, 1).to(rows.dtype))


def _stays_on_cpu(a: Any) -> bool:
    """Whether the compiled kernel can answer: arrays, and CPU tensors that need no gradient."""
    return not is_tensor(a) or (a.device.type == "cpu" and not a.requires_grad)


def _in_kind(a: Any, like: Any) -> Any:
    """A result in the dtype of the samples, and as a tensor if they are one. Booleans stay as they are."""
    if is_tensor(a):
        return a
    if is_tensor(like):
        import torch

        tensor = torch.from_numpy(np.ascontiguousarray(a)).to(like.device)
        return tensor if tensor.dtype == torch.bool else tensor.to(like.dtype)
    return a if a.dtype == np.bool_ else a.astype(like.dtype, copy=False)


def _float64(a: Any) -> Any:
    import torch

    return torch.float32 if a.device.type == "mps" else torch.float64


def _join(parts: list[BSplineTokens]) -> BSplineTokens:
    if len(parts) == 1:
        return parts[0]
    joined: dict[str, Any] = {}
    for name in BSplineTokens.arrays:
        pieces = [getattr(part, name) for part in parts]
        if pieces[0] is None:
            joined[name] = None
        elif is_tensor(pieces[0]):
            import torch

            joined[name] = torch.cat(pieces)
        else:
            joined[name] = np.concatenate(pieces)
    return replace(parts[0], **joined)
