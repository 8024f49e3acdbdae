"""Fit attention over `centroids`, together with the layer's output projection, which is then part of the adapter.

One pass over the data: a random sample of sequences of a layer's queries, keys and values is kept, up to `TOKENS`
tokens. Everything else is computed from these (solvers/centroids.py), so memory does not depend on the number of
tokens. Inputs come from the layers as converted so far; the target is the original attention on these inputs.
"""

from __future__ import annotations

import copy
from typing import Any, cast

import torch
from torch import nn

from snnk_peft.families.base import as_linear
from snnk_peft.functional.at_hand import at_hand
from snnk_peft.functional.precision import as_a_linear, full_precision, wide
from snnk_peft.layers.attention_term import AttentionTerm
from snnk_peft.layers.kernel_attention import KernelAttention
from snnk_peft.layers.slots import (
    Base,
    Call,
    Fit,
    FitOptions,
    FitPlace,
    Fitter,
    FoldPlace,
    Given,
    Slot,
    Tokens,
    as_given,
    no_folded_form,
)
from snnk_peft.layers.snnk_linear import plain_linear
from snnk_peft.parts.attention.recording import Recorder, Sample
from snnk_peft.parts.base import refuse_offloaded
from snnk_peft.projections.base_drawn import site_generator
from snnk_peft.projections.centroids import Centroids
from snnk_peft.solvers.centroids import (
    CentroidMaps,
    Scores,
    centroids,
    descend,
    divergence,
    key_moments,
    output_error,
    sharpest,
)
from snnk_peft.solvers.corrected import Solver, Target, fit_corrected, merged
from snnk_peft.solvers.landmarks import SecondMoments
from snnk_peft.solvers.reduce import ErrorMeter, same_everywhere

TOKENS = 32_768  # kept for fitting; a quarter as many are held out
QUERIES = 6_000  # per key head, for the clusters
TRIED = 6  # batches used to choose τ
MOST = 128  # queries per sequence for which weights are formed


