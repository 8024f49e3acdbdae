"""Settings of small networks whose layers become features with a readout, or low-rank layers."""

# `option` returns a dataclasses.field, which is a valid dataclass default.
# ruff: noqa: RUF009

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from snnk_cli.config import option
from snnk_peft.errors import ConfigError
from snnk_peft.feature_map import FeatureMapSpec

INITS = ("nystrom", "paper", "random")  # of the readout, see SNNKLinear.from_linear


def feature_faults(given: Mapping[str, Any]) -> list[str]:
    """List the faults of a feature map, apart from its input dimension, and of its init."""
    fields = dict(given)
    init = fields.pop("init", INITS[0])
    faults = [] if init in INITS else [f"snnk.init is {init!r}; expected one of {', '.join(INITS)}"]
    try:
        return faults + FeatureMapSpec.from_dict({"slot": "layer", **fields, "dim": 2}).faults("snnk")
    except ConfigError as error:
        return faults + error.faults


def feature_label(given: Mapping[str, Any]) -> str:
    """Return component, projection and number of features, joined by hyphens."""
    return "-".join(str(given.get(name, "default")) for name in ("component", "projection", "num_features"))


@dataclass
class SineModel:
    """The dense network: SIREN for images has three hidden layers of 256, the SNNK paper one."""

    width: int = option(256, "of all layers", low=1)
    hidden: int = option(1, "layers of width × width", low=0)
    omega: float = option(30.0, "ω₀, the factor in every sine", above=0)


@dataclass
class SineMethod:
    """The hidden layers that become SNNK layers or low-rank layers."""

    kind: str = option(
        "snnk",
        "what the hidden layers become; low_rank gets as many numbers as snnk would",
        choices=("snnk", "low_rank"),
    )
    snnk: dict[str, Any] | None = option(
        None, "component, projection, num_features and what else a feature map has, and init; null: all layers dense"
    )
    layers: list[int] | None = option(None, "which hidden layers, from 0; null: all")

    def check(self) -> list[str]:
        faults = [] if self.snnk is None else feature_faults(self.snnk)
        if self.kind == "low_rank" and "num_features" not in (self.snnk or {}):
            faults.append(
                f"snnk is {self.snnk!r}; expected num_features, which sets the number of parameters of kind low_rank"
            )
        return faults

    def label(self) -> str:
        """Return "dense", "low_rank", or component, projection and number of features."""
        if self.snnk is None:
            return "dense"
        return self.kind if self.kind == "low_rank" else feature_label(self.snnk)


def layer_faults(model: SineModel, method: SineMethod) -> list[str]:
    """List named hidden layers that do not exist."""
    absent = [index for index in method.layers or [] if not 0 <= index < model.hidden]
    return [f"method.layers names {absent}; model.hidden is {model.hidden}, expected 0 to one less"] if absent else []
