"""Llama: pre-norm decoder, rotary positions, grouped-query attention, gated FFN (SwiGLU)."""

from snnk_peft.families import register_family
from snnk_peft.families.base_layouts import LLAMA

register_family(LLAMA)
