"""OLMo 2: Llama with the norms behind attention and FFN; adapters stand behind the norms."""

import dataclasses

from snnk_peft.families import register_family
from snnk_peft.families.base_layouts import LLAMA

register_family(
    dataclasses.replace(
        LLAMA,
        name="olmo2",
        attention_adapter="post_attention_layernorm",
        ffn_adapter="post_feedforward_layernorm",
    )
)
