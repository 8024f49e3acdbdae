"""When an adapter may be computed as one operation (`functional/adapter_sum.py`), and its arguments then.

The modules, called one after the other, are the reference. They serve in inference, in compiled and exported graphs,
under vmap and the other transforms, for subclasses of tensors, for modules with hooks (offloaded or
watched ones) and for whatever has a way of its own.
"""

from __future__ import annotations

import functools
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.modules.module import _has_any_global_hook

from snnk_peft.components.base import Component
from snnk_peft.feature_map.base import check_finite
from snnk_peft.functional.adapter_sum import AdapterForm, adapter_sum
from snnk_peft.functional.blocks import traced
from snnk_peft.functional.precision import product_dtype
from snnk_peft.layers.feature_stage import FeatureStage
from snnk_peft.projections.base import Projection
from snnk_peft.projections.base_structured import Structured

PLAIN = (Tensor, nn.Parameter)
MANY = 1 << 17  # elements of r above which a CPU computes for longer than it dispatches, and gains nothing
_NARROW: WeakKeyDictionary[Projection, tuple[Any, Tensor, Tensor]] = WeakKeyDictionary()


def adapter_step(stage: FeatureStage, readout: Any, x: Tensor, residual: Tensor | None) -> Tensor | None:
    """r + Φ(x) Mᵀ as one operation, or None where the modules have to be called.

    Args:
        stage: Φ.
        readout: the `GatedReadout` that holds M.
        x: (..., dim).
        residual: r (..., out_dim); None for x itself.
    """
    feature_map = stage.feature_map
    component, projection = feature_map.component, feature_map.projection
    classes: Any = type(stage), type(component), type(projection)
    if not (
        serves(readout, x, residual)
        and one_product(*classes)
        and projection.uniform
        and not projection.fast
        and stage.shift is None
        and not component._parameters
        and not stage.append_input
        and untouched(stage, feature_map, component, projection, readout)
    ):
        return None
    dtype = product_dtype(readout.A.dtype, x.device.type)
    if component.periodic and (dtype.itemsize < 4 or x.dtype.itemsize < 4):
        return None
    check_finite("phi", x, projection)
    weight, bias = projection.materialize(), projection.bias
    if any(tensor is not None and tensor.is_inference() for tensor in (weight, bias, stage.means)):
        return None  # made in inference mode: cannot be saved for a backward pass, and has no version
    offsets = component.offsets(projection.num_features, x.device)
    if offsets is not None:
        bias = offsets if bias is None else bias + offsets
    amplitude: Any = projection.amplitudes()
    form = AdapterForm(component, stage.normalize, stage.scale, 1 / amplitude, readout.scaling * amplitude, dtype)
    low = in_dtype(projection, weight, dtype)
    return adapter_sum(x, residual, weight, low, bias, stage.means, readout.gated(), form)


def readout_step(readout: Any, features: Tensor, residual: Tensor) -> Tensor | None:
    """r + z Mᵀ as one operation, or None; z (..., feature_dim), the rest as in `adapter_step`."""
    if not serves(readout, features, residual):
        return None
    form = AdapterForm(None, False, 1.0, 1.0, readout.scaling, product_dtype(readout.A.dtype, features.device.type))
    return adapter_sum(features, residual, None, None, None, None, readout.gated(), form)


def serves(readout: Any, x: Tensor, residual: Tensor | None) -> bool:
    """Return True in a training step that can use an operation with its own backward pass.

    What is checkpointed runs without gradients first: then too, so that both runs give the same.
    """
    return (
        not traced()
        and (torch.is_grad_enabled() or readout.training)
        and not torch.is_inference_mode_enabled()
        and type(x) in PLAIN
        and (x.device.type != "cpu" or (x if residual is None else residual).numel() < MANY)
        and type(readout.A) in PLAIN
        and (residual is None or type(residual) in PLAIN)
        and not torch._C._are_functorch_transforms_active()
        and forward_ad._current_level < 0
    )


@functools.cache
def one_product(stage: Any, component: Any, projection: Any) -> bool:
    """Return True if the features of these classes are f(x Wᵀ + c) with a known derivative of f."""
    return (
        stage is FeatureStage
        and component.gradient is not Component.gradient
        and all(getattr(component, name) is getattr(Component, name) for name in ("activate", "tower", "phi"))
        and projection.normalized is Projection.normalized
        and projection.forward in (Projection.forward, Structured.forward)
    )


def untouched(*modules: nn.Module) -> bool:
    """Return True if calling these modules runs their `forward` and nothing else (no hooks, no wrapper)."""
    if _has_any_global_hook():
        return False
    for module in modules:
        own = module.__dict__
        if (
            own["_forward_hooks"]
            or own["_forward_pre_hooks"]
            or own["_backward_hooks"]
            or own["_backward_pre_hooks"]
            or "forward" in own
        ):
            return False
    return True


def in_dtype(projection: Projection, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """W in another dtype, without a gradient; of a matrix that is not trained it is kept until that changes.

    Args:
        projection: whose matrix it is.
        weight: W.
        dtype: wanted.
    """
    if weight.dtype == dtype:
        return weight.detach() if weight.requires_grad else weight
    if weight.requires_grad:
        return weight.detach().to(dtype)
    # A detached W shares memory and version with it: while that is held here, nothing else has the address.
    state = (weight.data_ptr(), weight._version, weight.shape, weight.stride(), weight.dtype, weight.device, dtype)
    kept = _NARROW.get(projection)
    if kept is None or kept[0] != state:
        kept = _NARROW[projection] = state, weight.detach(), weight.detach().to(dtype)
    return kept[2]
