"""ViT-MSN: laid out as ViT, without a pooler."""

import dataclasses

from snnk_peft.families import register_family
from snnk_peft.families.base_layouts import VIT

register_family(dataclasses.replace(VIT, name="vit_msn", pooler=None, pooler_activation=None))
