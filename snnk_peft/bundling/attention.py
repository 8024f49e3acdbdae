"""Linear attention in a bundle: the attention module stays, and a KernelAttention is put inside it as `snnk_kernel`.

    attention       linear attention for the module above       spec: terms (stages, key_stages), num_heads, near_field

Part of the code file of bundles that have it. Importing this module registers the attention function.
"""

from __future__ import annotations

from typing import Any, cast

from torch import nn

from snnk_peft.attention.cache import use_recurrent_cache
from snnk_peft.attention.interface import NAME
from snnk_peft.bundling.modules import ADDITIONS, BUILDERS, FINISHERS, Spec
from snnk_peft.feature_map import FeatureMap
from snnk_peft.layers.attention_term import AttentionTerm
from snnk_peft.layers.feature_stage import FeatureStage
from snnk_peft.layers.kernel_attention import KernelAttention


def attention_spec(kernel: KernelAttention) -> Spec:
    """The spec of a kernel."""
    return {
        "kind": "attention",
        "terms": [_term_spec(cast(AttentionTerm, term)) for term in kernel.terms],
        "num_heads": kernel.num_heads,
        "near_field": kernel.near_field,
        "attention_implementation": NAME,
    }


def _term_spec(term: AttentionTerm) -> Spec:
    first, second = zip(*term.pairs(), strict=True)
    return {
        "stages": [FeatureStage(feature_map).spec() for feature_map in first],
        "key_stages": None if term.key_maps is None else [FeatureStage(feature_map).spec() for feature_map in second],
    }


def _attention_maps(stages: list[Spec]) -> list[FeatureMap]:
    return [FeatureStage.from_spec(stage).feature_map for stage in stages]


def _attention(spec: Spec, present: Any) -> nn.Module:
    terms = [
        AttentionTerm(_attention_maps(term["stages"]), term["key_stages"] and _attention_maps(term["key_stages"]))
        for term in spec["terms"]
    ]
    return KernelAttention(terms, spec["num_heads"], near_field=spec["near_field"])


BUILDERS["attention"] = _attention
ADDITIONS.add("attention")
FINISHERS["attention"] = use_recurrent_cache
