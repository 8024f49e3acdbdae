"""Tiny models whose attention is far from uniform, and linear attention in them; for tests of attention and caches."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.nn.functional import pad
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from snnk_peft import AttentionPart, SNNKConfig, get_snnk_model
from snnk_peft.layers.kernel_attention import KernelAttention, continue_attention
from tests.tiny_models import inputs_for, tiny, trained

TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "vocab_size": 100}
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
LLAMA = LlamaConfig(intermediate_size=64, max_position_embeddings=128, **SIZES, **TOKENS)
GPT2 = GPT2Config(n_embd=32, n_layer=2, n_head=2, n_positions=64, attn_pdrop=0.0, **TOKENS)


def causal_model(name: str, wide: bool = True) -> Any:
    torch.manual_seed(0)
    model = LlamaForCausalLM(copy.deepcopy(LLAMA)) if name == "llama" else GPT2LMHeadModel(copy.deepcopy(GPT2))
    return (widened(model) if wide else model).eval()


def widened(model: Any) -> Any:
    """The model with six times its matrices: fresh weights are so small that all attention is uniform."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(6)
    return model


def sharpened(family: str, factor: float = 4) -> Any:
    """A tiny encoder whose attention is not uniform."""
    model = tiny(family)
    words = ("query", "key", "q_lin", "k_lin", "q_proj", "k_proj", "Wqkv")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2 and any(word in name for word in words):
                parameter.mul_(factor)
    return model


def left_padded() -> dict[str, torch.Tensor]:
    ids = torch.randint(3, 100, (3, 12), generator=torch.Generator().manual_seed(5))
    mask = torch.ones_like(ids)
    mask[1, :5] = 0
    return {"input_ids": ids, "attention_mask": mask}


def in_pieces(
    kernel: KernelAttention, tensors: Sequence[Tensor], sizes: list[int], mask: Tensor | None = None
) -> tuple[Tensor, Any]:
    """What a layer gives for pieces of a text, each behind the state of those before it, and the last state."""
    masks = [None] * len(sizes) if mask is None else mask.split(sizes, -1)
    state, parts = None, []
    for piece in zip(*(tensor.split(sizes, -2) for tensor in tensors), masks, strict=True):
        part, state = continue_attention(kernel, *piece, state)
        parts.append(part)
    return torch.cat(parts, -2), state


@torch.no_grad()
def logits_of_pieces(
    model: Any, inputs: dict[str, Tensor], sizes: list[int], cache: Any, slots: int | None = None
) -> Tensor:
    """The same of a model and its cache. Masks speak of the tokens so far, or of as many slots as the cache has."""
    mask, parts, end = inputs["attention_mask"], [], 0
    positions = (mask.cumsum(-1) - 1).clamp_min(0)
    for size in sizes:
        begin, end = end, end + size
        known = mask[:, :end] if slots is None else pad(mask, (0, slots - mask.shape[1]), value=1)
        piece = {"input_ids": inputs["input_ids"][:, begin:end], "position_ids": positions[:, begin:end]}
        parts.append(model(**piece, attention_mask=known, past_key_values=cache).logits)
    return torch.cat(parts, 1)


def patched(model: Any, **fields: Any) -> Any:
    return get_snnk_model(model, SNNKConfig(attention=AttentionPart(**fields), modules_to_save=[])).eval()


def windowed(window: int | None = 4, **changes: Any) -> Any:
    """A tiny model that attends to a band in all layers, and keeps no more than that in its caches."""
    torch.manual_seed(0)
    config = transformers.MistralConfig(**SIZES, **TOKENS, intermediate_size=64, sliding_window=window, **changes)
    return widened(transformers.MistralForCausalLM(config).eval())


def built(family: str, parts: dict[str, Any]) -> tuple[Any, dict[str, torch.Tensor]]:
    """A patched model that is as if trained, and inputs for it."""
    model = sharpened("bert") if family == "bert" else causal_model(family)
    inputs = inputs_for(model) if family == "bert" else {**left_padded(), "use_cache": False}
    return trained(get_snnk_model(model, SNNKConfig(**parts, modules_to_save=[])), 0.1).eval(), inputs
