"""DINOv2: pre-norm encoder of images, with a learned scale before each sum; the giant model's gated FFN is refused."""

import dataclasses

from snnk_peft.families import register_family
from snnk_peft.families.base_layouts import VIT

register_family(
    dataclasses.replace(
        VIT,
        name="dinov2",
        layers="{base}.encoder.layer",
        attention_adapter="layer_scale1",
        ffn_adapter="layer_scale2",
        ffn_norm="norm2",
        expects={"use_swiglu_ffn": False},
    )
)
