"""The only place that registers with transformers' attention and mask interfaces."""

from snnk_peft.attention.interface import NAME, kernel_attention_forward, padding_mask

__all__ = ["NAME", "kernel_attention_forward", "padding_mask"]
