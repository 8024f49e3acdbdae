"""Slots: changes to one module of a model, as modules that receive the original as a function.

A slot's forward takes `base`, the original module (or a slot that already wraps it), and the original's inputs. Slots
hold the new parameters; the original stays in place. The slots are defined with the parts that plan them (parts/); this
is their common interface, in the order of use:

    placed       called when the slot is in the model
    forward      the new computation of the module
    fitter       how the slot is fitted to the module it replaces (`calibrate`), or None
    reads_out    features and the matrix that adds them to an output (`calibrate_adapters`), or None
    fold         the plain module that replaces it (`bundle`)
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from snnk_peft.errors import UnsupportedError
from snnk_peft.functional.at_hand import at_hand
from snnk_peft.layers.adapter import GatedReadout
from snnk_peft.layers.feature_stage import FeatureStage

Base = Callable[..., torch.Tensor]
# (is it held out?, inputs (n, dim)), batch by batch; can be read again. With `Fitter.calls`, calls instead of inputs.
Tokens = Iterable[tuple[bool, Any]]


@dataclass(frozen=True)
class Call:
    """One call of a module, for fitters that need more than its tokens.

    Args:
        args: positional arguments of the module.
        kwargs: keyword arguments of the module.
        mask: mask of the batch (batch, tokens), nonzero at real tokens, or None.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    mask: Any

    def real(self, x: torch.Tensor) -> torch.Tensor:
        """Remove padding, (batch, tokens, dim) -> (n, dim)."""
        return real_tokens(x, self.mask)


def real_tokens(x: torch.Tensor, mask: Any) -> torch.Tensor:
    """Flatten (..., dim) -> (n, dim), without padding if x has as many rows as the mask has entries."""
    rows = x.reshape(-1, x.shape[-1])
    return rows[mask.bool().flatten()] if isinstance(mask, torch.Tensor) and mask.numel() == len(rows) else rows


class FoldPlace(Protocol):
    """One module of a model being folded; the model itself does not change.

    Attributes:
        path: its path in the unpatched model.
        module: the current module: the one in use, or its replacement.
        original: whether it has not been replaced yet.
        slots: the slots of the active adapters here, innermost first.
    """

    @property
    def path(self) -> str: ...

    @property
    def module(self) -> nn.Module: ...

    @property
    def original(self) -> bool: ...

    @property
    def slots(self) -> Sequence[Slot]: ...

    def at(self, path: str) -> FoldPlace:
        """Return another module's place; LookupError if the model has none at this path."""

    def put(self, module: nn.Module) -> None:
        """Put `module` in this place."""

    def add(self, name: str, module: nn.Module, before: str, after: str) -> None:
        """Add `module` as a child of the module here, under a new name; `before` and `after` describe the change."""

    def alter(self, kind: str, before: str = "", after: str = "", **values: Any) -> None:
        """Keep the module here but change its behaviour, given a kind of `bundling/modules.py` and its fields.

        "heads" (an attention module splits into heads of `size`) or "mean_first" (a layer returns the mean); `before`
        and `after` describe the change in the report.
        """

    def remark(self, text: str) -> None:
        """Add a remark to the report."""

    def reads_features(self, stage: FoldPlace) -> None:
        """Declare this the head that reads the features of `stage`; both may be in one place, in a Sequential."""


class FitPlace(Protocol):
    """A module with slots in a model being calibrated.

    Attributes:
        path: its path in the unpatched model.
        original: the module that the slot replaces.
    """

    @property
    def path(self) -> str: ...

    @property
    def original(self) -> nn.Module: ...

    def original_at(self, path: str) -> nn.Module:
        """Return the pretrained module at a path of the unpatched model."""

    def active_at(self, path: str) -> nn.Module:
        """Return the module in use there: a trained copy, or the original."""


