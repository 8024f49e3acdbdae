"""Timing of models and their layers on a machine with other load: alternating, cached, in bounded time."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import nn

from snnk_peft.errors import ConfigError
from snnk_peft.functional.at_hand import offloaded, place_of
from snnk_peft.json_files import read_json
from snnk_peft.planning.candidates import replayed
from snnk_peft.saved_folder import whole_file

ROUNDS, MOST = 3, 16  # minimum and maximum number of timings
WITHIN = 1.02  # times the minimum: counts as equal to it
LIMIT = 40.0  # seconds of wall time that a plan spends on timings, beyond the minimum number of rounds
_SINCE_START: dict[str, Any] = {}  # measured in this process


class Cost(NamedTuple):
    """Cost of one forward pass, or of the model's file, in some unit.

    Attributes:
        whole: cost of the model.
        layers: cost of each Transformer layer.
    """

    whole: float
    layers: tuple[float, ...]

    @property
    def outside(self) -> float:
        return self.whole - sum(self.layers)


def by_layer(model: nn.Module, inputs: Mapping[str, Any], paths: Sequence[str], now: Callable[[], float]) -> Cost:
    """Measure the advance of `now` in one forward pass; a layer that runs several times counts every time."""
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


def clock(model: nn.Module) -> Callable[[], float]:
    """Return a clock in seconds, which synchronises on a GPU, and measures CPU time for a single thread.

    Other load then adds almost nothing: three busy programs on two cores double the minimum wall time, but add 4% to
    the CPU time.
    """
    device = place_of(model)
    if device is None or device.type != "cuda":
        alone = device is not None and device.type == "cpu" and torch.get_num_threads() == 1 and not offloaded(model)
        return time.thread_time if alone else time.perf_counter

    def now() -> float:
        torch.cuda.synchronize(device)
        return time.perf_counter()

    return now


class Allowance:
    """Remaining wall time for timings, which runs only during a timing."""

    def __init__(self, limit: float):
        self.left = limit

    def __enter__(self) -> Allowance:
        self.began = time.monotonic()
        return self

    def __exit__(self, *error: object) -> None:
        self.left -= time.monotonic() - self.began

    @property
    def spent(self) -> bool:
        return time.monotonic() - self.began >= self.left


def _reached(samples: Sequence[float]) -> bool:
    """Return whether the minimum of some timings is reliable: other load only adds, rarely the same three times."""
    return sum(each <= min(samples) * WITHIN for each in samples) >= 3


def seconds(
    models: Mapping[str, nn.Module],
    inputs: Mapping[str, Any],
    paths: Sequence[str],
    alike: Mapping[str, Sequence[Any]],
    allowance: Allowance,
) -> dict[str, Cost]:
    """Time the layers of each model in turn, so that a slow phase of the machine affects all of them.

    Of identical layers, one is timed, in a forward pass in which the others return stored outputs. The minimum over all
    rounds is used, since other load only adds. Rounds go on until each minimum has been reached three times, up to
    `MOST`, or until the allowed time is used up.

    Args:
        models: by name; the first is the original, with which the others share identical layers and everything outside
            them.
        inputs: keyword arguments of all models.
        paths: paths of their Transformer layers.
        alike: keys per model and layer, equal for identical layers.
        allowance: the remaining time for timings.
    """
    first = next(iter(models))
    outputs = _outputs(models[first], inputs, paths)
    seen: set[Any] = set()
    run: dict[str, list[int]] = {}
    for name in models:
        run[name] = [i for i, kind in enumerate(alike[name]) if kind not in seen and alike[name].index(kind) == i]
        seen.update(alike[name])
    names = [name for name in models if run[name] or name == first]
    by_kind: dict[Any, list[float]] = defaultdict(list)
    outside: list[float] = []
    with allowance:
        for turn in range(MOST + 1):
            for name in names if turn % 2 else reversed(names):
                own = [paths[index] for index in run[name]]
                with replayed(models[name], {path: out for path, out in outputs.items() if path not in own}):
                    cost = by_layer(models[name], inputs, own, clock(models[name]))
                if turn == 0:
                    continue  # to warm up
                for index, spent in zip(run[name], cost.layers, strict=True):
                    by_kind[alike[name][index]].append(spent)
                if name == first:
                    outside.append(cost.outside)
            reached = all(len(samples) >= 3 and _reached(samples) for samples in (outside, *by_kind.values()))
            if turn >= ROUNDS and (reached or allowance.spent):
                break
    layers = {name: tuple(min(by_kind[kind]) for kind in alike[name]) for name in models}
    return {name: Cost(sum(spent) + min(outside), spent) for name, spent in layers.items()}


def _outputs(model: nn.Module, inputs: Mapping[str, Any], paths: Sequence[str]) -> dict[str, Any]:
    outputs: dict[str, Any] = {}
    with ExitStack() as hooks:
        for path in paths:

            def keep(module: nn.Module, args: Any, output: Any, path: str = path) -> None:
                outputs[path] = output

            hooks.enter_context(model.get_submodule(path).register_forward_hook(keep))
        with torch.no_grad():
            model(**inputs)
    return outputs


def paired(
    original: nn.Module, other: nn.Module, inputs: Mapping[str, Any], allowance: Allowance
) -> tuple[list[float], list[float]]:
    """Measure the seconds of two models, alternating after one warm-up round; as often as in `seconds`."""
    spent: tuple[list[float], list[float]] = ([], [])
    with allowance:
        for turn in range(MOST + 1):
            for which in (0, 1) if turn % 2 else (1, 0):
                model = (original, other)[which]
                took = by_layer(model, inputs, (), clock(model)).whole
                if turn:
                    spent[which].append(took)
            if turn >= ROUNDS and (all(_reached(each) for each in spent) or allowance.spent):
                break
    return spent


def share_left(before: Sequence[float], after: Sequence[float]) -> float:
    """Return the ratio of the alternating timings `after` to `before`: that of the minima if both are reliable.

    Otherwise the median of the ratios within pairs, over the faster half of the pairs: a temporary load slows down both
    timings of a pair.
    """
    if _reached(before) and _reached(after):
        return min(after) / min(before)
    quiet = sorted(zip(before, after, strict=True), key=sum)[: max(1, (len(before) + 1) // 2)]
    return median(other / one for one, other in quiet)


class Timings:
    """Cache of timings, so that nothing is measured twice: timings vary, but a plan must not.

    Args:
        path: a JSON file that is read if it exists, and written; None keeps them while the process lives.
    """

    def __init__(self, path: str | os.PathLike[str] | None):
        self.path = None if path is None else Path(path)
        self.known = _SINCE_START if self.path is None else _read(self.path)

    def get(self, of: Mapping[str, Any], measure: Callable[[], Any]) -> Any:
        """Return the result of `measure`, plain data, cached by `of`."""
        key = hashlib.sha256(json.dumps(of, sort_keys=True, default=str).encode()).hexdigest()
        if key not in self.known:
            self.known[key] = measure()
            self._write()
        return self.known[key]

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
