"""Qwen2: laid out as Llama, with biases in the projections of the attention."""

import dataclasses

from snnk_peft.families import register_family
from snnk_peft.families.base_layouts import LLAMA

register_family(dataclasses.replace(LLAMA, name="qwen2"))
