"""Training a bundled head without backpropagation (Section 3.3 and Appendix J.3 of the SNNK paper).

A fully bundled head is linear in its features, y = W̄ φ + b, so for the squared error the optimum is explicit: ridge
regression, in one pass over the data. For classification the targets are one-hot vectors; the argmax of the fitted
outputs is then a least-squares classifier (its outputs are scores, not log-probabilities).
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from snnk_peft.errors import ConfigError
from snnk_peft.solvers.ridge import GramAccumulator, Readout


def one_hot_targets(labels: Tensor, num_classes: int) -> Tensor:
    """Class indices (n,) as targets (n, num_classes) of a regression, in fp64; ConfigError for anything else."""
    if labels.is_floating_point() or labels.ndim != 1:
        raise ConfigError(f"labels are {tuple(labels.shape)} {labels.dtype}; expected integer class indices (n,)")
    if labels.numel() and not 0 <= int(labels.min()) <= int(labels.max()) < num_classes:
        raise ConfigError(
            f"labels run from {int(labels.min())} to {int(labels.max())}; expected 0 to {num_classes - 1} "
            f"(num_classes={num_classes})"
        )
    return torch.nn.functional.one_hot(labels.long(), num_classes).double()


def closed_form_head(batches: Iterable[tuple[Tensor, Tensor]], ridge: float = 0.0) -> Readout:
    """The optimal head on given features, in one pass and fp64.

    Args:
        batches: pairs (features (n, m), targets (n,) or (n, k)); of classes, the `one_hot_targets`. Memory does not
            grow with the number of batches.
        ridge: λ >= 0 of the penalty λ‖W̄‖² (scikit-learn's `alpha`; the intercept is not penalised). 0 is least squares,
            of minimum norm when there are fewer examples than features.

    Returns:
        Readout with weight (k, m) and bias (k,) in fp64; `relative_error` is on the data that was fitted.

    Raises:
        ConfigError: shapes that differ.
        ValueError: no examples, or a NaN or infinity among features or targets.
    """
    accumulator: GramAccumulator | None = None
    for features, targets in batches:
        if targets.ndim == 1:
            targets = targets.unsqueeze(1)
        if accumulator is None:
            accumulator = GramAccumulator(features.shape[-1], targets.shape[-1])
        accumulator.update(features, targets)
    if accumulator is None:
        raise ValueError("batches is empty; expected at least one (features, targets) pair")
    return accumulator.solve(ridge)
