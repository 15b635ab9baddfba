"""Many networks of one shape at once: their parameters side by side along a first axis, one pass for all.

M networks, each with a batch of its own: activations are (M, B n, d). This file holds the parameters, the dropout masks
and the pass in plain torch, for any device and for autograd; `fused` has the same pass, and its gradient, as CUDA
kernels. A network's feed-forward part may be narrower than the stack's: the numbers beyond it are zero, and stay zero,
since neither they nor their gradients ever differ from it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from .attention import Attention
from .dropout import Dropout
from .encoder import Encoder, EncoderLayer, TokenBatchNorm
from .head import FlattenHead, SplineHead
from .instance_norm import InstanceNorm
from .network import Network
from .positions import BASE, LearnedPositions, RotaryPositions

MOMENTUM, EPSILON = 0.1, 1e-5
"""Of torch's batch norm."""


@dataclass(frozen=True)
class Shape:
    """What networks must have in common to be stacked."""

    tokens: int
    features: int
    width: int
    layers: int
    heads: int
    feed: int
    horizon: int
    rotary: bool
    learned: bool
    ranked: bool
    spline: bool

    @property
    def head_width(self) -> int:
        """k"""
        return self.width // self.heads


def describe(network: nn.Module) -> Shape | None:
    """The shape of a network as `build_network` makes it; None if any part of it is another, or is frozen."""
    try:
        return _describe(network)
    except (AttributeError, TypeError, IndexError, ValueError):  # a part that lacks what the paper's has
        return None


def _describe(built: nn.Module) -> Shape | None:
    network: Any = built
    if type(built) is not Network or type(network.norm) is not InstanceNorm or type(network.encoder) is not Encoder:
        return None
    embedding, head, ranks = network.embedding, network.head, network.positions
    layers: list[Any] = list(network.encoder.layers)
    first = layers[0]
    rotary = first.attention.rotary
    width, heads, feed = embedding.out_features, first.attention.n_heads, first.d_ff
    learned = rotary is not None and isinstance(rotary.log_base, nn.Parameter)
    usual = [
        type(head) in (FlattenHead, SplineHead),
        type(ranks) in (LearnedPositions, type(None)),
        _is_linear(embedding) and _is_linear(head.project),
        type(network.dropout) is Dropout,
        all(parameter.requires_grad for parameter in network.parameters()),
        all(_is_usual_layer(layer, width, heads, feed, learned, rotary is not None) for layer in layers),
        len({_layer_dropouts(layer) for layer in layers} | {(network.dropout.p, *_layer_dropouts(first)[1:])}) == 1,
        len({layer.attention.rotary.unit for layer in layers if layer.attention.rotary is not None}) <= 1,
    ]
    if not all(usual):
        return None
    return Shape(
        tokens=head.project.in_features // width,
        features=embedding.in_features,
        width=width,
        layers=len(layers),
        heads=heads,
        feed=feed,
        horizon=head.project.out_features,
        rotary=rotary is not None,
        learned=learned,
        ranked=ranks is not None,
        spline=head.needs_knots,
    )


def _is_linear(part: Any) -> bool:
    return type(part) is nn.Linear and part.bias is not None


def _is_norm(part: Any) -> bool:
    usual = part.eps == EPSILON and part.momentum == MOMENTUM and part.affine and part.track_running_stats
    return type(part) is TokenBatchNorm and usual


def _layer_dropouts(layer: Any) -> tuple[float, float, float]:
    return layer.dropout.p, layer.feed_forward[2].p, layer.attention.dropout.p


