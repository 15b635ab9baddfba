"""What every tokenizer offers, so that one network serves all of them.

A tokenizer turns windows (B, L) or (B, L, C) into `Tokens`: what the embedding sees (`values`) and where it is
(`positions`, in samples). It takes numpy arrays and torch tensors and answers in kind, on the same device.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from typing import Any, ClassVar, Self

import numpy as np

from ..spline import is_tensor
from .door import check_finite, to_array, to_numpy, to_rows, to_series, to_whole


class Tokens:
    """Tokens of B windows; index or slice it along the windows.

    As a numpy array it is a table with one row of features per window, which is what scikit-learn asks of the step of
    a pipeline.
    """

    length: int
    """L, the samples in a window"""

    arrays: ClassVar[tuple[str, ...]]
    """The fields whose first axis runs over the windows."""

    values: Any
    """(B, n[, C], f): what the embedding sees"""

    positions: Any
    """(B, n[, C]): where the tokens are, in samples; 0 is the oldest and L - 1 the newest"""

    def __len__(self) -> int:
        return len(getattr(self, self.arrays[0]))

    def __getitem__(self, index: Any) -> Self:
        if isinstance(index, (int, np.integer)):
            if not -len(self) <= index < len(self):
                raise IndexError(f"window {index} of {len(self)}")
            index = slice(index, index + 1) if index != -1 else slice(-1, None)
        fields = dict(vars(self))
        for name in self.arrays:
            if fields[name] is not None:
                fields[name] = fields[name][index]
        return type(self)(**fields)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        table = to_numpy(self.values).reshape(self.shape)
        return table.astype(dtype or table.dtype, copy=bool(copy))

    @property
    def shape(self) -> tuple[int, int]:
        """Of the table that numpy sees."""
        return len(self), int(np.prod(self.values.shape[1:]))

    @property
    def ndim(self) -> int:
        """Of the table that numpy sees."""
        return 2


class Tokenizer(ABC):
    """scikit-learn's manners without scikit-learn: parameters are what the constructor takes."""

    n_tokens: int

    label: ClassVar[str]
    """What a forecaster with these tokens is called."""

    adaptive: ClassVar[bool] = False
    """Whether tokens move with the signal, and are costly enough to be worth keeping."""

    @abstractmethod
    def level_features(self, lookback: int) -> list[bool]:
        """For each of the f values of a token, whether it is in the unit of the series. Checks the lookback."""

    @abstractmethod
    def transform(self, windows: Any, *, times: Any = None, mask: Any = None) -> Tokens:
        """Windows (B, L) or (B, L, C) to tokens."""

    @abstractmethod
    def inverse_transform(self, tokens: Tokens, length: int | None = None) -> Any:
        """What the tokens say the window was: (B, length[, C]), evenly spread over the window; by default L samples."""

    def fit(self, X: Any, y: Any = None, *, lookback: int | None = None) -> Self:
        """Nothing to learn; checks what it is given. X is (B, L) windows, or a series if `lookback` is given."""
        if lookback is not None:
            check_finite(to_series(X, to_whole(lookback, "lookback", 2), "X"), "X")
        else:
            check_finite(to_rows(X, "X").rows, "X")
        return self

    def fit_transform(self, X: Any, y: Any = None) -> Tokens:
        """`fit`, then `transform`."""
        return self.fit(X).transform(X)

    def transform_series(self, series: Any, lookback: int = 720, stride: int = 1) -> Tokens:
        """Tokens of all windows of `lookback` samples of a (T,) or (T, C) series, `stride` apart."""
        lookback, stride = to_whole(lookback, "lookback", 2), to_whole(stride, "stride", 1)
        return self.transform(sliding(to_series(series, lookback), lookback, stride))

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """The constructor's arguments."""
        return {name: getattr(self, name) for name in inspect.signature(type(self)).parameters}

    def set_params(self, **params: Any) -> Self:
        """Change some of them; what was fitted is forgotten."""
        current = self.get_params()
        unknown = sorted(set(params) - set(current))
        if unknown:
            raise ValueError(
                f"{type(self).__name__} has no parameter {', '.join(map(repr, unknown))}; it has {', '.join(current)}."
            )
        fresh = type(self)(**{**current, **params})
        self.__dict__.clear()
        self.__dict__.update(vars(fresh))
        return self

    def __repr__(self) -> str:
        defaults = {k: v.default for k, v in inspect.signature(type(self)).parameters.items()}
        shown = (f"{k}={v!r}" for k, v in self.get_params().items() if k == "n_tokens" or v != defaults[k])
        return f"{type(self).__name__}({', '.join(shown)})"

    def __sklearn_is_fitted__(self) -> bool:
        return True

    def __sklearn_tags__(self) -> Any:
        """Only scikit-learn calls this, so it is there to import."""
        from sklearn.utils import InputTags, Tags, TargetTags, TransformerTags

        return Tags(
            estimator_type="transformer",
            target_tags=TargetTags(required=False),
            transformer_tags=TransformerTags(preserves_dtype=["float64", "float32"]),
            input_tags=InputTags(two_d_array=True, three_d_array=True),
        )


def sliding(series: Any, lookback: int, stride: int) -> Any:
    """All windows of a series as a view: (T,) -> (W, L), (T, C) -> (W, L, C)."""
    if is_tensor(series):
        view = series.unfold(0, lookback, stride)
        return view if view.ndim == 2 else view.transpose(1, 2)
    view = np.lib.stride_tricks.sliding_window_view(series, lookback, axis=0)[::stride]
    return view if view.ndim == 2 else view.swapaxes(1, 2)


def complete(windows: Any, times: Any, mask: Any, who: str) -> Any:
    """The windows of a tokenizer that cannot do without a sample, checked."""
    for name, value in (("times", times), ("mask", mask)):
        if value is not None:
            raise ValueError(
                f"{who} needs complete windows on a regular grid, so `{name}` must be None. "
                f"Fill the gaps first, or use BSplineTokenizer, which fits what was observed."
            )
    a = to_array(windows, "windows")
    to_rows(a)
    check_finite(a, "windows", way="Fill the gaps first, or use BSplineTokenizer with a mask.")
    return a
