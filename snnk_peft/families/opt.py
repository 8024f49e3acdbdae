"""OPT: pre-norm decoder; FFN of two Linears in the layer itself. The 350m model norms after the sums: refused."""

from snnk_peft.families import register_family
from snnk_peft.families.base import ModelFamily

register_family(
    ModelFamily(
        name="opt",
        layers="{base}.decoder.layers",
        attention="self_attn",
        query="self_attn.q_proj",
        value="self_attn.v_proj",
        key="self_attn.k_proj",
        attention_out="self_attn.out_proj",
        attention_adapter="self_attn.out_proj",
        ffn_in="fc1",
        activation="activation_fn",
        ffn_out="fc2",
        ffn_adapter="fc2",
        ffn_norm="final_layer_norm",
        classifier="score",
        causal=True,
        expects={"do_layer_norm_before": True},
    )
)
