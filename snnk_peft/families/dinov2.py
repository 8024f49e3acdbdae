"""DINOv2: pre-norm encoder of images, with a learned scale before each sum; the giant model's gated FFN is refused."""

from snnk_peft.families import register_family
from snnk_peft.families.base_layouts import DINO

register_family(DINO)
