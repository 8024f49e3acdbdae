"""The replaceable parts of a model, one dataclass each: which layers, with which feature maps.

Plain data, checked against the registries: names, parameters and sizes. `faults` collects everything that is wrong.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from snnk_peft.registry import did_you_mean

if TYPE_CHECKING:
    from snnk_peft.feature_map.spec import FeatureMapSpec


@dataclass
class Part:
    """Fields that every replaceable part has.

    Args:
        component: the function f of the features f(Wx), a name of `COMPONENTS`.
        projection: the matrix W, a name of `PROJECTIONS`.
        num_features: rows of W, >= 1. Cost and trainable parameters grow linearly with it.
        layers: which Transformer layers: "all", "top-K" (the last K), "bottom-K", or a list of indices from 0.
        component_params: keyword arguments of the component.
        projection_params: keyword arguments of the projection.
    """

    component: str = "relu"
    projection: str = "orf"
    num_features: int = 16
    layers: str | list[int] = "all"
    component_params: dict[str, Any] = field(default_factory=dict)
    projection_params: dict[str, Any] = field(default_factory=dict)

    def faults(self, part: str) -> list[str]:
        """Everything that is wrong with this part, each message starting with the field's path."""
        from snnk_peft.components import COMPONENTS

        found = self.feature_map_spec().faults(part)
        if self.component in COMPONENTS and getattr(self, "init", "") == "nystrom":
            elementwise = [name for name in COMPONENTS if COMPONENTS[name].elementwise()]
            if self.component not in elementwise:
                found.append(
                    f"{part}.init is 'nystrom', a closed form for elementwise features, and {self.component!r} is none "
                    f"(these are: {', '.join(elementwise)}); use init='random' and calibrate"
                )
        return found + layers_faults(f"{part}.layers", self.layers)

    def feature_map_spec(self, **known: Any) -> FeatureMapSpec:
        """The feature map of this part, as far as the config decides it.

        Args:
            **known: further fields of `FeatureMapSpec`: dim, seed, site, save.
        """
        from snnk_peft.feature_map.spec import FeatureMapSpec

        chosen = (self.component, self.projection, self.num_features, self.component_params, self.projection_params)
        return FeatureMapSpec(*chosen, **known)

    def choice_fault(self, part: str, name: str, valid: tuple[str, ...]) -> list[str]:
        """A message if field `name` is not one of `valid`."""
        value = getattr(self, name)
        return [] if value in valid else [f"{part}.{name}: {did_you_mean(name, value, list(valid))}"]


@dataclass
class AdapterPart(Part):
    """Non-linear adapters y = x + scaling · v ⊙ (Φ(x) Aᵀ) (SNNK paper, Eq. 22, App. D).

    Args:
        placement: "houlsby" (after attention and after the FFN), "pfeiffer" (after the FFN only), "parallel" (beside
            the FFN: reads the FFN's input, adds to its output; folds completely when bundled) or "query_value" (beside
            the query and value projections, LoRA's place; each becomes one Linear of [Φ(x), x] when bundled; slow to
            start on some seeds, see model_cards/glue).
        init: "default" is what won on GLUE: normalised inputs, A = 0, no gate. "paper" is the paper's form: raw inputs,
            A = Φ(W₀) for a random W₀, gate v = 0. "random" is A ~ N(0, 1/feature_dim) behind a gate.
        gate: whether there is a trainable vector v; None follows `init`.
        normalize: whether Φ sees (x − mean) / std of each token, and each feature loses its mean; None follows `init`.
        scaling: factor on the residual branch; raising it acts like a higher learning rate of A alone. None means 8
            for init="default" and 1 otherwise.
    """

    placement: str = "houlsby"
    init: str = "default"
    gate: bool | None = None
    normalize: bool | None = None
    scaling: float | None = None

    def faults(self, part: str) -> list[str]:
        """See `Part.faults`."""
        found = super().faults(part)
        found += self.choice_fault(part, "placement", ("houlsby", "pfeiffer", "parallel", "query_value"))
        found += self.choice_fault(part, "init", ("default", "paper", "random"))
        if self.feature_map_spec().needs_layer:
            found.append(
                f"{part}.projection is {self.projection!r}; an adapter replaces no pretrained weight to take rows from"
            )
        scaling = self.effective_scaling
        if isinstance(scaling, bool) or not isinstance(scaling, (int, float)) or scaling == 0:
            found.append(f"{part}.scaling is {self.scaling!r}; expected a number other than 0")
        if self.gate is False and self.init == "random":
            found.append(f"{part}.gate is False with init='random': the model would start broken; use gate=True")
        if self.gate is False and self.init == "paper":
            found.append(f"{part}.gate is False with init='paper': the paper's form has a gate; use init='default'")
        if self.gate is True and self.init == "default":
            found.append(
                f"{part}.gate is True with init='default': A and v would both start at zero and get no gradient; "
                "use init='random' or init='paper'"
            )
        return found

    @property
    def uses_gate(self) -> bool:
        """Whether v exists, with `gate=None` resolved."""
        return self.init != "default" if self.gate is None else self.gate

    @property
    def effective_scaling(self) -> float:
        """The factor, with `scaling=None` resolved."""
        if self.scaling is None:
            return 8.0 if self.init == "default" else 1.0
        return self.scaling

    @property
    def uses_normalize(self) -> bool:
        """Whether inputs are normalised, with `normalize=None` resolved."""
        return self.init != "paper" if self.normalize is None else self.normalize


