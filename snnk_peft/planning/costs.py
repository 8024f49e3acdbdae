"""Cost of a model, layer by layer: MACs and bytes exactly, seconds as measured on this machine.

A cost covers the whole model and each Transformer layer in it; the difference is spent outside of the layers. Seconds
of layers that are built alike are pooled: such layers then cost the same, and more measurements stand behind each.
"""

from __future__ import annotations

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

from snnk_peft.errors import ConfigError
from snnk_peft.functional.at_hand import offloaded, place_of
from snnk_peft.json_files import read_json
from snnk_peft.whole_file import whole_file

ROUNDS, MOST = 4, 16  # of timings, at least and at most
WITHIN = 1.02  # times the least: the same
_SINCE_START: dict[str, Any] = {}  # measured in this process


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
        """The cost of everything outside of the layers."""
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
    """Count the MACs of one forward pass.

    Args:
        model: in eval mode.
        inputs: its keyword arguments.
        paths: of its Transformer layers.
    """
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
    found: dict[Any, list[float]] = defaultdict(list)
    outside: list[float] = []
    first = next(iter(models))
    for turn in range(MOST):
        for name in list(models) if turn % 2 else reversed(list(models)):
            cost = _by_layer(models[name], inputs, paths, clock(models[name]))
            for kind, spent in zip(alike[name], cost.layers, strict=True):
                found[kind].append(spent)
            if name == first:
                outside.append(cost.outside)
        if turn + 1 >= ROUNDS and all(_reached(samples) for samples in (outside, *found.values())):
            break
    layers = {name: tuple(min(found[kind]) for kind in alike[name]) for name in models}
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
    """The least seconds of two models, taken in turn after one round to warm up, until each was reached three times.

    Args:
        original: a model.
        other: another.
        inputs: keyword arguments of both.
    """
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
        """Return what `measure` gives, or gave for the same question before: plain data.

        Args:
            of: plain data that says what is measured, and on what.
            measure: returns plain data.
        """
        key = hashlib.sha256(json.dumps(of, sort_keys=True, default=str).encode()).hexdigest()
        if key not in self.known:
            self.known[key] = measure()
            self._write()
        return self.known[key]

    def least(self, of: Mapping[str, Any], measure: Callable[[], list[float]], times: int) -> list[float]:
        """Return the minimum of each value of `measure` over so many measurements, stored ones included.

        Args:
            of: as in `get`.
            measure: returns as many numbers each time.
            times: >= 1.
        """
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
        found = read_json(path)
    except ConfigError as error:
        raise ConfigError(
            f"timings is {str(path)!r}, which cannot be read ({error}); expected a file that plan() wrote, or one that "
            "does not exist yet. Remove it to measure again"
        ) from error
    if not isinstance(found, dict):
        raise ConfigError(
            f"timings is {str(path)!r}, which holds a {type(found).__name__}; expected a file that plan() wrote. Give "
            "another name"
        )
    return found
