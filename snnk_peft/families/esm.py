"""ESM-2: pre-norm encoder of proteins in BERT's modules; the FFN calls GELU inline, so that it cannot be replaced."""

import dataclasses

from snnk_peft.families import register_family
from snnk_peft.families.base_layouts import ROBERTA

register_family(dataclasses.replace(ROBERTA, name="esm", key=None, activation=None, ffn_norm=None, last_norm=None))
