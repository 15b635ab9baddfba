"""What may be varied (paper, appendix "Search Space"), as one description that whoever searches can read."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from ..model import NetworkConfig
    from ..tokens import Tokenizer
    from ..train import TrainConfig
    from ..train.population import Trial

Point = dict[str, int | float | str]
"""A value for every name of a space."""


@dataclass(frozen=True)
class Categorical:
    """One of a few numbers or names. The sampler sees no order in them, as with Ray Tune's `choice`."""

    values: tuple[int | str, ...]

    def __post_init__(self) -> None:
        if not self.values:
            raise ValueError("`values` must hold at least one choice; got none.")

    def suggest(self, trial: Any, name: str) -> int | str:
        """From an Optuna trial."""
        chosen: int | str = trial.suggest_categorical(name, self.values)
        return chosen

    def draw(self, rng: np.random.Generator) -> int | str:
        """At random."""
        return self.values[rng.integers(len(self.values))]

    def __contains__(self, value: object) -> bool:
        return not isinstance(value, bool) and value in self.values

    def __str__(self) -> str:
        return f"one of {', '.join(map(str, self.values))}"


@dataclass(frozen=True)
class Whole:
    """A whole number between two, both included."""

    low: int
    high: int

    def __post_init__(self) -> None:
        _check_bounds(self.low, self.high)

    def suggest(self, trial: Any, name: str) -> int:
        """From an Optuna trial."""
        return int(trial.suggest_int(name, self.low, self.high))

    def draw(self, rng: np.random.Generator) -> int:
        """At random."""
        return int(rng.integers(self.low, self.high + 1))

    def __contains__(self, value: object) -> bool:
        return isinstance(value, int) and not isinstance(value, bool) and self.low <= value <= self.high

    def __str__(self) -> str:
        return f"a whole number from {self.low} to {self.high}"


@dataclass(frozen=True)
class Real:
    """A number between two; with `log`, each decade is as likely as another."""

    low: float
    high: float
    log: bool = False

    def __post_init__(self) -> None:
        _check_bounds(self.low, self.high)
        if self.log and self.low <= 0:
            raise ValueError(f"`low` must be positive on a logarithmic scale; got {self.low}. Raise it.")

    def suggest(self, trial: Any, name: str) -> float:
        """From an Optuna trial."""
        return float(trial.suggest_float(name, self.low, self.high, log=self.log))

    def draw(self, rng: np.random.Generator) -> float:
        """At random."""
        if self.log:
            value = math.exp(rng.uniform(math.log(self.low), math.log(self.high)))
            return min(max(value, self.low), self.high)  # exp(log(x)) may be an ulp outside
        return float(rng.uniform(self.low, self.high))

    def __contains__(self, value: object) -> bool:
        return isinstance(value, (int, float)) and not isinstance(value, bool) and self.low <= value <= self.high

    def __str__(self) -> str:
        return f"a number from {self.low:g} to {self.high:g}"


Range = Categorical | Whole | Real
TOKENS = ("degree", "feature")
"""What is the tokenizer's; only adaptive ones have it."""


def _check_bounds(low: float, high: float) -> None:
    if not (math.isfinite(low) and math.isfinite(high) and low <= high):
        raise ValueError(f"`low` and `high` must be finite, and low at most high; got {low} and {high}. Swap them.")


