"""Low-rank layers: W x + b becomes U (Vᵀ x) + b, for Linears and convolutions.

W is (out, in) as in nn.Linear, U (out, rank), V (in, rank): (out + in)·rank MACs instead of out·in. The kernel
of a convolution, (out, in, kh, kw), is a matrix in one of two ways:

    split       matrix W                   Vᵀ, applied first                U, applied then
    spatial     (out·kw, in·kh)            kh × 1, in to rank channels      1 × kw, rank to out channels
    channel     (out, in·kh·kw)            kh × kw, in to rank channels     1 × 1, rank to out channels

One dimension is the second of two: spatial is 1, then k. The first of the two has no bias, so that what padding adds
stays what the dense layer pads; each axis keeps its stride, padding and dilation in the one that acts on it. "Spatial"
is what "Efficiently learning low-rank networks" takes from Khodak et al. (2021).
"""

from __future__ import annotations

from torch import nn

from snnk_peft.layers.low_rank_conv import SPLITS, LowRankConv, LowRankConv1d, LowRankConv2d
from snnk_peft.layers.low_rank_linear import LowRank, LowRankLinear

__all__ = ["SPLITS", "LowRank", "LowRankConv", "LowRankConv1d", "LowRankConv2d", "LowRankLinear", "low_rank_class"]


def low_rank_class(module: nn.Module) -> type[LowRankLinear] | type[LowRankConv]:
    """Return the low-rank class for a dense nn.Linear, nn.Conv1d or nn.Conv2d."""
    if isinstance(module, nn.Linear):
        return LowRankLinear
    return LowRankConv1d if isinstance(module, nn.Conv1d) else LowRankConv2d
