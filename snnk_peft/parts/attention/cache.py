"""RecurrentCache: generation with linear attention in constant memory and constant time per token.

    model.generate(**inputs)                                          # patched models and bundles use it by default
    model.generate(**inputs, past_key_values=RecurrentCache(model))   # one to keep, for the next turn of a conversation
    model.generate(**inputs, past_key_values=DynamicCache(config=model.config))       # all keys kept, as elsewhere

A layer with linear attention holds sums over all earlier keys (RecurrentLayer); a layer with softmax attention keeps
its keys in an ordinary, growing layer. A forward pass outside `generate` uses the given cache, or creates a growing one
if there is none.

An attention function of transformers does not receive the cache, only the results of the cache's `update`: here just
the new keys and values, with the RecurrentLayer as an attribute of the keys. The function finds it there and calls it
with the currently active kernel, so neither hooks nor global state are needed. A model that does not pass the keys on
unchanged is detected at the next step.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer

from snnk_peft.digests import tensor_digest, value_digest
from snnk_peft.errors import ConfigError, UnsupportedError
from snnk_peft.layers.attention_term import KeptMaps
from snnk_peft.layers.kernel_attention import AttentionMemory, KernelAttention, continue_attention
from snnk_peft.parts.attention.interface import CACHE_LAYER, NAME, active_kernel, is_linear

GROWING = "past_key_values=transformers.DynamicCache(config=model.config)"  # what to pass where sums are not enough


class RecurrentCache(Cache):
    """A cache whose size does not grow with the number of tokens, for a causal model with linear attention.

    Chunked prefill, beam search, left padding, pickling and `copy.deepcopy` of a cache with a common prompt work as
    with other caches; cropping does not.

    Args:
        model: from `get_snnk_model`, or a bundle. Linear layers are determined when the cache is created, which is
            not possible while adapters are disabled.

    Raises:
        UnsupportedError: no layer of the model currently has linear attention.

    Example:
        >>> import torch
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from snnk_peft import AttentionPart, SNNKConfig, get_snnk_model
        >>> from snnk_peft.attention import RecurrentCache
        >>> tiny = LlamaConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64)
        >>> config = SNNKConfig(attention=AttentionPart(num_features=16), modules_to_save=[])
        >>> model = get_snnk_model(LlamaForCausalLM(tiny), config).eval()
        >>> cache = RecurrentCache(model)
        >>> _ = model.generate(input_ids=torch.tensor([[5, 6, 7]]), past_key_values=cache, max_new_tokens=4)
        >>> before = cache.nbytes
        >>> _ = model.generate(input_ids=torch.ones(1, 50).long(), past_key_values=cache, max_new_tokens=4)
        >>> cache.nbytes == before
        True
    """

    def __init__(self, model: nn.Module):
        base = plain_model(model)
        linear = linear_layers(base)
        if not linear:
            raise UnsupportedError(
                f"no layer of {type(base).__name__} has linear attention at the moment (attention implementation "
                f"{getattr(base.config, '_attn_implementation', None)!r}, adapters may be disabled); expected a model "
                f"patched with an AttentionPart, or a bundle of one. For softmax attention pass {GROWING}"
            )
        layers = DynamicCache(config=base.config).layers
        for index in linear:
            layers[index] = RecurrentLayer()
        super().__init__(layers=layers)

    @property
    def nbytes(self) -> int:
        """Size of all layers in bytes: constant if all are linear and no head keeps softmax."""
        own = sum(layer.nbytes for layer in self.layers if isinstance(layer, RecurrentLayer))
        kept = [getattr(layer, name, None) for layer in self.layers for name in ("keys", "values")]
        return own + sum(tensor.untyped_storage().nbytes() for tensor in kept if tensor is not None)


class RecurrentByDefault:
    """Replacement for `prepare_inputs_for_generation` that turns the cache made by `generate` into a RecurrentCache.

    transformers calls this method to let a model choose its inputs. Only an empty, growing cache created by `generate`
    itself is exchanged, and only while some layer is linear; the caller's own cache stays. The assistant of another
    model gets a growing cache that keeps all keys, since rejected tokens are cropped from it; an assistant is
    recognised by a first step that is not flagged as the first.
    """

    def __init__(self, model: Any):
        self.model = model
        self.__signature__ = inspect.signature(model.prepare_inputs_for_generation)  # `generate` inspects its arguments

    def __call__(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Prepare inputs as the model does, with a RecurrentCache in place of the cache created by `generate`."""
        cache: Any = kwargs.get("past_key_values")
        made_by_generate = type(cache) is DynamicCache and not getattr(cache, "_is_user_defined", False)
        if made_by_generate and not cache.offloading and cache.get_seq_length() == 0:
            linear = linear_layers(self.model)
            if linear and kwargs.get("is_first_iteration"):
                kwargs["past_key_values"] = RecurrentCache(self.model)
            else:
                for index in linear:  # instead of a layer that drops keys outside the window
                    cache.layers[index] = DynamicLayer()
        return type(self.model).prepare_inputs_for_generation(self.model, *args, **kwargs)


