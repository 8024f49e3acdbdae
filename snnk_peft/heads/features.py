"""Features of a task head: hidden states of any layers, pooled over the unpadded tokens.

    φ = [pool₁(h_{l₁}), pool₂(h_{l₂}), ...]        and, through a feature map,  [Φ(φ), φ]

For pairs of texts there are also |a − b| ("apart") and a ⊙ b ("product") of the means a and b over each text's tokens:
the difference between two texts is not a linear function of the mean over both.

h₀ are the embeddings and h_l the output of layer l, as in transformers' `hidden_states`; l < 0 counts from the last.
One vector of a pretrained model rarely holds everything a task needs ([CLS] of a model trained on means is nearly
constant). Several layers, and maxima in addition to means, add no cost to the one forward pass.

Shapes: hidden states (B, L, width), mask (B, L), φ (B, views · width).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from snnk_peft.errors import ConfigError
from snnk_peft.feature_map.base import FeatureMapSpec
from snnk_peft.functional.precision import wide
from snnk_peft.layers.feature_stage import FeatureStage
from snnk_peft.layers.folded import token_mean
from snnk_peft.registry import did_you_mean

HEAD = "snnk_head"  # path of a new head in the model

Pool = Callable[[Tensor, Tensor, Tensor | None], Tensor]


def _mean(hidden: Tensor, mask: Tensor, second: Tensor | None) -> Tensor:
    return token_mean(hidden, mask)


def _maximum(hidden: Tensor, mask: Tensor, second: Tensor | None) -> Tensor:
    return hidden.masked_fill(~mask.unsqueeze(-1), -torch.inf).amax(1)


def _at(hidden: Tensor, position: Tensor) -> Tensor:
    return hidden.gather(1, position[:, None, None].expand(-1, 1, hidden.shape[-1])).squeeze(1)


def _first(hidden: Tensor, mask: Tensor, second: Tensor | None) -> Tensor:
    """Select the first token, [CLS], skipping left padding."""
    return _at(hidden, mask.int().argmax(1))


def _last(hidden: Tensor, mask: Tensor, second: Tensor | None) -> Tensor:
    """Select the last token, the only one that attends to all others in a causal model."""
    return _at(hidden, mask.shape[1] - 1 - mask.flip(1).int().argmax(1))


def _of_either(hidden: Tensor, mask: Tensor, second: Tensor | None) -> tuple[Tensor, Tensor]:
    """Compute the means over the first and the second text, 0 for a text without tokens."""
    if second is None:
        raise ValueError("the head reads pairs of texts; expected a mask of the second text's tokens")
    return token_mean(hidden, mask & ~second), token_mean(hidden, mask & second)


def _apart(hidden: Tensor, mask: Tensor, second: Tensor | None) -> Tensor:
    """Compute |a − b| of the two texts' means."""
    a, b = _of_either(hidden, mask, second)
    return (a - b).abs()


def _product(hidden: Tensor, mask: Tensor, second: Tensor | None) -> Tensor:
    """Compute a ⊙ b of the two texts' means."""
    a, b = _of_either(hidden, mask, second)
    return a * b


PAIR_POOLS: dict[str, Pool] = {"apart": _apart, "product": _product}
POOLS: dict[str, Pool] = {"mean": _mean, "max": _maximum, "first": _first, "last": _last, **PAIR_POOLS}


def pooled(hidden: Tensor, mask: Tensor | None, pool: str, second: Tensor | None = None) -> Tensor:
    """Pool hidden (B, L, width) with mask (B, L), zero at padding, to (B, width) in at least fp32.

    `second` (B, L), nonzero at tokens of the second text, is required for the pools "apart" and "product" (ValueError
    without it).
    """
    hidden = wide(hidden)
    counted = torch.ones(hidden.shape[:2], dtype=torch.bool, device=hidden.device) if mask is None else mask.bool()
    return POOLS[pool](hidden, counted, None if second is None else second.bool())


