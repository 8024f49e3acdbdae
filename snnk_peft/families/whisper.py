"""Whisper's encoder, bare or with the head for audio classification; models with the decoder are refused."""

import dataclasses

from snnk_peft.families import register_family
from snnk_peft.families.base_layouts import CLIP

register_family(
    dataclasses.replace(
        CLIP,
        name="whisper",
        layers="{base}.layers",
        ffn_in="fc1",
        activation="activation_fn",
        ffn_out="fc2",
        ffn_adapter="fc2",
        ffn_norm="final_layer_norm",
        classifier="classifier",
        encoder="encoder",
        excludes="decoder",
        attention_backend=True,
    )
)
