"""Linear attention in a bundle: the attention module stays, and a KernelAttention is put inside it as `snnk_kernel`.

    attention               linear attention for the module above          spec: stages, num_heads, near_field

Part of the code file of bundles that have it. Importing this module registers the attention function.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from snnk_peft.attention.cache import use_recurrent_cache
from snnk_peft.attention.interface import NAME
from snnk_peft.bundling.modules import ADDITIONS, BUILDERS, FINISHERS, Spec
from snnk_peft.layers.feature_stage import FeatureStage
from snnk_peft.layers.kernel_attention import KernelAttention


def attention_spec(kernel: KernelAttention) -> Spec:
    """The spec of a kernel."""
    return {
        "kind": "attention",
        "stages": [FeatureStage(feature_map).spec() for feature_map in kernel.maps()],
        "num_heads": kernel.num_heads,
        "near_field": kernel.near_field,
        "attention_implementation": NAME,
    }


def _attention(spec: Spec, present: Any) -> nn.Module:
    maps = [FeatureStage.from_spec(stage).feature_map for stage in spec["stages"]]
    return KernelAttention(maps, spec["num_heads"], near_field=spec["near_field"])


BUILDERS["attention"] = _attention
ADDITIONS.add("attention")
FINISHERS["attention"] = use_recurrent_cache
