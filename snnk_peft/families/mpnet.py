"""MPNet: BERT layers with a bias per pair of positions, so attention stays softmax; the head is RoBERTa's."""

import dataclasses

from snnk_peft.families import register_family
from snnk_peft.families.base_layouts import ROBERTA

register_family(
    dataclasses.replace(
        ROBERTA,
        name="mpnet",
        attention="attention.attn",
        query="attention.attn.q",
        value="attention.attn.v",
        key=None,
        attention_out="attention.attn.o",
        attention_adapter="attention.dropout",
        ffn_norm="attention.LayerNorm",
    )
)
