"""SigLIP's image encoder: laid out as CLIP's."""

import dataclasses

from snnk_peft.families import register_family
from snnk_peft.families.base_layouts import CLIP

register_family(dataclasses.replace(CLIP, name="siglip_vision_model"))
