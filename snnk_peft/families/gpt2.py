"""GPT-2: pre-norm decoder with causal attention; its matrices are Conv1D, query, key and value are one."""

from snnk_peft.families import register_family
from snnk_peft.families.base import ModelFamily

register_family(
    ModelFamily(
        name="gpt2",
        layers="{base}.h",
        attention="attn",
        attention_adapter="attn.resid_dropout",
        ffn_in="mlp.c_fc",
        activation="mlp.act",
        ffn_out="mlp.c_proj",
        ffn_adapter="mlp.dropout",
        ffn_norm="ln_2",
        classifier="score",
        causal=True,
    )
)
