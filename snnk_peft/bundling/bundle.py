"""bundle: fold a patched model into a plain transformers model that anybody can load.

The bundle is built the way `from_pretrained` will build it: its class on the meta device from config and plan, then the
tensors. Every tensor is copied once; tensors that folding removes are never copied. The patched model is not changed.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from snnk_peft.bundling.attention import attention_spec
from snnk_peft.bundling.classes import bundle_model_class, original_class
from snnk_peft.bundling.fold import FoldPlan, Place, places, plan_folds
from snnk_peft.bundling.modules import spec_of
from snnk_peft.bundling.pooled_head import PooledHeadModel
from snnk_peft.bundling.report import BundleReport, compare, probe_inputs
from snnk_peft.calibrating.batches import checked_one
from snnk_peft.calibrating.guards import named_padding, refuse_not_finite, refuse_overflow
from snnk_peft.calibrating.inputs import masked_tokens
from snnk_peft.errors import ConfigError, UnsupportedError
from snnk_peft.families import known_family
from snnk_peft.functional.at_hand import offloaded
from snnk_peft.model_card import hub_id
from snnk_peft.tuner.given_model import is_bundle, of_transformers, takes_model
from snnk_peft.tuner.slot_layer import SlotLayer, root_of

Tensors = dict[str, torch.Tensor]

# Relative to the largest output. Half precision rounds every layer's output to 8 or 11 bits; feature matrices are fp32
# in the patched model, whatever its dtype.
TOLERANCES = {torch.float64: 1e-7, torch.float32: 1e-5, torch.float16: 2e-2, torch.bfloat16: 1e-1}


@takes_model
def bundle(model: nn.Module, *, probe: Mapping[str, Any] | None = None) -> Any:
    """Fold the active SNNK adapter into a plain transformers model.

    Pooler and classifier become a feature map and one Linear (num_classes × num_features), an FFN becomes a feature map
    and one Linear, gates and scalings of adapters are multiplied into one matrix, a parallel adapter disappears into
    the FFN. Dropout layers stay where they are; after a folded pooler they act on features, which matters only if the
    bundle is trained further.

    Args:
        model: from `get_snnk_model`, or a transformers model with a loaded SNNK adapter. It is not changed.
        probe: model inputs on which bundle and model must agree; random token ids with padding, or random images, if
            None.

    Returns:
        A `PreTrainedModel` in eval mode, on the same device, sharing no memory with `model`. `save_pretrained` writes a
        folder that loads with the Auto classes after `import snnk_peft`, or without this package under
        `trust_remote_code=True`. `.bundle_report` lists what was folded, sizes, parity.

    Raises:
        ConfigError: nothing to fold.
        UnsupportedError: a model that cannot be folded or rebuilt from its config; says why.
        ValueError: a weight or output is NaN or infinite; or the bundle's outputs differ from the model's by more than
            1e-5 of the largest output in fp32 (2e-2 in fp16, 1e-1 in bf16), and in fp32 those of float64 copies do,
            too.

    Example:
        >>> from transformers import BertConfig, BertForSequenceClassification
        >>> from snnk_peft import FFNPart, SNNKConfig, bundle, get_snnk_model
        >>> tiny = BertConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64)
        >>> model = get_snnk_model(BertForSequenceClassification(tiny), SNNKConfig(ffn=FFNPart(num_features=8)))
        >>> small = bundle(model)
        >>> small.bundle_report.folded[0].after
        '8 gelu features + Linear 8→32'
    """
    base = root_of(model)
    family = known_family(base)
    refuse_not_finite(base, replaced=False)
    bundled, plan, table = folded_model(base)
    inputs = probe_inputs(base) if probe is None else checked_one(base, probe, "probe")
    masked = masked_tokens(inputs)
    with named_padding(base, masked), named_padding(bundled, masked):
        error, where = compare(base, bundled, inputs)
        if error != error:
            refuse_overflow(base, inputs, "the probe")
        tolerance = TOLERANCES.get(base.dtype, 1e-5)
        # A model may amplify the rounding of its own layers; folding is not to blame.
        if base.dtype == torch.float32 and error > tolerance >= (exact := _in_float64(base, bundled, inputs)):
            warnings.warn(
                f"the bundle's {where} differs from the model's by {error:.0e} of its largest value in float32, but by "
                f"{exact:.0e} in float64: this model makes much of rounding, and its outputs differ as much from one "
                "machine to another",
                RuntimeWarning,
                stacklevel=3,
            )
            tolerance = error
    read = family is not None and family.classifier_of_pooler is not None and family.pooler_activation is None
    if not error <= tolerance and plan.head is not None and family is not None and read:
        raise UnsupportedError(
            f"family {family.name!r} says that {plan.head!r} reads what {plan.pooler!r} gives (classifier_of_pooler), "
            f"but a bundle that multiplies the two differs by {error:.1e} in {where}: something lies between them, "
            "such as an activation that forward() calls as a function. Leave classifier_of_pooler out of the family, "
            "or name that module as pooler_activation"
        )
    if not error <= tolerance:
        raise ValueError(
            f"the bundle's {where} differs from the model's by {error:.1e} of its largest value; expected at most "
            f"{tolerance:.0e} in {str(base.dtype).removeprefix('torch.')}. Feature matrices or readouts with very "
            "large entries lose precision: calibrate the replaced parts, or bundle in float64 (model.double())"
        )
    _write_report(bundled, model, base, plan, table, error, tolerance)
    return bundled


def _in_float64(base: nn.Module, bundled: nn.Module, inputs: Mapping[str, Any]) -> float:
    """Apply `compare` to float64 copies of both models."""
    wide = {
        name: value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value
        for name, value in inputs.items()
    }
    return compare(copy.deepcopy(base).double(), copy.deepcopy(bundled).double(), wide)[0]


def folded_model(base: nn.Module) -> tuple[Any, FoldPlan, dict[str, Place]]:
    """Build the bundle of a patched transformers model, also on the meta device, without comparing outputs.

    Returns:
        The bundle, what was folded, and the places of the patched model.

    Raises:
        ConfigError, UnsupportedError: as in `bundle`.
    """
    if is_bundle(base):
        raise ConfigError(
            f"{type(base).__name__} is a bundle already; expected a patched model, from get_snnk_model. There is "
            "nothing more to fold: use it, or save it with save_pretrained (LoRA that was put on it is merged by "
            "merge_and_unload)"
        )
    base = of_transformers(base, "its bundle could not be loaded back")
    if getattr(base, "is_quantized", False):
        raise UnsupportedError("the model is quantized; load it in full precision, then patch and bundle it")
    if away := offloaded(base):
        raise UnsupportedError(
            f"tensors of {len(away)} modules of the model are offloaded to memory or disk; a bundle is made of copies "
            "of them. Load the model without device_map, bundle it, and offload the bundle"
        )
    table = dict(places(base))
    plan = plan_folds(table, base.dtype)
    retrained = any(place.module is not place.original for place in table.values())  # norms, say: nothing to fold
    if not (plan.modules or plan.additions or plan.altered or retrained):
        raise ConfigError(
            "nothing to bundle: no active SNNK adapter in this model; use get_snnk_model first, or activate one with "
            "set_adapter(name) and leave disable_adapter()"
        )
    state, volatile = _tensors(table, plan, base.dtype)
    return _build(base, table, plan, state, volatile), plan, table


def _tensors(table: dict[str, Place], plan: FoldPlan, dtype: torch.dtype) -> tuple[Tensors, Tensors]:
    """Copy all tensors of the bundle: those of its state dict, and non-persistent buffers."""
    state: Tensors = {}
    volatile: Tensors = {}
    inside = tuple(f"{path}." for path in plan.modules)
    for path, place in table.items():
        if path.startswith(inside):
            continue
        planned = path in plan.modules
        module = plan.modules.get(path, place.module)
        trained = planned or place.module is not place.original
        prefix = f"{path}." if path else ""
        for name, part in module.named_modules() if planned else [("", module)]:
            local = f"{prefix}{name}." if name else prefix
            own = [*part.named_parameters(recurse=False), *part.named_buffers(recurse=False)]
            for key, tensor in own:
                cast = dtype if trained and tensor.is_floating_point() else tensor.dtype
                into = volatile if key in part._non_persistent_buffers_set else state
                into[local + key] = tensor.detach().to(cast, copy=True)
    for path, kernel in plan.additions.items():
        for key, tensor in kernel.state_dict().items():
            state[f"{path}.{key}"] = tensor.detach().to(dtype if tensor.is_floating_point() else None, copy=True)
        for name, part in kernel.named_modules():
            for key in part._non_persistent_buffers_set:
                buffer = getattr(part, key)
                volatile[f"{path}.{name}.{key}"] = buffer.detach().to(dtype, copy=True)
    return state, volatile


def _build(base: PreTrainedModel, table: dict[str, Place], plan: FoldPlan, state: Tensors, volatile: Tensors) -> Any:
    headed = isinstance(base, PooledHeadModel)  # its head is new, and nothing of its encoder is folded
    cls = bundle_model_class(original_class(type(base)) if headed else type(base), pooled=headed)
    fields = {key: value for key, value in copy.deepcopy(base.config.to_dict()).items() if key not in REMOVED_FIELDS}
    fields["snnk_plan"] = {
        "model_class": cls.__name__,
        "modules": {
            **(base.config.snnk_plan["modules"] if headed else {}),
            **{path: spec_of(module, table[path].module) for path, module in plan.modules.items()},
            **{path: attention_spec(kernel) for path, kernel in plan.additions.items()},
            **plan.altered,
        },
        "head": plan.head,
        "pooler": plan.pooler,
    }
    config = cls.config_class(**fields)
    config._attn_implementation = base.config._attn_implementation
    config.dtype = base.dtype
    with torch.device("meta"):
        bundled = cls(config)
        if untied(bundled.all_tied_weights_keys, state):
            config.tie_word_embeddings = config.get_text_config().tie_word_embeddings = False
            bundled = cls(config)
        if left_out := _left_out(bundled, table, plan):
            config.snnk_plan["modules"].update(left_out)
            bundled = cls(config)
    return filled(bundled, base, state, volatile)


def untied(tied: Mapping[str, str], state: Tensors) -> bool:
    """Return True if weights that a config ties, {copy: source}, have diverged; never on the meta device."""
    pairs = [(state[copy], state[source]) for copy, source in tied.items() if copy in state and source in state]
    return any(not copy.is_meta and not torch.equal(copy, source) for copy, source in pairs)


def filled(bundled: Any, base: PreTrainedModel, state: Tensors, volatile: Tensors) -> Any:
    """Load the tensors into a bundle built on the meta device and set it to eval mode.

    Args:
        bundled: the bundle, changed in place.
        base: the model that it was made from.
        state: everything in its state dict, by path.
        volatile: non-persistent buffers, by path.

    Raises:
        UnsupportedError: tensors that do not fit, or a buffer without value: the config does not build such a model.
    """
    try:
        bundled.load_state_dict(state, strict=True, assign=True)
    except RuntimeError as error:
        raise UnsupportedError(
            f"{type(base).__name__} is not what its config builds, so a bundle of it could not be loaded back: {error}"
        ) from error
    bundled.tie_weights()
    for name, buffer in list(bundled.named_buffers()):
        if name in volatile:
            parent, _, leaf = name.rpartition(".")
            setattr(bundled.get_submodule(parent), leaf, volatile[name])
        elif buffer.device.type == "meta" and name not in state:
            raise UnsupportedError(f"{type(base).__name__} builds a buffer {name!r} that the given model does not have")
    if getattr(base, "generation_config", None) is not None:
        bundled.generation_config = copy.deepcopy(base.generation_config)
    return bundled.eval()


def _left_out(built: nn.Module, table: dict[str, Place], plan: FoldPlan) -> dict[str, Any]:
    """Return specs for the modules that the model's owner has replaced by nn.Identity."""
    identities = {path for path, place in table.items() if type(place.module) is nn.Identity} - plan.modules.keys()
    present = {path for path, module in built.named_modules() if type(module) is not nn.Identity}
    return {path: spec_of(nn.Identity()) for path in sorted(identities & present)}


