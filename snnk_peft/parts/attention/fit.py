"""How attention over `centroids` is fitted by `calibrate`, and the projection behind the heads that is fitted with it.

One pass over the data: of the queries, keys and values of a layer as many sequences are kept, chosen at random, as
`TOKENS` allows. Everything else is computed from these (solvers/centroids.py), so memory does not depend on the
number of tokens. What comes in is what the layers converted so far give; the target is the original attention on that.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any, NamedTuple, cast

import torch
from torch import nn
from transformers.integrations.sdpa_attention import repeat_kv

from snnk_peft.errors import ConfigError
from snnk_peft.families.base import as_linear
from snnk_peft.functional.at_hand import at_hand, offloaded
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
    Slot,
    Tokens,
    no_folded_form,
)
from snnk_peft.layers.snnk_linear import plain_linear
from snnk_peft.parts.attention.softmax import pairwise_mask
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
from snnk_peft.solvers.error_meter import ErrorMeter
from snnk_peft.solvers.reduce import same_everywhere
from snnk_peft.solvers.ridge import GramAccumulator, fit_ridge

TOKENS = 32_768  # kept of the fitted ones; of the held-out ones a quarter
QUERIES = 6_000  # per key head, for the clusters
TRIED = 6  # batches that choose τ
MOST = 128  # queries of a sequence when weights are formed


class ReadHeads(Slot):
    """The projection behind the heads, with numbers of its own.

    Args:
        linear: the original.
    """

    replaces = True

    def __init__(self, linear: nn.Linear):
        super().__init__()
        with at_hand(linear):
            self.linear = copy.deepcopy(linear)

    def forward(self, base: Base, x: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        """x (..., heads·d) -> (..., out); PEFT keeps what is trained in fp32, also in a model of half precision."""
        return as_a_linear(self.linear(x.to(self.linear.weight.dtype)), x)

    def take(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        """Other numbers of any dtype."""
        with torch.no_grad():
            self.linear.weight.copy_(weight)
            if self.linear.bias is not None and bias is not None:
                self.linear.bias.copy_(bias)

    def fold(self, place: FoldPlace) -> None:
        """A plain Linear."""
        if any(slot is not self for slot in place.slots):
            raise no_folded_form(place, self)
        place.put(plain_linear(self.linear.weight, self.linear.bias))


class HeadsReader:
    """The projection behind the heads of a layer: where it is, and its slot, which stands there.

    Args:
        path: in the model.
        source: the original.
    """

    def __init__(self, path: str, source: nn.Linear):
        self.path = path
        self._source: nn.Linear | None = source
        self._slot: ReadHeads | None = None

    def slot(self) -> ReadHeads:
        """Made once."""
        if self._slot is None:
            assert self._source is not None
            self._slot, self._source = ReadHeads(self._source), None  # a copy of the model copies no original
        return self._slot


class Heard(NamedTuple):
    """What a layer's attention was given in one call, and which of it counts.

    Attributes:
        q: (B, H, L, d).
        k: (B, G, N, d).
        v: (B, G, N, D).
        out: what softmax gave, (B, H, L, D) in at least fp32.
        mask: (B, N) bool, or None.
        causal: whether a query sees only keys at or before it.
        scaling: factor on q·k.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor
    mask: torch.Tensor | None
    causal: bool
    scaling: float

    @property
    def counted(self) -> torch.Tensor:
        """(B, L), False at padding."""
        if self.mask is None:
            return torch.ones(self.q.shape[0], self.q.shape[2], dtype=torch.bool, device=self.q.device)
        return self.mask[:, -self.q.shape[2] :]

    def scores(self) -> Scores:
        """Queries and keys in at least fp32, each times the root of the scaling, query heads by key heads."""
        root = self.scaling**0.5
        pairs = pairwise_mask(self.mask, self.q, self.k, self.causal)
        q, out = (wide(each).unflatten(1, (self.k.shape[1], -1)) for each in (self.q, self.out))
        pairs = None if pairs is None else pairs.unsqueeze(1)
        return Scores(q * root, wide(self.k) * root, wide(self.v), out, pairs, self.counted)

    def rows(self, out: torch.Tensor) -> torch.Tensor:
        """(B, H, L, D) -> (n, H·D) without padding."""
        return out.transpose(1, 2).flatten(2)[self.counted]

    def softmax(self) -> torch.Tensor:
        """What the original gave, (n, H·D)."""
        return self.rows(self.out)

    def linear(self, kernel: KernelAttention) -> torch.Tensor:
        """What linear attention gives, (n, H·D)."""
        out = kernel(self.q, self.k, wide(self.v), self.mask, causal=self.causal, scaling=self.scaling)
        return self.rows(out)


