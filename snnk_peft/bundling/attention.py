"""Linear attention in a bundle: the attention module stays, and a KernelAttention is put inside it as `snnk_kernel`.

    attention           linear attention for the module above   spec: terms (stages, key_stages), num_heads, near_field
    joint_attention     the same under one normalisation        spec: sinks, full_heads and rotary as well

Part of the code file of bundles that have it. Importing this module registers the attention function.
"""

from __future__ import annotations

import math
from typing import Any, cast

from torch import nn

from snnk_peft.bundling.modules import ADDITIONS, BUILDERS, FINISHERS, Spec
from snnk_peft.bundling.plan import FIELDS, SIZE, WIDEST, Check, expects, field_faults, list_of, or_none, stage_faults
from snnk_peft.digests import notes
from snnk_peft.errors import ConfigError
from snnk_peft.feature_map import FeatureMap
from snnk_peft.functional.rotary import Rotary
from snnk_peft.functional.rounded import BITS
from snnk_peft.layers.attention_term import AttentionTerm
from snnk_peft.layers.feature_stage import FeatureStage
from snnk_peft.layers.kernel_attention import KernelAttention
from snnk_peft.options import MOST
from snnk_peft.parts.attention.cache import use_recurrent_cache
from snnk_peft.parts.attention.interface import NAME

PLANNED_ATTENTION = "snnk_peft"  # in plans; the name under which a function is registered depends on the module


def attention_spec(kernel: KernelAttention) -> Spec:
    """Return the spec of a kernel."""
    joint: Spec = {} if kernel.joint is None else {"kind": "joint_attention", "sinks": kernel.joint.sinks}
    if kernel.full_heads:
        joint |= {"full_heads": list(kernel.full_heads), "cache_bits": kernel.cache_bits}
    if kernel.joint is not None and (rotary := kernel.joint.rotary) is not None:
        joint["rotary"] = {"frequencies": list(rotary.frequencies), "distance": rotary.distance}
    return {
        "kind": "attention",
        "terms": [_term_spec(cast(AttentionTerm, term)) for term in kernel.terms],
        "num_heads": kernel.num_heads,
        "near_field": kernel.near_field,
        "attention_implementation": PLANNED_ATTENTION,
        "fitted_length": kernel.fitted_length,
        **joint,
    }


def _term_spec(term: AttentionTerm) -> Spec:
    first, second = zip(*term.pairs(), strict=True)
    return {
        "stages": [FeatureStage(feature_map).spec() for feature_map in first],
        "key_stages": None if term.key_maps is None else [FeatureStage(feature_map).spec() for feature_map in second],
    }


def _attention_maps(stages: list[Spec]) -> list[FeatureMap]:
    return [FeatureStage.from_spec(stage).feature_map for stage in stages]


def _attention(spec: Spec, present: Any) -> nn.Module:
    terms = [
        AttentionTerm(_attention_maps(term["stages"]), term["key_stages"] and _attention_maps(term["key_stages"]))
        for term in spec["terms"]
    ]
    joint: Spec = {}
    if spec["kind"] == "joint_attention":
        joint = {"joint": True, "sinks": spec["sinks"], "full_heads": spec.get("full_heads", ())}
        joint["cache_bits"] = spec.get("cache_bits")
        joint["rotary"] = Rotary(**spec["rotary"]) if "rotary" in spec else None
    return KernelAttention(
        terms, spec["num_heads"], near_field=spec["near_field"], fitted_length=spec.get("fitted_length"), **joint
    )


def _use_linear_attention(model: Any) -> None:
    """Switch to this attention function and its cache, which transformers does not record in config.json."""
    model.set_attn_implementation(NAME)
    if model.config._attn_implementation != NAME:
        raise ConfigError(
            f"{type(model).__name__} keeps attention {model.config._attn_implementation!r}, so its linear attention "
            f"would be ignored; expected {NAME!r}. Use transformers 5 and the classes of this bundle"
        )
    use_recurrent_cache(model)
    unknown = [
        path
        for path, module in model.named_modules()
        if isinstance(module, KernelAttention)
        and module.fitted_length is None
        and any(feature_map.projection.of_attention for feature_map in module.maps())
        and getattr(model.get_submodule(path.rpartition(".")[0]), "is_causal", False)
    ]
    if unknown:
        notes.warning(
            "%s does not say how long the texts were that its linear attention was fitted to (an earlier version saved "
            "it, or it was never calibrated): on longer ones its output is wrong, without an error. Convert it again",
            type(model).__name__,
        )


STAGES = list_of("stages", stage_faults)
TERM: dict[str, Check] = {"stages": STAGES, "key_stages": or_none(STAGES)}
ROTARY: dict[str, Check] = {
    "frequencies": expects(
        "a list of finite numbers",
        lambda value: (
            isinstance(value, list)
            and 0 < len(value) < WIDEST
            and all(type(number) in (int, float) and math.isfinite(number) for number in value)
        ),
    ),
    "distance": SIZE,
}
FIELDS["attention"] = {
    "terms": list_of("terms", lambda where, term: field_faults(where, term, TERM)),
    "num_heads": SIZE,
    "near_field": or_none(SIZE),
    "fitted_length": or_none(SIZE),
    "attention_implementation": expects(
        f"{PLANNED_ATTENTION!r}, without which the linear attention would be ignored",
        lambda value: value == PLANNED_ATTENTION,
    ),
}
FIELDS["joint_attention"] = {
    **FIELDS["attention"],
    "near_field": SIZE,
    "sinks": expects(f"an integer >= 0 and <= {MOST}", lambda value: type(value) is int and 0 <= value <= MOST),
    "full_heads": expects(
        "a list of key heads, each once",
        lambda value: (
            isinstance(value, list)
            and all(type(head) is int and 0 <= head < WIDEST for head in value)
            and len(set(value)) == len(value)
        ),
    ),
    "cache_bits": expects("8, 4 or null", lambda value: value is None or (type(value) is int and value in BITS)),
    "rotary": lambda where, value: field_faults(where, value, ROTARY),
}
BUILDERS |= dict.fromkeys(("attention", "joint_attention"), _attention)
ADDITIONS |= {"attention", "joint_attention"}
FINISHERS |= dict.fromkeys(("attention", "joint_attention"), _use_linear_attention)
