"""The door: what users pass in is checked here, once, and brought to rows of one window and channel each.

Every message states the rule, the value that broke it and the way out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..spline import LARGEST, is_tensor


@dataclass(frozen=True)
class Rows:
    """Windows (B, L) or (B, L, C) as rows (B, L) or (B * C, L)."""

    rows: Any
    channels: int | None

    def restore(self, a: Any) -> Any:
        """(B * C, k...) back to (B, k..., C): the channels go after the token axis, or last if there is none."""
        if self.channels is None:
            return a
        a = a.reshape(-1, self.channels, *a.shape[1:])
        if a.ndim == 2:
            return a
        return a.movedim(1, 2) if is_tensor(a) else np.moveaxis(a, 1, 2)

    def spread(self, a: Any) -> Any:
        """(B, ...) repeated for every channel: (B * C, ...)."""
        if self.channels is None:
            return a
        return a.repeat_interleave(self.channels, 0) if is_tensor(a) else np.repeat(a, self.channels, 0)


def to_array(a: Any, name: str) -> Any:
    """A real numeric numpy array or torch tensor in float32 or float64; integers become float64."""
    if is_tensor(a):
        if a.is_complex() or str(a.dtype) == "torch.bool":
            raise TypeError(f"`{name}` must hold real numbers; got {a.dtype}. Convert it first, e.g. with .float().")
        if not a.is_floating_point():
            return a.double()
        return a.float() if a.element_size() < 4 else a  # half precision cannot tell the knots of a window apart
    if isinstance(a, np.ma.MaskedArray) and np.ma.getmaskarray(a).any():
        raise TypeError(
            f"`{name}` must be a plain array; got a masked array with masked entries. "
            f"Pass `{name}.data`, and `mask=np.ma.getmaskarray({name})`."
        )
    array = np.asarray(a)
    if array.dtype.kind in "iu":
        return array.astype(np.float64)
    if array.dtype.kind != "f":
        raise TypeError(
            f"`{name}` must hold real numbers; got dtype {array.dtype}. Convert it first, e.g. with .astype(float)."
        )
    wanted = np.float32 if array.dtype.itemsize <= 4 else np.float64
    return array.astype(wanted, copy=False)  # also from half and long precision, and from another byte order


def to_numpy(a: Any) -> Any:
    """A tensor as an array, sharing its memory if it is on the CPU; anything else as it is."""
    return a.detach().cpu().numpy() if is_tensor(a) else a


def to_rows(windows: Any, name: str = "windows") -> Rows:
    """Check the shape of (B, L) or (B, L, C) windows and flatten the channels."""
    a = to_array(windows, name)
    if a.ndim not in (2, 3):
        shape = tuple(a.shape)
        way = f"A single window needs a batch axis: `{name}[None]`." if a.ndim == 1 else "Reshape it."
        raise ValueError(f"`{name}` must have shape (B, L) or (B, L, C); got {shape}. {way}")
    if 0 in a.shape:
        raise ValueError(f"`{name}` must not be empty; got shape {tuple(a.shape)}. Pass at least one window.")
    if a.ndim == 2:
        return Rows(a, None)
    B, L, C = a.shape
    return Rows(a.swapaxes(1, 2).reshape(B * C, L), C)


def to_series(series: Any, lookback: int, name: str = "series") -> Any:
    """Check a (T,) or (T, C) series that is to be cut into windows."""
    a = to_array(series, name)
    if a.ndim not in (1, 2) or 0 in a.shape:
        raise ValueError(
            f"`{name}` must have shape (T,) or (T, C), without empty axes; got {tuple(a.shape)}. Reshape it."
        )
    if a.shape[0] < lookback:
        raise ValueError(
            f"`lookback` must not exceed the length of `{name}` = {a.shape[0]}; got {lookback}. "
            f"Shorten the lookback or pass a longer series."
        )
    return a


def check_finite(a: Any, name: str, missing: Any = None, way: str | None = None) -> None:
    """No NaN, no infinity and no number beyond LARGEST outside of `missing`; `way` is the way out."""
    a = a.detach() if is_tensor(a) else a
    if missing is not None:
        a = a.masked_fill(missing, 0.0) if is_tensor(a) else np.where(missing, 0.0, a)
    low, high = float(a.min()), float(a.max())  # a NaN anywhere makes both NaN
    if math.isfinite(low) and math.isfinite(high):
        if max(-low, high) > LARGEST:
            raise ValueError(f"`{name}` must stay within ±{LARGEST:g}; got {max(-low, high):g}. Change the unit.")
        return
    array = to_numpy(a)
    where = tuple(int(i) for i in np.argwhere(~np.isfinite(array))[0])
    marked = "samples that `mask` does not mark as missing" if missing is not None else "all samples"
    raise ValueError(
        f"`{name}` must be finite in {marked}; got {array[where]} at index {where} "
        f"({np.count_nonzero(~np.isfinite(array))} in all). "
        + (way or f"Mark missing samples with mask=~np.isfinite({name}): True is missing.")
    )


def to_missing(mask: Any, like: Any) -> Any:
    """A boolean mask of the shape of ``like``, of its kind and on its device; True marks a missing sample."""
    if is_tensor(like):
        import torch

        mask = torch.as_tensor(mask, device=like.device)
        boolean = mask.dtype == torch.bool
    else:
        mask = np.asarray(mask)
        boolean = mask.dtype == np.bool_
    if not boolean:
        raise TypeError(f"`mask` must be boolean, True where a sample is missing; got {mask.dtype}. Use .astype(bool).")
    if tuple(mask.shape) != tuple(like.shape):
        raise ValueError(
            f"`mask` must have the shape of the samples, {tuple(like.shape)}; got {tuple(mask.shape)}. Broadcast it."
        )
    return mask


def to_positions(times: Any, B: int, L: int, like: Any) -> Any:
    """Strictly increasing times, (L,) or (B, L), as sample positions from 0 to L - 1: a window's first time is 0 and
    its last L - 1. Numbers or datetime64."""
    t = np.asarray(to_numpy(times))
    if t.dtype.kind == "O":  # datetime objects, and stamps with a time zone
        import pandas as pd

        flat = pd.to_datetime(pd.Series(t.reshape(-1)), utc=True)
        t = flat.dt.tz_localize(None).to_numpy().reshape(t.shape)
    if t.dtype.kind in "Mm":
        if np.isnat(t).any():
            raise ValueError(
                f"`times` must be complete; got NaT at index {tuple(map(int, np.argwhere(np.isnat(t))[0]))}."
            )
        t = (t - t.reshape(-1)[0]).astype(np.int64)
    t = to_array(t, "times").astype(np.float64)
    if t.shape not in ((L,), (B, L)):
        raise ValueError(f"`times` must have shape (L,) = ({L},) or (B, L) = ({B}, {L}); got {t.shape}. Reshape it.")
    check_finite(t, "times")
    steps = np.diff(t, axis=-1)
    if not (steps > 0).all():
        where = tuple(int(i) for i in np.argwhere(~(steps > 0))[0])
        after = (*where[:-1], where[-1] + 1)
        raise ValueError(
            f"`times` must increase strictly; got {t[where]:g} at index {where} followed by {t[after]:g}. "
            f"Sort the samples and drop duplicates."
        )
    first, last = t[..., :1], t[..., -1:]
    x = (t - first) / (last - first) * (L - 1)
    if not (np.diff(x, axis=-1) > 0).all():
        raise ValueError(
            "`times` must be apart by more than rounding; got steps that vanish beside the window's length."
        )
    if is_tensor(like):
        import torch

        return torch.as_tensor(x, dtype=torch.float64, device=like.device)
    return x


def to_whole(value: Any, name: str, least: int) -> int:
    """A Python integer of at least `least`; a boolean is none."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise TypeError(f"`{name}` must be a whole number; got {value!r} of type {type(value).__name__}. Pass an int.")
    if value < least:
        raise ValueError(f"`{name}` must be at least {least}; got {value}. Raise it.")
    return int(value)


def check_number(value: Any, name: str, *, finite: bool = True) -> None:
    """A positive number, and no boolean."""
    if isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)):
        raise TypeError(f"`{name}` must be a number; got {value!r} of type {type(value).__name__}. Pass a float.")
    if not value > 0 or (finite and math.isinf(value)):
        raise ValueError(f"`{name}` must be positive{' and finite' if finite else ''}; got {value}. Change it.")


def check_choice(value: Any, name: str, choices: tuple[str, ...]) -> None:
    """One of a few words."""
    if value not in choices:
        raise ValueError(f"`{name}` must be one of {', '.join(map(repr, choices))}; got {value!r}. Choose one of them.")
