"""The settings of recipes/fit_head.py. Nothing here imports torch."""

# `option` returns a dataclasses.field, which is a valid dataclass default.
# ruff: noqa: RUF009

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from snnk_cli.config import option
from snnk_cli.settings import FinetuneConfig, RunOutput, StepSettings


@dataclass
class FitHeadSection:
    """The features that the head reads."""

    views: list[list[int | str]] | None = option(
        None,
        "pairs [layer, pool] of hidden states, 0 the embeddings, -1 the last; pools: mean, max, first, last, and, for "
        "pairs of texts, apart and product. null: means after a third, two thirds and all layers, and "
        "the maximum of the last; for pairs also how the two differ after two thirds and all layers",
    )
    feature_map: dict[str, Any] | None = option(
        None, "also pass the vectors through this map: component, projection, num_features"
    )
    points: int = option(4, "how many scores: after n, n/2, n/4, ... examples", low=1)
    beside: list[str] | None = option(None, "run folders of finetune.py to include in the plot")


@dataclass
class FitHeadConfig(FinetuneConfig):
    """All settings of this recipe; of `train` only batch sizes, precision and seed matter."""

    output: RunOutput
    method: FitHeadSection = field(default_factory=FitHeadSection)
    train: StepSettings = field(default_factory=StepSettings)
