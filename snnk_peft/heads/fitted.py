"""A task head in closed form, with estimates of its own errors.

    scores      s(φ) = A φ + a,   ridge regression (solvers/ridge.py); columns of φ are divided by their standard
                deviations first, so that the penalty is the same for all of them
    variance    of a new target, σ² (1 + h(φ))   (solvers/ridge_posterior.py)
    probability softmax(t s) of classes, sigmoid(t (s − ½)) of labels. Least squares fits scores, not log-probabilities;
                t > 0 is the one missing parameter. It minimises the negative log-likelihood of *leave-one-out* scores,
                which need no further fit: y − (y − Hy)/(1 − h).

Everything follows from moments except t, which needs the vectors of some fitted examples.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy

from snnk_peft.arguments import numbers_faults
from snnk_peft.errors import ConfigError, NumericalWarning
from snnk_peft.heads.statistics import HeadStatistics
from snnk_peft.heads.targets import as_tensor, as_vectors, class_indices, fit_notes, require_finite
from snnk_peft.solvers.ridge_posterior import RidgePosterior, cross_validated

# From shrinking all columns to interpolating. A few directions of hidden states hold nearly all of the variance, so
# with as many examples as columns the best ridge is far above their mean, the unit of a ridge.
HEAD_RIDGES = tuple(10 ** (exponent / 2) for exponent in range(6, -17, -1))
LEAST = 2  # examples
SHARPEST = 7.0  # maximum log t; scores that separate all examples would need infinity
CONSTANT = 1e-10  # a column whose standard deviation is below this share of its mean's size is constant


@dataclass(frozen=True)
class HeadFitReport:
    """Result of a fit.

    Args:
        examples: number of fitted examples.
        ridge: λ as a fraction of the mean variance sum of the (standardised) columns.
        cross_validated: generalised cross-validation error, relative to the variance of the targets.
        degrees: effective number of parameters of each output.
        temperature: t, or None while unknown.
    """

    examples: int
    ridge: float
    cross_validated: float
    degrees: float
    temperature: float | None = None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        return (
            f"{self.examples:,} examples, {self.degrees:.1f} effective parameters per output, ridge {self.ridge:g}; "
            f"cross-validated error {self.cross_validated:.3f} of the targets' variance"
        )


class FittedHead:
    """The optimal head for given statistics.

    Args:
        statistics: statistics of the examples; changing them later has no effect.
        ridges: candidates above 0, as fractions of the mean diagonal of the standardised Gram matrix; the one with the
            smallest generalised cross-validation error is chosen.

    Attributes:
        weight: A (outputs, width), for unscaled vectors; fp64.
        bias: a (outputs,).
        temperature: t, or None before `temper`.

    Raises:
        ConfigError: no candidates, or candidates <= 0; fewer than two examples.

    Warns:
        NumericalWarning: all vectors are the same, or classes have no examples.

    Example:
        >>> import torch
        >>> _ = torch.manual_seed(0)
        >>> x = torch.randn(200, 4)
        >>> y = (x[:, 0] + 0.1 * torch.randn(200) > 0).long()
        >>> statistics = HeadStatistics(4, 2, "classes")
        >>> statistics.add(x, y)
        >>> head = FittedHead(statistics)
        >>> head.temper([(x, y)])
        >>> bool(head.probabilities(torch.tensor([[2.0, 0.0, 0.0, 0.0]]))[0, 1] > 0.9)
        True
    """

    def __init__(self, statistics: HeadStatistics, ridges: Sequence[float] = HEAD_RIDGES):
        self.kind, self.count, moments = statistics.kind, statistics.count, statistics.moments
        faults = numbers_faults("ridges", ridges, above=0)
        if self.count < LEAST:
            counted = "1 example was counted" if self.count else "no examples were counted, call add(batches) first"
            faults.append(f"{counted}; expected two at least, and some dozen of every class")
        if faults:
            raise ConfigError(faults)
        gram = moments.normal_equations()[0]
        spread = (gram.diagonal() / self.count).clamp_min(0).sqrt()
        told = spread > CONSTANT * moments.feature_mean.abs().clamp_min(1e-300)
        shares = moments.target_mean if self.kind == "classes" else None
        for note in fit_notes(self.count, shares, statistics.names, bool(told.any())):
            warnings.warn(note, NumericalWarning, stacklevel=2)
        self._scale = torch.where(told, 1 / torch.where(told, spread, 1.0), 0.0)
        standardised = moments.mapped(self._scale)
        eigen = standardised.eigen()
        fit = cross_validated(standardised, ridges, eigen)
        self.ridge, self.cross_validated = fit.ridge, fit.error
        self.posterior = RidgePosterior(standardised, fit.ridge * standardised.ridge_scale, eigen)
        assert self.posterior.readout.bias is not None
        self.weight, self.bias = self.posterior.readout.weight * self._scale, self.posterior.readout.bias
        self._targets = statistics.targets
        self.temperature: float | None = None

    @property
    def report(self) -> HeadFitReport:
        return HeadFitReport(self.count, self.ridge, self.cross_validated, self.posterior.degrees, self.temperature)

    def _read(self, vectors: Any) -> Tensor:
        return as_vectors(vectors, self.weight.shape[1]).to(self.weight)

    def scores(self, vectors: Any) -> Tensor:
        """Compute scores, (n, width) -> (n, outputs) in fp64: regression targets, or classes by the largest score.

        Raises:
            ConfigError: vectors of another width, or with NaN or infinity; as in the other methods.
        """
        return self._read(vectors) @ self.weight.T + self.bias

    def variance(self, vectors: Any) -> Tensor:
        """Return the predictive variance of new targets at vectors (n, width): (n, outputs)."""
        return self.posterior.variance(self._read(vectors) * self._scale)

    def leave_one_out(self, vectors: Any, targets: Any) -> Tensor:
        """Return scores (n, outputs) of fitted examples, each from a head fitted without it.

        Arguments as in `HeadStatistics.add`.
        """
        vectors, wanted = self._read(vectors), self._targets(targets).to(self._scale.device)
        if len(vectors) != len(wanted):
            raise ConfigError(f"{len(vectors)} vectors and {len(wanted)} targets were given; expected as many of each")
        return wanted - self.posterior.leave_one_out(vectors * self._scale, wanted)

    def temper(self, examples: Iterable[tuple[Any, Any]]) -> None:
        """Find t from fitted pairs (vectors, targets): all, or a few hundred of them.

        Raises:
            ConfigError: a regression head, or no examples.
        """
        if self.kind == "numbers":
            raise ConfigError("a regression head has no probabilities; expected kind 'classes' or 'labels'")
        pairs = [(self.leave_one_out(*pair), self._targets(pair[1])) for pair in examples]
        if not pairs:
            raise ConfigError("no examples were given; expected some that were fitted")
        scores, wanted = (torch.cat(parts).cpu() for parts in zip(*pairs, strict=True))

        loss = cross_entropy if self.kind == "classes" else binary_cross_entropy_with_logits
        logarithm = torch.zeros((), dtype=torch.float64, requires_grad=True)
        optimizer = torch.optim.LBFGS([logarithm], max_iter=100, line_search_fn="strong_wolfe")

        def likelihood() -> Tensor:
            optimizer.zero_grad()
            found = loss(self._logits(scores, logarithm.clamp(max=SHARPEST).exp()), wanted)
            found.backward()
            return found

        with torch.enable_grad():
            optimizer.step(likelihood)
        self.temperature = float(logarithm.detach().clamp(max=SHARPEST).exp())

    def _logits(self, scores: Tensor, temperature: Tensor | float) -> Tensor:
        return temperature * (scores if self.kind == "classes" else scores - 0.5)

    def probabilities(self, vectors: Any) -> Tensor:
        """Return the probabilities of classes, which sum to one, or of labels: (n, width) -> (n, outputs).

        Raises:
            ConfigError: t is unknown.
        """
        if self.temperature is None:
            raise ConfigError("the temperature is not known; call temper(examples) first, on examples that were fitted")
        logits = self._logits(self.scores(vectors), self.temperature)
        return logits.softmax(-1) if self.kind == "classes" else logits.sigmoid()


def expected_calibration_error(probabilities: Any, labels: Any, bins: int = 15) -> float:
    """Compute Σ over bins |accuracy − mean confidence| · share (Naeini et al. 2015).

    From probabilities (n, classes) and labels (n,). Bins have equal width in the confidence, the largest probability.

    Raises:
        ConfigError: no examples, wrong shapes, NaN, or labels that are not class indices.
    """
    probabilities = as_tensor("probabilities", probabilities)
    if probabilities.ndim != 2 or len(probabilities) == 0:
        raise ConfigError(f"probabilities are {tuple(probabilities.shape)}; expected (examples, classes), one at least")
    require_finite("probabilities", probabilities)
    labels = class_indices("labels", as_tensor("labels", labels), probabilities.shape[1])
    if len(labels) != len(probabilities):
        raise ConfigError(f"{len(probabilities)} probabilities and {len(labels)} labels were given; expected as many")
    confidence, found = probabilities.double().max(-1)
    right = (found == labels.to(found.device)).double()
    place = (confidence * bins).ceil().long().clamp(1, bins) - 1
    total = probabilities.new_zeros(bins, dtype=torch.float64).index_add(0, place, right - confidence)
    return float(total.abs().sum() / len(labels))
