"""A bundle's plan, checked like any other config before a module is built from it.

    plan    {module path: spec}
    spec    {"kind": ..., and the fields of that kind}, as described in bundling/modules.py

Part of the code file of every bundle.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from snnk_peft.feature_map.base import FeatureMapSpec
from snnk_peft.options import MOST
from snnk_peft.registry import did_you_mean

Check = Callable[[str, Any], list[str]]

WIDEST, WIDEST_KERNEL = 1 << 22, 1 << 8  # a module of these sizes can be described, on the meta device


def expects(what: str, fits: Callable[[Any], bool]) -> Check:
    """Return a check of one value: "WHERE is VALUE; expected WHAT"."""
    return lambda where, value: [] if fits(value) else [f"{where} is {str(value)[:100]!r}; expected {what}"]


def or_none(check: Check) -> Check:
    """Return a check that accepts None as well."""
    return lambda where, value: [] if value is None else check(where, value)


def list_of(what: str, check: Check) -> Check:
    """Return a check of a list with at least one item, each by its own check."""

    def faults(where: str, items: Any) -> list[str]:
        if not isinstance(items, list) or not items:
            return [f"{where} is {str(items)[:100]!r}; expected a list of {what}"]
        return [fault for i, item in enumerate(items) for fault in check(f"{where}[{i}]", item)]

    return faults


def _is_whole(value: Any, least: int, most: int = WIDEST) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < math.inf


def _are_whole(value: Any, least: int) -> bool:
    return isinstance(value, list) and all(_is_whole(item, least, WIDEST_KERNEL) for item in value)


SIZE = expects(f"an integer >= 1 and <= {WIDEST}", lambda value: _is_whole(value, 1))
SIZES = expects(
    f"one or two integers >= 1 and <= {WIDEST_KERNEL}, in a list",
    lambda value: _are_whole(value, 1) and len(value) in (1, 2),
)
PADDING = expects(
    f"'same', 'valid' or a list of integers >= 0 and <= {WIDEST_KERNEL}",
    lambda value: value in ("same", "valid") or _are_whole(value, 0),
)
PADDING_MODE = expects("a padding mode of torch", lambda value: value in ("zeros", "reflect", "replicate", "circular"))
YES_OR_NO = expects("true or false", lambda value: isinstance(value, bool))

STAGE: dict[str, Check] = {
    **dict.fromkeys(FeatureMapSpec.stored_names(), lambda where, value: []),  # it checks them itself
    "dim": expects("an integer >= 1", lambda value: value is not None),
    "normalize": YES_OR_NO,
    "whitened": YES_OR_NO,
    "center": YES_OR_NO,
    "scale": expects("a finite number", _is_number),
    "append_input": YES_OR_NO,
}


def stage_faults(where: str, stage: Any) -> list[str]:
    """List the faults of a FeatureStage's spec."""
    faults = field_faults(where, stage, STAGE)
    if not isinstance(stage, Mapping) or any(name not in stage for name in STAGE):
        return faults
    spec = FeatureMapSpec.from_dict({name: stage[name] for name in FeatureMapSpec.stored_names()})
    faults += spec.faults(where)
    if not faults and spec.num_features * stage["dim"] > MOST:
        faults.append(f"{where}: num_features × dim is {spec.num_features} × {spec.dim}; expected <= {MOST}")
    return faults


def spec_faults(where: str, spec: Any) -> list[str]:
    """List the faults of one spec, nested ones included."""
    kind = spec.get("kind") if isinstance(spec, Mapping) else None
    if not isinstance(kind, str) or kind not in FIELDS:
        return [f"{where}: {did_you_mean('kind of bundled module', kind, list(FIELDS))}"]
    return field_faults(where, {key: value for key, value in spec.items() if key != "kind"}, FIELDS[kind])


# Kind -> its fields; bundling/attention.py adds its own.
FIELDS: dict[str, dict[str, Check]] = {
    "keep": {},
    "identity": {},
    "linear": {"in": SIZE, "out": SIZE, "bias": YES_OR_NO},
    "convolution": {
        "in": SIZE,
        "out": SIZE,
        "kernel": SIZES,
        "stride": SIZES,
        "padding": PADDING,
        "dilation": SIZES,
        "padding_mode": PADDING_MODE,
        "bias": YES_OR_NO,
    },
    "features": {"stage": stage_faults},
    "adapter": {"stage": stage_faults},
    "sequence": {"modules": list_of("modules", spec_faults)},
    "beside": {"module": spec_faults, "stage": stage_faults},
    "leading": {"module": spec_faults, "width": SIZE},
    "heads": {"size": SIZE},
    "mean_first": {},
}


LATER = {
    "cache_bits",
    "fitted_length",
    "full_heads",
    "rotary",
    "standardized",
}  # fields that earlier versions did not write


def field_faults(where: str, given: Any, fields: Mapping[str, Check]) -> list[str]:
    """List the faults of an object that must have exactly these fields."""
    if not isinstance(given, Mapping):
        return [f"{where} is {str(given)[:100]!r}; expected an object with {', '.join(fields)}"]
    faults = [f"{where} lacks {name!r}" for name in fields if name not in given and name not in LATER]
    faults += [f"{where}: {did_you_mean('field', name, list(fields))}" for name in given if name not in fields]
    return faults + [f for name in fields if name in given for f in fields[name](f"{where}.{name}", given[name])]


def plan_faults(modules: Any) -> list[str]:
    """List all faults of a bundle's plan."""
    if not isinstance(modules, Mapping):
        return [f"snnk_plan.modules is {str(modules)[:100]!r}; expected an object {{module path: spec}}"]
    return [fault for path, spec in modules.items() for fault in spec_faults(f"snnk_plan.modules[{path!r}]", spec)]
