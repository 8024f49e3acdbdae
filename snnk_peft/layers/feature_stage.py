"""The input side of an SNNK layer: normalise or whiten, then the feature map, optionally with the input appended.

    stage(x) = Φ(t(x)) − c        or, with append_input,  [Φ(t(x)) − c, x]
    t(x) = scale · x              or, with normalize,     scale · (x − mean(x)) / std(x)  over the last axis
                                  or, with an affine input, scale · (x − shift) ⊙ inverse_std

Shapes: x (..., dim) -> (..., out_dim). An SNNK layer is a stage followed by one matrix, both in training and bundled,
so a bundle holds these same modules.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from snnk_peft.feature_map.base import FeatureMap, FeatureMapSpec
from snnk_peft.functional.at_hand import tensors_at_hand
from snnk_peft.functional.gauss_hermite import hermite_coefficients
from snnk_peft.functional.normalized_projection import EPSILON
from snnk_peft.functional.precision import full_precision, wide
from snnk_peft.projections import GIVEN_ROWS, PROJECTIONS
from snnk_peft.projections.base import check_finite


class FeatureStage(nn.Module):
    """Features of a layer's input.

    Args:
        feature_map: Φ.
        normalize: give Φ each vector minus its mean, divided by its standard deviation (a LayerNorm without weights).
        scale: factor on the input of Φ; determines how non-linear the features are (dim^-½ gives unit pre-activations
            for normalised inputs).
        shift: (dim,) means of the inputs, or None. Together with `inverse_std` whitens them.
        inverse_std: (dim,) reciprocal standard deviations of the inputs, or None.
        center: subtract from each feature its mean over normalised inputs, E f(z) for z ~ N(c, (scale·‖ω‖)²). A ReLU
            feature is mostly its mean, so without centring a readout trained from zero first learns a bias. Components
            that are not elementwise have no such closed form and are not centred.
        append_input: also return x itself, after the features: an exact affine path through the readout.
    """

    shift: torch.Tensor | None
    inverse_std: torch.Tensor | None
    means: torch.Tensor | None

    def __init__(
        self,
        feature_map: FeatureMap,
        *,
        normalize: bool = False,
        scale: float = 1.0,
        shift: torch.Tensor | None = None,
        inverse_std: torch.Tensor | None = None,
        center: bool = False,
        append_input: bool = False,
    ):
        super().__init__()
        self.feature_map = feature_map
        self.normalize, self.scale, self.append_input = normalize, scale, append_input
        self.register_buffer("shift", shift)
        self.register_buffer("inverse_std", inverse_std)
        center = center and feature_map.component.elementwise()
        self.register_buffer("means", self._means_of_normalized() if center else None)

    @torch.no_grad()
    def _means_of_normalized(self) -> torch.Tensor:
        projection = self.feature_map.projection
        if projection.is_blank():  # a loader fills in learned rows, and these means, from the checkpoint
            return torch.empty(self.feature_map.feature_dim, device="meta")
        std = projection.squared_row_norms().sqrt().double().cpu() * abs(self.scale)
        return self._means(torch.zeros_like(std), std)

    def _means(self, mean: torch.Tensor, std: torch.Tensor) -> torch.Tensor:
        """Compute E f(z + c) for z ~ N(mean, std²), one of each per row; fp64, on the CPU."""
        projection, component = self.feature_map.projection, self.feature_map.component
        for added in (projection.bias, component.offsets(projection.num_features)):
            mean = mean if added is None else mean + added.to(mean)
        found = hermite_coefficients(component.function, mean, std, degree=0)[:, 0]
        return (found * projection.amplitudes()).float()

    @torch.no_grad()
    def recenter(self, mean: torch.Tensor, std: torch.Tensor) -> None:
        """Subtract the features' means for inputs whose products with the rows have this mean and std (num_features,).

        Does nothing without `center`.
        """
        if self.means is not None:
            self.means = self._means(mean.double().cpu(), std.double().cpu()).to(self.means)

    def seen(self, x: torch.Tensor) -> torch.Tensor:
        """Return the input that the rows are multiplied by, (..., dim)."""
        if self.normalize:
            return nn.functional.layer_norm(x, x.shape[-1:], eps=EPSILON) * self.scale
        return self.transform(x)

    @property
    def dim(self) -> int:
        return self.feature_map.dim

    @property
    def out_dim(self) -> int:
        return self.feature_map.feature_dim + (self.dim if self.append_input else 0)

    def transform(self, x: torch.Tensor) -> torch.Tensor:
        """Compute t(x), the input of Φ, without `normalize`."""
        if self.shift is not None and self.inverse_std is not None:
            x = (x - self.shift.to(x.dtype)) * self.inverse_std.to(x.dtype)
        return x if self.scale == 1.0 else x * self.scale

    @tensors_at_hand
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x (..., dim) -> (..., out_dim)."""
        if self.feature_map.component.periodic:
            with full_precision(x):
                features = self._features(wide(x)).to(x.dtype)
        else:
            features = self._features(x)
        return torch.cat((features, x), -1) if self.append_input else features

    def _features(self, x: torch.Tensor) -> torch.Tensor:
        projection = self.feature_map.projection
        if self.normalize and not self.feature_map.component.elementwise():
            features = self.feature_map(self.seen(x))
        elif self.normalize:
            check_finite("phi", x, projection)
            z = projection.normalized(x, self.scale)
            features = self.feature_map.component.activate(z, projection.amplitudes())
        else:
            features = self.feature_map(self.transform(x))
        return features if self.means is None else features - self.means.to(features.dtype)

    def effective_rows(self, rows: torch.Tensor, bias: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return rows and biases that act on x as `rows`, `bias` act on t(x); not defined for `normalize`."""
        if self.normalize:
            raise ValueError("a normalised input is not an affine function of x; it has no effective rows")
        effective = rows * self.scale
        if self.shift is not None and self.inverse_std is not None:
            effective = effective * self.inverse_std.to(rows)
            offset = -(effective @ self.shift.to(rows))
            bias = offset if bias is None else bias + offset
        return effective, bias

    def preactivation(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return rows (num_features, dim) and biases (num_features,) of z = rows · x + bias in Φ(t(x)) = m^-½ f(z)."""
        projection = self.feature_map.projection
        rows, bias = self.effective_rows(projection.materialize(), projection.bias)
        added = self.feature_map.component.offsets(projection.num_features, rows.device)
        if added is not None:
            bias = added.to(rows) if bias is None else bias + added.to(rows)
        return rows, bias

    @torch.no_grad()
    def simplified(self) -> FeatureStage:
        """Return an equal stage with a whitened input folded into one dense matrix and bias (cheaper at inference).

        A matrix that is stored as a seed cannot change, so nothing is folded then; nor for a matrix that is cheaper
        than a dense one, or has feature weights of its own.
        """
        old = self.feature_map.projection
        dense_will_do = old.uniform and not old.fast and self.feature_map.component.elementwise()
        if self.shift is None or not old.save or not dense_will_do:
            return self
        rows, bias = self.effective_rows(old.materialize(), old.bias)
        dense = PROJECTIONS[GIVEN_ROWS](self.dim, len(rows), site=old.site).to(rows.device, rows.dtype)
        dense.select(rows, bias, torch.ones_like(rows[:, 0]))  # all rows
        simple = FeatureStage(FeatureMap(self.feature_map.component, dense), append_input=self.append_input)
        simple.means = None if self.means is None else self.means.clone()
        return simple

    def with_input(self) -> FeatureStage:
        """Return the stage [Φ(t(x)) − c, x]: the same features (sharing tensors), with the input appended."""
        stage = copy.copy(self)
        stage.append_input = True
        return stage

    def in_words(self) -> str:
        """Describe the stage in a short phrase, e.g. "64 relu features and the input"."""
        spec = FeatureMapSpec.of(self.feature_map)
        extra = " and the input" if self.append_input else ""
        stored = "" if spec.save else " (seed only)"
        return f"{spec.num_features} {spec.component} features{extra}{stored}"

    def spec(self) -> dict[str, Any]:
        """Return plain data from which `FeatureStage.from_spec` builds a stage of the same shape (see bundling/)."""
        return {
            **FeatureMapSpec.of(self.feature_map).as_dict(),
            "normalize": self.normalize,
            "whitened": self.shift is not None,
            "center": self.means is not None,
            "scale": self.scale,
            "append_input": self.append_input,
        }

    @classmethod
    def from_spec(cls, spec: dict[str, Any]) -> FeatureStage:
        """Build a stage from `spec()`; its tensors come from a checkpoint afterwards."""
        options = {name: spec[name] for name in ("normalize", "scale", "append_input")}
        plain = {name: spec[name] for name in FeatureMapSpec.stored_names()}
        stage = cls(FeatureMapSpec.from_dict(plain).build(), **options)
        if spec["whitened"]:
            stage.shift, stage.inverse_std = torch.zeros(stage.dim), torch.ones(stage.dim)
        if spec["center"]:
            stage.means = torch.zeros(stage.feature_map.feature_dim)
        return stage
