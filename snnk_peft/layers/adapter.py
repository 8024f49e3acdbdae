"""Adapters in training: r + Φ(x) Mᵀ with M = scaling · diag(v) A (SNNK paper, Eq. 22 and App. D).

Called in sequence, the modules `FeatureStage` and `GatedReadout` are the reference implementation: they are used in
inference, in compiled and exported graphs, under vmap and the other transforms, for tensor subclasses, and for modules
with hooks (such as offloaded ones) or a custom forward. Otherwise a training step is one operation,
`functional/adapter_sum.py`. Bundles hold a `FoldedAdapter` instead (`folded.py`).

Shapes: x (..., dim), Φ(x) (..., feature_dim), r (..., out_dim), A (out_dim, feature_dim), v (out_dim,). Trainable:
dim·(m + 1) parameters with the gate v, dim·m without (the paper prints (dim + 1)·m).
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
from snnk_peft.errors import ConfigError
from snnk_peft.functional.adapter_sum import AdapterForm, adapter_sum, product_dtype, residual_linear
from snnk_peft.functional.backend import traced
from snnk_peft.functional.random_numbers import normal_numbers
from snnk_peft.layers.feature_stage import FeatureStage
from snnk_peft.projections.base import Projection, check_finite
from snnk_peft.projections.base_structured import Structured

PLAIN = (Tensor, nn.Parameter)
MANY = 1 << 17  # elements of r above which a CPU computes for longer than it dispatches, and gains nothing
_NARROW: WeakKeyDictionary[Projection, tuple[Any, Tensor, Tensor]] = WeakKeyDictionary()


class GatedReadout(nn.Module):
    """Readout scaling · v ⊙ (features Aᵀ), the trainable half of an adapter.

    It is initialised to 0, with v = 0 (the paper's form) or with A = 0 on normalised inputs (the default).

    Args:
        stage: the features it will read; determines the sizes.
        init: "default": A = 0 (only without gate). "paper": A = Φ(W₀), W₀ random with N(0, 1/dim) entries.
            "random": A ~ N(0, 1/feature_dim).
        gate: whether there is a vector v, initialised to 0.
        scaling: constant factor.
        out_dim: length of the outputs; None for that of the inputs.
        generator: random generator for `init`.

    Raises:
        ConfigError: an unknown init, or one with which the block is not the identity or gets no gradient.
    """

    def __init__(
        self,
        stage: FeatureStage,
        *,
        init: str = "default",
        gate: bool = False,
        scaling: float = 1.0,
        out_dim: int | None = None,
        generator: torch.Generator | None = None,
    ):
        super().__init__()
        if init not in ("default", "paper", "random"):
            raise ConfigError(f"init is {init!r}; expected 'default', 'paper' or 'random'")
        if (init == "default") == gate:
            raise ConfigError(
                f"init={init!r} with gate={gate}: the block must start as the identity with a gradient for something; "
                "use init='default' without a gate, or init='paper' or 'random' with one"
            )
        self.scaling = scaling
        dim, features = stage.dim if out_dim is None else out_dim, stage.out_dim
        if stage.feature_map.projection.is_blank():
            A = torch.empty(dim, features, device="meta")  # a loader fills it in as well
        elif init == "default":
            A = torch.zeros(dim, features)
        elif init == "random":
            A = normal_numbers(dim, features, generator=generator).float() * features**-0.5
        else:
            weight = normal_numbers(dim, stage.dim, generator=generator).float() * stage.dim**-0.5
            with torch.no_grad():
                A = stage.feature_map.psi(weight * stage.scale).dense()
        self.A = nn.Parameter(A)
        self.v = nn.Parameter(torch.zeros(dim)) if gate else None

    def forward(self, features: Tensor, residual: Tensor) -> Tensor:
        """Return residual (..., out_dim) + scaling · v ⊙ (features Aᵀ), in the dtype of the residual."""
        summed = readout_step(self, features, residual)
        return residual_linear(residual, features.to(self.A.dtype), self.matrix()) if summed is None else summed

    def gated(self) -> Tensor:
        """Return diag(v) A, (out_dim, feature_dim)."""
        return self.A if self.v is None else self.v[:, None] * self.A

    def matrix(self) -> Tensor:
        """Return scaling · diag(v) A, the one matrix that everything folds into, (out_dim, feature_dim).

        Gate and scaling act on this small matrix instead of the hidden states, in training and in a bundle.
        """
        A = self.A if self.scaling == 1.0 else self.A * self.scaling
        return A if self.v is None else self.v[:, None] * A


class SNNKAdapter(nn.Module):
    """Adapter r + Φ(x) Mᵀ, with the features Φ of a stage and the matrix M of a readout."""

    def __init__(self, stage: FeatureStage, readout: GatedReadout):
        super().__init__()
        self.stage, self.readout = stage, readout

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Map (..., dim) -> (..., out_dim), in the dtype of r; r defaults to x."""
        if isinstance(self.readout, GatedReadout):  # FSDP may have wrapped it
            summed = adapter_step(self.stage, self.readout, x, None if residual is x else residual)
            if summed is not None:
                return summed
        out: Tensor = self.readout(self.stage(x.to(self.readout.A.dtype)), x if residual is None else residual)
        return out


def adapter_step(stage: FeatureStage, readout: GatedReadout, x: Tensor, residual: Tensor | None) -> Tensor | None:
    """Compute r + Φ(x) Mᵀ as one operation; return None if the modules have to be called. r defaults to x."""
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
        return None  # created in inference mode: cannot be saved for a backward pass, and has no version
    offsets = None
    if type(component).offsets is not Component.offsets:
        offsets = component.offsets(projection.num_features, x.device)
    if offsets is not None:
        bias = offsets if bias is None else bias + offsets
    amplitude: Any = projection.amplitudes()
    form = AdapterForm(component, stage.normalize, stage.scale, 1 / amplitude, readout.scaling * amplitude, dtype)
    low = in_dtype(projection, weight, dtype)
    return adapter_sum(x, residual, weight, low, bias, stage.means, readout.gated(), form)


def readout_step(readout: GatedReadout, features: Tensor, residual: Tensor) -> Tensor | None:
    """Compute r + z Mᵀ for features z (..., feature_dim) as one operation, or return None."""
    if not serves(readout, features, residual):
        return None
    form = AdapterForm(None, False, 1.0, 1.0, readout.scaling, product_dtype(readout.A.dtype, features.device.type))
    return adapter_sum(features, residual, None, None, None, None, readout.gated(), form)


def serves(readout: GatedReadout, x: Tensor, residual: Tensor | None) -> bool:
    """Return whether this is a training step that can use an operation with its own backward pass.

    A checkpointed function first runs without gradients; this also counts, so that both runs give the same result.
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
    """Return whether the features of these classes are f(x Wᵀ + c) with a known derivative of f."""
    return (
        stage is FeatureStage
        and component.gradient is not Component.gradient
        and all(getattr(component, name) is getattr(Component, name) for name in ("activate", "tower", "phi"))
        and projection.normalized is Projection.normalized
        and projection.forward in (Projection.forward, Structured.forward)
    )


def untouched(*modules: nn.Module) -> bool:
    """Return whether calling these modules runs their `forward` and nothing else (no hooks, no wrapper)."""
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
    """Return a projection's W in another dtype, without gradient; if W is not trained, cached until it changes."""
    if weight.dtype == dtype:
        return weight.detach() if weight.requires_grad else weight
    if weight.requires_grad:
        return weight.detach().to(dtype)
    # A detached W shares memory and version with W: while it is held here, nothing else can get its address.
    state = (weight.data_ptr(), weight._version, weight.shape, weight.stride(), weight.dtype, weight.device, dtype)
    kept = _NARROW.get(projection)
    if kept is None or kept[0] != state:
        kept = _NARROW[projection] = state, weight.detach(), weight.detach().to(dtype)
    return kept[2]
