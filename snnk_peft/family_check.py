"""check_family: check that the description of an architecture (`ModelFamily`) matches a model.

A path can name a module that exists but is never called, or whose output is not used. So every part that the model
supports is put into a copy of it, and run on one probe batch:

    called      the model and every slot in it run
    gradient    the trained parameters at each place get a nonzero gradient
    changes     changing trained parameters changes the output
    beliefs     a slot's assumptions hold (`Slot.check`: hidden units are activation(a), gated ones times b)
    disabled    disable_adapter() restores the original's output, bit by bit (softmax attention: up to rounding)
    bundle      the folded model agrees with the patched one
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import nn

from snnk_peft.bundling.bundle import TOLERANCES, bundle
from snnk_peft.bundling.report import probe_inputs
from snnk_peft.calibrating.batches import checked_one
from snnk_peft.calibrating.guards import refuse_not_finite
from snnk_peft.config import SNNKConfig
from snnk_peft.config_parts import SHORTCUTS
from snnk_peft.errors import UnsupportedError
from snnk_peft.families import family_of
from snnk_peft.families.base import ModelFamily
from snnk_peft.layers.slots import Slot
from snnk_peft.parts import PARTS
from snnk_peft.tuner.get_model import get_snnk_model
from snnk_peft.tuner.given_model import of_transformers, refuse_patched, refuse_prepared, takes_model
from snnk_peft.tuner.model import plan_patches
from snnk_peft.tuner.slot_layer import SlotLayer, is_saved_in_full

# Paths inside one layer, which exist in every model of a family; the others are those of heads, which may be missing.
IN_LAYERS = (
    *("attention", "query", "key", "value", "attention_out", "attention_adapter"),
    *("ffn_in", "ffn_up", "activation", "ffn_out", "ffn_adapter"),
)
SHOWN = 6  # places named in a message


@dataclass(frozen=True)
class FamilyReport:
    """Result of `check_family`; prints as a table.

    Args:
        model_class: the class of the model.
        family: the name of its family.
        checked: the cases that passed.
        left_out: case -> why this model or family does not support it.
    """

    model_class: str
    family: str
    checked: list[str] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        rows = [f"{case:<12} as it should be" for case in self.checked]
        rows += [f"{case:<12} left out: {reason}" for case, reason in self.left_out.items()]
        return "\n".join([f"{self.model_class} (family {self.family!r})", *rows])


@takes_model
def check_family(model: nn.Module, *, probe: Mapping[str, Any] | None = None) -> FamilyReport:
    """Check the description of a model's family on the model itself, with one probe batch for each part it supports.

    Every case runs on a copy of the model. A small model with random weights, created from a config, is enough.

    Args:
        model: a transformers model without adapters, of a family in `FAMILIES` (see `register_family`). It is not
            changed.
        probe: model inputs. None creates random ones for models with the input `input_ids` or `pixel_values`.

    Returns:
        The cases that were checked, and those that this model does not support, with the reason.

    Raises:
        UnsupportedError: the description is wrong (lists all faults of all parts, with their paths); or the family is
            unknown or supports no part; or the model is patched, a bundle, or quantized.

    Example:
        >>> from transformers import ViTConfig, ViTModel
        >>> from snnk_peft import check_family
        >>> tiny = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
        >>> report = check_family(ViTModel(ViTConfig(image_size=8, patch_size=4, **tiny)))
        >>> report.checked
        ['houlsby', 'pfeiffer', 'parallel', 'query_value', 'attention', 'ffn', 'narrow_ffn', 'narrow_heads', 'pooler']
        >>> report.left_out
        {}
    """
    refuse_prepared(model)
    refuse_patched(model)
    refuse_not_finite(model)
    model = of_transformers(model, "expected one, of the family whose description is to be checked")
    family = family_of(model)
    report = FamilyReport(type(model).__name__, family.name)
    faults = [fault for name in IN_LAYERS for fault in _missing(model, family, name)]
    if not faults:
        inputs = probe_inputs(model) if probe is None else checked_one(model, probe, "probe")
        probes = [(kind, case, part) for kind in PARTS for case, part in PARTS[kind].probes().items()]
        for kind, case, part in probes:
            config = SNNKConfig(**({kind: part} if kind in SHORTCUTS else {"parts": [part]}))
            reason = _reason_against(model, config)
            if reason is not None:
                report.left_out[case] = reason
                continue
            try:
                problems = list(_check(copy.deepcopy(model), config, inputs))
            except (RuntimeError, TypeError, ValueError, LookupError) as error:
                problems = [f"the patched model does not run ({type(error).__name__}: {error})"]
            faults += [f"{case}: {fault}" for fault in problems]
            if not problems:
                report.checked.append(case)
    if not faults and not report.checked:
        faults = [f"{case} left out: {reason}" for case, reason in report.left_out.items()]
    if faults:
        raise UnsupportedError(
            f"the description of family {family.name!r} does not fit {type(model).__name__}; expected paths of modules "
            "that run in its forward(). Correct them (ModelFamily, register_family):\n"
            + "\n".join(f"  - {fault}" for fault in faults)
        )
    return report


def _missing(model: nn.Module, family: ModelFamily, name: str) -> list[str]:
    """List the layers that lack a module described by the family."""
    relative = getattr(family, name)
    assert name in {one.name for one in fields(family)}
    if relative is None:
        return []
    present = {path for path, _ in model.named_modules(remove_duplicate=False)}
    absent = [f"{layer}.{relative}" for layer in family.layer_paths(model) if f"{layer}.{relative}" not in present]
    return [f"{name}: there is no module {_some(absent)}"] if absent else []


def _reason_against(model: nn.Module, config: SNNKConfig) -> str | None:
    """Return why this model does not support the part, or None."""
    try:
        plan_patches(model, config)
    except UnsupportedError as error:
        return str(error)
    return None


def _check(model: Any, config: SNNKConfig, inputs: Mapping[str, Any]) -> Iterator[str]:
    """Try one part in a model, changing the model, and yield the faults."""
    before = _outputs(model.eval(), inputs)
    patched = get_snnk_model(model, config).eval()
    layers = {name.removeprefix("base_model.model."): m for name, m in patched.named_modules() if _holds(m)}
    called: set[nn.Module] = set()
    hooks = [layer.register_forward_pre_hook(lambda module, args: called.add(module)) for layer in layers.values()]
    weights = {name: _weight(value) for name, value in before.items()}
    with torch.enable_grad():
        total = sum(
            (value.float() * weights[name]).sum() for name, value in _tensors(patched(**inputs), inputs).items()
        )
        total.backward()  # type: ignore[union-attr]
    for hook in hooks:
        hook.remove()
    silent = [name for name, layer in layers.items() if layer not in called]
    if silent:
        yield f"{_some(silent)} is not called by forward(), so nothing that is put there has an effect"
    still = [name for name, layer in layers.items() if name not in silent and not _gets_gradient(layer)]
    if still:
        yield f"no gradient reaches {_some(still)}: nothing reads what is computed there"
    if silent or still:
        return
    yield from _wrong_beliefs(patched, inputs)
    _perturb(patched)
    after = _outputs(patched, inputs)
    if all(torch.equal(after[name], value) for name, value in before.items()):
        yield "other trained parameters leave the output as it is"
    with patched.disable_adapter():
        disabled = _outputs(patched, inputs)
    exact = all(part.disables_exactly for part in config.named_parts().values())
    tolerance = 0.0 if exact else TOLERANCES.get(model.dtype, 1e-5)
    for name, value in before.items():
        error = float((disabled[name].double() - value.double()).abs().max())
        if not error <= tolerance * float(value.double().abs().max()):
            yield f"with disable_adapter(), {name} differs from the original's by {error:.1e}"
    try:
        bundle(patched, probe=inputs)
    except (ValueError, UnsupportedError) as error:
        yield f"no bundle: {error}"


def _wrong_beliefs(patched: Any, inputs: Mapping[str, Any]) -> Iterator[str]:
    """Yield the wrong assumptions of slots; see `Slot.check`."""
    with patched.disable_adapter(), torch.no_grad():
        for slot in [module for module in patched.modules() if isinstance(module, Slot)]:
            yield from slot.check(patched.get_base_model(), lambda: patched(**inputs))


def _holds(module: nn.Module) -> bool:
    return isinstance(module, SlotLayer) or is_saved_in_full(module)


def _gets_gradient(layer: nn.Module) -> bool:
    """Return True if a trained parameter here has a gradient, or nothing is trained here (an omitted activation)."""
    inside = {p for child in layer.modules() if child is not layer and _holds(child) for p in child.parameters()}
    trained = [p for p in layer.parameters() if p.requires_grad and p not in inside]
    return not trained or any(p.grad is not None and bool(p.grad.count_nonzero()) for p in trained)


@torch.no_grad()
def _perturb(model: nn.Module) -> None:
    """Randomise every trained parameter, as after training: a part may be initialised to the identity."""
    generator = torch.Generator("cpu").manual_seed(0)
    for parameter in model.parameters():
        if parameter.requires_grad:
            noise = torch.randn(parameter.shape, generator=generator, device="cpu")
            parameter.add_(noise.to(parameter), alpha=0.02)


@torch.no_grad()
def _outputs(model: Any, inputs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    return _tensors(model(**inputs), inputs)


def _tensors(output: Mapping[str, Any], inputs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return the floating-point outputs, set to 0 at padded tokens, where they are arbitrary."""
    several = [
        (f"{key}[{i}]", v) for key, value in output.items() if isinstance(value, tuple) for i, v in enumerate(value)
    ]
    tensors = {key: v for key, v in [*output.items(), *several] if torch.is_tensor(v) and v.is_floating_point()}
    mask = inputs.get("attention_mask")
    if not isinstance(mask, torch.Tensor):
        return tensors
    padding = mask == 0
    return {
        key: v.masked_fill(padding.reshape(padding.shape + (1,) * (v.dim() - padding.dim())), 0.0)
        if v.shape[: padding.dim()] == padding.shape
        else v
        for key, v in tensors.items()
    }


def _weight(value: torch.Tensor) -> torch.Tensor:
    """Draw random weights for a sum over outputs: a plain sum is constant after a LayerNorm."""
    generator = torch.Generator("cpu").manual_seed(value.numel())
    return torch.randn(value.shape, generator=generator, device="cpu").to(value.device)


def _some(places: list[str]) -> str:
    rest = f" and {len(places) - SHOWN} more places" if len(places) > SHOWN else ""
    return ", ".join(map(repr, places[:SHOWN])) + rest
