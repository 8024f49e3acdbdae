"""ALBERT: BERT's layer with other names, shared by all layers of a group.

One entry of "layers" is one set of weights: `layers="all"` is every group (most checkpoints have one), and what is put
into it acts in each of its runs. The FFN's dropout is never called; an adapter stands behind the contraction.
"""

from snnk_peft.families import register_family
from snnk_peft.families.base import ModelFamily

register_family(
    ModelFamily(
        name="albert",
        layers="{base}.encoder.albert_layer_groups.*.albert_layers",
        attention="attention",
        query="attention.query",
        value="attention.value",
        key="attention.key",
        attention_out="attention.dense",
        attention_adapter="attention.output_dropout",
        ffn_in="ffn",
        activation="activation",
        ffn_out="ffn_output",
        ffn_adapter="ffn_output",
        ffn_norm="attention.LayerNorm",
        last_norm="full_layer_layer_norm",
        pooler="{base}.pooler",
        pooler_activation="{base}.pooler_activation",
        classifier="classifier",
        classifier_of_pooler="classifier",
    )
)
