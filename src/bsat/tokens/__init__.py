"""Windows to tokens: three tokenizers with one contract (`contract`)."""

from .bspline import BSplineTokenizer, BSplineTokens
from .cache import TokenCache
from .contract import Tokenizer, Tokens
from .downsample import DownsampleTokenizer
from .patch import PatchTokenizer

TOKENIZERS: dict[str, type[Tokenizer]] = {
    kind.__name__: kind for kind in (BSplineTokenizer, PatchTokenizer, DownsampleTokenizer)
}

__all__ = [
    "TOKENIZERS",
    "BSplineTokenizer",
    "BSplineTokens",
    "DownsampleTokenizer",
    "PatchTokenizer",
    "TokenCache",
    "Tokenizer",
    "Tokens",
]
