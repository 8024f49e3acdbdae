"""Costs in MACs, bytes or seconds: the savings of single candidates, and the remaining cost of a choice."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from snnk_peft.bundling.bundle import folded_model
from snnk_peft.calibrating.batches import split
from snnk_peft.config import SNNKConfig
from snnk_peft.config_parts import part_name
from snnk_peft.parts import Part
from snnk_peft.planning.candidates import Template, share_tensors, shared_copy
from snnk_peft.planning.choose import STEPS
from snnk_peft.planning.sizes import kind_of, rising
from snnk_peft.planning.timing import LIMIT, Allowance, Cost, Timings, by_layer, paired, seconds, share_left
from snnk_peft.tuner.get_model import get_snnk_model

OF = ("latency", "macs", "bytes")
LEAST = 0.005  # share of the MACs below which a saving cannot be timed
LOOKS = 2  # one timing may be wrong, and with it everything that follows from it
GRAIN = 0.005  # of the original's time, or a 32nd of the largest saving: savings of time are not resolved further


def macs(model: nn.Module, inputs: Mapping[str, Any], paths: Sequence[str]) -> Cost:
    """Count the MACs of one forward pass."""
    # Imported here, because torch's counters would slow down the import of the package.
    from snnk_peft.cost.meter import Meter

    with Meter() as meter:
        return by_layer(model, inputs, paths, lambda: meter.flops // 2)


def stored_bytes(model: nn.Module, paths: Sequence[str]) -> Cost:
    """Return the bytes of a state dict's tensors, shared ones once; arguments as for `macs`."""
    seen: dict[int, tuple[str, int]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        seen.setdefault(id(tensor), (name, tensor.numel() * tensor.element_size()))
    layers = tuple(sum(size for name, size in seen.values() if name.startswith(f"{path}.")) for path in paths)
    return Cost(sum(size for _, size in seen.values()), layers)


class Measure:
    """Cost measurements on given inputs."""

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
        self.allowance = Allowance(LIMIT)

    def savings(self, templates: Sequence[Template]) -> list[dict[int | None, float]]:
        """Return, per template and group, the share of the original's cost that is saved."""
        paths = templates[0].layers
        bundles: dict[str, nn.Module] = {"": self.original}
        bundles |= {str(number): template.folded() for number, template in enumerate(templates)}
        if self.of == "bytes":
            return _shares_saved([stored_bytes(bundle, paths) for bundle in bundles.values()], templates)
        # Shares of the MACs are equal for all examples, and latency only needs them to tell sizes apart.
        given = next(split(self.inputs, 1)) if self.of == "latency" else self.inputs
        counted = [macs(bundle, given, paths) for bundle in bundles.values()]
        shares = _shares_saved(counted, templates)
        if self.of == "macs":
            return shares
        enough = [{key: share for key, share in each.items() if share >= LEAST} for each in shares]
        sizes = self._by_kind(templates, enough)
        timed = sorted({number for order in sizes for number in (order[0], order[-1])})
        models = {name: bundles[name] for name in ("", *map(str, timed))}
        # A layer is identified by its original and its replacement: layers that differ in neither take the same time.
        built = [
            list(zip(each.layers, stored_bytes(bundle, paths).layers, strict=True))
            for each, bundle in zip(counted, bundles.values(), strict=True)
        ]
        alike = {
            name: [(was, now if now == was else (now, name)) for was, now in zip(built[0], own, strict=True)]
            for name, own in zip(bundles, built, strict=True)
            if name in models
        }
        names = [_described(templates[number].part) for number in timed]
        plain = self.timings.get(
            {"layers": self.key, "parts": names},
            lambda: [list(cost) for cost in seconds(models, self.inputs, paths, alike, self.allowance).values()],
        )
        costs = [Cost(whole, tuple(layers)) for whole, layers in plain]
        saved = dict(zip(timed, _shares_saved(costs, [templates[number] for number in timed]), strict=True))
        largest = max((share for each in saved.values() for share in each.values()), default=0.0)
        self.grain = max(1, round(min(GRAIN, largest / 32) * STEPS)) / STEPS
        result: list[dict[int | None, float]] = [{} for _ in templates]
        for order in sizes:
            low, high = order[0], order[-1]
            for key in enough[high]:
                ends = rising([round(saved[n].get(key, 0.0) / self.grain) * self.grain for n in (low, high)])
                known = shares[low].get(key, 0.0), shares[high][key]
                for number in (n for n in order if key in enough[n]):
                    result[number][key] = float(np.interp(enough[number][key], known, ends))
        return result

    @staticmethod
    def _by_kind(templates: Sequence[Template], counted: Sequence[Mapping[int | None, float]]) -> list[list[int]]:
        """Return the templates of each kind that save enough, in the order of increasing savings."""
        kinds: dict[Any, list[int]] = {}
        for number, each in enumerate(counted):
            if each:
                kinds.setdefault(kind_of(templates[number].part), []).append(number)
        return [sorted(numbers, key=lambda n: sum(counted[n].values())) for numbers in kinds.values()]

    def remaining(self, config: SNNKConfig) -> float:
        """Return the share of the original's cost that remains with a config, all parts together."""
        together = _together(config, self.original)
        if self.of == "bytes":
            return stored_bytes(together, ()).whole / stored_bytes(self.original, ()).whole
        if self.of == "macs":
            return macs(together, self.inputs, ()).whole / macs(self.original, self.inputs, ()).whole
        key = {"together": self.key, "parts": [_described(part) for part in config.parts]}
        before, after = [], []
        for look in range(LOOKS):
            if look and self.allowance.left <= 0:
                break
            pair = self.timings.get(
                {**key, "look": look}, lambda: paired(self.original, together, self.inputs, self.allowance)
            )
            before += pair[0]
            after += pair[1]
        return share_left(before, after)


def _shares_saved(costs: Sequence[Cost], templates: Sequence[Template]) -> list[dict[int | None, float]]:
    """Compute the savings from the cost of the original, followed by one for each template."""
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
    """Build the bundle of a config, before anything is fitted, sharing the model's unchanged tensors."""
    if not config.parts:
        return model
    start = SNNKConfig(parts=[part.undrawn() for part in config.parts], seed=config.seed, modules_to_save=[])
    bundled: nn.Module = folded_model(get_snnk_model(shared_copy(model), start).get_base_model())[0]
    share_tensors(bundled, model)
    return bundled
