"""CLIP for image classification: its image encoder. The two towers together are refused; patch one of them."""

import dataclasses

from snnk_peft.families import register_family
from snnk_peft.families.base_layouts import CLIP

register_family(
    dataclasses.replace(
        CLIP,
        name="clip",
        layers="vision_model.encoder.layers",
        classifier="classifier",
        pooled_heads=("classifier",),
        sizes="vision_config",
        excludes="text_model",
    )
)