def _is_usual_layer(layer: Any, width: int, heads: int, feed: int, learned: bool, turned: bool) -> bool:
    attention, (up, bend, drop, down) = layer.attention, layer.feed_forward
    rotary = attention.rotary
    if turned and (type(rotary) is not RotaryPositions or isinstance(rotary.log_base, nn.Parameter) != learned):
        return False
    if turned and not learned and abs(float(rotary.log_base) - math.log(BASE)) > 1e-5:
        return False
    return (
        type(layer) is EncoderLayer
        and type(attention) is Attention
        and (turned or rotary is None)
        and all(_is_linear(part) for part in (attention.to_qkv, attention.to_out, up, down))
        and type(bend) is nn.GELU
        and bend.approximate == "none"
        and all(type(part) is Dropout for part in (drop, layer.dropout, attention.dropout))
        and _is_norm(layer.attention_norm)
        and _is_norm(layer.feed_forward_norm)
        and (attention.to_out.out_features, attention.n_heads) == (width, heads)
        and layer.d_ff == up.out_features == feed
    )


def dropouts(network: Network) -> tuple[float, float, float]:
    """Of the stream, inside the feed-forward part, and of the attention weights."""
    return _layer_dropouts(network.encoder.layers[0])


def feed_width(network: Network) -> int:
    """Of its feed-forward parts."""
    layer: Any = network.encoder.layers[0]
    return layer.d_ff


class Stack:
    """The parameters of M networks in one (M, P) tensor, and the running statistics of their batch norms in another.

    The learned log-bases, which do not decay, come last.
    """

    def __init__(self, networks: Sequence[Network], shape: Shape) -> None:
        self.shape = shape
        self.feeds = [feed_width(network) for network in networks]
        model = networks[0]
        names = sorted((name for name, _ in model.named_parameters()), key=lambda name: name.endswith("log_base"))
        running = [name for name, _ in model.named_buffers() if "running" in name]
        self.free = sum(name.endswith("log_base") for name in names)
        own = dict(model.state_dict())
        self.table, size = _lay_out(names, own, shape)
        self.running_table, running_size = _lay_out(running, own, shape)
        device = next(model.parameters()).device
        # A multiple of eight keeps every network's parameters where wide loads can reach them; log-bases stay last.
        padding = -size % 8
        if padding and self.free:
            for name in names[-self.free :]:
                start, stop, form = self.table[name]
                self.table[name] = (start + padding, stop + padding, form)
        self.theta = torch.zeros(len(networks), size + padding, device=device)
        self.running = torch.zeros(len(networks), running_size, device=device)
        for member, network in enumerate(networks):
            self.load(member, network.state_dict())

    def __len__(self) -> int:
        return len(self.theta)

    def views(self, of: Tensor | None = None) -> dict[str, Tensor]:
        """The parameters, or numbers laid out like them, by name: (M, ...)."""
        of = self.theta if of is None else of
        return {name: of[:, a:b].unflatten(1, form) for name, (a, b, form) in self.table.items()}

    def running_views(self) -> dict[str, Tensor]:
        """The running statistics by name: (M, d)."""
        return {name: self.running[:, a:b] for name, (a, b, _) in self.running_table.items()}

    def load(self, member: int, state: dict[str, Tensor]) -> None:
        """Put a network's `state_dict` in."""
        for table, into in ((self.table, self.theta), (self.running_table, self.running)):
            for name, (a, b, form) in table.items():
                block = into[member, a:b].view(form)
                block.zero_()
                block[tuple(slice(s) for s in state[name].shape)].copy_(state[name].reshape(state[name].shape or (1,)))

    def save(self, member: int, *, theta: Tensor | None = None, running: Tensor | None = None) -> dict[str, Tensor]:
        """A network's `state_dict`, of what is in the stack or of a (P,) and an (S,) tensor laid out like it."""
        theta = self.theta[member] if theta is None else theta
        running = self.running[member] if running is None else running
        state = {}
        for table, source in ((self.table, theta), (self.running_table, running)):
            for name, (a, b, form) in table.items():
                block = source[a:b].view(form)
                if "feed_forward.0" in name:
                    block = block[: self.feeds[member]]
                if name.endswith("feed_forward.3.weight"):
                    block = block[:, : self.feeds[member]]
                state[name] = block.squeeze(0).clone() if name.endswith("log_base") else block.clone()
        return state

    def keep(self, members: Sequence[int]) -> None:
        """Drop all others."""
        index = torch.tensor(list(members), device=self.theta.device)
        self.theta, self.running = self.theta[index], self.running[index]
        self.feeds = [self.feeds[member] for member in members]


