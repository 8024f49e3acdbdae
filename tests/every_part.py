"""Every part in every form, and every component over every projection that fits: what tests of devices go through."""

from __future__ import annotations

import itertools
from typing import Any

import torch

from snnk_peft import (
    COMPONENTS,
    FAMILIES,
    PROJECTIONS,
    AdapterPart,
    AttentionPart,
    FFNPart,
    LowRankPart,
    MeanPoolingPart,
    NarrowFFNPart,
    NarrowHeadsPart,
    NormsPart,
    PoolerPart,
    build_feature_map,
)
from snnk_peft.feature_map import FeatureMap

PLACES = ("houlsby", "pfeiffer", "parallel", "query_value")
PARTS: dict[str, dict[str, Any]] = {
    **{place: {"adapter": AdapterPart(num_features=4, placement=place)} for place in PLACES},
    **{f"{place}-paper": {"adapter": AdapterPart("cos", placement=place, init="paper")} for place in PLACES},
    "free": {"adapter": AdapterPart(projection="free", num_features=4)},
    "norms": {"parts": [NormsPart()]},
    "ffn": {"ffn": FFNPart(num_features=6)},
    "ffn-drawn": {"ffn": FFNPart("relu", "orf", 6, linear_path=True, train_contraction=True)},
    "low-rank": {"parts": [LowRankPart("ffn", rank=3), LowRankPart("attention", rank_scale=0.9)]},
    "pooler": {"pooler": PoolerPart(num_features=6)},
    "mean_pooling": {"pooler": PoolerPart(num_features=6), "parts": [MeanPoolingPart()]},
    "attention": {"attention": AttentionPart(num_features=6, near_field=2)},
    "attention-learned": {
        "attention": AttentionPart("hrf", "gmm", 6, per_head=True, separate_maps=True, sum_of=[{"component": "elu"}])
    },
    "narrow_heads": {"parts": [NarrowHeadsPart(head_dim=6)]},
    "narrow_ffn": {"parts": [NarrowFFNPart()]},
    "attention-joint": {
        "attention": AttentionPart("mixture", "centroids", 6, near_field=2, near_field_normalisation="joint", sinks=1)
    },
    "attention-adapting": {"attention": AttentionPart("saderf", num_features=6)},
}
PAIRS = [
    (component, projection)
    for component, projection in itertools.product(COMPONENTS.names(), PROJECTIONS.names())
    if COMPONENTS[component].fits(PROJECTIONS[projection])
    and not (component in ("urf", "cos") and not PROJECTIONS[projection].uniform)
]


def takes(family: str, fields: dict[str, Any]) -> bool:
    """Whether a classifier of `CLASSIFIERS` (tiny_models.py) has a place for these parts."""
    spec, parts = FAMILIES[family], [*(fields.get(name) for name in ("adapter", "ffn")), *fields.get("parts", [])]
    placements = {getattr(part, "placement", None) for part in parts}
    kinds = {type(part) for part in parts}
    gated = spec.gated and (FFNPart in kinds or "parallel" in placements)
    fused = spec.query is None and ("query_value" in placements or NarrowHeadsPart in kinds)
    pooler = "pooler" not in fields or spec.pooler is not None or bool(spec.pooled_heads)
    mean = MeanPoolingPart not in kinds or family not in ("deit", "modernbert", "vit")
    attention = fields.get("attention")
    refitted = attention is not None and attention.projection == "centroids" and spec.attention_out is None
    return not gated and not fused and pooler and mean and not refitted


def pair(component: str, projection: str) -> FeatureMap:
    """A feature map of vectors of length 8, of as few rows as it can have from eight on."""
    rows = max(8, COMPONENTS[component]().fewest_rows())
    rows = PROJECTIONS[projection].nearest_size(8, -(-rows // 4) * 4)
    layer = {}
    if PROJECTIONS[projection].needs_layer:
        generator = torch.Generator().manual_seed(7)
        layer = {
            "source_weight": torch.randn(rows + 3, 8, generator=generator),
            "source_bias": torch.randn(rows + 3, generator=generator),
        }
    return build_feature_map(component, projection, 8, rows, projection_params=layer)
