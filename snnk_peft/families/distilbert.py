"""DistilBERT: post-norm encoder; the "pooler" is pre_classifier, followed by an inline ReLU."""

from snnk_peft.families import register_family
from snnk_peft.families.base import ModelFamily

register_family(
    ModelFamily(
        name="distilbert",
        layers="{base}.transformer.layer",
        attention="attention",
        query="attention.q_lin",
        value="attention.v_lin",
        key="attention.k_lin",
        attention_out="attention.out_lin",
        attention_adapter="attention.out_lin",
        ffn_in="ffn.lin1",
        activation="ffn.activation",
        ffn_out="ffn.lin2",
        ffn_adapter="ffn.dropout",
        ffn_norm="sa_layer_norm",
        last_norm="output_layer_norm",
        pooler="pre_classifier",
        classifier="classifier",
    )
)
