"""Llama: pre-norm decoder, rotary positions, grouped-query attention, gated FFN (SwiGLU)."""

from snnk_peft.families import register_family
from snnk_peft.families.base import ModelFamily

register_family(
    ModelFamily(
        name="llama",
        layers="{base}.layers",
        attention="self_attn",
        query="self_attn.q_proj",
        value="self_attn.v_proj",
        attention_adapter="self_attn.o_proj",
        ffn_in="mlp.gate_proj",
        activation="mlp.act_fn",
        ffn_out="mlp.down_proj",
        ffn_adapter="mlp.down_proj",
        ffn_norm="post_attention_layernorm",
        classifier="score",
        causal=True,
        gated=True,
    )
)
