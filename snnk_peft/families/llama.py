"""Llama: pre-norm decoder, rotary positions, grouped-query attention. Of the parts only attention fits: the FFN is
gated, two expansions multiplied, not one expansion and an activation; naming the whole block refuses the others.
"""

from snnk_peft.families import register_family
from snnk_peft.families.base import ModelFamily

register_family(
    ModelFamily(
        name="llama",
        layers="{base}.layers",
        attention="self_attn",
        attention_adapter="self_attn.o_proj",
        ffn_in="mlp",
        activation="mlp.act_fn",
        ffn_out="mlp.down_proj",
        ffn_adapter="mlp.down_proj",
        ffn_norm="post_attention_layernorm",
        classifier="score",
        causal=True,
    )
)