@dataclass(frozen=True, kw_only=True)
class Space:
    """The paper's space. The degree is BSAT's alone: `for_tokenizer` drops it for the others. What draws the knots and
    what instance normalisation looks at are fixed in the paper; they can join.

    The paper does not say whether its sampler knows that 64 lies between 32 and 128. We take widths, heads and factors
    as names, which is what Ray Tune makes of a list, and layers and degree as whole numbers.
    """

    n_layers: Range = field(default=Whole(2, 4))
    d_model: Range = field(default=Categorical((16, 32, 64, 128)))
    n_heads: Range = field(default=Categorical((4, 8)))
    ff_factor: Range = field(default=Categorical((2, 4, 6, 8)))
    dropout: Range = field(default=Real(0.0, 0.4))
    ff_dropout: Range = field(default=Real(0.0, 0.2))
    attention_dropout: Range = field(default=Real(0.0, 0.4))
    learning_rate: Range = field(default=Real(1e-6, 1e-3, log=True))
    weight_decay: Range = field(default=Real(1e-6, 1e-2, log=True))
    degree: Range | None = field(default=Whole(1, 6))
    feature: Range | None = None
    norm: Range | None = None

    @classmethod
    def for_tokenizer(cls, tokenizer: Tokenizer) -> Space:
        """The paper's space for these tokens."""
        return cls() if tokenizer.adaptive else cls(degree=None)

    @property
    def ranges(self) -> dict[str, Range]:
        """By name, in the order in which they are drawn."""
        every = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: range_ for name, range_ in every.items() if range_ is not None}

    def to_dict(self) -> dict[str, Any]:
        """For JSON, and for the hash of an experiment."""
        return {name: {"kind": type(r).__name__, **asdict(r)} for name, r in self.ranges.items()}

    def suggest(self, trial: Any) -> Point:
        """A point from an Optuna trial."""
        return {name: range_.suggest(trial, name) for name, range_ in self.ranges.items()}

    def draw(self, seed: int, index: int = 0) -> Point:
        """The point of this index in the random sequence of this seed; needs no Optuna."""
        rng = np.random.default_rng([seed, index])
        return {name: range_.draw(rng) for name, range_ in self.ranges.items()}

    def check(self, point: Mapping[str, Any]) -> None:
        """Every name once, every value within its range; else a ValueError that names them all."""
        ranges = self.ranges
        wrong = [f"{name} is missing" for name in ranges if name not in point]
        wrong += [f"{name} is unknown" for name in point if name not in ranges]
        wrong += [
            f"{name} must be {range_}; got {point[name]!r}"
            for name, range_ in ranges.items()
            if name in point and point[name] not in range_
        ]
        if wrong:
            raise ValueError("the point does not lie in the space: " + "; ".join(wrong) + ".")

    def to_trial(
        self,
        point: Mapping[str, Any],
        tokenizer: Tokenizer,
        network: NetworkConfig | None = None,
        train: TrainConfig | None = None,
    ) -> Trial:
        """What a point says, put over what is the same for all: tokenizer (fitted), network and training."""
        from ..model import NetworkConfig
        from ..train import TrainConfig
        from ..train.population import Trial

        self.check(point)
        network, train = network or NetworkConfig(), train or TrainConfig()
        shape = {name: point[name] for name in point if name in NetworkConfig.names()}
        rest = {name: point[name] for name in point if name in TrainConfig.names()}
        tokens = {name: point[name] for name in point if name in TOKENS}
        if tokens:
            tokenizer = _with(tokenizer, tokens)
        return Trial(tokenizer, replace(network, **shape), replace(train, **rest))

    def to_point(self, trial: Trial) -> Point:
        """The way back."""
        places = (trial.network, trial.train, trial.tokenizer)
        return {name: next(getattr(p, name) for p in places if hasattr(p, name)) for name in self.ranges}


def _with(tokenizer: Tokenizer, changes: Mapping[str, Any]) -> Tokenizer:
    """The same with other choices. A clip factor that was searched stays: its search takes degree 1 always."""
    if not tokenizer.adaptive:
        raise ValueError(
            f"`{'` and `'.join(changes)}` must be None in the space of {type(tokenizer).__name__}, which has none. "
            f"Use Space.for_tokenizer(tokenizer)."
        )
    fresh = type(tokenizer)(**{**tokenizer.get_params(), **changes})
    if hasattr(tokenizer, "clip_factor_"):
        fresh.clip_factor_ = tokenizer.clip_factor_  # type: ignore[attr-defined]
    return fresh
