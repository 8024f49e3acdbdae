"""GPT-NeoX (Pythia): decoder with one matrix for query, key and value; attention and FFN may stand side by side."""

from snnk_peft.families import register_family
from snnk_peft.families.base import ModelFamily

register_family(
    ModelFamily(
        name="gpt_neox",
        layers="{base}.layers",
        attention="attention",
        attention_adapter="post_attention_dropout",
        ffn_in="mlp.dense_h_to_4h",
        activation="mlp.act",
        ffn_out="mlp.dense_4h_to_h",
        ffn_adapter="post_mlp_dropout",
        ffn_norm="post_attention_layernorm",
        classifier="score",
        causal=True,
    )
)
