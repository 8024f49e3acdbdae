"""RoBERTa: BERT layers; the "pooler" is classifier.dense, followed by torch.tanh called inline."""

from snnk_peft.families import register_family
from snnk_peft.families.base_layouts import ROBERTA

register_family(ROBERTA)
