"""Frobenius decay: ½λ‖UVᵀ‖²_F of low-rank layers, as a hook on any optimizer.

Weight decay of the factors shrinks U and V; this shrinks the matrix that the layer multiplies with (section 5 of
"Efficiently learning low-rank networks", after Khodak et al. 2021). It is decoupled from the loss, as in AdamW: right
before an optimizer step

    U ← U − ηλ·U(VᵀV),    V ← V − ηλ·V(UᵀU),    η the learning rate of the parameter group,

both from the old values. So under plain SGD it is exactly the gradient of loss + ½λ‖UVᵀ‖²_F, adaptive optimizers do
not rescale it, and it acts once per optimizer step: independent of gradient accumulation, not at all in a step that a
GradScaler skips, and bitwise equal in every DDP process. UVᵀ itself is never formed.

A singular value σ of V multiplies its direction of U by 1 − ηλσ²: once ηλ·‖V‖²₂ (or ‖U‖²₂) passes 1 that changes
sign, which is no longer a decay, and beyond 2 it grows in each step and diverges. Choose λ below 1/(η·‖UVᵀ‖₂), for
balanced factors; `attach` warns above that. The paper gives up tuning λ for EfficientNet because training diverged.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import nn

from snnk_peft.arguments import in_words
from snnk_peft.errors import ConfigError, NumericalWarning
from snnk_peft.functional.precision import full_precision, wide


class FactorPair(NamedTuple):
    """The factors U (out, rank) and V (in, rank) of one layer, W = UVᵀ.

    Attributes:
        path: path of the module that holds them, for messages.
        strength: the module's λ (its attribute `frobenius_decay`, which LowRankPart sets), or None.
    """

    path: str
    U: torch.Tensor
    V: torch.Tensor
    strength: float | None


def find_factors(model: nn.Module) -> list[FactorPair]:
    """Find every module with its own parameters U (out, rank) and V (in, rank); shared ones once."""
    found: dict[tuple[int, int], FactorPair] = {}
    for path, module in model.named_modules():
        own = dict(module.named_parameters(recurse=False))
        U, V = own.get("U"), own.get("V")
        if U is not None and V is not None and U.ndim == V.ndim == 2 and U.shape[1] == V.shape[1]:
            found.setdefault((id(U), id(V)), FactorPair(path, U, V, getattr(module, "frobenius_decay", None)))
    return list(found.values())


def frobenius_penalty(U: torch.Tensor, V: torch.Tensor) -> torch.Tensor:
    """Compute ½‖UVᵀ‖²_F = ½ Σ (UᵀU)∘(VᵀV), a scalar in at least fp32; differentiable, O((out + in)·rank²)."""
    with full_precision(U):
        U, V = wide(U), wide(V)
        return ((U.mT @ U) * (V.mT @ V)).sum() / 2


def frobenius_gradients(U: torch.Tensor, V: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (U(VᵀV), V(UᵀU)), the gradients of `frobenius_penalty`, in at least fp32."""
    with full_precision(U):
        U, V = wide(U), wide(V)
        return U @ (V.mT @ V), V @ (U.mT @ U)


def _is_pair(given: object) -> bool:
    return isinstance(given, (list, tuple)) and len(given) == 2 and all(isinstance(x, torch.Tensor) for x in given)


