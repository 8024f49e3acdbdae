"""`factorize` for many layers at once, in parallel processes: each layer is an independent problem."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import pickle
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import Any

import torch
from torch import Tensor

from snnk_peft.arguments import in_words, takes_declared
from snnk_peft.errors import ConfigError
from snnk_peft.low_rank.factorize import Factors, factorize
from snnk_peft.low_rank.problem import InputMoments, check

_OPTIONAL = {"init": "function", "activation": "identity", "bias": None, "inputs": None, "seed": 0}


@takes_declared
def factorize_many(
    layers: Mapping[str, Mapping[str, Any]], *, processes: int | None = None, progress: bool = False
) -> dict[str, Factors]:
    """Apply `factorize` to every layer, in parallel.

    Each layer is computed with one thread, so the result does not depend on the number of processes. With more than one
    process a program needs the usual `if __name__ == "__main__":` of multiprocessing.

    Args:
        layers: name -> the arguments of `factorize`: {"weight": W, "rank": 8, "activation": "relu", "bias": b, ...}.
        processes: number of processes; None is one per CPU core available to this process, and at most one per layer. 1
            computes in this process.
        progress: show a progress bar on the terminal (needs rich).

    Returns:
        name -> Factors, in the order of `layers`, on the devices of the weights.

    Raises:
        ConfigError: the faults of all layers, at once and before anything is computed; rich is missing.
        NumericalError: a NaN or infinity in a layer, which is named.

    Example:
        >>> weights = {"first": torch.eye(4), "second": torch.ones(3, 5)}
        >>> layers = {name: {"weight": weight, "rank": 2} for name, weight in weights.items()}
        >>> {name: round(found.relative_risk, 4) for name, found in factorize_many(layers, processes=1).items()}
        {'first': 0.5, 'second': 0.0}
    """
    if processes is not None and (isinstance(processes, bool) or not isinstance(processes, int) or processes < 1):
        raise ConfigError(f"processes is {processes!r}; expected an integer >= 1, or None for one per CPU core")
    _check_all(layers)
    workers = min(processes or _processors(), len(layers))
    results = _here(layers) if workers <= 1 else _in_processes(layers, workers)
    found = dict(_with_bar(results, len(layers)) if progress else results)
    return {name: found[name] for name in layers}


def _check_all(layers: Mapping[str, Mapping[str, Any]]) -> None:
    if not isinstance(layers, Mapping):
        raise ConfigError(
            f"layers is {in_words(layers)}; expected a dict such as {{'name': {{'weight': W, 'rank': 8}}}}"
        )
    faults = []
    for name, layer in layers.items():
        if not isinstance(layer, Mapping):
            faults.append(f"layer {name!r} is {in_words(layer)}; expected a dict such as {{'weight': W, 'rank': 8}}")
            continue
        unknown = sorted(set(layer) - _OPTIONAL.keys() - {"weight", "rank"})
        missing = sorted({"weight", "rank"} - set(layer))
        if unknown or missing:
            faults.append(
                f"layer {name!r} has {', '.join(sorted(layer))}; expected weight, rank and any of "
                f"{', '.join(sorted(_OPTIONAL))}"
            )
            continue
        try:
            check(**(_OPTIONAL | dict(layer)))
        except ConfigError as error:
            faults += [f"layer {name!r}: {fault}" for fault in error.faults]
        except ArithmeticError as error:
            raise type(error)(f"layer {name!r}: {error}") from None
    if faults:
        raise ConfigError(faults)


def _here(layers: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, Factors]]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for name, layer in layers.items():
            yield name, factorize(**layer)
    finally:
        torch.set_num_threads(threads)


def _in_processes(layers: Mapping[str, Mapping[str, Any]], workers: int) -> Iterator[tuple[str, Factors]]:
    # Fork a process that never used a thread: a fork of this one could wait forever for a lock held by a thread.
    method = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
    context = multiprocessing.get_context(method)
    if method == "forkserver":
        context.set_forkserver_preload(["snnk_peft.low_rank"])
    # Large layers first, so that none is left over at the end.
    order = sorted(layers, key=lambda name: -layers[name]["weight"].numel())
    with ProcessPoolExecutor(workers, mp_context=context, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        jobs = {}
        for name in order:
            try:
                # As bytes: a pool sends tensors through shared memory, which may be scarce.
                packed = pickle.dumps({key: _on(value, "cpu") for key, value in layers[name].items()})
            except (pickle.PicklingError, AttributeError, TypeError) as error:
                raise ConfigError(
                    f"layer {name!r} cannot be sent to another process ({error}); use the name of an activation or a "
                    "function that can be imported, or processes=1"
                ) from error
            jobs[pool.submit(_work, packed)] = name
        for job in as_completed(jobs):
            factors = pickle.loads(job.result())
            device = layers[jobs[job]]["weight"].device
            moved = {key: _on(getattr(factors, key), device) for key in ("U", "V", "bias")}
            yield jobs[job], dataclasses.replace(factors, **moved)


def _work(packed: bytes) -> bytes:
    return pickle.dumps(factorize(**pickle.loads(packed)))


def _on(value: Any, device: Any) -> Any:
    """Return tensors, or moments of tensors, on a device; anything else as it is."""
    if isinstance(value, Tensor):
        return value.detach().to(device).clone(memory_format=torch.contiguous_format)  # without the rest of a view
    return InputMoments(*(_on(each, device) for each in value)) if isinstance(value, InputMoments) else value


def _processors() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _with_bar(results: Iterator[tuple[str, Factors]], total: int) -> Iterator[tuple[str, Factors]]:
    try:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
    except ModuleNotFoundError as error:
        raise ConfigError("the progress bar needs rich: pip install rich, or progress=False") from error
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns) as bar:
        yield from bar.track(results, total=total, description="low-rank factors")
