"""Record and sample the inputs of a layer's attention while the model runs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import nn
from transformers.integrations.sdpa_attention import repeat_kv

from snnk_peft.functional.precision import full_precision, wide
from snnk_peft.layers.kernel_attention import KernelAttention
from snnk_peft.parts.attention.softmax import pairwise_mask
from snnk_peft.solvers.centroids import (
    Scores,
)


class Recorded(NamedTuple):
    """The inputs of one attention call, and which tokens count.

    Attributes:
        q: (B, H, L, d).
        k: (B, G, N, d).
        v: (B, G, N, D).
        out: what softmax gave, (B, H, L, D) in at least fp32.
        mask: (B, N) bool, or None.
        causal: whether a query sees only keys at or before it.
        scaling: factor on q·k.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor
    mask: torch.Tensor | None
    causal: bool
    scaling: float

    @property
    def counted(self) -> torch.Tensor:
        """(B, L), False at padding."""
        if self.mask is None:
            return torch.ones(self.q.shape[0], self.q.shape[2], dtype=torch.bool, device=self.q.device)
        return self.mask[:, -self.q.shape[2] :]

    def scores(self) -> Scores:
        """Queries and keys in at least fp32, each times the root of the scaling, query heads by key heads."""
        root = self.scaling**0.5
        pairs = pairwise_mask(self.mask, self.q, self.k, self.causal)
        q, out = (wide(each).unflatten(1, (self.k.shape[1], -1)) for each in (self.q, self.out))
        pairs = None if pairs is None else pairs.unsqueeze(1)
        return Scores(q * root, wide(self.k) * root, wide(self.v), out, pairs, self.counted)

    def rows(self, out: torch.Tensor) -> torch.Tensor:
        """(B, H, L, D) -> (n, H·D) without padding."""
        return out.transpose(1, 2).flatten(2)[self.counted]

    def softmax(self) -> torch.Tensor:
        """Return the outputs of softmax attention, (n, H·D)."""
        return self.rows(self.out)

    def linear(self, kernel: KernelAttention) -> torch.Tensor:
        """Compute the outputs of linear attention, (n, H·D)."""
        out = kernel(self.q, self.k, wide(self.v), self.mask, causal=self.causal, scaling=self.scaling)
        return self.rows(out)


class Recorder:
    """Takes the kernel's place in an attention module: returns softmax, and records its inputs."""

    near_field = None

    def __init__(self) -> None:
        self.calls: list[Recorded] = []

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: torch.Tensor | None = None,
        *,
        causal: bool = False,
        scaling: float | None = None,
    ) -> torch.Tensor:
        """Softmax attention (B, H, L, D); arguments as in `KernelAttention.forward`."""
        scaling = q.shape[-1] ** -0.5 if scaling is None else scaling
        pairs = pairwise_mask(mask, q, k, causal)
        keys, values = (repeat_kv(wide(each), q.shape[1] // k.shape[1]) for each in (k, v))
        with full_precision(q):
            out = nn.functional.scaled_dot_product_attention(wide(q), keys, values, attn_mask=pairs, scale=scaling)
        self.calls.append(Recorded(q, k, v, out, mask, causal, scaling))
        return out.to(q.dtype)


class Sample:
    """A random sample of calls, of at most a given number of tokens: reservoir sampling.

    Args:
        tokens: at most so many are kept, but at least one call.
        generator: chooses.
    """

    def __init__(self, tokens: int, generator: torch.Generator):
        self.most, self.generator = tokens, generator
        self.kept: list[tuple[float, Recorded]] = []

    def add(self, recorded: Recorded) -> None:
        """Each call has a random rank; those of the highest ranks stay."""
        self.kept.append((float(torch.rand((), generator=self.generator)), recorded))
        self.kept.sort(key=lambda pair: pair[0])
        while len(self.kept) > 1 and self.count > self.most:
            self.kept.pop()

    @property
    def count(self) -> int:
        """Tokens kept, padding included."""
        return sum(recorded.q.shape[0] * recorded.q.shape[2] for _, recorded in self.kept)

    @property
    def tokens(self) -> int:
        """Tokens kept, without padding."""
        return sum(int(recorded.counted.sum()) for _, recorded in self.kept)

    def __iter__(self) -> Iterator[Recorded]:
        return (recorded for _, recorded in self.kept)