class Given(NamedTuple):
    """Data that a fitter with `Fitter.counted` reads from one batch.

    Args:
        inputs: rows (n, dim), or with `Fitter.calls` the calls, which hold n rows together.
        weight: (n,), weights of the rows' errors, 1 on average; None for equal weights.
        missing: (n, out), the original's stream behind the counted module minus the converted model's with the original
            in this place; None if they are equal.
    """

    inputs: Any
    weight: torch.Tensor | None = None
    missing: torch.Tensor | None = None

    def split(self, rows: int) -> Iterator[Given]:
        """Yield the same data in pieces of `rows` rows."""
        for start in range(0, len(self.inputs), rows):
            yield Given(*(None if each is None else each[start : start + rows] for each in self))

    def target(self, output: torch.Tensor) -> torch.Tensor:
        """Return the target for the original's `output` (n, out): the output plus the missing part."""
        return output if self.missing is None else output + self.missing.to(output)


def as_given(read: Any) -> Given:
    """Return the data of a batch as a `Given`, with or without a metric."""
    return read if isinstance(read, Given) else Given(read)


@dataclass(frozen=True)
class FitOptions:
    """Options of `calibrate` for fitters.

    Args:
        landmarks: rule for choosing rows.
        ridges: candidates for the regularisation.
        refit: whether the held-out rows are fitted as well at the end.
        steps: steps of gradient descent after a closed form, if a fitter uses any.
        search: maximum number of steps of the iterative search for the directions that narrower heads keep.
    """

    landmarks: str
    ridges: Sequence[float]
    refit: bool
    steps: int = 0
    search: int = 100


@dataclass(frozen=True)
class Fit:
    """Result of one fit.

    Attributes:
        size: the size of the part (rows of W, a rank).
        tokens: rows fitted while choosing the regularisation.
        held_out_tokens: rows that the errors are measured on.
        ridge: the chosen regularisation, as a fraction of the mean feature variance; None if there is none.
        error_before: squared error relative to the variance of the target, on held-out rows.
        error_after: the same after the fit.
        divergence_before: for attention, the Kullback-Leibler divergence of its weights from softmax in nats, averaged
            over the queries and heads of held-out rows; None for others.
        divergence_after: the same after the fit.
        unknowns: the number of rows that determine the fitted parameters: for a readout its number of features, its
            bias counted as one. None if unknown.
        longest: tokens of the longest text, if the fit depends on positions.
    """

    size: int
    tokens: int
    held_out_tokens: int
    ridge: float | None
    error_before: float
    error_after: float
    divergence_before: float | None = None
    divergence_after: float | None = None
    unknowns: int | None = None
    longest: int | None = None


class Fitter:
    """Base class of fitters of one slot to the module it replaces.

    Attributes:
        reads: number of times that `fit` reads the data.
        calls: whether `fit` gets the calls of the module (a list of `Call`, one per run) instead of their tokens.
        together: paths of further modules whose originals are restored with this one's, if the layer runs several times
            and the inputs of all runs are needed before anything is fitted.
        reduces: whether `fit` sums its statistics over the processes of torch.distributed, each of which reads its own
            share of the data (the `reduce` of the accumulators in solvers/). With several processes `calibrate` rejects
            a fitter that does not, and broadcasts the result of process 0.
        remark: a warning for the user of the fitted model, set by `fit`; `calibrate` issues it once for all slots with
            the same text.
        counted: path in the unpatched model of the module at whose output the error is measured. With a `metric`, `fit`
            reads a `Given` for each batch, and its target is the original's output plus `missing`.
        metric: (out, out), root R of the metric at that output: the error of δ is ‖Rδ‖². Set before `fit`; None for the
            error of a fitter without `counted`.
        missing_from: the first read that uses `missing`, for which the original runs as well.
    """

    remark: str | None = None
    counted: str | None = None
    metric: torch.Tensor | None = None
    missing_from = 0
    reads = 1
    calls = False
    reduces = False
    together: Sequence[str] = ()

    def rows(self, x: torch.Tensor, mask: Any) -> torch.Tensor:
        """Return the rows (n, dim) that `fit` reads from one input of the module: by default all vectors without
        padding."""
        return real_tokens(x, mask)

    def fit(self, data: Tokens) -> Fit:
        """Fit the slot in place, without gradients; `data` is read `reads` times."""
        raise TypeError(f"{type(self).__name__} does not define fit()")

    def fit_sizes(self, others: Sequence[Fitter], data: Tokens) -> list[float] | None:
        """Fit this and others for the same module, which differ in size, from shared statistics.

        Returns:
            Their errors on held-out rows, this one's first; None if they share no statistics.
        """
        return None


