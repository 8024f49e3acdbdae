"""The slots of narrower heads: queries, keys, values and outputs of one attention block, with folding and fitting.

The pretrained module still splits its inputs into heads of d dimensions, so in a patched model every head of r
dimensions is padded with d − r zeros, which change neither q·k nor the values. Folding removes the zeros.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

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
    as_given,
    no_folded_form,
)
from snnk_peft.parts.base import refuse_offloaded
from snnk_peft.parts.narrow.linear import NarrowLinear, OneMatrix
from snnk_peft.solvers.corrected import CorrectedFit, Solver, Target, fit_corrected, merged
from snnk_peft.solvers.landmarks import SecondMoments
from snnk_peft.solvers.narrow import narrow_products, narrow_values
from snnk_peft.solvers.reduce import ErrorMeter, same_everywhere, summed


class NarrowProjection(NarrowLinear):
    """Projection to queries, keys or values with r dimensions per head, padded with zeros to d.

    Args:
        in_features: length of the inputs.
        heads: number of heads.
        size: r.
        dim: d.
        bias: whether to have a bias.

    Attributes:
        original: while True, the original is called instead; used for fitting.
    """

    original = False

    def __init__(self, in_features: int, heads: int, size: int, dim: int, bias: bool):
        super().__init__(in_features, heads * size, bias)
        self.heads, self.zeros = heads, dim - size

    def forward(self, base: Base, x: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        """x (..., in) -> (..., heads·d)."""
        if self.original:
            return base(x)
        return nn.functional.pad(self.product(x).unflatten(-1, (self.heads, -1)), (0, self.zeros)).flatten(-2)

    def fold(self, place: FoldPlace) -> None:
        if any(slot is not self for slot in place.slots):
            raise no_folded_form(place, self)
        place.put(self.folded())


class NarrowReader(NarrowLinear):
    """Output projection of narrowed heads, from the first r of every d dimensions.

    Attributes:
        original: as in `NarrowProjection`.
    """

    original = False

    def __init__(self, out_features: int, heads: int, size: int):
        super().__init__(heads * size, out_features, True)
        self.heads, self.size = heads, size

    def forward(self, base: Base, x: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        """x (..., heads·d) -> (..., out)."""
        if self.original:
            return base(x)
        return self.product(x.unflatten(-1, (self.heads, -1))[..., : self.size].flatten(-2))

    def fold(self, place: FoldPlace) -> None:
        place.put(self.folded())


class NarrowHeads(Slot):
    """Attention block with narrow heads, which acts through the slots of its four projections.

    Args:
        paths: paths of query, key, value and output projection.
        sources: these Linears.
        attention: path of the module that splits into heads.
        heads: number of heads.
        size: r, the new dimension of a head.

    Attributes:
        four: the slots of the projections, which are registered at the projections themselves.
    """

    def __init__(self, paths: tuple[str, ...], sources: tuple[nn.Linear, ...], attention: str, heads: int, size: int):
        super().__init__()
        query, key, value, out = sources
        dim = query.out_features // heads
        # A key bias adds the same to all logits of a query, to which softmax is invariant. A value bias is
        # averaged with weights that sum to 1, so it can be added after the output.
        self.four: tuple[NarrowProjection | NarrowReader, ...] = (
            NarrowProjection(query.in_features, heads, size, dim, query.bias is not None),
            NarrowProjection(key.in_features, heads, size, dim, False),
            NarrowProjection(value.in_features, heads, size, dim, False),
            NarrowReader(out.out_features, heads, size),
        )
        self.paths, self.attention, self.heads, self.size = paths, attention, heads, size
        if self.four[0].linear.weight.is_meta:
            return  # only the sizes are needed
        matrices = [OneMatrix(linear) for linear in sources]
        if not any(matrix.weight.is_meta for matrix in matrices):
            self._start(*matrices)

    def _start(self, query: OneMatrix, key: OneMatrix, value: OneMatrix, out: OneMatrix) -> None:
        """Start from the singular vectors of W_qᵀ W_k and W_o W_v, with a bias of the queries as one more input."""
        queries, keys, values = (each.by_head(self.heads) for each in (query, key, value))
        readers = out.weight.unflatten(-1, (self.heads, -1)).permute(1, 2, 0)  # (heads, d, out)
        if query.bias is not None:
            queries = torch.cat((queries, query.bias.view(self.heads, -1, 1)), -1)
        self.keep_products(query, key, *narrow_products(queries @ queries.mT, keys @ keys.mT, self.size))
        kept, read = narrow_products(values @ values.mT, readers @ readers.mT, self.size)
        self.keep_values(value, kept)
        bias = 0.0 if out.bias is None else out.bias
        self.four[3].take((read @ readers).flatten(0, 1).mT, bias + out.weight @ value.full_bias())

    def keep_products(self, query: OneMatrix, key: OneMatrix, left: torch.Tensor, right: torch.Tensor) -> None:
        """Replace queries by P q and keys by R k, with P and R (heads, r, d)."""
        bias = None if query.bias is None else (left @ query.bias.view(self.heads, -1, 1).to(left)).flatten()
        self.four[0].take((left @ query.by_head(self.heads).to(left)).flatten(0, 1), bias)
        self.four[1].take((right @ key.by_head(self.heads).to(right)).flatten(0, 1))

    def keep_values(self, value: OneMatrix, kept: torch.Tensor) -> None:
        """Replace values by E v, with E (heads, r, d)."""
        self.four[2].take((kept @ value.by_head(self.heads).to(kept)).flatten(0, 1))

    def forward(self, base: Base, *args: Any, **kwargs: Any) -> Any:
        """Call the original, whose projections are replaced."""
        return base(*args, **kwargs)

    def fold(self, place: FoldPlace) -> None:
        """Make the attention module split into heads of the new size."""
        attention = place.at(self.attention)
        if any(slot is not self for slot in attention.slots):
            raise no_folded_form(attention, self)
        attention.alter("heads", size=self.size)


class FittedHeads(NarrowHeads):
    """Narrower heads fitted by `calibrate`."""

    def fitter(self, place: FitPlace, options: FitOptions) -> Fitter:
        return HeadsFitter(self, place, options)


class HeadsFitter(Fitter):
    """Fitter of queries and keys by their second moments, then of values and outputs under the resulting attention.

    The target is the output of the original block for the same inputs. Keys enter by their variation within a sequence:
    a shared component adds the same to all logits of a query. Memory does not depend on the number of tokens.
    """

    reads, calls, reduces = 2, True, True
    missing_from = 1

    def __init__(self, slot: FittedHeads, place: FitPlace, options: FitOptions):
        self.slot, self.block, self.options, self.together = slot, place.original, options, slot.paths
        self.counted = slot.paths[3]
        refuse_offloaded(f"the narrower projections {', '.join(slot.paths)}", slot.four)
        self.sources = [OneMatrix(place.original_at(path)) for path in slot.paths]

    def fit(self, data: Tokens) -> Fit:
        left, right, before = self._products(data)
        return self._fit(left, right, before.value(), data)

    def fit_sizes(self, others: Sequence[Fitter], data: Tokens) -> list[float] | None:
        """Fit several sizes: the second moments of queries and keys do not depend on the size."""
        alike = [self, *(other for other in others if isinstance(other, HeadsFitter))]
        if len(alike) <= len(others):
            return None
        left, right, before = self._products(data)
        return [fitter._fit(left, right, before.value(), data).error_after for fitter in alike]

    def _fit(self, left: torch.Tensor, right: torch.Tensor, before: float, data: Tokens) -> Fit:
        """Fit, given the second moments of queries and keys and the error of the slot as it was."""
        slot, (query, key, value, _) = self.slot, self.sources
        slot.keep_products(query, key, *narrow_products(left, right, slot.size))
        train, test = self._outputs(data)
        kept, columns = self._keep(train)
        fit = self._read(columns, train, test, self.options.ridges)
        weight, bias = fit.weight, fit.bias
        if self.options.refit:
            both = merged(train, test)
            kept, columns = self._keep(both)
            moments, target = self._kept(columns, both)
            features = torch.arange(len(columns), device=moments.mean.device)
            weight, bias = Solver(moments, features)(target.at(fit.strength), fit.ridge)
        slot.keep_values(value, kept)
        assert bias is not None
        # The output was fitted to values including their bias.
        slot.four[3].take(weight, bias + weight @ columns @ value.full_bias().to(weight))
        for each in slot.four:  # not part of the slot that `calibrate` fits
            same_everywhere(each)
        unknowns = slot.heads * slot.size + 1
        return Fit(slot.size, train.count, test.count, fit.ridge, before, fit.error, unknowns=unknowns)

    def _read(self, columns: torch.Tensor, train: SecondMoments, test: SecondMoments, ridges: Any) -> CorrectedFit:
        """Fit the output projection of the kept directions."""
        (fitted, target), (other, _) = self._kept(columns, train), self._kept(columns, test)
        features = torch.arange(len(columns), device=fitted.mean.device)
        metric = torch.eye(len(self.sources[3].weight)) if self.metric is None else self.metric
        return fit_corrected(fitted, other, features, target, metric, ridges)

    def _kept(self, columns: torch.Tensor, moments: SecondMoments) -> tuple[SecondMoments, Target]:
        """Return the moments of the kept directions, the target and the missing part."""
        width, out = columns.shape[1], len(self.sources[3].weight)
        rest, kept = len(moments.mean) - width, moments.mapped(columns)
        weight = torch.eye(out, len(kept.mean), dtype=torch.float64).roll(len(columns), 1).to(kept.mean)
        behind = len(columns) + out
        return kept, Target(weight, slice(behind, behind + out) if rest > out else None)

    def _keep(self, moments: SecondMoments) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the kept directions of each head, (heads, r, d), and as one matrix (heads·r, heads·d)."""
        width, out = len(self.sources[2].weight), len(self.sources[3].weight)
        gram, cross = moments.scatter[:width, :width], moments.scatter[width : width + out, :width]
        if self.metric is not None:
            cross = self.metric.to(cross) @ (cross + moments.scatter[width + out :, :width])
        kept = narrow_values(gram, cross, self.slot.heads, self.slot.size, steps=self.options.search)
        return kept, torch.block_diag(*kept)

    def _products(self, data: Tokens) -> tuple[torch.Tensor, torch.Tensor, ErrorMeter]:
        """Return the second moments of queries and keys, both (heads, d, d), and the error of the slot as it is."""
        heads = self.slot.heads
        dim = len(self.sources[0].weight) // heads
        left, right = torch.zeros(2, heads, dim, dim, dtype=torch.float64)
        before = ErrorMeter()
        for is_test, read in data:
            for call in as_given(read).inputs:
                (_, queries), (_, keys), _, (_, target) = self._run(call, originals=(0, 1, 2, 3))
                if is_test:
                    before.update(call.real(target), call.real(self._run(call)[3][1]))
                    continue
                real = real_places(keys, call.mask)
                mean = (keys * real).sum(1, keepdim=True) / real.sum(1, keepdim=True).clamp_min(1)
                keys = (keys - mean) * real
                for total, vectors in ((left, queries.double() * real), (right, keys)):
                    rows = vectors.flatten(0, 1).unflatten(-1, (heads, dim))
                    total += torch.einsum("nhd,nhe->hde", rows, rows).to(total)
        before.reduce()
        return summed(left), summed(right), before

    def _outputs(self, data: Tokens) -> tuple[SecondMoments, SecondMoments]:
        """Return the moments of the heads' outputs with all values, the target and, with a metric, the missing part;
        for fitted and for held-out tokens."""
        width, out = len(self.sources[2].weight), len(self.sources[3].weight)
        most = width + out * (1 if self.metric is None else 2)
        train, test = SecondMoments(most), SecondMoments(most)
        for is_test, read in data:
            given = as_given(read)
            targets = [call.real(self._run(call, originals=(0, 1, 2, 3))[3][1]) for call in given.inputs]
            heads = [call.real(self._run(call, originals=(2,))[3][0]) for call in given.inputs]
            target = torch.cat(targets)
            missing = given._replace(inputs=None).target(torch.zeros_like(target))
            vectors = torch.cat((torch.cat(heads), target, missing), -1)[:, :most]
            (test if is_test else train).update(vectors, given.weight)
        train.reduce()
        test.reduce()
        return train, test

    def _run(self, call: Call, originals: tuple[int, ...] = ()) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return inputs and outputs of the four projections in one call of the block, with the given `originals`."""
        seen: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        hooks = []
        for number, slot in enumerate(self.slot.four):
            slot.original = number in originals
            hooks.append(slot.register_forward_hook(partial(_note, seen, number)))
        try:
            # Otherwise every call would fill a cache.
            self.block(*call.args, **{key: None if key == "past_key_values" else v for key, v in call.kwargs.items()})
        finally:
            for slot, hook in zip(self.slot.four, hooks, strict=True):
                slot.original = False
                hook.remove()
        return [seen[number] for number in range(4)]


def _note(seen: dict[int, Any], number: int, slot: nn.Module, args: tuple[Any, ...], output: torch.Tensor) -> None:
    seen[number] = args[1], output


def real_places(x: torch.Tensor, mask: Any) -> torch.Tensor:
    """Return (batch, tokens, 1): 1 at real tokens of x (batch, tokens, dim), 0 at padding; 1 without such a mask."""
    if isinstance(mask, torch.Tensor) and mask.shape == x.shape[:2]:
        return mask.to(x.device, torch.float64).unsqueeze(-1)
    return torch.ones(*x.shape[:2], 1, dtype=torch.float64, device=x.device)
