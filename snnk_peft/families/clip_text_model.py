"""CLIP's text encoder, bare or with its projection: laid out as the image encoder, causal."""

import dataclasses

from snnk_peft.families import register_family
from snnk_peft.families.base_layouts import CLIP

register_family(dataclasses.replace(CLIP, name="clip_text_model", causal=True))
