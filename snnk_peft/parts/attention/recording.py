"""Attention that runs as softmax and records data for a fit: a sample of inputs, or the error of linear attention."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers.integrations.sdpa_attention import repeat_kv

from snnk_peft.functional.pairwise import pairwise_mask
from snnk_peft.functional.precision import full_precision, wide
from snnk_peft.layers.kernel_attention import KernelAttention
from snnk_peft.layers.slots import Given
from snnk_peft.parts.attention.softmax import softmax_weights
from snnk_peft.solvers.centroids import Scores
from snnk_peft.solvers.reduce import relative_error


class Recorded(NamedTuple):
    """The inputs of one attention call, and its real tokens.

    Attributes:
        q: (B, H, L, d).
        k: (B, G, N, d).
        v: (B, G, N, D).
        out: result of softmax attention, (B, H, L, D) in at least fp32.
        mask: (B, N) bool, or None.
        causal: whether a query sees only keys at or before it.
        scaling: factor on q·k.
        positions: (B or 1, L), positions of the tokens, or None for 0, 1, ...
        given: weights of the tokens and the missing part after the output projection, with rows as in `rows`; or None.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor
    mask: torch.Tensor | None
    causal: bool
    scaling: float
    positions: torch.Tensor | None = None
    given: Given | None = None

    @property
    def counted(self) -> torch.Tensor:
        """Mask of real tokens (B, L), False at padding."""
        if self.mask is None:
            return torch.ones(self.q.shape[0], self.q.shape[2], dtype=torch.bool, device=self.q.device)
        return self.mask[:, -self.q.shape[2] :]

    def scores(self) -> Scores:
        """Return queries (grouped by key heads) and keys in at least fp32, each times the root of the scaling."""
        root = self.scaling**0.5
        pairs = pairwise_mask(self.mask, self.q, self.k, self.causal)
        q, out = (wide(each).unflatten(1, (self.k.shape[1], -1)) for each in (self.q, self.out))
        pairs = None if pairs is None else pairs.unsqueeze(1)
        return Scores(q * root, wide(self.k) * root, wide(self.v), out, pairs, self.counted)

    def rows(self, out: torch.Tensor) -> torch.Tensor:
        """(B, H, L, D) -> (n, H·D) without padding."""
        return out.transpose(1, 2).flatten(2)[self.counted]

    def softmax(self) -> torch.Tensor:
        return self.rows(self.out)

    @property
    def options(self) -> dict[str, Any]:
        """The further arguments of the kernel."""
        return {"causal": self.causal, "scaling": self.scaling, "positions": self.positions}

    def linear(self, kernel: KernelAttention) -> torch.Tensor:
        return self.rows(kernel(self.q, self.k, wide(self.v), self.mask, **self.options))

    def of_others(self, kernel: KernelAttention) -> Recorded:
        """Return the record without the heads that keep softmax."""
        if not kernel.full_heads:
            return self
        q, k, v = kernel.split(self.q, self.k, self.v)[1]
        return self._replace(q=q, k=k, v=v, out=kernel.split(self.out, self.k, self.v)[1][0])


class Recorder:
    """Stand-in for the kernel in an attention module that returns softmax attention and records its inputs."""

    near_field: int | None = None

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
        positions: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Softmax attention (B, H, L, D); arguments as in `KernelAttention.forward`."""
        scaling = q.shape[-1] ** -0.5 if scaling is None else scaling
        pairs = pairwise_mask(mask, q, k, causal)
        keys, values = (repeat_kv(wide(each), q.shape[1] // k.shape[1]) for each in (k, v))
        out, weights = self.attend(wide(q), keys, values, pairs, scaling)
        self.note(Recorded(q, k, v, out, mask, causal, scaling, positions), weights)
        return out.to(q.dtype)

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, pairs: torch.Tensor | None, scaling: float
    ) -> tuple[torch.Tensor, Any]:
        """Compute softmax attention over keys of every head, and its weights if `note` reads them."""
        with full_precision(q):
            return nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=pairs, scale=scaling), None

    def note(self, call: Recorded, weights: Any) -> None:
        """Record one call."""
        self.calls.append(call)


class Sample:
    """Random sample of calls with at most a given number of tokens, by reservoir sampling."""

    def __init__(self, tokens: int, generator: torch.Generator):
        self.most, self.generator = tokens, generator
        self.kept: list[tuple[float, Recorded]] = []

    def add(self, recorded: Recorded) -> None:
        """Add a call with a random rank; the calls with the highest ranks are kept."""
        self.kept.append((float(torch.rand((), generator=self.generator)), recorded))
        self.kept.sort(key=lambda pair: pair[0])
        while len(self.kept) > 1 and self.count > self.most:
            self.kept.pop()

    @property
    def count(self) -> int:
        return sum(recorded.q.shape[0] * recorded.q.shape[2] for _, recorded in self.kept)

    @property
    def tokens(self) -> int:
        """Number of tokens kept, without padding."""
        return sum(int(recorded.counted.sum()) for _, recorded in self.kept)

    def __iter__(self) -> Iterator[Recorded]:
        return (recorded for _, recorded in self.kept)


class Observer(Recorder):
    """Stand-in that records the loss of the kernel it stands in for instead of its inputs.

    Attributes:
        losses: losses of the calls since `clear`, scalars with a gradient; empty without gradients.
        tokens: number of queries seen since `clear`, without padding.
    """

    def __init__(self, path: str, module: nn.Module, kernel: KernelAttention, loss: str):
        self.path, self.module, self.kernel, self.loss = path, module, kernel, loss
        self.near_field = kernel.near_field  # the attention function reads it
        self.fitting = False
        self.clear()

    def clear(self) -> None:
        self.losses: list[torch.Tensor] = []
        self.tokens = 0
        self._sums: Any = [0.0, 0.0, 0.0]  # of squared errors, of outputs, of their squares

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, pairs: torch.Tensor | None, scaling: float
    ) -> tuple[torch.Tensor, Any]:
        weights = softmax_weights(q, k, pairs, scaling)
        return weights @ v, weights

    def note(self, call: Recorded, weights: Any) -> None:
        if self.fitting:
            with torch.enable_grad():
                self.losses.append(self._loss(call, weights).transpose(1, 2)[call.counted].mean())
        else:
            missed = self._kernel_output(call) - call.out
            error, rows = (x.transpose(1, 2)[call.counted].flatten(1).double() for x in (missed, call.out))
            for index, value in enumerate((error.square().sum(), rows.sum(0), rows.square().sum())):
                self._sums[index] = self._sums[index] + value
        self.tokens += int(call.counted.sum())

    def _kernel_output(self, call: Recorded) -> torch.Tensor:
        return wide(self.kernel(call.q, call.k, call.v, call.mask, **call.options))

    def _loss(self, call: Recorded, target: torch.Tensor) -> torch.Tensor:
        """Compute the loss per query, (B, H, L), from the weights of softmax."""
        if self.loss == "output":
            return (self._kernel_output(call) - call.out).square().mean(-1)
        own = wide(self.kernel.weights(call.q, call.k, call.mask, **call.options))
        if self.loss == "weights":
            return (own - target).square().sum(-1)
        tiny = torch.finfo(own.dtype).tiny
        own = own / own.sum(-1, keepdim=True).clamp_min(tiny)
        return (torch.xlogy(target, target) - target * own.clamp_min(tiny).log()).sum(-1)

    def error(self) -> float:
        """Return the squared error of the outputs since `clear`, relative to their variance."""
        wrong, total, squares = self._sums
        variance = squares - total.square().sum() / max(self.tokens, 1)
        return relative_error(float(wrong), float(variance), float(squares))
