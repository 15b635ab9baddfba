"""What an experiment is, before anything is run: a small frozen description with a hash.

The part that all experiments of a store share, so that their scores may stand in one table, is the `Protocol`; its hash
is printed on every table. An `Experiment` is one cell of such a table: a dataset, a tokenizer, a budget of tokens and
an encoding under a protocol.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from ..data.catalog import HORIZON, LOOKBACK, find_dataset
from ..search.space import Whole
from ..tokens.door import check_choice, to_whole
from .models import MODELS, SPACES

FORMAT = 1
"""Goes into every hash. Raise it whenever the same description would come to mean another experiment."""

ENCODINGS = ("lpe", "f-rope", "l-rope", "f-rope+lpe", "l-rope+lpe")
"""As `bsat.model.ENCODINGS`, which would load torch; in the order of the paper's ablation."""
BUDGETS = (45, 90, 180)
"""The paper's; others are welcome."""
SEEDS = (2025, 2026, 2027)
SHORT = 12
"""Characters of the hash that are printed: 48 bits."""


def hash_of(description: dict[str, Any]) -> str:
    """sha256 of the canonical JSON: keys sorted, no spaces, ASCII. It depends neither on the order of the keys nor on
    the process, and a tuple is a list."""
    text = json.dumps(
        {"format": FORMAT, **description}, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False
    )
    return hashlib.sha256(text.encode("ascii")).hexdigest()


@dataclass(frozen=True, kw_only=True)
class Protocol:
    """How experiments are searched, trained and selected. The defaults are the paper's ("Reproducibility"). The number
    of trials is not part of it, so that a search may be taken further: that is each experiment's own.

    Args:
        horizon: steps to forecast (DESIGN: horizon).
        lookback: samples of a window.
        space: name of the search space; what it holds is part of the hash.
        seeds: of the searches and the trainings.
        max_epochs: of a training.
        grace: epochs before the first rung of successive halving; None halves nothing.
        reduction: at a rung, the best one in so many goes on.
        selection: so many of a seed's runs, the best by validation RMSE, are scored on the test fold.
    """

    horizon: int = HORIZON
    lookback: int = LOOKBACK
    space: str = "paper"
    seeds: tuple[int, ...] = SEEDS
    max_epochs: int = 100
    grace: int | None = 20
    reduction: int = 3
    selection: int = 5

    def __post_init__(self) -> None:
        least = {"horizon": 1, "lookback": 2, "max_epochs": 1, "reduction": 2, "selection": 1}
        for name, smallest in least.items():
            object.__setattr__(self, name, to_whole(getattr(self, name), name, smallest))
        if self.grace is None:
            object.__setattr__(self, "reduction", type(self).reduction)  # nothing is halved: one hash, whatever it says
        else:
            object.__setattr__(self, "grace", to_whole(self.grace, "grace", 1))
        check_choice(self.space, "space", tuple(SPACES))
        if isinstance(self.seeds, (int, str)) or not self.seeds:
            raise ValueError(f"`seeds` must be a list of at least one seed; got {self.seeds!r}. Pass e.g. {SEEDS}.")
        seeds = tuple(sorted(to_whole(seed, "seeds", 0) for seed in self.seeds))
        if len(set(seeds)) < len(seeds):
            raise ValueError(f"`seeds` must differ from each other; got {self.seeds}. Drop the repeated ones.")
        if seeds[-1] >= 2**63:
            raise ValueError(f"`seeds` must be less than 2^63; got {seeds[-1]}. Lower it.")
        object.__setattr__(self, "seeds", seeds)

    @property
    def hash(self) -> str:
        """sha256, 64 characters."""
        return hash_of({**self.to_dict(), "ranges": SPACES[self.space].to_dict()})

    @property
    def short(self) -> str:
        """The hash as it is printed."""
        return self.hash[:SHORT]

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "seeds": list(self.seeds)}

    @classmethod
    def from_dict(cls, d: dict[str, Any]) -> Protocol:
        """From JSON; an error that names what is missing or unknown."""
        known = {f.name for f in fields(cls)}
        if set(d) != known:
            raise ValueError(
                f"a protocol must have exactly the fields {', '.join(sorted(known))}; "
                f"missing: {', '.join(sorted(known - set(d))) or 'none'}; "
                f"unknown: {', '.join(sorted(set(d) - known)) or 'none'}."
            )
        return cls(**d)

    def differences(self, other: Protocol) -> str:
        """In words: "horizon 96 instead of 192"."""
        a, b = self.to_dict(), other.to_dict()
        return ", ".join(f"{name} {a[name]} instead of {b[name]}" for name in a if a[name] != b[name])


@dataclass(frozen=True)
class Experiment:
    """One dataset, tokenizer, budget and encoding under a protocol.

    Args:
        dataset: a name of the catalog, however it is capitalised.
        model: a name of `models.MODELS`, e.g. "bsat", "uds" or "patchtst".
        tokens: how many a window becomes.
        encoding: how tokens know where they are; one of `ENCODINGS`.
        trials: for each seed; a search may be taken further, and keeps what it has.
        protocol: what it shares with the others of its table.
    """

    dataset: str
    model: str = "bsat"
    tokens: int = 45
    encoding: str = "l-rope+lpe"
    trials: int = 200
    protocol: Protocol = field(default_factory=Protocol)

    def __post_init__(self) -> None:
        object.__setattr__(self, "dataset", find_dataset(self.dataset).name)
        for name, choices in (("model", tuple(MODELS)), ("encoding", ENCODINGS)):
            value = getattr(self, name)
            object.__setattr__(self, name, value.strip().lower() if isinstance(value, str) else value)
            check_choice(getattr(self, name), name, choices)
        object.__setattr__(self, "tokens", to_whole(self.tokens, "tokens", 1))
        object.__setattr__(self, "trials", to_whole(self.trials, "trials", 1))
        lookback, degree = self.protocol.lookback, MODELS[self.model].space(self.protocol.space).degree
        least = degree.high + 2 if isinstance(degree, Whole) else 2
        if not least <= self.tokens < lookback or (self.model == "patchtst" and lookback % self.tokens):
            rule = f"be at least {least} and fewer than the lookback = {lookback}"
            if self.model == "patchtst":
                rule += " and divide it, for PatchTST's patches"
            budgets = " or ".join(map(str, BUDGETS))
            raise ValueError(f"`tokens` must {rule}; got {self.tokens}. The paper's budgets are {budgets}.")

    @property
    def hash(self) -> str:
        """sha256 of everything: the protocol, and what the model's name stands for, included."""
        return hash_of({**self.to_dict(), "protocol": self.protocol.hash, "definition": MODELS[self.model].to_dict()})

    @property
    def study(self) -> str:
        """Name of its searches: the hash, but for how far they go."""
        return replace(self, trials=1).short

    @property
    def short(self) -> str:
        """The hash as it is printed."""
        return self.hash[:SHORT]

    @property
    def cell(self) -> dict[str, Any]:
        """What tells it from the others of its protocol."""
        return {"dataset": self.dataset, "model": self.model, "tokens": self.tokens, "encoding": self.encoding}

    def to_dict(self) -> dict[str, Any]:
        """For JSON; flat."""
        return {**self.cell, "trials": self.trials, **self.protocol.to_dict()}

    def under(self, **changes: Any) -> Experiment:
        """The same cell under another protocol."""
        return replace(self, protocol=replace(self.protocol, **changes))
