"""The network of the paper's section "Model Architecture", for any tokenizer."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn

from ..tokens.contract import Tokenizer
from ..tokens.door import check_choice, to_whole
from .attention import Attention
from .dropout import Dropout
from .encoder import Encoder, EncoderLayer
from .head import HEADS, FlattenHead, SplineHead
from .instance_norm import NORMS, InstanceNorm
from .positions import ENCODINGS, ROTARY_UNITS, LearnedPositions, RotaryPositions


@dataclass(frozen=True, kw_only=True)
class NetworkConfig:
    """What can be chosen about the network. The paper searches the widths, depths and dropouts for every data set; the
    defaults are one choice of a small grid, by the validation RMSE on ETTh1 and the shipped series.

    Args:
        encoding: how tokens know where they are; one of `ENCODINGS`.
        head: "flatten" or "spline".
        norm: what instance normalisation looks at, "coefficients" or "window".
        rotary_unit: what rotary positions are counted in: "samples", as in the paper, or "tokens", their mean distance,
            so that the fastest pair of a head turns by about one radian from one token to the next.
        d_model: width of the stream.
        n_layers: encoder layers.
        n_heads: attention heads; they share d_model.
        ff_factor: the feed-forward part is this many times as wide as the stream.
        dropout: of the embedded tokens, and of what each part adds to the stream.
        ff_dropout: inside the feed-forward part.
        attention_dropout: of the attention weights.
    """

    encoding: str = "l-rope+lpe"
    head: str = "flatten"
    norm: str = "coefficients"
    rotary_unit: str = "samples"
    d_model: int = 32
    n_layers: int = 2
    n_heads: int = 4
    ff_factor: int = 4
    dropout: float = 0.1
    ff_dropout: float = 0.05
    attention_dropout: float = 0.05

    def __post_init__(self) -> None:
        check_choice(self.encoding, "encoding", ENCODINGS)
        check_choice(self.head, "head", HEADS)
        check_choice(self.norm, "norm", NORMS)
        check_choice(self.rotary_unit, "rotary_unit", ROTARY_UNITS)
        for name in ("d_model", "n_layers", "n_heads", "ff_factor"):
            object.__setattr__(self, name, to_whole(getattr(self, name), name, 1))
        if self.d_model % self.n_heads:
            raise ValueError(
                f"`d_model` must be a multiple of n_heads = {self.n_heads}; got {self.d_model}. Change one of them."
            )
        if "rope" in self.encoding and self.d_model // self.n_heads % 2:
            raise ValueError(
                f"`d_model` / `n_heads` must be even for encoding={self.encoding!r}, which turns pairs; "
                f"got {self.d_model // self.n_heads}. Change one of them, or use encoding='lpe'."
            )
        for name in ("dropout", "ff_dropout", "attention_dropout"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise TypeError(f"`{name}` must be a number; got {value!r}. Pass a float.")
            if not 0 <= value < 1:
                raise ValueError(f"`{name}` must lie in [0, 1); got {value}. Lower it.")

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """The names of the choices."""
        return tuple(field.name for field in fields(cls))


class Network(nn.Module):
    """Instance norm, embedding, positions, encoder, head, inverse instance norm. The parts are passed in.

    Args:
        norm: takes level and spread out of the values, and puts them into the forecast.
        embedding: (B, n, f) -> (B, n, d)
        positions: adds what a token's rank says, or None.
        encoder: (B, n, d) and positions -> (B, n, d)
        head: (B, n, d) and knots -> (B, H)
        dropout: after embedding and positions.
    """

    def __init__(
        self,
        *,
        norm: InstanceNorm,
        embedding: nn.Module,
        positions: LearnedPositions | None,
        encoder: Encoder,
        head: FlattenHead,
        dropout: float,
    ) -> None:
        super().__init__()
        self.norm = norm
        self.embedding = embedding
        self.positions = positions
        self.dropout = Dropout(dropout)
        self.encoder = encoder
        self.head = head

    def forward(
        self,
        values: Tensor,
        positions: Tensor,
        knots: Tensor | None = None,
        window: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """The forecasts (B, H), in the unit of the values.

        Args:
            values: (B, n, f), what the tokens hold.
            positions: (B, n) or (n,), where they are, in samples.
            knots: (B, n + p + 1) of a spline tokenizer, for the spline head.
            window: mean and variance (B,) of each window, for norm="window".
        """
        x, mean, deviation = self.norm(values, window)
        x = self.embedding(x)
        if self.positions is not None:
            x = self.positions(x)
        x = self.encoder(self.dropout(x), positions)
        return self.norm.inverse(self.head(x, knots), mean, deviation)

    def to_unit(self, positions: Tensor) -> Tensor:
        """Positions as the rotations count them, which is the same in all layers."""
        layer: Any = self.encoder.layers[0]
        rotary = layer.attention.rotary
        return positions if rotary is None else rotary.to_unit(positions)

    def log_bases(self) -> list[Tensor]:
        """The learned log-base of every layer; empty without L-RoPE."""
        found = (m.log_base for m in self.modules() if isinstance(m, RotaryPositions))
        return [log_base for log_base in found if isinstance(log_base, nn.Parameter)]


def build_network(config: NetworkConfig, tokenizer: Tokenizer, *, lookback: int, horizon: int) -> Network:
    """The paper's network for a tokenizer's tokens, with Xavier-uniform weights drawn from torch's generator."""
    levels = tokenizer.level_features(lookback)
    n, d, h = tokenizer.n_tokens, config.d_model, config.n_heads
    if getattr(tokenizer, "coefficients", "plain") == "asinh" and config.norm == "coefficients":
        raise ValueError(
            "`norm` must be 'window' with a tokenizer of coefficients='asinh', whose coefficients are not in the unit "
            "of the series; got 'coefficients'. Change one of them."
        )

    unit = lookback / n if config.rotary_unit == "tokens" else 1.0

    def layer() -> EncoderLayer:
        learned = "l-rope" in config.encoding
        rotary = RotaryPositions(d // h, learned=learned, unit=unit) if "rope" in config.encoding else None
        attention = Attention(d, h, rotary=rotary, dropout=config.attention_dropout)
        return EncoderLayer(
            attention, d_model=d, d_ff=d * config.ff_factor, dropout=config.dropout, ff_dropout=config.ff_dropout
        )

    head: FlattenHead
    if config.head == "spline" and tokenizer.adaptive:
        head = SplineHead(n, d, horizon, lookback=lookback, degree=tokenizer.degree)  # type: ignore[attr-defined]
    else:
        head = FlattenHead(n, d, horizon)
    network = Network(
        norm=InstanceNorm(levels, config.norm),
        embedding=nn.Linear(len(levels), d),
        positions=LearnedPositions(n, d) if "lpe" in config.encoding else None,
        encoder=Encoder(layer() for _ in range(config.n_layers)),
        head=head,
        dropout=config.dropout,
    )
    network.apply(_xavier)
    return network


def _xavier(module: Any) -> None:
    """Xavier uniform, as the paper; queries, keys and values are three matrices and drawn as such."""
    if isinstance(module, nn.Linear):
        nn.init.xavier_uniform_(module.weight)
        nn.init.zeros_(module.bias)
    if isinstance(module, Attention):
        with torch.no_grad():
            for part in module.to_qkv.weight.chunk(3):
                nn.init.xavier_uniform_(part)