REMOVED_FIELDS = ("model_type", "architectures", "auto_map", "transformers_version", "dtype")


def _write_report(
    bundled: Any,
    model: nn.Module,
    base: PreTrainedModel,
    plan: FoldPlan,
    table: dict[str, Place],
    error: float,
    tolerance: float,
) -> None:
    configs = getattr(model, "peft_config", None) or {}
    # Read from a layer, since the transformers model inside a PeftModel does not know them.
    names = next((list(part.active_adapters) for part in base.modules() if isinstance(part, SlotLayer)), [])
    original = size_of(_unique(table[path].original for path in table))
    slots = size_of(_unique(part for place in table.values() for slot in place.slots for part in slot.modules()))
    trained = size_of(_unique(place.module for place in table.values() if place.module is not place.original))
    after = size_of(_unique(bundled.modules()))
    named = next((configs[name].base_model_name_or_path for name in names if name in configs), None)
    report = BundleReport(
        model_class=type(bundled).__name__,
        base_model=hub_id(named) or hub_id(base.config._name_or_path),
        parts={
            name: {part: vars(value) for part, value in configs[name].named_parts().items()}
            for name in names
            if hasattr(configs.get(name), "named_parts")
        },
        folded=plan.folded,
        remarks=plan.remarks,
        parameters_base=original[0],
        parameters_patched=original[0] + slots[0] + trained[0],
        parameters_after=after[0],
        bytes_base=original[1],
        bytes_patched=original[1] + slots[1] + trained[1],
        bytes_after=after[1],
        parity_error=error,
        parity_tolerance=tolerance,
        dtype=str(base.dtype).removeprefix("torch."),
    )
    bundled.config.snnk_plan["report"] = copy.deepcopy(report.to_dict())


def _unique(modules: Any) -> Tensors:
    """Return the persistent tensors that modules hold directly; a shared tensor counts once."""
    return {
        str(id(tensor)): tensor
        for module in modules
        for name, tensor in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        if name not in module._non_persistent_buffers_set
    }


def size_of(tensors: Mapping[str, torch.Tensor]) -> tuple[int, int]:
    """Return the number of their entries, and of their bytes."""
    return (
        sum(tensor.numel() for tensor in tensors.values()),
        sum(tensor.numel() * tensor.element_size() for tensor in tensors.values()),
    )
