"""What stands in the rows of the tables: models by name, each with its tokens, its network and what is searched.

One network serves all. "bsat" is the paper's, to the letter; "bsat-safe" changes the placement of the knots alone, so
that the two tell what the cure costs or gains; "bsat-spline" is what adaptive tokens seem to need. Three are there to
find something out: "bsat-even" and "bsat-even-spline", what placing the knots gives at all, and "bsat-unit", whether
rotary positions in samples are what makes deep networks of adaptive tokens overfit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ..search.space import Categorical, Space

if TYPE_CHECKING:
    from ..tokens import Tokenizer

CLIP_AT = 10.0
"""C_max in deviations of the train fold, on which the paper is silent (DESIGN: C_max)."""
PAPER = {"clip_factor": "auto", "placement": "paper", "feature": "curvature", "max_coefficient": CLIP_AT}
EVEN = {**PAPER, "feature": "uniform", "clip_factor": 1.0}
"""Knots at even distances, where no interval is long enough to be clipped: there is no factor to search."""
SPACES = {"paper": Space()}
"""By name; a protocol's hash depends on what they hold, not on their names."""


@dataclass(frozen=True)
class Model:
    """A row.

    Args:
        label: as tables print it.
        tokenizer: name of the class in `bsat.tokens`.
        tokens: its settings, but for their number and the degree.
        network: settings that are not searched.
        searched: ranges beside the protocol's space.
        about: in words, for the list of models.
    """

    label: str
    about: str
    tokenizer: str
    tokens: Mapping[str, Any] = field(default_factory=dict)
    network: Mapping[str, Any] = field(default_factory=dict)
    searched: Mapping[str, Categorical] = field(default_factory=dict)

    @property
    def adaptive(self) -> bool:
        """Whether its tokens move."""
        return self.tokenizer == "BSplineTokenizer"

    @property
    def kin(self) -> tuple[Any, ...]:
        """Models with the same one build networks of the same shapes, which can be trained side by side."""
        return self.tokenizer, self.tokens.get("detail", 0), tuple(sorted(self.network.items()))

    def space(self, name: str) -> Space:
        """What is searched under a protocol with this space."""
        space = replace(SPACES[name], **self.searched)
        return space if self.adaptive else replace(space, degree=None)

    def make_tokenizer(self, tokens: int) -> Tokenizer:
        """Not fitted yet."""
        from .. import tokens as kinds

        made: Tokenizer = getattr(kinds, self.tokenizer)(n_tokens=tokens, **self.tokens)
        return made

    def to_dict(self) -> dict[str, Any]:
        """For the hash of an experiment: all that changes its figures."""
        searched = {name: list(range_.values) for name, range_ in self.searched.items()}
        made = {"tokenizer": self.tokenizer, "tokens": dict(self.tokens), "network": dict(self.network)}
        return {**made, "searched": searched}


MODELS = {
    "bsat": Model("BSAT", "as in the paper: its placement of knots, clipped", "BSplineTokenizer", PAPER),
    "bsat-safe": Model(
        "BSAT safe", "the same with knots kept apart: no fallback", "BSplineTokenizer", {**PAPER, "placement": "safe"}
    ),
    "bsat-spline": Model(
        "BSAT spline",
        "safe knots, detail=8, spline head; feature and norm are searched",
        "BSplineTokenizer",
        {**PAPER, "placement": "safe", "detail": 8},
        {"head": "spline"},
        {"feature": Categorical(("curvature", "slope")), "norm": Categorical(("coefficients", "window"))},
    ),
    "bsat-even": Model(
        "BSAT even",
        "as in the paper, but with knots at even distances, wherever the signal bends",
        "BSplineTokenizer",
        EVEN,
    ),
    "bsat-even-spline": Model(
        "BSAT even spline",
        "even knots, detail=8, spline head; norm is searched",
        "BSplineTokenizer",
        {**EVEN, "placement": "safe", "detail": 8},
        {"head": "spline"},
        {"norm": Categorical(("coefficients", "window"))},
    ),
    "bsat-unit": Model(
        "BSAT unit",
        "as in the paper, but rotary positions count in tokens, not samples",
        "BSplineTokenizer",
        PAPER,
        {"rotary_unit": "tokens"},
    ),
    "uds": Model("UDS", "uniform down-sampling", "DownsampleTokenizer"),
    "patchtst": Model("PatchTST", "patches", "PatchTokenizer"),
}
"""In the order of the tables."""
