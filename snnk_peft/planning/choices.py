"""The choices of a plan: measured candidates, the sizes between them, and the best choice at each cost."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from snnk_peft.config import SNNKConfig
from snnk_peft.config_parts import part_name
from snnk_peft.parts import Part
from snnk_peft.planning.choose import Offer, Point, pareto
from snnk_peft.planning.sizes import Measured, between, resized, size_of


@dataclass(frozen=True)
class Candidate:
    """Measurements of one part in one place.

    Args:
        layer: index of the Transformer layer, or None for a part outside the layers.
        part: name of the part.
        size: its size: rows, dimensions or the like.
        saved: share of the original's cost that it saves.
        fit_error: normalised squared error at the replaced module, on held-out tokens; None if nothing is fitted.
        output_error: its effect alone on the model's answers, see `plan`.
        chosen: whether it is part of the plan.
        place: index of the place; at most one candidate per place is chosen.
        kind: index in `Plan.kinds`: its options apart from the size.
        between: whether this size was not measured, but interpolated between its neighbours.
    """

    layer: int | None
    part: str
    size: str
    saved: float
    fit_error: float | None
    output_error: float
    chosen: bool
    place: int | None = None
    kind: int | None = None
    between: bool = False


class Choices:
    """The Pareto-optimal choices in cost and error.

    Args:
        candidates: the measured ones, grouped by place and, within a place, by kind.
        kinds: the parts of which they are sizes, on any layers.
        seed: seed of the configs.

    Attributes:
        points: from the original to the cheapest choice.
    """

    def __init__(self, candidates: Sequence[Candidate], kinds: Sequence[Part], seed: int):
        self.candidates = [each for each in candidates if not each.between]
        self.kinds, self.seed = kinds, seed
        groups: dict[int | None, dict[int, list[Candidate]]] = {}
        for each in self.candidates:
            assert each.kind is not None
            groups.setdefault(each.place, {}).setdefault(each.kind, []).append(each)
        self.places = list(groups)
        self.layers = [next(iter(group.values()))[0].layer for group in groups.values()]
        self.offers = [
            [(kind, size) for kind, members in group.items() for size in self._sizes(kind, members)]
            for group in groups.values()
        ]
        self.points = pareto([[Offer(each.saved, each.error) for _, each in offers] for offers in self.offers])

    def _sizes(self, kind: int, members: Sequence[Candidate]) -> list[Measured]:
        whole = size_of(self.kinds[kind])
        if whole is None:
            return [Measured(0, each.saved, each.output_error) for each in members]
        number = type(whole[1])
        fits = [math.nan if each.fit_error is None else each.fit_error for each in members]
        figures = zip(members, fits, strict=True)
        return between([Measured(number(each.size), each.saved, each.output_error, fit) for each, fit in figures])

    def _chosen(self, point: Point) -> list[tuple[int, int, Measured]]:
        """Return (index of the place, kind, size) for the places that are not the original."""
        taken = zip(range(len(self.offers)), self.offers, point.chosen, strict=True)
        return [(place, *offers[index]) for place, offers, index in taken if index >= 0]

    def config(self, point: Point) -> SNNKConfig:
        layers: dict[tuple[int, float], list[int | None]] = {}
        for place, kind, size in self._chosen(point):
            layers.setdefault((kind, size.size), []).append(self.layers[place])
        parts = []
        for (kind, number), on in sorted(layers.items(), key=lambda each: each[0]):
            part = resized(self.kinds[kind], number)
            parts.append(part if None in on else dataclasses.replace(part, layers=sorted(on)))  # type: ignore[call-arg, type-var]
        return SNNKConfig(parts=parts, seed=self.seed, modules_to_save=[])

    def marked(self, point: Point) -> list[Candidate]:
        """Return the candidates with those of a choice marked, including the interpolated sizes that it uses."""
        taken = {(self.places[place], kind): size for place, kind, size in self._chosen(point)}
        result: list[Candidate] = []
        for (place, kind), members in itertools.groupby(self.candidates, key=lambda each: (each.place, each.kind)):
            assert kind is not None
            size, group = taken.get((place, kind)), list(members)
            words = None if size is None else resized(self.kinds[kind], size.size).size_in_words()
            result += [dataclasses.replace(each, chosen=each.size == words) for each in group]
            if size is not None and all(each.size != words for each in group):
                fit = None if math.isnan(size.fit_error) else size.fit_error
                alike = dataclasses.replace(group[0], size=str(words), chosen=True, between=True)
                result.append(dataclasses.replace(alike, saved=size.saved, fit_error=fit, output_error=size.error))
        return result


def named(part: Part) -> dict[str, object]:
    """Return a part as plain data."""
    return {"part": part_name(type(part)), **dataclasses.asdict(part)}
