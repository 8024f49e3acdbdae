"""ViT: pre-norm encoder. Image classifiers have no pooler."""

from snnk_peft.families import register_family
from snnk_peft.families.base_layouts import VIT

register_family(VIT)
