"""CamemBERT: laid out as RoBERTa."""

import dataclasses

from snnk_peft.families import register_family
from snnk_peft.families.base_layouts import ROBERTA

register_family(dataclasses.replace(ROBERTA, name="camembert"))
