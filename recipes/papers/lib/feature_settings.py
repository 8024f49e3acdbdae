"""What recipes ask about a layer that becomes features and a readout: fields of a FeatureMapSpec, and `init`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from snnk_peft.errors import ConfigError
from snnk_peft.feature_map import FeatureMapSpec

INITS = ("nystrom", "paper", "random")  # of the readout, see SNNKLinear.from_linear


def feature_faults(given: Mapping[str, Any]) -> list[str]:
    """What is wrong with a feature map, its length of inputs aside, and with its init."""
    fields = dict(given)
    init = fields.pop("init", INITS[0])
    faults = [] if init in INITS else [f"snnk.init is {init!r}; expected one of {', '.join(INITS)}"]
    try:
        return faults + FeatureMapSpec.from_dict({"slot": "layer", **fields, "dim": 2}).faults("snnk")
    except ConfigError as error:
        return faults + error.faults


def feature_label(given: Mapping[str, Any]) -> str:
    """Component, projection and number of features."""
    return "-".join(str(given.get(name, "default")) for name in ("component", "projection", "num_features"))
