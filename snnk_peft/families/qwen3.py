"""Qwen3: laid out as Llama; queries and keys are normed per head."""

import dataclasses

from snnk_peft.families import register_family
from snnk_peft.families.base_layouts import LLAMA

register_family(dataclasses.replace(LLAMA, name="qwen3"))
