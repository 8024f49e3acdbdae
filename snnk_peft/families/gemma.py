"""Gemma: laid out as Llama; the FFN is gated by GELU, norms scale by one plus their weight."""

import dataclasses

from snnk_peft.families import register_family
from snnk_peft.families.base_layouts import LLAMA

register_family(dataclasses.replace(LLAMA, name="gemma"))
