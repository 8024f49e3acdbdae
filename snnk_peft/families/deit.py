"""DeiT: laid out as ViT."""

import dataclasses

from snnk_peft.families import register_family
from snnk_peft.families.base_layouts import VIT

register_family(dataclasses.replace(VIT, name="deit"))
