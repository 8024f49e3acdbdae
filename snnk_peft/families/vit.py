"""ViT: pre-norm encoder. Image classifiers have no pooler."""

from snnk_peft.families import register_family
from snnk_peft.families.base import ModelFamily

register_family(
    ModelFamily(
        name="vit",
        layers="{base}.layers",
        attention="attention",
        query="attention.q_proj",
        value="attention.v_proj",
        attention_adapter="attention.o_proj",
        ffn_in="mlp.fc1",
        activation="mlp.activation_fn",
        ffn_out="mlp.fc2",
        ffn_adapter="mlp.fc2",
        ffn_norm="layernorm_after",
        classifier="classifier",
    )
)
