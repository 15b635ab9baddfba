"""Windows to tokens: three tokenizers with one contract (`contract`)."""

from .bspline import BSplineTokenizer, BSplineTokens
from .cache import TokenCache
from .contract import Tokenizer, Tokens
from .downsample import DownsampleTokenizer
from .patch import PatchTokenizer

__all__ = [
    "BSplineTokenizer",
    "BSplineTokens",
    "DownsampleTokenizer",
    "PatchTokenizer",
    "TokenCache",
    "Tokenizer",
    "Tokens",
]
