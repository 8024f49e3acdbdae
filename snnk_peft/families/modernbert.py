"""ModernBERT: pre-norm encoder with rotary positions. Two layers of three attend to a band of neighbours only and are
left as they are by `layers="all"`; the FFN is gated (GeGLU); the "pooler" is head.dense, with a LayerNorm behind it.
"""

from snnk_peft.families import register_family
from snnk_peft.families.base import ModelFamily

register_family(
    ModelFamily(
        name="modernbert",
        layers="{base}.layers",
        attention="attn",
        attention_adapter="attn.out_drop",
        ffn_in="mlp.Wi",
        activation="mlp.act",
        ffn_out="mlp.Wo",
        ffn_adapter="mlp.Wo",
        ffn_norm="mlp_norm",
        pooler="head.dense",
        pooler_activation="head.act",
        classifier="classifier",
        gated=True,
    )
)
