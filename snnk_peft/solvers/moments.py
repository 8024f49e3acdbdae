"""Moments of features and targets. They add: those of batches, shards and machines together are those of one pass.

For tokens t with features φ_t (m,) and targets y_t (l,), the count n, the means φ̄ and ȳ, and

    S = Σ (φ−φ̄)(φ−φ̄)ᵀ,     C = Σ (y−ȳ)(φ−φ̄)ᵀ,     Σ (W₂(y−ȳ))² of each output

are kept: m² + m l values for any n. Each batch is centred at its own mean, and merged (Chan, Golub & LeVeque):

    S ← S₁ + S₂ + n₁n₂/(n₁+n₂) (φ̄₂−φ̄₁)(φ̄₂−φ̄₁)ᵀ

This does not cancel if means are large, and a negative n₂ undoes it, up to the rounding of what was there before: at
most n eps (S_jj + 2 |φ̄_j| √(S_jj/n)) in a column, which is kept. A column whose S_jj is not above it is constant.
Cost per token: m² + m l, plus l·o with an output metric W₂ (o, l). For their use, see solvers/ridge.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from snnk_peft.errors import ConfigError
from snnk_peft.solvers.reduce import pooled_mean, summed

if TYPE_CHECKING:
    from typing_extensions import Self

MOMENTS = ("feature_mean", "target_mean", "gram", "cross", "spread")
ROUNDING = "rounding"  # of gram's diagonal after removals; statistics saved before it was kept have none
IMPOSSIBLE = 1e-3  # relative to a column's S_jj: rows that were counted never leave less than minus this


class Moments:
    """Collect the moments of features (m,) and targets (l,) over any number of batches.

    Args:
        feature_dim: m.
        out_dim: l.
        intercept: whether `normal_equations` are centred.
        dtype: of the moments; float64 unless the device does not support it.
        output_weight: W₂ (o, l), optional.

    Attributes:
        count: number of tokens so far.

    Raises:
        ConfigError: lengths below 1, or an output weight that does not fit.
    """

    def __init__(
        self,
        feature_dim: int,
        out_dim: int,
        intercept: bool = True,
        dtype: torch.dtype = torch.float64,
        output_weight: Tensor | None = None,
    ):
        faults = [
            f"{name} is {value}; expected >= 1"
            for name, value in (("feature_dim", feature_dim), ("out_dim", out_dim))
            if value < 1
        ]
        if output_weight is not None and (output_weight.ndim != 2 or output_weight.shape[1] != out_dim):
            faults.append(f"output_weight is {tuple(output_weight.shape)}; expected (any, out_dim={out_dim})")
        if faults:
            raise ConfigError(faults)
        self.feature_dim, self.out_dim, self.intercept, self.dtype = feature_dim, out_dim, intercept, dtype
        self.output_weight = None if output_weight is None else output_weight.detach()
        self._clear()

    def _clear(self) -> None:
        feature_dim, out_dim, dtype, output_weight = self.feature_dim, self.out_dim, self.dtype, self.output_weight
        self.count = 0
        self._feature_mean = torch.zeros(feature_dim, dtype=dtype)
        self._target_mean = torch.zeros(out_dim, dtype=dtype)
        self._gram = torch.zeros(feature_dim, feature_dim, dtype=dtype)
        self._cross = torch.zeros(out_dim, feature_dim, dtype=dtype)
        rows = out_dim if output_weight is None else len(output_weight)
        self._spread = torch.zeros(rows, dtype=dtype)  # Σ (W₂(y − ȳ))² per output
        self._rounding = torch.zeros(feature_dim, dtype=dtype)

    @torch.no_grad()
    def update(self, features: Tensor, targets: Tensor, mask: Tensor | None = None) -> None:
        """Add tokens.

        Args:
            features: (..., m).
            targets: (..., l) with the same leading dimensions.
            mask: (...) bool or integer, nonzero for real tokens; padding is dropped and may hold anything.

        Raises:
            ConfigError: shapes do not fit.
            ValueError: a real token holds NaN or infinity; names the tensor. The moments are left unchanged.
        """
        leading = features.shape[:-1]
        if (
            features.shape != (*leading, self.feature_dim)
            or targets.shape != (*leading, self.out_dim)
            or (mask is not None and (mask.shape != leading or mask.is_floating_point()))
        ):
            given = "none" if mask is None else f"{tuple(mask.shape)} {mask.dtype}"
            raise ConfigError(
                f"features {tuple(features.shape)}, targets {tuple(targets.shape)}, mask {given} do not fit; expected "
                f"(..., {self.feature_dim}), (..., {self.out_dim}) and a bool or integer mask (...)"
            )
        features, targets = features.reshape(-1, self.feature_dim), targets.reshape(-1, self.out_dim)
        if mask is not None:
            kept = mask.reshape(-1).bool()
            features, targets = features[kept], targets[kept]
        for name, tensor in (("features", features), ("targets", targets)):
            if not (finite := torch.isfinite(tensor)).all():
                raise ValueError(
                    f"{name}: {int((~finite).sum())} of {tensor.numel()} entries are NaN or infinite; expected finite "
                    "activations. Check the layer's input, or run the model in fp32 or bf16 instead of fp16"
                )
        count = len(features)
        if count == 0:
            return
        features, targets = features.to(self.dtype), targets.to(self.dtype)
        feature_mean, target_mean = features.mean(0), targets.mean(0)
        features, targets = features - feature_mean, targets - target_mean
        self._add(
            count, feature_mean, target_mean, features.T @ features, targets.T @ features, self._behind(targets.T)
        )

    def merge(self, other: Moments) -> None:
        """Add the tokens of another accumulator of the same shape."""
        self._require_alike(other)
        if other.count:
            self._add(other.count, other._feature_mean, other._target_mean, other._gram, other._cross, other._spread)
            self._rounding += other._rounding.to(self._gram)

    def remove(self, other: Moments, noise: float = 0.0) -> None:
        """Remove tokens that were added before, up to rounding errors.

        A column in which the remaining tokens do not differ is then constant in `normal_equations`.

        Args:
            other: their moments. The caller must know that they were added: foreign tokens are detected only if they
                would leave a column with a negative variance.
            noise: relative error of S with which their features were computed again; 0 for the same bits.

        Raises:
            ConfigError: another shape, more tokens than there are, or tokens that cannot have been among them; nothing
                is removed then.
        """
        self._require_alike(other)
        if other.count > self.count:
            raise ConfigError(
                f"{other.count} tokens are to be removed of {self.count}; expected tokens that were added before"
            )
        if other.count == self.count:
            self._clear()
        elif other.count:
            self._require_within(other)
            before, mean = self._gram.diagonal().clamp_min(0), self._feature_mean.abs()
            eps = torch.finfo(self.dtype).eps
            rounding = eps * (self.count * before + 2 * mean * (self.count * before).sqrt()) + noise * before
            self._rounding = torch.maximum(self._rounding, rounding) + other._rounding.to(self._gram)
            self._add(
                -other.count, other._feature_mean, other._target_mean, -other._gram, -other._cross, -other._spread
            )

    def _require_within(self, other: Moments) -> None:
        step = other._feature_mean.to(self._gram) - self._feature_mean
        between = self.count * other.count / (self.count - other.count)
        before = self._gram.diagonal()
        left = before - other._gram.diagonal().to(before) - between * step.square()
        wrong = left < -IMPOSSIBLE * before - self._rounding
        if wrong.any():
            raise ConfigError(
                f"{other.count} tokens are to be removed that were not added before: {int(wrong.sum())} of {len(left)} "
                "features would keep a negative variance; expected tokens that were added, as they were then"
            )

    def _require_alike(self, other: Moments) -> None:
        if (other.feature_dim, other.out_dim) != (self.feature_dim, self.out_dim):
            raise ConfigError(
                f"cannot merge moments of ({other.feature_dim} features, {other.out_dim} outputs) into "
                f"({self.feature_dim}, {self.out_dim})"
            )
        ours, theirs = self.output_weight, other.output_weight
        if (ours is None) != (theirs is None) or (
            ours is not None and theirs is not None and not torch.equal(ours.cpu(), theirs.cpu())
        ):
            raise ConfigError("cannot merge accumulators that measure errors after different output weights")

    def tensors(self) -> dict[str, Tensor]:
        """Return everything accumulated, as tensors for a file; see `of_tensors`."""
        named = {name: getattr(self, f"_{name}") for name in (*MOMENTS, ROUNDING)}
        return {"count": torch.tensor(self.count), **named}

    @classmethod
    def of_tensors(cls, tensors: Mapping[str, Tensor]) -> Self:
        """Restore an accumulator with an intercept and without output weight from `tensors`.

        Raises:
            ConfigError: tensors that are missing or have the wrong shape.
        """
        missing = sorted({"count", *MOMENTS} - tensors.keys())
        if missing:
            raise ConfigError(f"tensors of the moments are missing: {', '.join(missing)}")
        width, gram, count = tensors["feature_mean"].numel(), tensors["gram"], tensors["count"]
        if gram.shape != (width, width) or not gram.is_floating_point() or count.numel() != 1 or count < 0:
            raise ConfigError(
                f"gram is {tuple(gram.shape)} in {gram.dtype} and count {tuple(count.shape)}; expected ({width}, "
                f"{width}) in floating point, as feature_mean says, and one number >= 0"
            )
        found = cls(tensors["feature_mean"].numel(), tensors["target_mean"].numel(), dtype=tensors["gram"].dtype)
        for name in (*MOMENTS, *({ROUNDING} & tensors.keys())):
            wanted, given = getattr(found, f"_{name}").shape, tensors[name].shape
            if wanted != given:
                raise ConfigError(f"{name} is {tuple(given)}; expected {tuple(wanted)}, as the means say")
            setattr(found, f"_{name}", tensors[name].clone())
        found.count = int(tensors["count"])
        return found

    def mapped(self, matrix: Tensor) -> Self:
        """Return the moments of features Mφ, for M (k, m) or the diagonal of M (m,), from those of φ."""
        found = type(self)(len(matrix), self.out_dim, self.intercept, self.dtype, self.output_weight)
        matrix, rooted = matrix.to(self._gram), self._rounding.sqrt()

        def rows(of: Tensor) -> Tensor:
            return matrix[:, None] * of if matrix.ndim == 1 else matrix @ of

        found.count, found._target_mean, found._spread = self.count, self._target_mean.clone(), self._spread.clone()
        gram, cross = self._without_rounding()
        found._feature_mean = rows(self._feature_mean[:, None]).squeeze(1)
        found._gram, found._cross = rows(rows(gram).T), rows(cross.T).T
        found._rounding = (matrix * rooted if matrix.ndim == 1 else matrix.abs() @ rooted).square()
        return found

    def reduce(self) -> None:
        """Add the tokens of all other processes; every process must call this, even one without any."""
        total, feature_mean = pooled_mean(self.count, self._feature_mean)
        target_mean = pooled_mean(self.count, self._target_mean)[1]
        feature_step, target_step = self._feature_mean - feature_mean, self._target_mean - target_mean
        self._gram = summed(self._gram.addr(feature_step, feature_step, alpha=self.count))
        self._cross = summed(self._cross.addr(target_step, feature_step, alpha=self.count))
        self._spread = summed(self._spread + self.count * self._behind(target_step.unsqueeze(1)))
        self._rounding = summed(self._rounding)
        self.count, self._feature_mean, self._target_mean = total, feature_mean, target_mean

    def _behind(self, columns: Tensor) -> Tensor:
        if self.output_weight is not None:
            columns = self.output_weight.to(columns) @ columns
        return columns.square().sum(1)

    def _add(
        self, count: int, feature_mean: Tensor, target_mean: Tensor, gram: Tensor, cross: Tensor, spread: Tensor
    ) -> None:
        if self.count == 0:  # the first tokens determine the device
            for name in (*MOMENTS, ROUNDING):
                setattr(self, f"_{name}", getattr(self, f"_{name}").to(gram.device))
        total = self.count + count
        feature_step = feature_mean.to(self._gram) - self._feature_mean
        target_step = target_mean.to(self._gram) - self._target_mean
        between = self.count * count / total
        # In place: with thousands of features, a pass over the matrix costs as much as the product of a small batch.
        self._gram.add_(gram.to(self._gram)).addr_(feature_step, feature_step, alpha=between)
        self._cross.add_(cross.to(self._gram)).addr_(target_step, feature_step, alpha=between)
        self._spread += spread.to(self._gram) + between * self._behind(target_step.unsqueeze(1))
        self._feature_mean += feature_step * (count / total)
        self._target_mean += target_step * (count / total)
        self.count = total

    def _without_rounding(self) -> tuple[Tensor, Tensor]:
        """Return S and C with zeros where only the rounding of removed tokens is left of a column."""
        if not self._rounding.any():
            return self._gram, self._cross
        constant = self._gram.diagonal() <= self._rounding
        return self._gram.masked_fill(constant | constant[:, None], 0.0), self._cross.masked_fill(constant, 0.0)

    def normal_equations(self) -> tuple[Tensor, Tensor]:
        """Return Gram matrix (m, m) and cross moments (l, m), sums over tokens: centred with intercept, raw without."""
        self._require_tokens()
        gram, cross = self._without_rounding()
        if self.intercept:
            return gram, cross
        mean = self._feature_mean
        return (
            gram + self.count * torch.outer(mean, mean),
            cross + self.count * torch.outer(self._target_mean, mean),
        )

    @property
    def feature_mean(self) -> Tensor:
        """Return the mean of the features, φ̄ (m,)."""
        return self._feature_mean.clone()

    @property
    def target_mean(self) -> Tensor:
        """Return the mean of the targets, ȳ (l,)."""
        return self._target_mean.clone()

    @property
    def ridge_scale(self) -> float:
        """Return the mean diagonal entry of the Gram matrix: multiply a relative ridge by it to get an absolute one.

        1 if it is zero, as for features that are all constant, where any ridge gives the same readout.
        """
        return float(self.normal_equations()[0].diagonal().mean()) or 1.0

    def _require_tokens(self) -> None:
        if self.count == 0:
            raise ValueError("no tokens were accumulated; call update() with at least one unmasked token first")
