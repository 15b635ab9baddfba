"""From the encoder's outputs to the forecast."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..spline.autograd import basis

HEADS = ("flatten", "spline")


class FlattenHead(nn.Module):
    """All tokens side by side through one linear map (the paper's, and PatchTST's)."""

    needs_knots = False

    def __init__(self, n_tokens: int, d_model: int, horizon: int) -> None:
        super().__init__()
        self.project = nn.Linear(n_tokens * d_model, horizon)

    def forward(self, x: Tensor, knots: Tensor | None = None) -> Tensor:
        """(B, n, d) -> (B, H)"""
        return self.project(x.flatten(1))


class SplineHead(FlattenHead):
    """The outputs taken as coefficients of a latent spline, evaluated at n uniform times, then flattened.

    The flatten head ties a weight to a token's index, but an adaptive token's time moves from window to window. Here a
    weight is tied to a time. For tokens at uniform times it would be the identity, so they take the flatten head.

    Args:
        lookback: L; the times are spread evenly from 0 to L - 1.
        degree: of the tokens' spline.
    """

    needs_knots = True
    times: Tensor

    def __init__(self, n_tokens: int, d_model: int, horizon: int, *, lookback: int, degree: int) -> None:
        super().__init__(n_tokens, d_model, horizon)
        self.degree = degree
        times = torch.linspace(0, lookback - 1, n_tokens, dtype=torch.float64)
        self.register_buffer("times", times, persistent=False)

    def forward(self, x: Tensor, knots: Tensor | None = None) -> Tensor:
        """(B, n, d) and the knots (B, n + p + 1) -> (B, H)"""
        if knots is None:
            raise ValueError("`knots` must be given with head='spline'; got None. Pass tokens.knots.")
        return super().forward(basis(knots, self.degree, self.times).to(x.dtype) @ x)
