"""Costs in MACs, bytes or seconds: the savings of single candidates, and what a choice of them leaves."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from snnk_peft.bundling.bundle import folded_model
from snnk_peft.config import SNNKConfig
from snnk_peft.config_parts import part_name
from snnk_peft.errors import ConfigError
from snnk_peft.functional.at_hand import offloaded, place_of
from snnk_peft.json_files import read_json
from snnk_peft.parts import Part
from snnk_peft.planning.candidates import Template, share_tensors, shared_copy
from snnk_peft.planning.choose import STEPS
from snnk_peft.saved_folder import whole_file
from snnk_peft.tuner.get_model import get_snnk_model

ROUNDS, MOST = 4, 16  # of timings, at least and at most
WITHIN = 1.02  # times the least: the same
_SINCE_START: dict[str, Any] = {}  # measured in this process
OF = ("latency", "macs", "bytes")
LEAST = 0.005  # share of the MACs below which a saving cannot be timed
GRAIN = 0.005  # of the original's time, or a 16th of the largest saving: savings of time are not resolved further


class Cost(NamedTuple):
    """Cost of one forward pass, or of the model's file, in some unit.

    Attributes:
        whole: of the model.
        layers: of each Transformer layer.
    """

    whole: float
    layers: tuple[float, ...]

    @property
    def outside(self) -> float:
        return self.whole - sum(self.layers)


def _by_layer(model: nn.Module, inputs: Mapping[str, Any], paths: Sequence[str], now: Callable[[], float]) -> Cost:
    """By how much `now` advances in one forward pass; a layer that runs several times counts every time."""
    spent, began = [0.0] * len(paths), [0.0] * len(paths)

    def enter(index: int) -> Any:
        def hook(module: nn.Module, args: Any) -> None:
            began[index] = now()

        return hook

    def leave(index: int) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            spent[index] += now() - began[index]

        return hook

    with ExitStack() as hooks:
        for index, path in enumerate(paths):
            layer = model.get_submodule(path)
            for hook in (layer.register_forward_pre_hook(enter(index)), layer.register_forward_hook(leave(index))):
                hooks.callback(hook.remove)
        start = now()
        with torch.no_grad():
            model(**inputs)
        return Cost(now() - start, tuple(spent))


def macs(model: nn.Module, inputs: Mapping[str, Any], paths: Sequence[str]) -> Cost:
    """Count the MACs of one forward pass."""
    # Here, because it takes in torch's own counters, which would slow down the import of the package.
    from snnk_peft.cost.meter import Meter

    with Meter() as meter:
        return _by_layer(model, inputs, paths, lambda: meter.flops // 2)


def stored_bytes(model: nn.Module, paths: Sequence[str]) -> Cost:
    """Bytes of the tensors of a state dict, shared ones once; arguments as in `macs`."""
    seen: dict[int, tuple[str, int]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        seen.setdefault(id(tensor), (name, tensor.numel() * tensor.element_size()))
    layers = tuple(sum(size for name, size in seen.values() if name.startswith(f"{path}.")) for path in paths)
    return Cost(sum(size for _, size in seen.values()), layers)


def clock(model: nn.Module) -> Callable[[], float]:
    """Seconds; on a GPU, until it has done what it was given; of a single thread, those it ran itself.

    What else runs on the machine then adds next to nothing: three busy programs on two cores double the least time on
    the wall, and add 4% to the CPU time.
    """
    device = place_of(model)
    if device is None or device.type != "cuda":
        alone = device is not None and device.type == "cpu" and torch.get_num_threads() == 1 and not offloaded(model)
        return time.thread_time if alone else time.perf_counter

    def now() -> float:
        torch.cuda.synchronize(device)
        return time.perf_counter()

    return now


def _reached(samples: Sequence[float]) -> bool:
    """Return True if the minimum of some timings is reliable: other load only adds, seldom the same thrice."""
    return sum(each <= min(samples) * WITHIN for each in samples) >= 3


def seconds(
    models: Mapping[str, nn.Module],
    inputs: Mapping[str, Any],
    paths: Sequence[str],
    alike: Mapping[str, Sequence[Any]],
) -> dict[str, Cost]:
    """Time a forward pass of each model in turn, so that a slow phase of the machine affects all of them.

    Of all rounds, and of all layers that are built alike, the least counts: what else a machine does only adds. Rounds
    go on until each of these has been reached three times, up to `MOST`.

    Args:
        models: by name, warm; the first is the original, whose layers and surroundings the others share where they are
            built alike.
        inputs: keyword arguments of all of them.
        paths: of their Transformer layers.
        alike: per model and layer, equal where layers are built alike.
    """
    by_kind: dict[Any, list[float]] = defaultdict(list)
    outside: list[float] = []
    first = next(iter(models))
    for turn in range(MOST):
        for name in list(models) if turn % 2 else reversed(list(models)):
            cost = _by_layer(models[name], inputs, paths, clock(models[name]))
            for kind, spent in zip(alike[name], cost.layers, strict=True):
                by_kind[kind].append(spent)
            if name == first:
                outside.append(cost.outside)
        if turn + 1 >= ROUNDS and all(_reached(samples) for samples in (outside, *by_kind.values())):
            break
    layers = {name: tuple(min(by_kind[kind]) for kind in alike[name]) for name in models}
    return {name: Cost(sum(spent) + min(outside), spent) for name, spent in layers.items()}


def rising(values: Sequence[float]) -> list[float]:
    """The nearest sequence, in squares, that never falls: neighbours that do are replaced by their mean."""
    blocks: list[list[float]] = []  # sum, count
    for value in values:
        blocks.append([value, 1])
        while len(blocks) > 1 and blocks[-2][0] * blocks[-1][1] > blocks[-1][0] * blocks[-2][1]:
            total, count = blocks.pop()
            blocks[-1] = [blocks[-1][0] + total, blocks[-1][1] + count]
    return [total / count for total, count in blocks for _ in range(int(count))]


def paired(original: nn.Module, other: nn.Module, inputs: Mapping[str, Any]) -> list[float]:
    """The least seconds of two models, taken in turn after one round to warm up, until each was reached three times."""
    spent: tuple[list[float], list[float]] = ([], [])
    for turn in range(MOST + 1):
        for which in (0, 1) if turn % 2 else (1, 0):
            model = (original, other)[which]
            took = _by_layer(model, inputs, (), clock(model)).whole
            if turn:
                spent[which].append(took)
        if turn >= ROUNDS and all(_reached(each) for each in spent):
            break
    return [min(each) for each in spent]


class Timings:
    """A store of timings, so that nothing is measured twice: timings vary, and a plan must not.

    Args:
        path: a JSON file that is read if it is there, and written; None keeps them as long as the process lives.
    """

    def __init__(self, path: str | os.PathLike[str] | None):
        self.path = None if path is None else Path(path)
        self.known = _SINCE_START if self.path is None else _read(self.path)

    def get(self, of: Mapping[str, Any], measure: Callable[[], Any]) -> Any:
        """Return what `measure` gives, or gave for the same question before: plain data."""
        key = hashlib.sha256(json.dumps(of, sort_keys=True, default=str).encode()).hexdigest()
        if key not in self.known:
            self.known[key] = measure()
            self._write()
        return self.known[key]

    def least(self, of: Mapping[str, Any], measure: Callable[[], list[float]], times: int) -> list[float]:
        """Return the minimum of each value of `measure` over so many measurements, stored ones included."""
        done = [self.get({**of, "time": time}, measure) for time in range(times)]
        return [min(each) for each in zip(*done, strict=True)]

    def _write(self) -> None:
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with whole_file(self.path) as temporary:
                temporary.write_text(json.dumps(self.known, indent=1), encoding="utf-8")


def _read(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        timings = read_json(path)
    except ConfigError as error:
        raise ConfigError(
            f"timings is {str(path)!r}, which cannot be read ({error}); expected a file that plan() wrote, or one that "
            "does not exist yet. Remove it to measure again"
        ) from error
    if not isinstance(timings, dict):
        raise ConfigError(
            f"timings is {str(path)!r}, which holds a {type(timings).__name__}; expected a file that plan() wrote. "
            "Give another name"
        )
    return timings


class Measure:
    """Cost measurements on one kind of inputs."""

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
        """The share of the original's cost that a config leaves, all parts together."""
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
