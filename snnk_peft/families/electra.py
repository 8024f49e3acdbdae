"""ELECTRA: BERT layers; the head is dense + GELU module + out_proj on [CLS]."""

import dataclasses

from snnk_peft.families import register_family
from snnk_peft.families.base_layouts import BERT

register_family(
    dataclasses.replace(
        BERT,
        name="electra",
        pooler="classifier.dense",
        pooler_activation="classifier.activation",
        head_output="classifier.out_proj",
        classifier_of_pooler="classifier.out_proj",
    )
)
