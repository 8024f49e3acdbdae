"""ELECTRA: BERT layers; the head is dense + GELU module + out_proj on [CLS]."""

from snnk_peft.families import register_family
from snnk_peft.families.base import ModelFamily

register_family(
    ModelFamily(
        name="electra",
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
        pooler="classifier.dense",
        pooler_activation="classifier.activation",
        classifier="classifier",
        head_output="classifier.out_proj",
        classifier_of_pooler="classifier.out_proj",
    )
)