@dataclass(frozen=True)
class HeadFeatures:
    """The features that a task head reads.

    Args:
        views: pairs (layer, pool): the hidden state, and how its tokens become one vector ("mean", "max", "first",
            "last"; for pairs of texts also "apart" and "product").
        feature_map: component, projection, num_features and other fields of a FeatureMapSpec, without `dim`; adds the
            features of the vectors under this map. None for the vectors alone.

    Example:
        >>> HeadFeatures([(2, "mean"), (-1, "mean"), (-1, "max")]).width(384)
        1152
    """

    views: Sequence[tuple[int, str]] = ((-1, "mean"),)
    feature_map: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        found = []
        if not isinstance(self.views, (list, tuple)) or not self.views:
            found.append(f"views is {self.views!r}; expected pairs (layer, pool), one at least")
        else:
            for index, view in enumerate(self.views):
                if not isinstance(view, (list, tuple)) or len(view) != 2 or type(view[0]) is not int:
                    found.append(f"views[{index}] is {view!r}; expected a pair (layer, pool) such as (-1, 'mean')")
                elif view[1] not in POOLS:
                    found.append(f"views[{index}]: {did_you_mean('pool', view[1], list(POOLS))}")
        if self.feature_map is not None and not found:
            found += _map_faults(self.feature_map)
        if found:
            raise ConfigError(found)
        object.__setattr__(self, "views", tuple((int(layer), str(pool)) for layer, pool in self.views))

    @classmethod
    def across(cls, layers: int, feature_map: Mapping[str, Any] | None = None, *, pairs: bool = False) -> HeadFeatures:
        """Choose the means after a third, two thirds and all of the layers, and the maximum after the last.

        For `pairs` of texts, add the difference between the two after two thirds and all of the layers.

        Raises:
            ConfigError: `layers` is not an integer >= 1.

        Example:
            >>> HeadFeatures.across(6).views
            ((2, 'mean'), (4, 'mean'), (6, 'mean'), (6, 'max'))
        """
        _check_count(layers)
        places = sorted({max(1, round(layers * part / 3)) for part in (1, 2, 3)})
        between = [(place, pool) for place in places[-2:] for pool in PAIR_POOLS] if pairs else []
        return cls([*((place, "mean") for place in places), (layers, "max"), *between], feature_map)

    @classmethod
    def means(cls, layers: int, *, pairs: bool = False) -> HeadFeatures:
        """Choose the means after each layer and, for `pairs` of texts, the difference between the two means.

        Raises:
            ConfigError: `layers` is not an integer >= 1.

        Example:
            >>> HeadFeatures.means(2, pairs=True).views
            ((1, 'mean'), (2, 'mean'), (1, 'apart'), (2, 'apart'))
        """
        _check_count(layers)
        return cls([(layer, pool) for pool in ("mean", "apart")[: 1 + pairs] for layer in range(1, layers + 1)])

    @property
    def of_pairs(self) -> bool:
        """True if a view needs to know which of two texts a token belongs to."""
        return any(pool in PAIR_POOLS for _, pool in self.views)

    def width(self, hidden: int) -> int:
        """Return the length of φ for hidden states of this width, without the feature map."""
        return len(self.views) * hidden

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "views": [list(view) for view in self.views]}


def _check_count(layers: object) -> None:
    if type(layers) is not int or layers < 1:
        raise ConfigError(f"layers is {layers!r}; expected an integer >= 1")


def _map_faults(given: object) -> list[str]:
    if not isinstance(given, Mapping):
        return [
            f"feature_map is {repr(given)[:100]}; expected a dict with component, projection and num_features, or None"
        ]
    try:
        return FeatureMapSpec.from_dict({"dim": 1, **given}).faults("feature_map")
    except ConfigError as error:
        return [f"feature_map: {error}"]


class HeadReader(nn.Module):
    """Module that computes φ from `layers` hidden states of a model, embeddings included, of width `hidden`.

    Raises:
        ConfigError: a layer that the model does not have.
    """

    def __init__(self, features: HeadFeatures, hidden: int, layers: int):
        super().__init__()
        absent = [layer for layer, _ in features.views if not -layers <= layer < layers]
        if absent:
            raise ConfigError(
                f"views name the hidden states {', '.join(map(str, absent))}; the model has {layers}, 0 to "
                f"{layers - 1} or {-layers} to -1"
            )
        self.features, self.hidden, self.layers = features, hidden, layers
        self.stage: FeatureStage | None = None
        dim = features.width(hidden)
        if features.feature_map is not None:
            built = FeatureMapSpec.from_dict({"slot": "head", **features.feature_map, "dim": dim}).build()
            self.stage = FeatureStage(built, normalize=True, scale=dim**-0.5, append_input=True)

    @property
    def out_dim(self) -> int:
        return self.features.width(self.hidden) if self.stage is None else self.stage.out_dim

    def forward(
        self, hidden_states: Sequence[Tensor], mask: Tensor | None = None, second: Tensor | None = None
    ) -> Tensor:
        """Compute (B, out_dim) from hidden states (B, L, width).

        The masks (B, L) are those of all tokens and of the second text.
        """
        views = self.features.views
        found = torch.cat([pooled(hidden_states[layer], mask, pool, second) for layer, pool in views], -1)
        return found if self.stage is None else self.stage(found)