@dataclass
class PoolerPart(Part):
    """The pooler's dense layer and activation become Φ(x) Aᵀ + b (SNNK paper, 4.3.1 and J.1).

    Inputs and pretrained weights are both scaled by dim^-¼. `layers` has no meaning here.

    Args:
        init: how A starts: "nystrom" (closed form for Gaussian inputs, no data), "paper" (A = Φ(W)) or "random".
    """

    component: str = "cos"
    num_features: int = 32
    init: str = "nystrom"

    def faults(self, part: str) -> list[str]:
        """See `Part.faults`."""
        found = [fault for fault in super().faults(part) if not fault.startswith(f"{part}.layers")]
        found += self.choice_fault(part, "init", ("nystrom", "paper", "random"))
        if self.layers != "all":
            found.append(f"{part}.layers is {self.layers!r}; a model has one pooler, leave it out")
        return found


@dataclass
class FFNPart(Part):
    """Expansion and activation of the feed-forward block become Φ(x) Aᵀ + b; the contraction stays (4.4, J.4).

    Args:
        init: how A starts: "nystrom" (closed form for Gaussian inputs, no data), "paper" (A = Φ(W)) or "random".
            `calibrate` replaces it by a fit to real activations.
        linear_path: append the input itself to the features, so that the readout holds an exact affine part. Costs
            dim² multiply-adds per token after bundling, and helps most at few features.
        train_contraction: also train the contraction (the block's second matrix) of the converted layers.
    """

    component: str = "gelu"
    projection: str = "landmark"
    num_features: int = 64
    init: str = "nystrom"
    linear_path: bool = False
    train_contraction: bool = False

    def faults(self, part: str) -> list[str]:
        """See `Part.faults`."""
        return super().faults(part) + self.choice_fault(part, "init", ("nystrom", "paper", "random"))


DEFAULT_ROWS = 64  # of linear attention, where nothing is said

# What the entries of `AttentionPart.sum_of` may say.
TERM_FIELDS = ["component", "projection", "num_features", "component_params", "projection_params"]
TERM_FIELDS += ["per_head", "separate_maps"]


