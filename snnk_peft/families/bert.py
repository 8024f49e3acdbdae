"""BERT: post-norm encoder; pooler = dense + tanh on [CLS], then dropout and the classifier."""

from snnk_peft.families import register_family
from snnk_peft.families.base_layouts import BERT

register_family(BERT)
