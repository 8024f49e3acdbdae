"""DINOv2 with register tokens: laid out as DINOv2."""

import dataclasses

from snnk_peft.families import register_family
from snnk_peft.families.base_layouts import DINO

register_family(dataclasses.replace(DINO, name="dinov2_with_registers"))
