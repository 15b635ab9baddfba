"""Tokens to forecasts: one network for every tokenizer.

Shapes are written with the same letters throughout: B windows, n tokens, f values a token, d model width, h heads,
k = d / h head width, H steps ahead, L samples of lookback.
"""

from .attention import Attention
from .encoder import Encoder, EncoderLayer
from .head import HEADS, FlattenHead, SplineHead
from .instance_norm import NORMS, InstanceNorm
from .network import Network, NetworkConfig, build_network
from .positions import ENCODINGS, LearnedPositions, RotaryPositions

__all__ = [
    "ENCODINGS",
    "HEADS",
    "NORMS",
    "Attention",
    "Encoder",
    "EncoderLayer",
    "FlattenHead",
    "InstanceNorm",
    "LearnedPositions",
    "Network",
    "NetworkConfig",
    "RotaryPositions",
    "SplineHead",
    "build_network",
]
