"""Networks and tokens small enough to check by hand."""

import torch

import bsat
from bsat.model import Network, NetworkConfig, build_network
from conftest import make_signals

L, H, N, D, HEADS, LAYERS = 48, 5, 8, 8, 2, 2

TOKENIZERS = {
    "bspline": bsat.BSplineTokenizer(N),
    "bspline, detail": bsat.BSplineTokenizer(N, detail=2),
    "patch": bsat.PatchTokenizer(N),
    "downsample": bsat.DownsampleTokenizer(N),
}
SMALL = {"d_model": D, "n_heads": HEADS, "n_layers": LAYERS, "ff_factor": 2}


def make_network(tokenizer="bspline", *, seed=0, dtype=torch.float64, horizon=H, **choices) -> Network:
    """In eval mode, with batch norms that have seen something, so that they are no identities."""
    with torch.random.fork_rng([]):
        torch.manual_seed(seed)
        config = NetworkConfig(**{**SMALL, **choices})
        network = build_network(config, TOKENIZERS[tokenizer], lookback=L, horizon=horizon).to(dtype)
        for module in network.modules():
            if isinstance(module, torch.nn.BatchNorm1d):
                module.running_mean.uniform_(-0.2, 0.2)
                module.running_var.uniform_(0.7, 1.4)
    return network.eval()


def make_windows(count=4, dtype=torch.float64) -> torch.Tensor:
    return torch.tensor(make_signals(L, count)["transformer"], dtype=dtype)


def make_inputs(tokenizer="bspline", count=4, dtype=torch.float64) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Values (B, n, f), positions (B, n) and knots (B, n + p + 1), or None."""
    tokens = TOKENIZERS[tokenizer].transform(make_windows(count, dtype))
    return tokens.values, tokens.positions, getattr(tokens, "knots", None)


def make_stream(count=4, seed=1, dtype=torch.float64) -> torch.Tensor:
    """What an encoder might be handed: (B, n, d)."""
    return torch.randn(count, N, D, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def count_parameters(network: torch.nn.Module) -> int:
    return sum(p.numel() for p in network.parameters())