def use_recurrent_cache(model: Any) -> None:
    """Let `model.generate` use a RecurrentCache unless another one is given; no change for an encoder."""
    if model.can_generate():
        model.prepare_inputs_for_generation = RecurrentByDefault(model)


def release_recurrent_cache(model: Any) -> None:
    """Undo `use_recurrent_cache`."""
    if isinstance(vars(model).get("prepare_inputs_for_generation"), RecurrentByDefault):
        del model.prepare_inputs_for_generation


def linear_layers(model: nn.Module) -> list[int]:
    """Return the indices of the layers whose attention is currently linear; none while adapters are disabled.

    Raises:
        ConfigError: an attention module without a layer index.
    """
    if not is_linear(getattr(model.config, "_attn_implementation", None)):
        return []
    modules = [module for module in model.modules() if active_kernel(module) is not None]
    unknown = {type(module).__name__ for module in modules if getattr(module, "layer_idx", None) is None}
    if unknown:
        raise ConfigError(
            f"{', '.join(sorted(unknown))} has no layer_idx, by which caches know layers; build it with one"
        )
    return [module.layer_idx for module in modules]  # type: ignore[misc]


def plain_model(model: Any) -> Any:
    """Return the transformers model inside a PeftModel, or the model itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


class KernelRef:
    """Reference to the linear attention behind the sums: the object itself or, once unpickled, one with equal
    tensors."""

    def __init__(self, kernel: KernelAttention):
        self._kernel: weakref.ref[KernelAttention] | None = weakref.ref(kernel)
        self._digest: str | None = None

    def matches(self, kernel: KernelAttention) -> bool:
        return self._digest == tensors_digest(kernel) if self._kernel is None else self._kernel() is kernel

    def __deepcopy__(self, memo: dict[int, Any]) -> KernelRef:
        return self

    def __getstate__(self) -> dict[str, Any]:
        digest = self._digest
        if self._kernel is not None and (kernel := self._kernel()) is not None:
            digest = tensors_digest(kernel)
        return {"_kernel": None, "_digest": digest}


def tensors_digest(module: nn.Module) -> str:
    """Compute a digest of the names and contents of all tensors of a module."""
    tensors = [*module.named_parameters(), *module.named_buffers()]
    return value_digest({name: tensor_digest(tensor) for name, tensor in tensors})


class RecurrentLayer(CacheLayerMixin):
    """The cache of one layer with linear attention: sums over all keys so far, in at least fp32.

    Attributes:
        state: the sums, the last keys and values of a near field, its sinks, and all keys and values of heads that keep
            softmax; None before the first token.
    """

    is_sliding = False
    is_croppable = False
    supports_early_init = False

    def __init__(self) -> None:
        super().__init__()
        self.state: AttentionMemory | None = None
        self._seen = 0
        self._attended = True
        self._made_by: KernelRef | None = None
        self._maps = KeptMaps()

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Record the device; nothing is allocated before the first token."""
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Register new tokens; the attention function finds this layer on the keys and adds the tokens to the sums.

        Returns:
            The same keys and values, not those of earlier tokens.

        Raises:
            UnsupportedError: the previously registered tokens never reached the attention function.
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
        positions: Tensor | None = None,
    ) -> Tensor:
        """Compute the attention of the new tokens to all tokens so far; the state then includes them.

        Args:
            kernel: the linear attention in use, or None for softmax.
            query: (B, H, L, d).
            key: (B, G, L, d), from `update`.
            value: (B, G, L, D).
            mask: (B, earlier + L) bool, True at keys to attend to; the last L entries are for the new keys.
            causal: must be True.
            scaling: factor on q·k; None for d^-½.
            positions: (B or 1, L), positions of the new tokens.

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
            kernel, query, key, value, own, self.state, scaling=scaling, kept=self._maps, positions=positions
        )
        self._made_by = KernelRef(kernel)
        self._attended = True
        return out

    def get_seq_length(self) -> int:
        """Return the number of tokens seen, padding included."""
        return self._seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return length and offset of the mask, which covers all tokens although only the new ones still matter."""
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
        """Raise an error, since sums cannot be cropped.

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
        """Size of the state in bytes, without the copy of the feature maps that exists once per cache."""
        return sum(tensor.untyped_storage().nbytes() for tensor in _tensors(self.state))

    def _change(self, change: Callable[[Tensor], Tensor]) -> None:
        self.state = _mapped(self.state, change)


def _mapped(state: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(state, torch.Tensor):
        return change(state)
    if isinstance(state, tuple):
        parts = [_mapped(part, change) for part in state]
        return type(state)(*parts) if hasattr(state, "_fields") else tuple(parts)
    return state


def _tensors(state: Any) -> list[Tensor]:
    if isinstance(state, torch.Tensor):
        return [state]
    return [tensor for part in state for tensor in _tensors(part)] if isinstance(state, tuple) else []