class Ear:
    """Stands where an attention module asks for its kernel: gives softmax, and keeps what it was given."""

    near_field = None

    def __init__(self) -> None:
        self.heard: list[Heard] = []

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: torch.Tensor | None = None,
        *,
        causal: bool = False,
        scaling: float | None = None,
    ) -> torch.Tensor:
        """Softmax attention (B, H, L, D); arguments as in `KernelAttention.forward`."""
        scaling = q.shape[-1] ** -0.5 if scaling is None else scaling
        pairs = pairwise_mask(mask, q, k, causal)
        keys, values = (repeat_kv(wide(each), q.shape[1] // k.shape[1]) for each in (k, v))
        with full_precision(q):
            out = nn.functional.scaled_dot_product_attention(wide(q), keys, values, attn_mask=pairs, scale=scaling)
        self.heard.append(Heard(q, k, v, out, mask, causal, scaling))
        return out.to(q.dtype)


class Sample:
    """A random choice of what was heard, of so many tokens at most, however many come: reservoir sampling.

    Args:
        tokens: at most so many are kept, but at least one call.
        generator: chooses.
    """

    def __init__(self, tokens: int, generator: torch.Generator):
        self.most, self.generator = tokens, generator
        self.kept: list[tuple[float, Heard]] = []

    def add(self, heard: Heard) -> None:
        """Each call has a random rank; those of the highest ranks stay."""
        self.kept.append((float(torch.rand((), generator=self.generator)), heard))
        self.kept.sort(key=lambda pair: pair[0])
        while len(self.kept) > 1 and self.count > self.most:
            self.kept.pop()

    @property
    def count(self) -> int:
        """Tokens kept, padding included."""
        return sum(heard.q.shape[0] * heard.q.shape[2] for _, heard in self.kept)

    @property
    def tokens(self) -> int:
        """Tokens kept, without padding."""
        return sum(int(heard.counted.sum()) for _, heard in self.kept)

    def __iter__(self) -> Iterator[Heard]:
        return (heard for _, heard in self.kept)


class AttentionFitter(Fitter):
    """Fits the maps of one attention to its softmax, and then the projection behind the heads to what is left.

    Args:
        kernel: the linear attention, one term over `centroids`.
        readout: what takes the place of that projection, or None where it stays.
        readout_path: where, in the model.
        place: where the attention stands.
        options: of `calibrate`.
    """

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
        self.longest = 0  # tokens of a text
        kernel.fitted_length = None  # of an earlier fit
        if any(offloaded(each) for each in (kernel, readout) if each is not None):
            raise ConfigError(
                "the feature maps of an attention, or the projection behind its heads, are offloaded to memory or "
                "disk, where a fit would not last; expected them beside the model. Calibrate before dispatching it"
            )
        self.weight: torch.Tensor | None = None
        self.bias: torch.Tensor | None = None
        if readout_path is not None:
            found = as_linear(place.original_at(readout_path))
            assert isinstance(found, nn.Linear)
            with at_hand(found):
                self.weight = wide(found.weight.detach())
                self.bias = None if found.bias is None else wide(found.bias.detach())

    def fit(self, data: Tokens) -> Fit:
        """See `Fitter.fit`."""
        first = self.kernel.maps()[0].projection
        generator = site_generator(first.seed, f"{first.site}.fit")  # the same in every fit
        train, test = self._listen(data, generator)
        with full_precision(first.weight):  # logarithms of weights, whatever precision the model runs in
            return self._fit(train, test, generator)

    def _fit(self, train: Sample, test: Sample, generator: torch.Generator) -> Fit:
        before = ErrorMeter(self.weight)
        for heard in test:
            before.update(heard.softmax(), heard.linear(self.kernel))
        diverging = self._divergence(test)
        self._take(self._maps(train, generator))
        self.kernel.fitted_length = self.longest
        after, ridge = ErrorMeter(self.weight), None
        if self.readout is None:
            for heard in test:
                after.update(heard.softmax(), heard.linear(self.kernel))
        else:
            after, ridge = self._read(train, test)
        for each in (self.kernel, self.readout):
            if each is not None:
                same_everywhere(each)
        size = unknowns = self.kernel.maps()[0].num_features  # as many centres as queries are the queries
        if self.readout is not None:
            unknowns = max(unknowns, self.readout.linear.in_features + 1)
        errors = before.value(), after.value()
        counts = train.tokens, before.count
        return Fit(size, *counts, ridge, *errors, diverging, self._divergence(test), unknowns, self.longest)

    def _divergence(self, sample: Sample) -> float:
        """Of the weights from those of softmax, the mean over queries and heads."""
        pairs = cast(AttentionTerm, self.kernel.terms[0]).pairs()
        projections = [[cast(Centroids, feature_map.projection) for feature_map in pair] for pair in pairs]
        rows = [torch.stack([head[side].weight for head in projections]).float() for side in (0, 1)]
        biases = [torch.stack([cast(torch.Tensor, head[side].bias) for head in projections]).float() for side in (0, 1)]
        maps = CentroidMaps(rows[0], biases[0], rows[1], biases[1])
        first = projections[0][0]
        generator = site_generator(first.seed, f"{first.site}.divergence")  # the same queries before and after
        found = [(divergence(maps, heard.scores().some(MOST, generator)).mean(), heard) for heard in sample]
        queries = [int(heard.counted.sum()) for _, heard in found]
        return sum(float(each) * count for (each, _), count in zip(found, queries, strict=True)) / max(sum(queries), 1)

    def _listen(self, data: Tokens, generator: torch.Generator) -> tuple[Sample, Sample]:
        """What is kept of the fitted and of the held-out calls."""
        train, test = Sample(TOKENS, generator), Sample(TOKENS // 4, generator)
        owner = vars(self.module)["snnk_owner"]
        for is_test, calls in data:
            ear = Ear()
            self.module.snnk_owner = lambda ear=ear: ear
            try:
                for call in calls:
                    self._run(call)
            finally:
                self.module.snnk_owner = owner
            for heard in ear.heard:
                if not (torch.isfinite(heard.q).all() and torch.isfinite(heard.k).all()):
                    raise ValueError(
                        "queries or keys hold NaN or infinity; expected finite numbers. Run the model in fp32 or bf16"
                    )
                self.longest = max(self.longest, int(heard.counted.sum(-1).max()))
                (test if is_test else train).add(heard)
        return train, test

    def _run(self, call: Call) -> None:
        # A cache would be filled by every call.
        self.module(*call.args, **{key: None if key == "past_key_values" else v for key, v in call.kwargs.items()})

    def _maps(self, train: Sample, generator: torch.Generator) -> CentroidMaps:
        scores = [heard.scores() for heard in train]
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
        """Put them into the feature maps, one pair per key head."""
        for head, pair in enumerate(cast(AttentionTerm, self.kernel.terms[0]).pairs()):
            for feature_map, rows, bias in zip(pair, maps[::2], maps[1::2], strict=True):
                projection = cast(Centroids, feature_map.projection)
                projection.weight.copy_(rows[head])
                cast(torch.Tensor, projection.bias).copy_(bias[head])

    def _read(self, train: Sample, test: Sample) -> tuple[ErrorMeter, float]:
        """Refit the projection: ridge regression of what is missing, so that a large ridge leaves the old one."""
        assert self.readout is not None
        assert self.weight is not None
        found = [GramAccumulator(self.weight.shape[1], len(self.weight)) for _ in range(2)]
        for moments, sample in zip(found, (train, test), strict=True):
            for heard in sample:
                given = heard.linear(self.kernel)
                moments.update(given, (heard.softmax() - given) @ self.weight.T)
        fit = fit_ridge(found[0], found[1], self.options.ridges)
        step, offset = fit.weight, fit.bias
        if self.options.refit:
            found[0].merge(found[1])
            step, offset, _ = found[0].solve(fit.ridge * found[0].ridge_scale)
        weight = self.weight.double() + step
        bias = offset if self.bias is None or offset is None else self.bias.double() + offset
        self.readout.take(weight, bias)
        after, measured = ErrorMeter(), (self.weight + fit.weight.to(self.weight)).T
        for heard in test:
            estimate = heard.linear(self.kernel) @ measured
            after.update(heard.softmax() @ self.weight.T, estimate if fit.bias is None else estimate + fit.bias)
        return after, fit.ridge
