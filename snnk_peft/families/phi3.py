"""Phi-3: Llama with one matrix for query, key and value and one for both expansions; dropout before each sum."""

import dataclasses

from snnk_peft.families import register_family
from snnk_peft.families.base_layouts import LLAMA

register_family(
    dataclasses.replace(
        LLAMA,
        name="phi3",
        query=None,
        value=None,
        attention_adapter="resid_attn_dropout",
        ffn_in="mlp.gate_up_proj",
        ffn_up=None,
        activation="mlp.activation_fn",
        ffn_adapter="resid_mlp_dropout",
    )
)
