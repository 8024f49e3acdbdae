"""FFN blocks with fewer hidden units, plain or gated (SwiGLU, GeGLU): some are kept, and the contraction is corrected.

W₂ (f(W x) ⊙ V x) + b      becomes      A (f(W_S x) ⊙ V_S x) + a        (without V x in a plain FFN)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import ClassVar, cast

import torch
from torch import nn

from snnk_peft.errors import ConfigError, UnsupportedError
from snnk_peft.families import family_of
from snnk_peft.families.base import module_at
from snnk_peft.layers.slots import Base, Fit, FitOptions, FitPlace, Fitter, FoldPlace, Slot, Tokens, as_given
from snnk_peft.options import MOST, documented, option
from snnk_peft.parts import PARTS
from snnk_peft.parts.base import Part, Patch, PatchContext, layers_faults, refuse_offloaded, resolve_layers
from snnk_peft.parts.narrow.linear import NarrowLinear, OneMatrix
from snnk_peft.projections.base_drawn import site_generator
from snnk_peft.solvers.descent import descend_block
from snnk_peft.solvers.landmarks import SecondMoments
from snnk_peft.solvers.narrow import RULES, narrow_units
from snnk_peft.solvers.reduce import ErrorMeter, TokenSample, same_everywhere

TOKENS = 16_384  # in a sample of inputs; a quarter as many are held out
ROWS = 1024  # processed at a time


@PARTS.register("narrow_ffn")
@documented
@dataclass
class NarrowFFNPart(Part):
    """Narrower FFN blocks: some hidden units are kept, and the contraction compensates for the others.

    For plain and gated FFNs. `calibrate` chooses the units and corrects the contraction in closed form, from the second
    moment of the units' outputs on real data; without it the units with the largest weights are kept. All matrices are
    trained. Bundled, they are plain narrower Linears.
    """

    keep: float = option(0.75, "share of the hidden units to keep, 0 < keep < 1.", above=0, below=1)
    num_features: int | None = option(None, "hidden units to keep, >= 1; None follows `keep`.", low=1, high=MOST)
    rule: str = option(
        "greedy",
        'which units `calibrate` keeps: "greedy" (removes units one by one, each time the one without which the '
        'repaired output errs least) or "leverage" (largest ridge leverage scores, blind to the contraction).',
        choices=RULES,
    )
    layers: str | list[int] = option(
        "all",
        'which Transformer layers: "all", "top-K" (the last K), "bottom-K", or a list of indices from 0.',
        checked=False,
    )

    def faults(self, part: str) -> list[str]:
        return super().faults(part) + layers_faults(f"{part}.layers", self.layers)

    size_fields: ClassVar[tuple[str, ...]] = ("num_features", "keep")

    @classmethod
    def candidates(cls, model: nn.Module, length: int) -> list[Part]:
        """Propose sizes for gated FFNs; for plain ones `FFNPart` is cheaper."""
        return [cls(keep=share) for share in (1 / 4, 1 / 2, 3 / 4)] if family_of(model).gated else []

    @classmethod
    def probes(cls) -> dict[str, Part]:
        return {"narrow_ffn": cls()}

    def plan(self, context: PatchContext) -> list[Patch]:
        """Plan the narrower FFNs.

        Raises:
            ConfigError: not fewer units than the FFN has, layers that the model does not have.
            UnsupportedError: an activation that is not a module, matrices of incompatible shapes.
        """
        layers = context.family.layer_paths(context.model)
        chosen, faults = resolve_layers(f"{context.where}.layers", self.layers, len(layers))
        blocks = [_Block(context, self, layers[index]) for index in chosen]
        if self.num_features is not None:
            faults += [
                f"{context.where}.num_features is {self.num_features}; layer {index} has {block.units} hidden units; "
                "expected fewer"
                for index, block in zip(chosen, blocks, strict=True)
                if block.units <= self.num_features
            ]
        if faults:
            raise ConfigError(faults)
        return [patch for block in blocks for patch in block.patches()]


class _Block:
    """The FFN of one layer: the paths of its Linears, and its slots, created on demand."""

    def __init__(self, context: PatchContext, part: NarrowFFNPart, layer: str):
        family, model = context.family, context.model
        what = f"{context.where} (narrow_ffn)"
        if family.activation is None:
            raise UnsupportedError(
                f"{what}: the FFN of {type(model).__name__} (family {family.name!r}) calls its activation as a "
                "function, so that what its hidden units give cannot be computed; expected a module. Leave this part "
                "out for this model"
            )
        module_at(model, f"{layer}.{family.activation}", f"{what}: the activation")
        self.activation = f"{layer}.{family.activation}"
        names = [name for name in (family.ffn_in, family.ffn_up, family.ffn_out) if name is not None]
        self.paths = tuple(f"{layer}.{name}" for name in names)
        self.sources = tuple(context.linear(path, what) for path in self.paths)
        *expansions, contraction = self.sources
        self.units = contraction.in_features
        self.halves = 2 if family.gated and family.ffn_up is None else 1  # expansions in one matrix
        self.kept = part.num_features or max(1, round(part.keep * self.units))
        self.rule, self.filled = part.rule, context.filled
        if wrong := [each.out_features for each in expansions if each.out_features != self.halves * self.units]:
            raise UnsupportedError(
                f"{what}: {self.paths[0]!r} of {type(model).__name__} gives {wrong[0]} features and {self.paths[-1]!r} "
                f"reads {self.units}; expected {self.halves * self.units}. A gated FFN is activation(a) * b, where two "
                "Linears (ffn_in, ffn_up) or one (ffn_in) make a and b; describe it with ModelFamily and "
                "register_family"
            )

    def patches(self) -> list[Patch]:
        return [Patch(path, partial(self._slot, i), replaces=True) for i, path in enumerate(self.paths)]

    def _slot(self, index: int) -> Slot:
        return self._slots[index]

    @cached_property
    def _slots(self) -> tuple[NarrowUnits, ...]:
        *expansions, contraction = self.sources
        slots: list[NarrowUnits] = []
        for source in expansions:
            kind = NarrowUnits if slots else FirstUnits
            slots.append(kind(source.in_features, self.halves * self.kept, source.bias is not None))
        slots.append(NarrowUnits(self.kept, contraction.out_features, contraction.bias is not None))
        block = NarrowBlock(self.paths, self.activation, tuple(slots), self.halves, self.rule)
        cast(FirstUnits, slots[0]).block = block
        if not (self.filled or slots[0].linear.weight.is_meta):
            matrices = [OneMatrix(source) for source in self.sources]
            if not any(matrix.weight.is_meta for matrix in matrices):
                block.start(matrices)
        return block.slots


class NarrowUnits(NarrowLinear):
    """Slot of one Linear of a narrower FFN."""

    lets_pass = True

    def forward(self, base: Base, x: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        return self.product(x)

    def fold(self, place: FoldPlace) -> None:
        place.put(self.folded())


class FirstUnits(NarrowUnits):
    """Slot of the first Linear, at which `calibrate` fits all of them.

    Attributes:
        block: the whole FFN, including this slot.
    """

    block: NarrowBlock

    def fitter(self, place: FitPlace, options: FitOptions) -> Fitter:
        return UnitsFitter(self.block, place, options)

    def changes(self, path: str) -> tuple[str, ...]:
        return self.block.paths

    def check(self, root: nn.Module, run: Callable[[], object]) -> Iterator[str]:
        """Check that the contraction reads what `NarrowBlock.hidden` computes."""
        block, given = self.block, dict[nn.Module, torch.Tensor]()
        *expansions, contraction = (root.get_submodule(path) for path in block.paths)

        def note(module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
            given[module] = args[0]

        with expansions[0].register_forward_pre_hook(note), contraction.register_forward_pre_hook(note):
            run()
        computed = block.hidden(expansions, root.get_submodule(block.activation), given[expansions[0]])
        units = given[contraction].reshape(computed.shape)
        if not torch.allclose(computed, units, rtol=1e-3, atol=1e-3 * float(units.abs().max())):
            yield f"{block.paths[-1]!r} reads something else than activation(a) or, gated, activation(a) * b"


@dataclass(frozen=True)
class NarrowBlock:
    """The slots of one FFN.

    Args:
        paths: paths of the expansion (or both expansions) and the contraction.
        activation: path of the activation after the first.
        slots: the slots at `paths`.
        halves: number of expansions in the first Linear.
        rule: rule by which the kept units are chosen.
    """

    paths: tuple[str, ...]
    activation: str
    slots: tuple[NarrowUnits, ...]
    halves: int
    rule: str

    @property
    def size(self) -> int:
        return self.slots[-1].linear.in_features

    def start(self, sources: list[OneMatrix]) -> None:
        """Keep the units with the largest product of the norms of their rows and their column of the contraction."""
        *expansions, contraction = sources
        importance = contraction.weight.norm(dim=0)
        for each in expansions:
            importance = importance * each.weight.norm(dim=1).view(self.halves, -1).prod(0)
        kept = importance.topk(self.size).indices.sort().values
        self.take(sources, kept, contraction.weight[:, kept], contraction.bias)

    def hidden(self, expansions: Sequence[Base], activation: Base, x: torch.Tensor) -> torch.Tensor:
        """Compute f(W x), or f(W x) ⊙ V x with two expansions, for x (n, dim)."""
        parts = [part for each in expansions for part in each(x).chunk(self.halves, -1)]
        return activation(parts[0]) if len(parts) == 1 else activation(parts[0]) * parts[1]

    def take(
        self, sources: list[OneMatrix], kept: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> None:
        for slot, source in zip(self.slots[:-1], sources, strict=False):
            units = len(source.weight) // self.halves
            rows = torch.cat([kept + half * units for half in range(self.halves)])
            slot.take(source.weight[rows], None if source.bias is None else source.bias[rows])
        self.slots[-1].take(weight, bias)


class UnitsFitter(Fitter):
    """Fitter that chooses the units and corrects the contraction, from second moments of all units on the same inputs.

    One pass; memory is the square of the number of units, and with `steps` a sample of the inputs, independent of the
    number of tokens. With `steps`, gradient descent on the sample then trains all matrices, as long as the error on
    held-out tokens falls.
    """

    reduces = True

    def __init__(self, block: NarrowBlock, place: FitPlace, options: FitOptions):
        self.block, self.options, self.together, self.counted = block, options, block.paths[1:], block.paths[-1]
        refuse_offloaded(f"the narrower matrices {', '.join(block.paths)}", block.slots)
        self.modules = [place.original_at(path) for path in block.paths]
        self.activation = place.original_at(block.activation)
        self.narrow = [partial(slot, None) for slot in block.slots]

    def fit(self, data: Tokens) -> Fit:
        block, options, sources = self.block, self.options, [OneMatrix(module) for module in self.modules]
        contraction, (width, units) = sources[-1], sources[-1].weight.shape
        dim = 0 if self.metric is None else width
        train, test, before = SecondMoments(units + dim), SecondMoments(units + dim), ErrorMeter(self.metric)
        samples = [TokenSample(most, self._generator(f"sample{most}")) for most in (TOKENS, TOKENS // 4)]
        for is_test, read in data:
            given = as_given(read)
            hidden = self._hidden(self.modules, given.inputs)
            output = self.modules[-1](hidden)
            missing = given.target(torch.zeros_like(output))
            (test if is_test else train).update(torch.cat((hidden, missing[:, :dim]), -1), given.weight)
            if is_test:
                before.update(output + missing, self._output(self.narrow, given.inputs), given.weight)
            if options.steps:
                samples[is_test].update(torch.cat((given.inputs, missing[:, :dim]), -1))
        for each in (train, test, before):
            each.reduce()
        fit = narrow_units(
            train,
            test,
            contraction.weight,
            block.size,
            rule=block.rule,
            ridges=options.ridges,
            intercept=contraction.bias is not None,
            refit=options.refit and not options.steps,  # held-out tokens must show whether steps help
            metric=self.metric,
        )
        bias = None if contraction.bias is None or fit.offset is None else contraction.bias + fit.offset.cpu()
        block.take(sources, fit.kept.cpu(), fit.weight, bias)
        error = self._descend(*(each.reduced() for each in samples)) if options.steps else None
        for slot in block.slots:  # `calibrate` fits the first; the others are elsewhere
            same_everywhere(slot)
        unknowns = block.size + (contraction.bias is not None)
        error = fit.error if error is None else error
        return Fit(block.size, train.count, before.count, fit.ridge, before.value(), error, unknowns=unknowns)

    def _hidden(self, functions: Sequence[Base], x: torch.Tensor) -> torch.Tensor:
        return self.block.hidden(functions[:-1], self.activation, x)

    def _output(self, functions: Sequence[Base], x: torch.Tensor) -> torch.Tensor:
        return functions[-1](self._hidden(functions, x))

    def _judged(self, output: torch.Tensor) -> torch.Tensor:
        return output if self.metric is None else output @ self.metric.to(output).T

    def _generator(self, what: str) -> torch.Generator:
        """Return a generator with the same seed in every fit and process."""
        return site_generator(0, f"{self.block.paths[0]}.{what}")

    def _descend(self, fitted: torch.Tensor, held_out: torch.Tensor) -> float | None:
        """Train all matrices; return the error afterwards, or None if they are left unchanged.

        Rows are inputs and, with a metric, the missing part of the stream after the contraction.
        """
        own = [dict(slot.linear.named_parameters()) for slot in self.block.slots]
        dim = OneMatrix(self.modules[0]).weight.shape[1]

        def output(tensors: Sequence[torch.Tensor], x: torch.Tensor) -> torch.Tensor:
            rest = iter(tensors)
            linears = [{name: next(rest) for name in each} for each in own]
            return self._judged(self._output([partial(nn.functional.linear, **each) for each in linears], x.float()))

        def wanted(rows: torch.Tensor) -> torch.Tensor:
            target = self._output(self.modules, rows[:, :dim]).float()
            return self._judged(target if self.metric is None else target + rows[:, dim:])

        targets = torch.cat([wanted(rows) for rows in fitted.split(ROWS)])
        tensors = [tensor for each in own for tensor in each.values()]
        generator = self._generator("steps")
        moved = descend_block(output, tensors, fitted[:, :dim], targets, self.options.steps, generator)
        errors = []
        for candidate in (tensors, moved):
            meter = ErrorMeter()
            for rows in held_out.split(ROWS):
                meter.update(wanted(rows), output(candidate, rows[:, :dim]))
            errors.append(meter.value())
        if not errors[1] < errors[0]:
            return None
        with torch.no_grad():
            for tensor, better in zip(tensors, moved, strict=True):
                tensor.copy_(better)
        return errors[1]
