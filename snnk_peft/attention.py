"""Public names of attention: the recurrent cache (parts/attention/)."""

from snnk_peft.parts.attention.cache import RecurrentCache
from snnk_peft.parts.attention.interface import NAME, kernel_attention_forward, padding_mask

__all__ = ["NAME", "RecurrentCache", "kernel_attention_forward", "padding_mask"]