def _lay_out(
    names: Sequence[str], state: dict[str, Tensor], shape: Shape
) -> tuple[dict[str, tuple[int, int, tuple[int, ...]]], int]:
    """From where to where each lies in a row, and its form in the stack."""
    table, at = {}, 0
    for name in names:
        form = list(state[name].shape) or [1]
        if "feed_forward.0" in name:
            form[0] = shape.feed
        if name.endswith("feed_forward.3.weight"):
            form[1] = shape.feed
        table[name] = (at, at + math.prod(form), tuple(form))
        at += math.prod(form)
    return table, at


@dataclass(frozen=True)
class Noise:
    """Dropout whose masks follow from a network's seed, the step, the place and the index alone.

    So they do not depend on who else is in the stack, need no memory, and are the same here and in the kernels.
    """

    seeds: Tensor
    """(M,) int32"""
    step: Tensor
    """(1,) int32, how many steps were made"""
    shares: Tensor
    """(3, M): the dropouts of the stream, inside the feed-forward part, and of the attention weights"""

    def dropping(self, kind: int, training: bool) -> tuple[Tensor, Tensor, Tensor | None]:
        """What kernels need to find the masks of this kind: seeds, step and shares, these None in evaluation."""
        return self.seeds, self.step, self.shares[kind] if training else None

    def __call__(self, x: Tensor, site: int, kind: int, *, columns_first: bool = False) -> Tensor:
        """Drop some of x, (M, ...); with `columns_first`, (M, R, c) is counted by column."""
        shares = self.shares[kind]
        if not bool((shares > 0).any()):
            return x
        count = x[0].numel()
        index = torch.arange(count, device=x.device)
        if columns_first:
            index = index.view(x.shape[2], x.shape[1]).T.flatten()
        key = _mix(_mix(_mix(self.seeds.long() & _WORD) + self.step.long()) + site)
        bits = _mix((index + key[:, None]) & _WORD).view(x.shape)
        form = [-1] + [1] * (x.ndim - 1)
        least = (shares.double() * 2**32).long().view(form)
        return x * torch.where(bits >= least, (1 / (1 - shares)).view(form), 0.0)


_WORD = 0xFFFFFFFF


def _mix(x: Tensor) -> Tensor:
    """A hash of 32 bits, held in 64 (lowbias32)."""
    x = x & _WORD
    x = ((x ^ (x >> 16)) * 0x21F0AAAD) & _WORD
    x = ((x ^ (x >> 15)) * 0xD35A2D97) & _WORD
    return x ^ (x >> 15)


@dataclass(frozen=True)
class Batch:
    """Normalised tokens of B windows for each of M networks."""

    values: Tensor
    """(M, B, n, f)"""
    positions: Tensor
    """(M, B, n), in the networks' unit"""
    basis: Tensor | None
    """(M, B, n, n) for the spline head"""


def sites(layer: int) -> tuple[int, int, int, int]:
    """Where dropout acts in a layer; 0 is after the embedding."""
    first = 4 * layer + 1
    return first, first + 1, first + 2, first + 3


