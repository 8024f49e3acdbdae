"""RoBERTa: BERT layers; the "pooler" is classifier.dense, followed by torch.tanh called inline."""

from snnk_peft.families import register_family
from snnk_peft.families.base import ModelFamily

register_family(
    ModelFamily(
        name="roberta",
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
        classifier="classifier",
        head_output="classifier.out_proj",
    )
)
