"""Softmax attention, and beside it the error of a layer's linear attention, which `fit_attention` minimises."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers.integrations.sdpa_attention import repeat_kv

from snnk_peft.functional.precision import wide
from snnk_peft.functional.relative_error import relative_error
from snnk_peft.layers.kernel_attention import KernelAttention
from snnk_peft.parts.attention.softmax import pairwise_mask, softmax_weights


class Observer:
    """Takes the kernel's place in an attention module: returns softmax, and records the loss of the kernel.

    Args:
        path: of the attention module.
        module: the attention module.
        kernel: its linear attention.
        loss: see `fit_attention`.

    Attributes:
        losses: of the calls since `clear`, scalars with a gradient; empty without gradients.
        tokens: queries seen since `clear`, padding left out.
    """

    def __init__(self, path: str, module: nn.Module, kernel: KernelAttention, loss: str):
        self.path, self.module, self.kernel, self.loss = path, module, kernel, loss
        self.near_field = kernel.near_field  # the attention function asks for it
        self.fitting = False
        self.clear()

    def clear(self) -> None:
        self.losses: list[torch.Tensor] = []
        self.tokens = 0
        self._sums: Any = [0.0, 0.0, 0.0]  # of squared errors, of outputs, of their squares

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
        factor = q.shape[-1] ** -0.5 if scaling is None else scaling
        pairs = pairwise_mask(mask, q, k, causal)
        target = softmax_weights(wide(q), wide(k), pairs, factor)
        out = target @ repeat_kv(wide(v), q.shape[1] // v.shape[1])
        counted = torch.ones(q.shape[0], q.shape[2], dtype=torch.bool, device=q.device)
        if mask is not None:
            counted = mask[:, -q.shape[2] :]
        options: dict[str, Any] = {"causal": causal, "scaling": scaling}
        if self.fitting:
            with torch.enable_grad():
                self.losses.append(self._loss(q, k, v, mask, options, target, out).transpose(1, 2)[counted].mean())
        else:
            self._measure(wide(self.kernel(q, k, v, mask, **options)) - out, out, counted)
        self.tokens += int(counted.sum())
        return out.to(q.dtype)

    def _loss(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: torch.Tensor | None,
        options: dict[str, Any],
        target: torch.Tensor,
        out: torch.Tensor,
    ) -> torch.Tensor:
        """(B, H, L), per query."""
        if self.loss == "output":
            return (wide(self.kernel(q, k, v, mask, **options)) - out).square().mean(-1)
        own = wide(self.kernel.weights(q, k, mask, **options))
        if self.loss == "weights":
            return (own - target).square().sum(-1)
        tiny = torch.finfo(own.dtype).tiny
        own = own / own.sum(-1, keepdim=True).clamp_min(tiny)
        return (torch.xlogy(target, target) - target * own.clamp_min(tiny).log()).sum(-1)

    def _measure(self, difference: torch.Tensor, out: torch.Tensor, counted: torch.Tensor) -> None:
        error, rows = (x.transpose(1, 2)[counted].flatten(1).double() for x in (difference, out))
        for index, value in enumerate((error.square().sum(), rows.sum(0), rows.square().sum())):
            self._sums[index] = self._sums[index] + value

    def error(self) -> float:
        """Squared error of the outputs since `clear`, relative to their variance."""
        wrong, total, squares = self._sums
        variance = squares - total.square().sum() / max(self.tokens, 1)
        return relative_error(float(wrong), float(variance), float(squares))