@dataclass
class AttentionPart(Part):
    """Softmax attention becomes linear attention over feature maps: Φ(q)·Φ(k) instead of e^{q·k} (Spectraformer).

    Cost and memory grow linearly with the length of the input. `disable_adapter` gives softmax back.

    Args:
        num_features: rows of W. None: 64, or the number nearest to it that the projection can have (for "identity", the
            classical linear attention with component "elu", the dimension of a head).
        per_head: a matrix W for every key head instead of one per layer.
        separate_maps: queries and keys have a matrix each. Both start as the same draw, hence at the kernel of a shared
            one, and learn apart: for learned projections only.
        near_field: width of an exact softmax band around the diagonal that is blended in with learned weights
            (FMMformer), or None for none. Costs near_field products per token.
        sum_of: further feature maps (the lecture's rank-r attention): attention is Σ_r w_r · att_r over this part's own
            map and one for each entry, w_r > 0 learned per head, equal at the start. An entry is a dict of any of
            component, projection, num_features, component_params, projection_params, per_head and separate_maps; what
            it leaves out is as in this part; naming a component puts its params back to the defaults, naming a
            projection its params and num_features. Every entry costs as much as an attention of its own, and has its
            own draw.

    Example:
        >>> part = AttentionPart(projection="gmm", sum_of=[{"component": "elu", "num_features": 16}])
        >>> [(term.component, term.projection, term.num_features) for term in part.terms()]
        [('posrf', 'gmm', None), ('elu', 'gmm', 16)]
    """

    component: str = "posrf"
    num_features: int | None = None  # type: ignore[assignment]
    per_head: bool = False
    separate_maps: bool = False
    near_field: int | None = None
    sum_of: list[dict[str, Any]] = field(default_factory=list)

    def faults(self, part: str) -> list[str]:
        """See `Part.faults`."""
        given = self if self.num_features is not None else dataclasses.replace(self, num_features=DEFAULT_ROWS)
        found = super(AttentionPart, given).faults(part)
        width = self.near_field
        if width is not None and (isinstance(width, bool) or not isinstance(width, int) or width < 1):
            found.append(f"{part}.near_field is {width!r}; expected an integer >= 1, or None")
        if self.feature_map_spec().needs_layer:
            found.append(
                f"{part}.projection is {self.projection!r}; attention replaces no pretrained weight to take rows from"
            )
        for name in ("per_head", "separate_maps"):
            if not isinstance(getattr(self, name), bool):
                found.append(f"{part}.{name} is {getattr(self, name)!r}; expected True or False")
        found += self._separation_faults(part)
        wrong = self._sum_faults(part)
        if not wrong:
            wrong = [f for i, term in enumerate(self.terms()[1:]) for f in term.faults(f"{part}.sum_of[{i}]")]
        return found + wrong

    def _separation_faults(self, part: str) -> list[str]:
        from snnk_peft.projections import PROJECTIONS

        if not self.separate_maps or self.projection not in PROJECTIONS or PROJECTIONS[self.projection].trainable:
            return []
        learned = ", ".join(name for name in PROJECTIONS if PROJECTIONS[name].trainable)
        return [
            f"{part}.separate_maps is True with projection {self.projection!r}, which is not learned: two copies of a "
            "draw would stay equal, and two independent draws estimate no kernel; use separate_maps=False or one of "
            f"the learned projections, {learned}"
        ]

    def _sum_faults(self, part: str) -> list[str]:
        if not isinstance(self.sum_of, (list, tuple)):
            return [f"{part}.sum_of is {self.sum_of!r}; expected a list of dicts, one for each further feature map"]
        found = []
        for i, entry in enumerate(self.sum_of):
            if not isinstance(entry, Mapping):
                found.append(f"{part}.sum_of[{i}] is {entry!r}; expected a dict such as {{'component': 'elu'}}")
                continue
            found += [
                f"{part}.sum_of[{i}].{did_you_mean('field', k, TERM_FIELDS)}" for k in entry if k not in TERM_FIELDS
            ]
        return found

    def terms(self) -> list[AttentionPart]:
        """One part per feature map of the sum: this one, then those of `sum_of` with what they leave out filled in."""
        own = dataclasses.replace(self, sum_of=[], near_field=None, layers="all")
        result = [own]
        for entry in self.sum_of:
            other: dict[str, Any] = {"component_params": {}} if "component" in entry else {}
            if "projection" in entry:
                other |= {"projection_params": {}, "num_features": None}
            result.append(dataclasses.replace(own, **{**other, **entry}))
        return result


PARTS: dict[str, type[Part]] = {
    "adapter": AdapterPart,
    "pooler": PoolerPart,
    "ffn": FFNPart,
    "attention": AttentionPart,
}


def layers_faults(where: str, layers: object) -> list[str]:
    """Messages if `layers` is neither "all", "top-K", "bottom-K" nor a list of indices."""
    if isinstance(layers, str) and (layers == "all" or re.fullmatch(r"(top|bottom)-[1-9]\d*", layers)):
        return []
    if isinstance(layers, (list, tuple)) and layers and all(type(i) is int and i >= 0 for i in layers):
        return []
    return [f"{where} is {layers!r}; expected 'all', 'top-K', 'bottom-K' (K >= 1) or a list of indices from 0"]
