"""ViT: pre-norm encoder. Image classifiers have no pooler and get a new one; the bare encoder has one."""

from snnk_peft.families import register_family
from snnk_peft.families.base_layouts import VIT

register_family(VIT)