class AttentionFitter(Fitter):
    """Fits the maps of one attention to its softmax, and then the output projection to the residual."""

    calls = True

    def __init__(
        self,
        kernel: KernelAttention,
        readout: ReadHeads | None,
        readout_path: str | None,
        place: FitPlace,
        options: FitOptions,
    ):
        self.kernel, self.readout, self.options = kernel, readout, options
        self.module: Any = place.original
        self.longest = 0  # in tokens
        kernel.fitted_length = None  # left by an earlier fit
        fitted = [kernel] if readout is None else [kernel, readout]
        refuse_offloaded("the feature maps of an attention, or its output projection,", fitted)
        self.weight: torch.Tensor | None = None
        self.bias: torch.Tensor | None = None
        if readout_path is not None:
            self.counted = readout_path
            projection = as_linear(place.original_at(readout_path))
            assert isinstance(projection, nn.Linear)
            with at_hand(projection):
                self.weight = wide(projection.weight.detach())
                self.bias = None if projection.bias is None else wide(projection.bias.detach())

    def fit(self, data: Tokens) -> Fit:
        first = self.kernel.maps()[0].projection
        generator = site_generator(first.seed, f"{first.site}.fit")  # the same in every fit
        train, test = self._record(data, generator)
        with full_precision(first.weight):  # logarithms of weights, whatever precision the model runs in
            return self._fit(train, test, generator)

    def _fit(self, train: Sample, test: Sample, generator: torch.Generator) -> Fit:
        before = ErrorMeter(self.weight)
        for recorded in test:
            before.update(recorded.softmax(), recorded.linear(self.kernel))
        diverging = self._divergence(test)
        self._take(self._maps(train, generator))
        self.kernel.fitted_length = self.longest
        after, ridge = ErrorMeter(self.weight), None
        if self.readout is None:
            for recorded in test:
                after.update(recorded.softmax(), recorded.linear(self.kernel))
        else:
            after, ridge = self._read(train, test)
        for each in (self.kernel, self.readout):
            if each is not None:
                same_everywhere(each)
        size = unknowns = self.kernel.maps()[0].num_features  # if they equal the queries, so do the centres
        if self.readout is not None:
            unknowns = max(unknowns, self.readout.linear.in_features + 1)
        errors = before.value(), after.value()
        counts = train.tokens, before.count
        return Fit(size, *counts, ridge, *errors, diverging, self._divergence(test), unknowns, self.longest)

    def _divergence(self, sample: Sample) -> float:
        """Return the KL divergence from the softmax weights, averaged over queries and heads."""
        pairs = cast(AttentionTerm, self.kernel.terms[0]).pairs()
        projections = [[cast(Centroids, feature_map.projection) for feature_map in pair] for pair in pairs]
        rows = [torch.stack([head[side].weight for head in projections]).float() for side in (0, 1)]
        biases = [torch.stack([cast(torch.Tensor, head[side].bias) for head in projections]).float() for side in (0, 1)]
        maps = CentroidMaps(rows[0], biases[0], rows[1], biases[1])
        first = projections[0][0]
        generator = site_generator(first.seed, f"{first.site}.divergence")  # the same queries before and after
        total, count = 0.0, 0
        for recorded in sample:
            queries = int(recorded.counted.sum())
            total += float(divergence(maps, recorded.scores().some(MOST, generator)).mean()) * queries
            count += queries
        return total / max(count, 1)

    def _record(self, data: Tokens, generator: torch.Generator) -> tuple[Sample, Sample]:
        train, test = Sample(TOKENS, generator), Sample(TOKENS // 4, generator)
        owner = vars(self.module)["snnk_owner"]
        for is_test, read in data:
            recorder, given = Recorder(), as_given(read)
            self.module.snnk_owner = lambda recorder=recorder: recorder
            try:
                for call in given.inputs:
                    self._run(call)
            finally:
                self.module.snnk_owner = owner
            for recorded in recorder.calls:
                if len(recorder.calls) == 1:
                    recorded = recorded._replace(given=given._replace(inputs=None))
                if not (torch.isfinite(recorded.q).all() and torch.isfinite(recorded.k).all()):
                    raise ValueError(
                        "queries or keys hold NaN or infinity; expected finite numbers. Run the model in fp32 or bf16"
                    )
                self.longest = max(self.longest, int(recorded.counted.sum(-1).max()))
                (test if is_test else train).add(recorded)
        return train, test

    def _run(self, call: Call) -> None:
        # Otherwise every call would fill a cache.
        self.module(*call.args, **{key: None if key == "past_key_values" else v for key, v in call.kwargs.items()})

    def _maps(self, train: Sample, generator: torch.Generator) -> CentroidMaps:
        scores = [recorded.scores() for recorded in train]
        mean, covariance = key_moments(scores)
        queries = torch.cat([each.q.permute(1, 0, 3, 2, 4)[:, each.counted].flatten(1, 2) for each in scores], 1)
        chosen = torch.randperm(queries.shape[1], generator=generator)[:QUERIES].to(queries.device)
        rows = self.kernel.maps()[0].num_features
        maps = centroids(queries[:, chosen], mean, covariance, rows, generator)
        every = max(1, len(scores) // TRIED)
        maps = sharpest(maps, [each.some(MOST, generator) for each in scores[::every]])

        def some() -> Scores:
            return scores[int(torch.randint(len(scores), (), generator=generator))].some(MOST, generator)

        steps = self.options.steps
        maps = descend(maps, lambda tried: divergence(tried, some()).sum(), steps - steps // 2)
        return descend(maps, lambda tried: output_error(tried, some(), self.weight), steps // 2)

    @torch.no_grad()
    def _take(self, maps: CentroidMaps) -> None:
        for head, pair in enumerate(cast(AttentionTerm, self.kernel.terms[0]).pairs()):
            for feature_map, rows, bias in zip(pair, maps[::2], maps[1::2], strict=True):
                projection = cast(Centroids, feature_map.projection)
                projection.weight.copy_(rows[head])
                cast(torch.Tensor, projection.bias).copy_(bias[head])

    def _read(self, train: Sample, test: Sample) -> tuple[ErrorMeter, float]:
        """Refit the projection by ridge regression of the residual, so that a large ridge leaves the old one."""
        assert self.readout is not None
        assert self.weight is not None
        out, width = self.weight.shape
        most = width + out * (1 if self.metric is None else 2)
        both = [SecondMoments(most) for _ in range(2)]
        for moments, sample in zip(both, (train, test), strict=True):
            for recorded in sample:
                heads, extra = recorded.linear(self.kernel), recorded.given or Given(None)
                rest = (recorded.softmax() - heads) @ self.weight.T
                missing = extra.target(torch.zeros_like(rest))
                moments.update(torch.cat((heads, rest, missing), -1)[:, :most], extra.weight)
        features = torch.arange(width, device=both[0].mean.device)
        goal = torch.eye(out, most, dtype=torch.float64).roll(width, 1).to(both[0].mean)
        target = Target(goal, slice(width + out, most) if self.metric is not None else None)
        metric = torch.eye(out) if self.metric is None else self.metric
        intercept = self.bias is not None
        fit = fit_corrected(both[0], both[1], features, target, metric, self.options.ridges, intercept=intercept)
        step, offset = fit.weight, fit.bias
        if self.options.refit:
            step, offset = Solver(merged(*both), features, intercept)(target.at(fit.strength), fit.ridge)
        weight = self.weight.double() + step
        bias = offset if self.bias is None or offset is None else self.bias.double() + offset
        self.readout.take(weight, bias)
        # The error of attention itself is measured at its own output, without the errors of earlier layers.
        own = Solver(both[0], features, intercept)(target.at(0.0), fit.ridge)
        after, measured = ErrorMeter(), (self.weight + own[0].to(self.weight)).T
        for recorded in test:
            estimate = recorded.linear(self.kernel) @ measured
            after.update(recorded.softmax() @ self.weight.T, estimate if own[1] is None else estimate + own[1])
        return after, fit.ridge


class ReadHeads(Slot):
    """An output projection with its own weight and bias."""

    replaces = True

    def __init__(self, linear: nn.Linear):
        super().__init__()
        with at_hand(linear):
            self.linear = copy.deepcopy(linear)

    def forward(self, base: Base, x: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        """x (..., heads·d) -> (..., out); PEFT keeps trained parameters in fp32, also in a half-precision model."""
        return as_a_linear(self.linear(x.to(self.linear.weight.dtype)), x)

    def take(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        """Overwrite weight and bias, from any dtype."""
        with torch.no_grad():
            self.linear.weight.copy_(weight)
            if self.linear.bias is not None and bias is not None:
                self.linear.bias.copy_(bias)

    def fold(self, place: FoldPlace) -> None:
        if any(slot is not self for slot in place.slots):
            raise no_folded_form(place, self)
        place.put(plain_linear(self.linear.weight, self.linear.bias))


class HeadsReader:
    """Path and slot of a layer's output projection."""

    def __init__(self, path: str, source: nn.Linear):
        self.path = path
        self._source: nn.Linear | None = source
        self._slot: ReadHeads | None = None

    def slot(self) -> ReadHeads:
        if self._slot is None:
            assert self._source is not None
            self._slot, self._source = ReadHeads(self._source), None  # a copy of the model must not copy it
        return self._slot
