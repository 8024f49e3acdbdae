"""The only place that registers with transformers' attention and mask interfaces; the recurrent cache."""

from snnk_peft.attention.cache import RecurrentCache
from snnk_peft.attention.interface import NAME, kernel_attention_forward, padding_mask

__all__ = ["NAME", "RecurrentCache", "kernel_attention_forward", "padding_mask"]
