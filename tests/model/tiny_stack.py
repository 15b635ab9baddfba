"""A few small networks side by side, each with windows of its own."""

import copy
from dataclasses import dataclass

import torch
from tiny_network import TOKENIZERS, L, make_network

from bsat.model import Network, SplineHead, stacked
from bsat.model.stacked import Batch, Noise, Stack
from bsat.spline.autograd import basis
from conftest import make_signals

NO_DROPOUT = {"dropout": 0.0, "ff_dropout": 0.0, "attention_dropout": 0.0}


@dataclass
class Side:
    """M networks, their stack, and the same windows as either wants them."""

    networks: list[Network]
    stack: Stack
    inputs: list[tuple]  # of each network: values, positions, knots
    batch: Batch
    levels: list[tuple[torch.Tensor, torch.Tensor]]  # mean and deviation (B, 1) of its windows

    def own(self, member: int) -> torch.Tensor:
        """The network's own forecasts, in units of each window's level and spread, as the stack's are."""
        mean, deviation = self.levels[member]
        return (self.networks[member](*self.inputs[member]) - mean) / deviation


def make_side(*, factors=(2, 1, 2), count=5, tokenizer="bspline", seed=0, **choices) -> Side:
    """Networks with feed-forward parts of different widths, in evaluation mode."""
    networks = [
        shake(make_network(tokenizer, seed=seed + m, dtype=torch.float32, ff_factor=factor, **choices), seed + m)
        for m, factor in enumerate(factors)
    ]
    windows = torch.tensor(make_signals(L, len(networks) * count)["transformer"], dtype=torch.float32)
    inputs, levels, parts = [], [], []
    for network, past in zip(networks, windows.split(count), strict=True):
        tokens = TOKENIZERS[tokenizer].transform(past)
        inputs.append((tokens.values, tokens.positions, getattr(tokens, "knots", None)))
        normal, *level = network.norm(tokens.values)
        levels.append(tuple(level))
        parts.append((normal, tokens.positions, _basis(network, inputs[-1][2])))
    values, positions, bases = zip(*parts, strict=True)
    batch = Batch(torch.stack(values), torch.stack(positions), None if bases[0] is None else torch.stack(bases))
    return Side(networks, stack_up(networks), inputs, batch, levels)


def _basis(network: Network, knots: torch.Tensor | None) -> torch.Tensor | None:
    """(B, n, n) for the spline head."""
    head = network.head
    return basis(knots, head.degree, head.times).float() if isinstance(head, SplineHead) else None


def shake(network: Network, seed: int, size: float = 0.1) -> Network:
    """Leaves no parameter at the 0 or 1 that it began with, behind which a mistake could hide."""
    generator = torch.Generator().manual_seed(seed)
    for p in network.parameters():
        p.data += size * torch.randn(p.shape, generator=generator)
    return network


def stack_up(networks: list[Network]) -> Stack:
    return Stack(networks, stacked.common_shape([stacked.describe(network) for network in networks]))


def make_noise(members: int, shares=(0.2, 0.1, 0.3), *, step=7) -> Noise:
    """Every network has a seed of its own."""
    return Noise(
        torch.arange(3, 3 + 2 * members, 2, dtype=torch.int32),
        torch.tensor([step], dtype=torch.int32),
        torch.tensor(shares)[:, None].repeat(1, members).contiguous(),
    )


def padding(stack: Stack) -> torch.Tensor:
    """(M, P) True where a number of the stack belongs to no parameter of the network."""
    marked = copy.copy(stack)
    marked.theta, marked.running = torch.zeros_like(stack.theta), torch.zeros_like(stack.running)
    for member in range(len(stack)):
        marked.load(member, {name: torch.ones_like(a) for name, a in stack.save(member).items()})
    return marked.theta == 0


def gradients(stack: Stack, batch: Batch, noise: Noise, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Forecasts in training (M, B, H), and autograd's gradient (M, P) of the mean squared errors."""
    leaf = stack.theta.detach().clone().requires_grad_()
    forecast = stacked.forward(stack, stack.views(leaf), batch, noise)
    (grad,) = torch.autograd.grad((forecast - targets).square().mean((1, 2)).sum(), leaf)
    return forecast.detach(), grad
