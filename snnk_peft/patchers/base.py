"""What a patcher gets and gives, and the feature stage that all of them build from a part's fields."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from snnk_peft.config import Part
from snnk_peft.errors import ConfigError, UnsupportedError
from snnk_peft.families.base import ModelFamily, module_at
from snnk_peft.feature_map import FeatureMap
from snnk_peft.functional.at_hand import at_hand
from snnk_peft.layers.feature_stage import FeatureStage
from snnk_peft.layers.slots import Slot
from snnk_peft.projections.base_drawn import site_generator


@dataclass(frozen=True)
class Patch:
    """One planned change.

    Args:
        path: the module to change.
        build: makes the slot; runs after all plans are known to be possible.
        train: whether the module itself is trained as well (and saved in full).
    """

    path: str
    build: Callable[[], Slot] | None
    train: bool = False


@dataclass(frozen=True)
class PatchContext:
    """The model being patched and the options that all parts share.

    Args:
        model: a transformers model.
        family: where its modules are.
        seed: seed of all draws.
        save_projection: whether matrices W are saved.
    """

    model: nn.Module
    family: ModelFamily
    seed: int
    save_projection: bool

    def linear(self, path: str, what: str) -> nn.Linear:
        """The nn.Linear at `path`, or UnsupportedError."""
        found = module_at(self.model, path, what)
        whole = [tensor for tensor in (*found.parameters(), *found.buffers()) if not tensor.is_floating_point()]
        if whole:
            raise UnsupportedError(
                f"{what}: the {type(found).__name__} at {path!r} holds {str(whole[0].dtype).removeprefix('torch.')} "
                "numbers, so the model is quantized; expected an nn.Linear in floating point. Load it without "
                "quantization_config, patch it, and quantize its bundle"
            )
        return module_at(self.model, path, what, nn.Linear)  # type: ignore[return-value]

    def require_plain_ffn(self, what: str) -> None:
        """UnsupportedError unless the family's FFN is one expansion and an activation module.

        Args:
            what: the part that cannot be used otherwise, and what to use instead.
        """
        fault = None
        if self.family.gated:
            fault = "is gated, two expansions multiplied"
        elif self.family.activation is None:
            fault = "calls its activation as a function, which no module can take the place of"
        if fault is not None:
            raise UnsupportedError(
                f"{what}: the FFN of {type(self.model).__name__} (family {self.family.name!r}) {fault}; expected one "
                "expansion and an activation"
            )

    def generator(self, slot: str) -> torch.Generator:
        """Randomness for the readout at `slot`."""
        return site_generator(self.seed, slot + ".readout")

    def stage(
        self, part: Part, dim: int, slot: str, source: nn.Linear | None = None, importance: Any = None, **options: Any
    ) -> FeatureStage:
        """The feature stage of `part` for inputs of length `dim`.

        Args:
            part: names component, projection, number of features and their parameters.
            dim: length of the inputs.
            slot: logical name of the place; decides the draw together with the seed.
            source: the pretrained layer that the features stand in for, if there is one.
            importance: (rows,) how much each row of that layer matters.
            **options: passed to `FeatureStage`.
        """
        spec = part.feature_map_spec(dim=dim, seed=self.seed, site=slot, save=self.save_projection)
        if spec.needs_layer and source is None:
            raise ConfigError(f"{slot}: projection {part.projection!r} needs a pretrained layer to take rows from")
        return FeatureStage(spec.build(source, importance=importance), **options)

    def feature_maps(self, part: Part, dim: int, slots: list[str]) -> list[FeatureMap]:
        """One feature map of `part` per slot name."""
        return [self.stage(part, dim, slot).feature_map for slot in slots]

    def input_statistics(self, path: str, what: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Mean and standard deviation of what a LayerNorm hands on, from its bias and weight alone; fp32, CPU."""
        norm = module_at(self.model, path, what, nn.LayerNorm)
        with at_hand(norm):
            weight = norm.weight.detach().float().cpu()  # type: ignore[operator]
            bias = norm.bias.detach().float().cpu()  # type: ignore[operator]
        # A norm may switch a coordinate off; a floor keeps its reciprocal finite.
        return bias, weight.abs().clamp_min(1e-3 * weight.abs().max().clamp_min(1e-6))


Patcher = Callable[[PatchContext, Any], "list[Patch]"]
