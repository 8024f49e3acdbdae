"""RecurrentLayer: the part of a RecurrentCache that belongs to one layer with linear attention.

An attention function of transformers does not receive the cache. What it does receive is what the cache's `update`
returned: here the new keys and values alone, with this layer as an attribute of the keys. The function finds it there
and lets it compute, with the kernel that is active at that moment, so neither hooks nor global state are needed. A
model that does not pass the keys on untouched is noticed at the next step.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import CacheLayerMixin

from snnk_peft.errors import UnsupportedError
from snnk_peft.layers.attention_term import KeptMaps
from snnk_peft.layers.joint_attention import JointState
from snnk_peft.layers.kernel_attention import KernelAttention
from snnk_peft.layers.recurrent_attention import KernelState, continue_attention
from snnk_peft.parts.attention.interface import CACHE_LAYER, NAME

GROWING = "past_key_values=transformers.DynamicCache(config=model.config)"  # what to pass where sums are not enough


class KernelRef:
    """Which linear attention made the sums: the object itself or, once unpickled, one with equal tensors.

    Args:
        kernel: the linear attention. It is not kept alive.
    """

    def __init__(self, kernel: KernelAttention):
        self._kernel: weakref.ref[KernelAttention] | None = weakref.ref(kernel)
        self._digest: str | None = None

    def matches(self, kernel: KernelAttention) -> bool:
        """Return True if `kernel` made the sums."""
        return self._digest == tensors_digest(kernel) if self._kernel is None else self._kernel() is kernel

    def __deepcopy__(self, memo: dict[int, Any]) -> KernelRef:
        return self

    def __getstate__(self) -> dict[str, Any]:
        digest = self._digest
        if self._kernel is not None and (kernel := self._kernel()) is not None:
            digest = tensors_digest(kernel)
        return {"_kernel": None, "_digest": digest}


def tensors_digest(module: nn.Module) -> str:
    """SHA-256 of the names and contents of all tensors of a module."""
    digest = hashlib.sha256()
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


class RecurrentLayer(CacheLayerMixin):
    """The cache of one layer with linear attention: sums over all keys so far, in at least fp32.

    Attributes:
        state: the sums, the last keys and values of a near field, and its sinks; None before the first token.
    """

    is_sliding = False
    is_croppable = False
    supports_early_init = False

    def __init__(self) -> None:
        super().__init__()
        self.state: KernelState | JointState | None = None
        self._seen = 0
        self._attended = True
        self._made_by: KernelRef | None = None
        self._maps = KeptMaps()

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Remember the device; there is nothing to allocate before the first token."""
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Announce new tokens; the attention function, which finds this layer at the keys, adds them to the sums.

        Args:
            key_states: (B, G, L, d).
            value_states: (B, G, L, D).
            *args: for other layers.
            **kwargs: for other layers.

        Returns:
            The same keys and values, not those of earlier tokens.

        Raises:
            UnsupportedError: the tokens announced before never reached the attention function.
        """
        if not self._attended:
            raise UnsupportedError(
                "a RecurrentCache got new keys, but those before were never attended to: the forward pass was "
                "interrupted, or another attention was chosen after the cache was made. Start again with "
                f"cache.reset(), and check that model.config._attn_implementation is {NAME!r}"
            )
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self._attended = False
        self._seen += key_states.shape[-2]
        keys = key_states.view_as(key_states)  # an object of our own to carry the attribute
        setattr(keys, CACHE_LAYER, self)
        return keys, value_states

    def attend(
        self,
        kernel: KernelAttention | None,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        *,
        causal: bool,
        scaling: float | None,
    ) -> Tensor:
        """Attention of the new tokens to all tokens so far; the state then includes them.

        Args:
            kernel: the linear attention in use, or None for softmax.
            query: (B, H, L, d).
            key: (B, G, L, d), from `update`.
            value: (B, G, L, D).
            mask: (B, earlier + L) bool, True where a key counts; its end is about the new keys.
            causal: must be True.
            scaling: factor on q·k; None for d^-½.

        Returns:
            (B, H, L, D).

        Raises:
            UnsupportedError: softmax, other feature maps than those that made the state, or attention to later tokens.
        """
        if kernel is None:
            raise UnsupportedError(
                "softmax attention needs all earlier keys, and a RecurrentCache keeps only sums over their features: "
                "it was made while this layer had linear attention, and the adapter is now disabled or another one is "
                f"active. Pass {GROWING} instead"
            )
        if self._made_by is not None and not self._made_by.matches(kernel):
            raise UnsupportedError(
                "the sums in this RecurrentCache were made with the feature maps of another adapter or model, and mean "
                "nothing to these; make a new RecurrentCache(model), or empty this one with cache.reset()"
            )
        if not causal:
            raise UnsupportedError("a RecurrentCache needs causal attention; this layer also attends to later tokens")
        own = None if mask is None else mask[:, mask.shape[1] - key.shape[-2] :]
        out, self.state = continue_attention(
            kernel, query, key, value, own, self.state, scaling=scaling, kept=self._maps
        )
        self._made_by = KernelRef(kernel)
        self._attended = True
        return out

    def get_seq_length(self) -> int:
        """Number of tokens seen, padding included."""
        return self._seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of the mask: it speaks of all tokens, of which only the new ones are still of interest."""
        return self._seen + query_length, 0

    def get_max_length(self) -> int:
        return -1

    def reset(self) -> None:
        self.state, self._seen, self._attended, self._made_by = None, 0, True, None
        self._maps = KeptMaps()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._change(lambda tensor: tensor.repeat_interleave(repeats, 0))

    def batch_select_indices(self, indices: Tensor) -> None:
        self._change(lambda tensor: tensor[indices.to(tensor.device)])

    def offload(self) -> None:
        self._change(lambda tensor: tensor.to("cpu", non_blocking=True))

    def prefetch(self) -> None:
        self._change(lambda tensor: tensor.to(self.device, non_blocking=True))

    def crop(self, tokens_to_remove: int) -> None:
        """Impossible.

        Raises:
            UnsupportedError: always, unless there is nothing to remove.
        """
        if tokens_to_remove != 0:
            raise UnsupportedError(
                "a RecurrentCache cannot take tokens back (crop), because a sum does not say what it was made of; "
                "assisted decoding and prompt look-up need that. Pass "
                f"{GROWING} to generate of the model that is assisted"
            )

    @property
    def nbytes(self) -> int:
        """Bytes of the state; beside it, once per cache, there is a copy of the feature maps."""
        return sum(tensor.untyped_storage().nbytes() for tensor in _tensors(self.state))

    def _change(self, change: Callable[[Tensor], Tensor]) -> None:
        self.state = _mapped(self.state, change)


def _mapped(state: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Apply a function to every tensor in nested tuples."""
    if isinstance(state, torch.Tensor):
        return change(state)
    if isinstance(state, tuple):
        parts = [_mapped(part, change) for part in state]
        return type(state)(*parts) if hasattr(state, "_fields") else tuple(parts)
    return state


def _tensors(state: Any) -> list[Tensor]:
    """All tensors in nested tuples."""
    if isinstance(state, torch.Tensor):
        return [state]
    return [tensor for part in state for tensor in _tensors(part)] if isinstance(state, tuple) else []
