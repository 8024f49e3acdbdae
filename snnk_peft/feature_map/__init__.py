"""FeatureMap = component ∘ projection, and its specification."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from snnk_peft.feature_map.base import FeatureMap, FeatureMapSpec, advance
from snnk_peft.projections import PROJECTIONS

__all__ = ["FeatureMap", "FeatureMapSpec", "advance", "build_feature_map"]


def build_feature_map(
    component: str,
    projection: str,
    dim: int,
    num_features: int,
    *,
    seed: int = 0,
    site: str = "",
    component_params: Mapping[str, Any] | None = None,
    projection_params: Mapping[str, Any] | None = None,
) -> FeatureMap:
    """Build the feature map of a component over a projection.

    Args:
        component: a name of `COMPONENTS`, e.g. "relu".
        projection: a name of `PROJECTIONS`, e.g. "orf".
        dim: length of the input vectors, >= 1.
        num_features: rows of W, >= 1; cost grows linearly, the standard error falls as 1/√num_features.
        seed: decides the draw of W together with `site`.
        site: any string, naming the place where the map is used.
        component_params: keyword arguments of the component, e.g. {"order": 2} for "arccos".
        projection_params: keyword arguments of the projection, e.g. {"norms": "sqrt_dim"} for "orf".

    Raises:
        ConfigError: every fault at once: unknown names (with a suggestion), unknown parameters, bad sizes.

    Example:
        >>> import torch
        >>> feature_map = build_feature_map("relu", "orf", dim=8, num_features=64)
        >>> feature_map.phi(torch.randn(2, 5, 8)).dense().shape
        torch.Size([2, 5, 64])
    """
    plain = dict(projection_params or {})
    taken = PROJECTIONS[projection].layer_arguments if projection in PROJECTIONS else ()
    tensors = {name: plain.pop(name) for name in taken if name in plain}
    spec = FeatureMapSpec(component, projection, num_features, component_params or {}, plain, dim, seed, site)
    return spec.build(**tensors)