class FrobeniusDecay:
    """Decoupled Frobenius decay of the low-rank layers of a model.

    Disable the optimizer's own weight decay for the factors (`decay_groups` makes such parameter groups).

    Args:
        factors: a model, in which all modules with parameters U (out, rank) and V (in, rank) are used (also inside DDP
            or a PeftModel), or pairs (U, V).
        strength: λ >= 0. None: the attribute `frobenius_decay` of each module, as set by LowRankPart; modules without
            it are left out.

    Attributes:
        pairs: the factors that decay, each with its λ.

    Raises:
        ConfigError: no low-rank module, none with a strength, a strength that is not a number >= 0, or pairs of
            mismatched shapes; all faults at once.

    Example:
        >>> import torch
        >>> U, V = (torch.nn.Parameter(torch.ones(3, 1)) for _ in range(2))
        >>> optimizer = torch.optim.SGD([U, V], lr=0.1)
        >>> decay = FrobeniusDecay([(U, V)], strength=0.5).attach(optimizer)
        >>> (U + V).sum().backward(); optimizer.step()
        >>> U.detach().flatten()  # 1 - 0.1 * 0.5 * 1 * 3, and then the step of 0.1
        tensor([0.7500, 0.7500, 0.7500])
    """

    def __init__(self, factors: nn.Module | Iterable[tuple[torch.Tensor, torch.Tensor]], strength: float | None = None):
        if isinstance(factors, nn.Module):
            found, what = find_factors(factors), type(factors).__name__
        else:
            factors = list(factors) if isinstance(factors, Iterable) and not isinstance(factors, str) else [factors]
            wrong = [each for each in factors if not _is_pair(each)]
            if wrong:
                raise ConfigError(
                    f"factors is or holds {in_words(wrong[0])}; expected a model with low-rank layers, or a list of "
                    "pairs (U, V) of tensors"
                )
            found = [FactorPair(f"pair {i}", U, V, None) for i, (U, V) in enumerate(factors)]
            what = "the list of factors"
        faults = [
            f"{pair.path}: U has shape {tuple(pair.U.shape)} and V {tuple(pair.V.shape)}; expected (out, rank) and "
            "(in, rank)"
            for pair in found
            if pair.U.ndim != 2 or pair.V.ndim != 2 or pair.U.shape[1] != pair.V.shape[1]
        ]
        self.pairs = [pair._replace(strength=strength) for pair in found] if strength is not None else found
        self.pairs = [pair for pair in self.pairs if pair.strength is not None]
        faults += [
            f"{place} is {value!r}; expected a number >= 0"
            for place, value in {"strength": strength, **{p.path: p.strength for p in self.pairs}}.items()
            if value is not None and not _is_strength(value)
        ]
        if not found:
            faults.append(
                f"{what} has no module with parameters U (out, rank) and V (in, rank); expected a model with low-rank "
                "layers. Make it low-rank first (LowRankLinear, or LowRankPart with get_snnk_model)"
            )
        elif not self.pairs:
            faults.append(
                f"strength is None and none of the {len(found)} low-rank layers of {what} says a frobenius_decay; "
                "expected one or the other. Pass strength=, such as 1e-3, or LowRankPart(frobenius_decay=...)"
            )
        if faults:
            raise ConfigError(faults)
        self._handles: dict[torch.optim.Optimizer, Any] = {}

    def attach(self, optimizer: torch.optim.Optimizer) -> FrobeniusDecay:
        """Let the factors decay whenever this optimizer steps; a second call for the same one changes nothing.

        Args:
            optimizer: holds the factors, or some of them (the others do not decay); may be wrapped by accelerate.

        Returns:
            This object.

        Raises:
            ConfigError: the optimizer holds no factor, or its parameter groups have no learning rate.

        Warns:
            NumericalWarning: ηλ‖V‖²₂ or ηλ‖U‖²₂ is above 1 at the largest known learning rate: factors change sign.
        """
        optimizer = _unwrapped(optimizer)
        if not hasattr(optimizer, "param_groups"):
            raise ConfigError(
                f"optimizer is {in_words(optimizer)}; expected a torch optimizer. A Trainer makes its own: give it "
                "callbacks=[decay.trainer_callback()]"
            )
        factors = {id(factor): pair.path for pair in self.pairs for factor in (pair.U, pair.V)}
        groups = [group for group in optimizer.param_groups if any(id(p) in factors for p in group["params"])]
        name, faults = type(optimizer).__name__, []
        if not groups:
            some = ", ".join(sorted(set(factors.values()))[:3])
            faults.append(
                f"{name} holds no factor of {some}; expected the optimizer that trains them. Make the "
                "optimizer from the parameters as they are now, after .to(), copies and sharding, and attach that one"
            )
        if any(group.get("lr") is None for group in groups):
            faults.append(
                f"{name} has parameter groups without a learning rate (lr), which the decay is scaled by; expected a "
                "number. Set lr, for Adafactor with relative_step=False"
            )
        if faults:
            raise ConfigError(faults)
        self._warn_of_steep(max(max(group["lr"], group.get("initial_lr", 0)) for group in groups))
        if optimizer not in self._handles:
            # Before the step, as in AdamW; the step itself only reads the gradients.
            self._handles[optimizer] = optimizer.register_step_pre_hook(self._decay)
        return self

    @torch.no_grad()
    def _warn_of_steep(self, rate: Any) -> None:
        steep = [
            pair.path
            for pair in self.pairs
            if any((pair.strength or 0.0) * rate * _largest_square(each) > 1 for each in (pair.U, pair.V))
        ]
        if steep:
            warnings.warn(
                "Frobenius decay: learning rate times strength times the largest squared singular value of a factor "
                f"is above 1 in {len(steep)} of {len(self.pairs)} layers ({', '.join(steep[:3])}): each step changes "
                "the sign of these directions instead of shrinking them, and beyond 2 it diverges. Choose a smaller "
                "strength",
                NumericalWarning,
                stacklevel=3,
            )

    def detach(self) -> None:
        """Detach from all optimizers."""
        while self._handles:
            self._handles.popitem()[1].remove()

    def penalty(self) -> torch.Tensor:
        """Compute Σ ½λ‖UVᵀ‖²_F, a differentiable scalar to be logged or (instead of `attach`) added to a loss."""
        return torch.stack([(pair.strength or 0.0) * frobenius_penalty(pair.U, pair.V) for pair in self.pairs]).sum()

    def trainer_callback(self) -> Any:
        """Return a transformers.TrainerCallback that attaches to the Trainer's optimizer until training ends."""
        from transformers import TrainerCallback

        decay = self

        class AttachDecay(TrainerCallback):
            def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
                decay.attach(kwargs["optimizer"])

            def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
                decay.detach()

        return AttachDecay()

    @torch.no_grad()
    def _decay(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        rates = {id(p): group["lr"] for group in optimizer.param_groups for p in group["params"]}
        # A GradScaler does not call an optimizer whose step it skips, but a fused one skips by itself.
        overflow = getattr(optimizer, "found_inf", None)
        for _, U, V, strength in self.pairs:
            # As in optimizers, a parameter without gradient was not used and does not change.
            used = [factor.grad is not None and id(factor) in rates for factor in (U, V)]
            if not strength or not any(used):
                continue
            for factor, gradient, moves in zip((U, V), frobenius_gradients(U, V), used, strict=True):
                if moves:
                    step = gradient * (rates[id(factor)] * strength)
                    if overflow is not None:
                        step = step * (overflow == 0).to(step.device)
                    factor.sub_(step.to(factor.dtype))


def _largest_square(factor: torch.Tensor) -> float:
    """Return ‖U‖²₂; 0 if it is unavailable (sharded, on the meta device, not finite)."""
    if factor.is_meta or hasattr(factor, "full_tensor"):
        return 0.0
    gram = wide(factor).mT @ wide(factor)
    return float(torch.linalg.eigvalsh(gram)[-1]) if bool(gram.isfinite().all()) else 0.0


def decay_groups(model: nn.Module, weight_decay: float, *, factor_decay: float | None = None) -> list[dict[str, Any]]:
    """Make parameter groups for an optimizer, with a separate weight decay for the factors of low-rank layers.

    Args:
        model: its trainable parameters are grouped, each in one group.
        weight_decay: weight decay of all other matrices (and convolution kernels). Vectors, biases and norms have none.
        factor_decay: weight decay of the factors: ½·factor_decay·(‖U‖² + ‖V‖²), the paper's "weight decay". None:
            `weight_decay`; use 0 with a `FrobeniusDecay`.

    Raises:
        ConfigError: a decay that is not a number >= 0.

    Example:
        >>> groups = decay_groups(torch.nn.Linear(3, 2), 0.1)
        >>> [(len(group["params"]), group["weight_decay"]) for group in groups]
        [(1, 0.1), (1, 0.0)]
    """
    given = {"weight_decay": weight_decay, "factor_decay": weight_decay if factor_decay is None else factor_decay}
    faults = [f"{k} is {v!r}; expected a number >= 0" for k, v in given.items() if not _is_strength(v)]
    if faults:
        raise ConfigError(faults)
    factors = {id(factor) for pair in find_factors(model) for factor in (pair.U, pair.V)}
    groups: dict[str, list[nn.Parameter]] = {"factors": [], "matrices": [], "vectors": []}
    for parameter in model.parameters():
        if parameter.requires_grad:
            kind = "vectors" if parameter.ndim < 2 else "factors" if id(parameter) in factors else "matrices"
            groups[kind].append(parameter)
    decays = {"factors": given["factor_decay"], "matrices": weight_decay, "vectors": 0.0}
    return [{"params": found, "weight_decay": decays[kind]} for kind, found in groups.items() if found]


def _is_strength(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < math.inf


def _unwrapped(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    while isinstance(inner := getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        optimizer = inner
    return optimizer