class Slot(nn.Module):
    """Base class of slots, which change the computation of one module of the model.

    Attributes:
        replaces: whether `base` is never called.
        alone: whether only one slot of its class is allowed per module.
        lets_pass: whether the following module still receives the module's output, or its replacement, as the first
            part of its input.
        by_row: whether rows of one batch can go through slots of different adapters (`adapter_names`), because each
            row's output depends on that row alone.
    """

    replaces = False
    alone = True
    lets_pass = False
    by_row = False

    def forward(self, base: Base, x: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        raise TypeError(f"{type(self).__name__} does not define forward()")

    def placed(self, layer: Any, model: nn.Module) -> None:
        """Called once the slot is in the model, held by a `SlotLayer`."""

    def fitter(self, place: FitPlace, options: FitOptions) -> Fitter | None:
        """Return the slot's fitter; None, the default, leaves the slot to training."""
        return None

    def after_fit(self) -> None:
        """Write results of the fits to the config; called once all slots of a model have been fitted."""

    def reads_out(self, slots_at: Callable[[str], Sequence[Slot]]) -> tuple[FeatureStage, GatedReadout] | None:
        """Return the features of an adapter and the readout that adds them to an output, if they are computed here.

        `slots_at` gives the active slots at a path of the unpatched model.
        """
        return None

    def check(self, root: nn.Module, run: Callable[[], object]) -> Iterator[str]:
        """Check the slot's assumptions about its model, for `check_family`; yield messages about violations.

        `run` is a forward pass of the patched model with adapters disabled, without gradients.
        """
        return iter(())

    def changes(self, path: str) -> tuple[str, ...]:
        """Return the modules that change together when this slot at `path` is folded, in the order of the report."""
        return (path,)

    def fold(self, place: FoldPlace) -> None:
        """Replace the slot and the module it acts on by plain modules; replacing slots are folded first.

        Raises:
            UnsupportedError: there is no plain form here.
        """
        raise UnsupportedError(f"{place.path}: a {type(self).__name__} slot has no folded form")


def no_folded_form(place: FoldPlace, slot: Slot) -> UnsupportedError:
    """Return the error for a slot in a combination that has no folded form."""
    return UnsupportedError(
        f"{place.path}: a {type(slot).__name__} slot has no folded form in this place; activate one adapter at a time "
        "with set_adapter, and check that the family describes the model's FFN"
    )


def check_passing(places: Iterable[FoldPlace]) -> None:
    """Raise UnsupportedError if a slot in one of these places does not pass the output on to the modules after it."""
    for place in places:
        for slot in place.slots:
            if not slot.lets_pass:
                raise no_folded_form(place, slot)


class Retrained(Slot):
    """Slot with a trainable copy of the original, where PEFT's modules_to_save would match a wrong module as well."""

    replaces = True
    by_row = True

    def __init__(self, module: nn.Module):
        super().__init__()
        with at_hand(module):
            self.module = copy.deepcopy(module)

    def forward(self, base: Base, x: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        """Run the copy in its own dtype: PEFT keeps trained parameters in fp32, also in half-precision models."""
        own = next((p.dtype for p in self.module.parameters() if p.is_floating_point()), x.dtype)
        if own == x.dtype or not x.is_floating_point():
            return self.module(x, *args, **kwargs)
        return self.module(x.to(own), *args, **kwargs).to(x.dtype)
