"""DeBERTa-v2 and v3: BERT layers with disentangled attention, which stays softmax; the pooler calls its GELU inline.

The query projection also projects the relative positions; an adapter beside it acts on both.
"""

import dataclasses

from snnk_peft.families import register_family
from snnk_peft.families.base_layouts import BERT

register_family(
    dataclasses.replace(
        BERT,
        name="deberta-v2",
        query="attention.self.query_proj",
        value="attention.self.value_proj",
        key=None,
        pooler="pooler.dense",
        pooler_activation=None,
        classifier_of_pooler=None,
    )
)
