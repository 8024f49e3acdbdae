"""RecurrentCache: generation with linear attention in constant memory and constant time per token.

    model.generate(**inputs)                                          # patched models and bundles use it by themselves
    model.generate(**inputs, past_key_values=RecurrentCache(model))   # one to keep, for the next turn of a conversation
    model.generate(**inputs, past_key_values=DynamicCache(config=model.config))       # all keys kept, as elsewhere

A layer with linear attention holds sums over all earlier keys (layers/recurrent_attention.py); a layer that was left
with softmax attention keeps its keys in an ordinary, growing layer.

An attention function of transformers does not receive the cache. What it does receive is what the cache's `update`
returned: here the new keys and values alone, with the cache layer as an attribute of the keys. The function finds it
there and lets it compute, with the kernel that is active at that moment, so neither hooks nor global state are needed.
A model that does not pass the keys on untouched is noticed at the next step.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.cache_utils import Cache, CacheLayerMixin

from snnk_peft.attention.interface import CACHE_LAYER, NAME, active_kernel
from snnk_peft.errors import ConfigError, UnsupportedError
from snnk_peft.layers.kernel_attention import KernelAttention
from snnk_peft.layers.recurrent_attention import KernelState, continue_attention

GROWING = "past_key_values=transformers.DynamicCache(config=model.config)"


class RecurrentLayer(CacheLayerMixin):
    """The cache of one layer with linear attention: sums over all keys so far, in at least fp32.

    Attributes:
        state: the sums, and the last keys and values of a near field; None before the first token.
    """

    is_sliding = False
    is_croppable = False
    supports_early_init = False

    def __init__(self) -> None:
        super().__init__()
        self.state: KernelState | None = None
        self._seen = 0
        self._attended = True
        self._made_by: weakref.ref[KernelAttention] | None = None

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
                f"interrupted, or the model's attention is not {NAME!r}. Start again with cache.reset(), and check "
                "model.config._attn_implementation"
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
        if self._made_by is not None and self._made_by() is not kernel:
            raise UnsupportedError(
                "the sums in this RecurrentCache were made with the feature maps of another adapter or model, and mean "
                "nothing to these; make a new RecurrentCache(model), or empty this one with cache.reset()"
            )
        if not causal:
            raise UnsupportedError("a RecurrentCache needs causal attention; this layer also attends to later tokens")
        own = None if mask is None else mask[:, mask.shape[1] - key.shape[-2] :]
        out, self.state = continue_attention(kernel, query, key, value, own, self.state, scaling=scaling)
        self._made_by = weakref.ref(kernel)
        self._attended = True
        return out

    def get_seq_length(self) -> int:
        """Number of tokens seen, padding included."""
        return self._seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of the mask: it speaks of all tokens, of which only the new ones are still of interest."""
        return self._seen + query_length, 0

    def get_max_length(self) -> int:
        """-1: no limit."""
        return -1

    def reset(self) -> None:
        """Forget everything."""
        self.state, self._seen, self._attended, self._made_by = None, 0, True, None

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Example i becomes example beam_idx[i]."""
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every example `repeats` times."""
        self._change(lambda tensor: tensor.repeat_interleave(repeats, 0))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the given examples."""
        self._change(lambda tensor: tensor[indices.to(tensor.device)])

    def offload(self) -> None:
        """Move the state to the CPU."""
        self._change(lambda tensor: tensor.to("cpu", non_blocking=True))

    def prefetch(self) -> None:
        """Move the state back."""
        self._change(lambda tensor: tensor.to(self.device, non_blocking=True))

    def crop(self, tokens_to_remove: int) -> None:
        """Impossible.

        Raises:
            UnsupportedError: always, unless there is nothing to remove.
        """
        if tokens_to_remove != 0:
            raise UnsupportedError(
                "a RecurrentCache cannot take tokens back (crop), because a sum does not say what it was made of; "
                "assisted decoding, prompt look-up and contrastive search need that. Pass "
                f"{GROWING} to generate for them"
            )

    @property
    def nbytes(self) -> int:
        """Bytes of the state."""
        return sum(tensor.untyped_storage().nbytes() for tensor in _tensors(self.state))

    def _change(self, change: Callable[[Tensor], Tensor]) -> None:
        self.state = _mapped(self.state, change)


class RecurrentCache(Cache):
    """A cache whose size does not grow with the number of tokens, for a causal model with linear attention.

    Chunked prefill, beam search, padding on the left, and `copy.deepcopy` of a cache that holds a common prompt work as
    with other caches; only cropping does not.

    Args:
        model: from `get_snnk_model`, or a bundle. Which layers are linear is read off when the cache is made; a cache
            made while adapters are disabled is refused.

    Raises:
        UnsupportedError: no layer of the model has linear attention at the moment.

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
        """Bytes of all layers: constant if all are linear."""
        total = 0
        for layer in self.layers:
            if isinstance(layer, RecurrentLayer):
                total += layer.nbytes
            else:
                total += sum(t.untyped_storage().nbytes() for t in (layer.keys, layer.values) if t is not None)
        return total


class RecurrentByDefault:
    """Stands in for a model's `prepare_inputs_for_generation`: the cache that `generate` made becomes a RecurrentCache.

    This method is how transformers lets a model decide about its inputs. Only an empty, growing cache that `generate`
    made itself is exchanged, and only while some layer is linear; one that the caller gave stays.

    Args:
        model: the model that generates.
    """

    def __init__(self, model: Any):
        self.model = model
        self.__signature__ = inspect.signature(model.prepare_inputs_for_generation)  # generate asks what it accepts

    def __call__(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """As the model's own method."""
        cache = kwargs.get("past_key_values")
        made_by_generate = type(cache) is DynamicCache and not getattr(cache, "_is_user_defined", False)
        if made_by_generate and not cache.offloading and cache.get_seq_length() == 0 and linear_layers(self.model):
            kwargs["past_key_values"] = RecurrentCache(self.model)
        return type(self.model).prepare_inputs_for_generation(self.model, *args, **kwargs)


def use_recurrent_cache(model: Any) -> None:
    """Let `model.generate` use a RecurrentCache unless it is given another one. Nothing changes for an encoder."""
    if model.can_generate():
        model.prepare_inputs_for_generation = RecurrentByDefault(model)


def release_recurrent_cache(model: Any) -> None:
    """Undo `use_recurrent_cache`."""
    if isinstance(vars(model).get("prepare_inputs_for_generation"), RecurrentByDefault):
        del model.prepare_inputs_for_generation


def linear_layers(model: nn.Module) -> list[int]:
    """Indices of the layers whose attention is linear at the moment; none while adapters are disabled.

    Raises:
        ConfigError: an attention module that does not say which layer it is.
    """
    if getattr(model.config, "_attn_implementation", None) != NAME:
        return []
    found = [module for module in model.modules() if active_kernel(module) is not None]
    unknown = {type(module).__name__ for module in found if getattr(module, "layer_idx", None) is None}
    if unknown:
        raise ConfigError(
            f"{', '.join(sorted(unknown))} has no layer_idx, by which caches know layers; build it with one"
        )
    return [module.layer_idx for module in found]  # type: ignore[misc]


def plain_model(model: Any) -> Any:
    """The transformers model inside a PeftModel, or the model itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _mapped(state: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Nested tuples with every tensor changed."""
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
