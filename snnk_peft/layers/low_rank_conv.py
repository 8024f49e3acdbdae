"""Low-rank convolutions: two small ones in place of one; see low_rank.py for the two kinds of split."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from snnk_peft.errors import ConfigError
from snnk_peft.layers.low_rank import LowRank, LowRankLinear, rounded_product, with_tensors

SPLITS = ("spatial", "channel")


class LowRankConv(LowRank):
    """Two convolutions in place of one; `LowRankConv1d` and `LowRankConv2d` set the number of dimensions.

    Arguments as in nn.Conv2d, and

    Args:
        rank: channels between the two, 1 to the full rank of the matrix (see low_rank.py).
        split: "spatial" or "channel".
        seed: seed of the random initialisation; None leaves memory uninitialised.

    Raises:
        ConfigError: rank beyond full rank, unknown split.
    """

    dimensions: ClassVar[int]
    convolution: ClassVar[type[nn.Module]]

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | Sequence[int],
        rank: int,
        *,
        split: str = "spatial",
        stride: int | Sequence[int] = 1,
        padding: str | int | Sequence[int] = 0,
        dilation: int | Sequence[int] = 1,
        bias: bool = True,
        padding_mode: str = "zeros",
        seed: int | None = 0,
    ):
        super().__init__()
        if split not in SPLITS:
            raise ConfigError(f"split is {split!r}; expected one of {', '.join(map(repr, SPLITS))}")
        self.in_channels, self.out_channels, self.split, self.padding_mode = (
            in_channels, out_channels, split, padding_mode
        )  # fmt: skip
        self.kernel_size, self.stride, self.dilation = (self._each(value) for value in (kernel_size, stride, dilation))
        self.padding: str | tuple[int, ...] = padding if isinstance(padding, str) else self._each(padding)
        # The axes that the first convolution acts on; the second acts on the others.
        self.first = tuple(split == "channel" or axis < self.dimensions - 1 for axis in range(self.dimensions))
        rows = out_channels * math.prod(self._sizes(False))
        self._make(rows, in_channels * math.prod(self._sizes(True)), rank, out_channels, bias, seed)

    def _each(self, value: int | Sequence[int]) -> tuple[int, ...]:
        return (value,) * self.dimensions if isinstance(value, int) else tuple(value)

    def _sizes(self, first: bool) -> tuple[int, ...]:
        return self._of(self.kernel_size, first, 1)

    def _of(self, values: Sequence[int], first: bool, neutral: int) -> tuple[int, ...]:
        pairs = zip(values, self.first, strict=True)
        return tuple(value if mine == first else neutral for value, mine in pairs)

    @classmethod
    def from_dense(
        cls,
        conv: Any,
        rank: int,
        init: str = "spectral",
        *,
        split: str = "spatial",
        activation: Any = "identity",
        inputs: Tensor | None = None,
        seed: int = 0,
    ) -> Any:
        """Create a low-rank convolution from an nn.Conv1d or nn.Conv2d of one group, on its device and in its dtype.

        Arguments as for `LowRankLinear.from_dense`; `inputs` are real patches (n, columns), for init="data" and
        split="channel".

        Raises:
            ConfigError: several groups, rank beyond full rank, unknown split or init.
        """
        return cls.like(conv, rank, split=split).fill(conv, init, activation, inputs, seed)

    @classmethod
    def like(cls, conv: Any, rank: int, *, split: str = "spatial") -> Any:
        """Create a layer of the same sizes with uninitialised factors."""
        if conv.groups != 1:
            raise ConfigError(
                f"the convolution has {conv.groups} groups of {conv.in_channels // conv.groups} channels; expected one "
                "group, whose kernel is one matrix. Leave it dense: what groups save is what low rank would save"
            )
        return cls(
            conv.in_channels,
            conv.out_channels,
            conv.kernel_size,
            rank,
            split=split,
            stride=conv.stride,
            padding=conv.padding,
            dilation=conv.dilation,
            bias=conv.bias is not None,
            padding_mode=conv.padding_mode,
            seed=None,
        )

    def matrix_of(self, weight: Tensor) -> Tensor:
        """Convert a kernel (out, in, *sizes) to the matrix to factorise, (rows, columns)."""
        axes = range(2, 2 + self.dimensions)
        mine = {flag: [axis for axis, first in zip(axes, self.first, strict=True) if first == flag] for flag in (0, 1)}
        return weight.permute(0, *mine[0], 1, *mine[1]).reshape(-1, self.in_channels * math.prod(self._sizes(True)))

    def kernel(self) -> Tensor:
        """Return the kernel (out, in, *sizes) of the equivalent dense convolution."""
        return self.kernel_from(self.weight_matrix())

    def kernel_from(self, matrix: Tensor) -> Tensor:
        """Convert a matrix to a kernel: (rows, columns) -> (out, in, *sizes)."""
        first, second = ([k for k, f in zip(self.kernel_size, self.first, strict=True) if f == flag] for flag in (1, 0))
        whole = matrix.reshape(self.out_channels, *second, self.in_channels, *first)
        places = iter(range(1, 1 + len(second))), iter(range(2 + len(second), 2 + self.dimensions))
        return whole.permute(0, 1 + len(second), *(next(places[flag]) for flag in self.first))

    def _kernels(self) -> tuple[Tensor, Tensor]:
        """Return the two kernels, (rank, in, ...) and (out, rank, ...)."""
        first = self.V.T.reshape(self.rank, self.in_channels, *self._sizes(True))
        second = self.U.reshape(self.out_channels, -1, self.rank).transpose(1, 2)
        second = second.reshape(self.out_channels, self.rank, *self._sizes(False))
        # Use the strides of a dense kernel. Views look like channels last (a 1 × 1 kernel even after contiguous()), and
        # there the backward pass of oneDNN 3.12 (torch 2.13) writes beyond its memory on CPUs without AVX-512:
        # training ended in "munmap_chunk(): invalid pointer".
        plain = torch.contiguous_format
        return first.clone(memory_format=plain), second.clone(memory_format=plain)

    def _settings(self, first: bool) -> dict[str, Any]:
        return {
            "kernel_size": self._sizes(first),
            "stride": self._of(self.stride, first, 1),
            "padding": self.padding if isinstance(self.padding, str) else self._of(self.padding, first, 0),
            "dilation": self._of(self.dilation, first, 1),
            "padding_mode": self.padding_mode,
        }

    def pads(self, first: bool) -> list[int]:
        """Return one convolution's padding in the order of `nn.functional.pad`: last axis first, before and after."""
        settings, found = self._settings(first), []
        for axis in reversed(range(self.dimensions)):
            if settings["padding"] == "same":
                total = settings["dilation"][axis] * (settings["kernel_size"][axis] - 1)
                found += [total // 2, total - total // 2]
            else:
                found += [0 if settings["padding"] == "valid" else settings["padding"][axis]] * 2
        return found

    def forward(self, x: Tensor) -> Tensor:
        """([n,] in_channels, *sizes) -> ([n,] out_channels, *sizes), in the dtype of x."""
        hidden = x.to(self.U.dtype)
        convolve = (nn.functional.conv1d, nn.functional.conv2d)[self.dimensions - 1]
        for first, kernel, bias in zip((True, False), self._kernels(), (None, self.bias), strict=True):
            settings = self._settings(first)
            if self.padding_mode != "zeros":
                hidden = nn.functional.pad(hidden, self.pads(first), mode=self.padding_mode)
                settings["padding"] = 0
            hidden = convolve(hidden, kernel, bias, settings["stride"], settings["padding"], settings["dilation"])
        return hidden.to(x.dtype)

    def patches(self, x: Tensor) -> Tensor:
        """Unfold the inputs of the dense kernel: ([n,] in_channels, *sizes) -> (pixels, in_channels · Πkernel)."""
        x = x if x.ndim == 2 + self.dimensions else x.unsqueeze(0)
        mode = "constant" if self.padding_mode == "zeros" else self.padding_mode
        both = [one + two for one, two in zip(self.pads(True), self.pads(False), strict=True)]
        x = nn.functional.pad(x, both, mode=mode)
        lead = (1,) * (2 - self.dimensions)  # a sequence is an image of height one
        sizes = (*lead, *self.kernel_size), (*lead, *self.dilation), 0, (*lead, *self.stride)
        found = nn.functional.unfold(x if not lead else x.unsqueeze(2), *sizes)
        return found.transpose(1, 2).reshape(-1, found.shape[1])

    def macs(self) -> tuple[int, int]:
        """Return MACs like `LowRank.macs`; the first convolution also runs at pixels that the second one's stride
        skips."""
        positions = math.prod(self._of(self.stride, False, 1))
        dense = self.in_channels * self.out_channels * math.prod(self.kernel_size)
        return self.V.numel() * positions + self.U.numel(), dense

    @torch.no_grad()
    def factored(self) -> nn.Sequential:
        """Return the two convolutions; the first has no bias."""
        cls: Any = self.convolution
        first, second = self._kernels()
        one = cls(self.in_channels, self.rank, **self._settings(True), bias=False, device="meta")
        two = cls(self.rank, self.out_channels, **self._settings(False), bias=self.bias is not None, device="meta")
        return nn.Sequential(with_tensors(one, first, None), with_tensors(two, second, self.bias))

    @torch.no_grad()
    def dense(self) -> nn.Module:
        """Return the equivalent single convolution."""
        cls: Any = self.convolution
        settings: dict[str, Any] = {"stride": self.stride, "padding": self.padding, "dilation": self.dilation}
        settings |= {"padding_mode": self.padding_mode, "bias": self.bias is not None, "device": "meta"}
        conv = cls(self.in_channels, self.out_channels, self.kernel_size, **settings)
        return with_tensors(conv, self.kernel_from(rounded_product(self.U, self.V)), self.bias)

    def extra_repr(self) -> str:
        sizes = f"{self.in_channels} → {self.rank} → {self.out_channels}, kernel_size={self.kernel_size}"
        return f"{sizes}, stride={self.stride}, padding={self.padding}, split={self.split!r}"


class LowRankConv1d(LowRankConv):
    """A low-rank convolution over sequences, ([n,] channels, length); see `LowRankConv`."""

    dimensions = 1
    convolution = nn.Conv1d


class LowRankConv2d(LowRankConv):
    """A low-rank convolution over images, ([n,] channels, height, width); see `LowRankConv`."""

    dimensions = 2
    convolution = nn.Conv2d


def low_rank_class(module: nn.Module) -> type[LowRankLinear] | type[LowRankConv]:
    """Return the low-rank class for a dense nn.Linear, nn.Conv1d or nn.Conv2d."""
    if isinstance(module, nn.Linear):
        return LowRankLinear
    return LowRankConv1d if isinstance(module, nn.Conv1d) else LowRankConv2d
