"""DeiT: laid out as ViT; a distilled model has a second head, on the distillation token."""

import dataclasses

from snnk_peft.families import register_family
from snnk_peft.families.base_layouts import VIT

register_family(
    dataclasses.replace(
        VIT,
        name="deit",
        pooled_heads=("classifier", "cls_classifier", "distillation_classifier"),
    )
)
