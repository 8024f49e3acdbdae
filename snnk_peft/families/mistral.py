"""Mistral: laid out as Llama; checkpoints with a sliding window keep it where attention stays softmax."""

import dataclasses

from snnk_peft.families import register_family
from snnk_peft.families.base_layouts import LLAMA

register_family(dataclasses.replace(LLAMA, name="mistral"))
