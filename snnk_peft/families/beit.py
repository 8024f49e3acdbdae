"""BEiT: ViT layers with a learned scale inside the layer and no dense layer in the pooler.

Its attention stays softmax where the config asks for a bias per pair of positions, as published ones do.
"""

import dataclasses

from snnk_peft.families import register_family
from snnk_peft.families.base_layouts import VIT

register_family(
    dataclasses.replace(VIT, name="beit", last_norm="{base}.pooler.layernorm", pooler=None, pooler_activation=None)
)
