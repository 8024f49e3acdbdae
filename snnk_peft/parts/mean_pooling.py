"""Mean pooling: the pooler or task head reads the mean over the tokens instead of [CLS], for models trained that way.

    pooler(h₁)   becomes   pooler(Σ_t m_t h_t / Σ_t m_t)        h of the last layer, m 0 at padding

Nothing is trained or stored: the last layer returns the mean in the first token's place (`layers/folded.py`), in a
bundle as well. It combines with a `PoolerPart`, whose features are then those of the mean, or with training the
original pooler (`modules_to_save=["pooler", "classifier"]`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from snnk_peft.errors import UnsupportedError
from snnk_peft.families.base import plain_modules
from snnk_peft.layers.folded import mean_first
from snnk_peft.layers.slots import Base, FoldPlace, Slot
from snnk_peft.options import documented
from snnk_peft.parts import PARTS
from snnk_peft.parts.base import Part, Patch, PatchContext


@PARTS.register("mean_pooling")
@documented
@dataclass
class MeanPoolingPart(Part):
    """Mean pooling: the pooler or task head reads the mean of the last layer's real tokens instead of [CLS].

    For text encoders without a norm after the last layer (BERT, RoBERTa, DistilBERT, ELECTRA, MPNet and variants). The
    mean replaces the first token in the model's last hidden states.
    """

    def plan(self, context: PatchContext) -> list[Patch]:
        family, model = context.family, context.model
        what = f"{context.where}: {type(model).__name__} (family {family.name!r})"
        layers = family.layer_paths(model)
        pooler = None if family.pooler is None else family.path(model, family.pooler)
        fault = None
        if hasattr(model.config, "classifier_pooling"):  # ModernBERT
            fault = "can do so by itself: set config.classifier_pooling to 'mean' and leave this part out"
        elif pooler is None or all(path != pooler for path, _ in plain_modules(model)):
            fault = "has no pooler that reads the first token"
        elif family.last_norm is None or family.last_norm.startswith("{base}."):
            fault = "normalises what its last layer gives before it reads a token of it"
        elif len(layers) != family.config_of(model).num_hidden_layers:
            fault = "runs one layer several times, and only the last run should give the mean"
        if fault is not None:
            raise UnsupportedError(f"{what} {fault}; expected an encoder of texts with a pooler on [CLS], such as BERT")
        return [Patch(layers[-1], MeanFirst)]


class MeanFirst(Slot):
    """Slot of the last layer that puts the mean over the tokens in the first one's place."""

    def forward(self, base: Base, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Run the layer on x (B, L, width), and put the mean in the first token's place."""
        return mean_first(base(x, *args, **kwargs), args, kwargs)

    def fold(self, place: FoldPlace) -> None:
        place.alter("mean_first", "the first token", "the mean over the tokens")
