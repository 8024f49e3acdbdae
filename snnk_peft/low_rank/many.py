"""`factorize` for many layers at once, in parallel processes: each layer is an independent problem."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import Any

import torch
from torch import Tensor

from snnk_peft.arguments import in_words, takes_declared
from snnk_peft.errors import ConfigError
from snnk_peft.low_rank.factorize import Factors, factorize
from snnk_peft.low_rank.problem import InputMoments, check

_OPTIONAL = {"init", "activation", "bias", "inputs", "seed"}


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
    found: dict[str, Factors] = {}
    with _bar(len(layers), progress) as advance:
        if workers <= 1:
            with _one_thread():
                for name, layer in layers.items():
                    found[name] = factorize(**layer)
                    advance()
        else:
            for name, factors in _in_processes(layers, workers):
                found[name] = factors
                advance()
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
        unknown = sorted(set(layer) - _OPTIONAL - {"weight", "rank"})
        missing = sorted({"weight", "rank"} - set(layer))
        if unknown or missing:
            faults.append(
                f"layer {name!r} has {', '.join(sorted(layer))}; expected weight, rank and any of "
                f"{', '.join(sorted(_OPTIONAL))}"
            )
            continue
        rest = {"init": "function", "activation": "identity", "bias": None, "inputs": None, "seed": 0} | dict(layer)
        try:
            check(**rest)
        except ConfigError as error:
            faults += [f"layer {name!r}: {fault}" for fault in error.faults]
        except ArithmeticError as error:
            raise type(error)(f"layer {name!r}: {error}") from None
    if faults:
        raise ConfigError(faults)


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
                packed = pickle.dumps({key: _plain(value) for key, value in layers[name].items()})
            except (pickle.PicklingError, AttributeError, TypeError) as error:
                raise ConfigError(
                    f"layer {name!r} cannot be sent to another process ({error}); use the name of an activation or a "
                    "function that can be imported, or processes=1"
                ) from error
            jobs[pool.submit(_work, packed)] = name
        for job in as_completed(jobs):
            U, V, bias, risk, seconds = job.result()
            like = layers[jobs[job]]["weight"]
            shift = None if bias is None else _tensors(bias).to(like.device)
            yield jobs[job], Factors(_tensors(U).to(like.device), _tensors(V).to(like.device), shift, risk, seconds)


def _work(packed: bytes) -> tuple[Any, ...]:
    factors = factorize(**{key: _tensors(value) for key, value in pickle.loads(packed).items()})
    U, V, bias = (_plain(value) for value in (factors.U, factors.V, factors.bias))
    return U, V, bias, factors.relative_risk, factors.seconds


class _Plain(tuple[Any, ...]):
    """Pack a tensor as (bytes of numpy, dtype): torch would use shared memory, which may be scarce."""

    __slots__ = ()


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        value = value.detach().cpu().contiguous()
        return _Plain((value.view(torch.uint8).numpy(), value.dtype))
    return InputMoments(*map(_plain, value)) if isinstance(value, InputMoments) else value


def _tensors(value: Any) -> Any:
    if isinstance(value, _Plain):
        array, dtype = value
        return torch.from_numpy(array).view(dtype)
    return InputMoments(*map(_tensors, value)) if isinstance(value, InputMoments) else value


def _processors() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@contextlib.contextmanager
def _bar(total: int, shown: bool) -> Iterator[Callable[[], None]]:
    if not shown:
        yield lambda: None
        return
    try:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
    except ModuleNotFoundError as error:
        raise ConfigError("the progress bar needs rich: pip install rich, or progress=False") from error
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns) as bar:
        task = bar.add_task("low-rank factors", total=total)
        yield lambda: bar.advance(task)
