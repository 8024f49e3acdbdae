"""data2vec-vision: BERT modules in the order of ViT; attention is computed inside the module and stays softmax."""

import dataclasses

from snnk_peft.families import register_family
from snnk_peft.families.base_layouts import BERT

register_family(
    dataclasses.replace(
        BERT,
        name="data2vec-vision",
        attention="attention.attention",
        query="attention.attention.query",
        value="attention.attention.value",
        key=None,
        attention_out="attention.output.dense",
        ffn_norm="layernorm_after",
        last_norm="{base}.pooler.layernorm",
        pooler=None,
        pooler_activation=None,
        pooled_heads=("classifier",),
        classifier_of_pooler=None,
    )
)
