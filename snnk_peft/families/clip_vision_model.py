"""CLIP's image encoder, bare or with its projection."""

from snnk_peft.families import register_family
from snnk_peft.families.base_layouts import CLIP

register_family(CLIP)