def forward(stack: Stack, v: dict[str, Tensor], batch: Batch, noise: Noise | None) -> Tensor:
    """Forecasts (M, B, H) in units of each window's level and spread.

    Args:
        stack: whose running statistics are used, or with `noise` moved on.
        v: the parameters, as `Stack.views` has them.
        batch: what goes in.
        noise: dropout and batch statistics are on; None means evaluation.
    """
    shape, running = stack.shape, stack.running_views()
    M, B, n = batch.positions.shape
    d, h, k = shape.width, shape.heads, shape.head_width

    def drop(x: Tensor, site: int, kind: int, *, columns_first: bool = False) -> Tensor:
        return x if noise is None else noise(x, site, kind, columns_first=columns_first)

    def norm(x: Tensor, name: str) -> Tensor:
        mean, var = running[f"{name}.running_mean"], running[f"{name}.running_var"]
        if noise is not None:
            batch_var, batch_mean = torch.var_mean(x, 1, correction=0)
            with torch.no_grad():
                mean.lerp_(batch_mean, MOMENTUM)
                var.lerp_(batch_var * (x.shape[1] / (x.shape[1] - 1)), MOMENTUM)
            mean, var = batch_mean, batch_var
        normal = (x - mean[:, None]) * (var + EPSILON).rsqrt()[:, None]
        return normal * v[f"{name}.weight"][:, None] + v[f"{name}.bias"][:, None]

    x = _linear(batch.values.flatten(1, 2), v, "embedding")
    if shape.ranked:
        x = (x.view(M, B, n, d) + v["positions.by_rank"][:, None]).flatten(1, 2)
    x = drop(x, 0, 0)
    scores: Tensor | None = None
    for i in range(shape.layers):
        name, at = f"encoder.layers.{i}", sites(i)
        qk, value = _linear(x, v, f"{name}.attention.to_qkv").view(M, B, n, 3 * d).split([2 * d, d], -1)
        if shape.rotary:
            angles = _angles(v, name, batch.positions, k).tile(h)[:, :, :, None]
            qk = _turn(qk.view(M, B, n, 2, d), angles)
        halves = 2 - k % 2
        q, key = qk.reshape(M, B, n, 2, halves, h, k // halves).permute(3, 0, 1, 5, 2, 4, 6).flatten(-2)
        own = q @ key.mT * k**-0.5  # (M, B, h, n, n)
        scores = own if scores is None else scores + own
        weights = drop(scores.softmax(-1), at[0], 2)
        mixed = (weights @ value.reshape(M, B, n, h, k).transpose(2, 3)).transpose(2, 3).reshape(M, B * n, d)
        x = norm(x + drop(_linear(mixed, v, f"{name}.attention.to_out"), at[1], 0), f"{name}.attention_norm")
        fed = drop(functional.gelu(_linear(x, v, f"{name}.feed_forward.0")), at[2], 1, columns_first=True)
        x = norm(x + drop(_linear(fed, v, f"{name}.feed_forward.3"), at[3], 0), f"{name}.feed_forward_norm")
    if batch.basis is not None:
        x = batch.basis @ x.view(M, B, n, d)
    return _linear(x.reshape(M, B, n * d), v, "head.project")


def _linear(x: Tensor, v: dict[str, Tensor], name: str) -> Tensor:
    return torch.baddbmm(v[f"{name}.bias"].unsqueeze(1), x, v[f"{name}.weight"].mT)


def _angles(v: dict[str, Tensor], layer: str, positions: Tensor, head_width: int) -> Tensor:
    """(M, B, n, k/2)"""
    exponents = torch.arange(0, head_width, 2, device=positions.device) / -head_width
    log_base = v.get(f"{layer}.attention.rotary.log_base")  # (M, 1), if learned
    speeds = (log_base * exponents).exp()[:, None, None] if log_base is not None else BASE**exponents
    return positions.unsqueeze(-1) * speeds


def _turn(x: Tensor, angles: Tensor) -> Tensor:
    (a, b), cos, sin = x.chunk(2, -1), angles.cos(), angles.sin()
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


def common_shape(shapes: Sequence[Shape]) -> Shape:
    """The shape of a stack of networks that differ in their feed-forward width alone."""
    widest = max(shape.feed for shape in shapes)
    if len({replace(shape, feed=widest) for shape in shapes}) > 1:
        raise ValueError("networks of one stack may differ in their feed-forward width alone")
    return replace(shapes[0], feed=widest)
