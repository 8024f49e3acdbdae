"""BERT: post-norm encoder; pooler = dense + tanh on [CLS], then dropout and the classifier."""

from snnk_peft.families import register_family
from snnk_peft.families.base import ModelFamily

register_family(
    ModelFamily(
        name="bert",
        layers="{base}.encoder.layer",
        attention="attention.self",
        query="attention.self.query",
        value="attention.self.value",
        attention_adapter="attention.output.dropout",
        ffn_in="intermediate.dense",
        activation="intermediate.intermediate_act_fn",
        ffn_out="output.dense",
        ffn_adapter="output.dropout",
        ffn_norm="attention.output.LayerNorm",
        last_norm="output.LayerNorm",
        pooler="{base}.pooler.dense",
        pooler_activation="{base}.pooler.activation",
        classifier="classifier",
        classifier_of_pooler="classifier",
    )
)
