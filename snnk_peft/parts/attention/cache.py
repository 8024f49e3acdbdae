"""RecurrentCache: generation with linear attention in constant memory and constant time per token.

    model.generate(**inputs)                                          # patched models and bundles use it by themselves
    model.generate(**inputs, past_key_values=RecurrentCache(model))   # one to keep, for the next turn of a conversation
    model.generate(**inputs, past_key_values=DynamicCache(config=model.config))       # all keys kept, as elsewhere

A layer with linear attention holds sums over all earlier keys (recurrent_layer.py); a layer that was left
with softmax attention keeps its keys in an ordinary, growing layer. A forward pass outside `generate` uses the cache
that it is given, and makes itself a growing one if it is given none.
"""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn
from transformers import DynamicCache
from transformers.cache_utils import Cache, DynamicLayer

from snnk_peft.errors import ConfigError, UnsupportedError
from snnk_peft.parts.attention.interface import active_kernel, is_linear
from snnk_peft.parts.attention.recurrent_layer import GROWING, RecurrentLayer


class RecurrentCache(Cache):
    """A cache whose size does not grow with the number of tokens, for a causal model with linear attention.

    Chunked prefill, beam search, padding on the left, and `copy.deepcopy` of a cache that holds a common prompt work as
    with other caches, and so does pickling; only cropping does not.

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
        own = sum(layer.nbytes for layer in self.layers if isinstance(layer, RecurrentLayer))
        kept = [getattr(layer, name, None) for layer in self.layers for name in ("keys", "values")]
        return own + sum(tensor.untyped_storage().nbytes() for tensor in kept if tensor is not None)


class RecurrentByDefault:
    """Stands in for a model's `prepare_inputs_for_generation`: the cache that `generate` made becomes a RecurrentCache.

    This method is how transformers lets a model decide about its inputs. Only an empty, growing cache that `generate`
    made itself is exchanged, and only while some layer is linear; one that the caller gave stays. The assistant of
    another model gets a growing cache that keeps all keys, since tokens that are not accepted are taken back from it;
    what tells an assistant is that its first step is not announced as the first.

    Args:
        model: the model that generates.
    """

    def __init__(self, model: Any):
        self.model = model
        self.__signature__ = inspect.signature(model.prepare_inputs_for_generation)  # generate asks what it accepts

    def __call__(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Prepare inputs as the model does, with a RecurrentCache where generate would make a cache."""
        cache: Any = kwargs.get("past_key_values")
        made_by_generate = type(cache) is DynamicCache and not getattr(cache, "_is_user_defined", False)
        if made_by_generate and not cache.offloading and cache.get_seq_length() == 0:
            linear = linear_layers(self.model)
            if linear and kwargs.get("is_first_iteration"):
                kwargs["past_key_values"] = RecurrentCache(self.model)
            else:
                for index in linear:  # instead of one that drops what is outside of a window
                    cache.layers[index] = DynamicLayer()
        return type(self.model).prepare_inputs_for_generation(self.model, *args, **kwargs)


def use_recurrent_cache(model: Any) -> None:
    """Let `model.generate` use a RecurrentCache unless it is given another one. Nothing changes for an encoder."""
    if model.can_generate():
        model.prepare_inputs_for_generation = RecurrentByDefault(model)


def release_recurrent_cache(model: Any) -> None:
    """Undo what `use_recurrent_cache` did."""
    if isinstance(vars(model).get("prepare_inputs_for_generation"), RecurrentByDefault):
        del model.prepare_inputs_for_generation


def linear_layers(model: nn.Module) -> list[int]:
    """Indices of the layers whose attention is linear at the moment; none while adapters are disabled.

    Raises:
        ConfigError: an attention module that does not say which layer it is.
    """
    if not is_linear(getattr(model.config, "_attn_implementation", None)):
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
