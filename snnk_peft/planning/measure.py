"""Savings of single candidates, and the cost of a choice of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from snnk_peft.bundling.bundle import folded_model
from snnk_peft.config import SNNKConfig, part_name
from snnk_peft.parts import Part
from snnk_peft.planning.candidates import Template, share_tensors, shared_copy
from snnk_peft.planning.choose import STEPS
from snnk_peft.planning.costs import Cost, Timings, macs, paired, rising, seconds, stored_bytes
from snnk_peft.tuner.get_model import get_snnk_model

OF = ("latency", "macs", "bytes")
LEAST = 0.005  # share of the MACs below which a saving cannot be timed
GRAIN = 0.005  # of the original's time, or a 16th of the largest saving: savings of time are not resolved further


class Measure:
    """Cost measurements on one kind of inputs.

    Args:
        model: the original.
        inputs: its keyword arguments.
        of: what cost is.
        timings: see `plan`.
    """

    def __init__(self, model: nn.Module, inputs: Mapping[str, Any], of: str, timings: Any):
        self.original, self.inputs, self.of, self.timings = shared_copy(model), inputs, of, Timings(timings)
        config: Any = model.config
        tensors = {name: value for name, value in inputs.items() if isinstance(value, torch.Tensor)}
        self.where = {
            "model": type(model).__name__,
            "inputs": {name: list(value.shape) for name, value in tensors.items()},
            "dtype": str(next(model.parameters()).dtype).removeprefix("torch."),
            "device": str(next(model.parameters()).device),
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
        }
        sizes = {name: value for name, value in config.to_dict().items() if name not in ("_name_or_path", "dtype")}
        self.key = {**self.where, "config": sizes}
        self.grain = 0.0  # resolution of `savings`: 0 for exact

    def savings(self, templates: Sequence[Template]) -> list[dict[int | None, float]]:
        """Per template and group the share of the original's cost that is saved."""
        paths = templates[0].layers
        bundles: dict[str, nn.Module] = {"": self.original}
        bundles |= {str(number): template.folded() for number, template in enumerate(templates)}
        if self.of == "bytes":
            return _shares_saved([stored_bytes(bundle, paths) for bundle in bundles.values()], templates)
        counted = [macs(bundle, self.inputs, paths) for bundle in bundles.values()]
        if self.of == "macs":
            return _shares_saved(counted, templates)
        enough = [
            {key: share for key, share in each.items() if share >= LEAST} for each in _shares_saved(counted, templates)
        ]
        timed = [number for number, each in enumerate(enough) if each]
        models = {name: bundles[name] for name in ("", *map(str, timed))}
        # A layer is known by what it was and what it is: layers that differ in neither take the same time.
        sizes = [
            list(zip(each.layers, stored_bytes(bundle, paths).layers, strict=True))
            for each, bundle in zip(counted, bundles.values(), strict=True)
        ]
        alike = {
            name: [(was, now if now == was else (now, name)) for was, now in zip(sizes[0], own, strict=True)]
            for name, own in zip(bundles, sizes, strict=True)
            if name in models
        }
        names = [_described(templates[number].part) for number in timed]
        plain = self.timings.get(
            {"layers": self.key, "parts": names},
            lambda: [list(cost) for cost in seconds(models, self.inputs, paths, alike).values()],
        )
        costs = [Cost(whole, tuple(layers)) for whole, layers in plain]
        saved = dict(zip(timed, _shares_saved(costs, [templates[number] for number in timed]), strict=True))
        for kind in {type(templates[number].part) for number in timed}:
            self._smooth([number for number in timed if type(templates[number].part) is kind], saved, enough)
        largest = max((share for each in saved.values() for share in each.values()), default=0.0)
        self.grain = max(1, round(min(GRAIN, largest / 16) * STEPS)) / STEPS
        saved = {
            number: {key: round(share / self.grain) * self.grain for key, share in each.items()}
            for number, each in saved.items()
        }
        return [
            {key: share for key, share in saved.get(number, {}).items() if key in enough[number]}
            for number in range(len(templates))
        ]

    @staticmethod
    def _smooth(
        indices: Sequence[int],
        saved: Mapping[int, dict[int | None, float]],
        counted: Sequence[Mapping[int | None, float]],
    ) -> None:
        """Make savings monotonic: of a part's sizes, one that saves more MACs saves no less time."""
        for key in {key for number in indices for key in counted[number]}:
            order = sorted((n for n in indices if key in counted[n]), key=lambda n: counted[n][key])
            for number, share in zip(order, rising([saved[n][key] for n in order]), strict=True):
                saved[number][key] = share

    def remaining(self, config: SNNKConfig, times: int = 1) -> float:
        """The share of the original's cost that a config leaves, all parts together.

        Args:
            config: the parts.
            times: how often seconds are measured before their least counts.
        """
        parts = [_described(part) for part in config.parts]
        together = _together(config, self.original)
        if self.of == "bytes":
            return stored_bytes(together, ()).whole / stored_bytes(self.original, ()).whole
        if self.of == "macs":
            return macs(together, self.inputs, ()).whole / macs(self.original, self.inputs, ()).whole
        key = {"together": self.key, "parts": parts}
        whole, left = self.timings.least(key, lambda: paired(self.original, together, self.inputs), times)
        return left / whole


def _shares_saved(costs: Sequence[Cost], templates: Sequence[Template]) -> list[dict[int | None, float]]:
    """From the cost of the original, followed by one for each template."""
    original = costs[0]
    return [
        {
            key: (original.outside - cost.outside if key is None else original.layers[key] - cost.layers[key])
            / original.whole
            for key in template.groups
        }
        for cost, template in zip(costs[1:], templates, strict=True)
    ]


def _described(part: Part) -> dict[str, Any]:
    return {"part": part_name(type(part)), **dataclasses.asdict(part)}


def _together(config: SNNKConfig, model: nn.Module) -> nn.Module:
    """The bundle of a config, before anything is fitted; with the model's tensors where they are the same."""
    if not config.parts:
        return model
    start = SNNKConfig(parts=[part.undrawn() for part in config.parts], seed=config.seed, modules_to_save=[])
    bundled: nn.Module = folded_model(get_snnk_model(shared_copy(model), start).get_base_model())[0]
    share_tensors(bundled, model)
    return bundled
