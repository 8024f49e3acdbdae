"""Sums over the processes of torch.distributed, so that each may read its own share of the data.

Every accumulator of this folder has a `reduce` made of these. A sum has the same bits in every process, and so has what
follows from it; without a process group, or with one process, nothing happens.
"""

from __future__ import annotations

from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

Value = TypeVar("Value")


def processes() -> int:
    """Return the number of processes, 1 without a process group."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def process() -> int:
    """The number of this one, from 0."""
    return dist.get_rank() if processes() > 1 else 0


def global_index(index: int) -> int:
    """The place of this process's batch `index` among those of all, if they take turns."""
    return index * processes() + process()


def summed(value: Tensor) -> Tensor:
    """The sum over all processes, of the same shape, dtype and device as each summand."""
    if processes() == 1:
        return value
    total = _reachable(value).clone()
    dist.all_reduce(total)
    return total.to(value.device)


def summed_number(value: float) -> float:
    """The sum of a number over all processes; exact for integers below 2^53."""
    return float(summed(torch.tensor(value, dtype=torch.float64)))


def pooled_mean(count: int, mean: Tensor) -> tuple[int, Tensor]:
    """Number and mean of the vectors of all processes, from those of this one; `mean` is (dim,)."""
    if processes() == 1:
        return count, mean
    total = int(summed_number(count))
    return total, summed(mean * count) / max(total, 1)


def gathered(value: Value) -> list[Value]:
    """Gather one small picklable value per process, ordered by rank."""
    if processes() == 1:
        return [value]
    found: list[Any] = [None] * processes()
    dist.all_gather_object(found, value)
    return found


@torch.no_grad()
def same_everywhere(module: nn.Module) -> None:
    """Give parameters and buffers of a module the values that they have in process 0."""
    if processes() == 1:
        return
    for value in (*module.parameters(), *module.buffers()):
        sent = _reachable(value.detach()).contiguous()
        dist.broadcast(sent, 0)
        value.copy_(sent)


def _reachable(value: Tensor) -> Tensor:
    """A tensor where the process group can read it: NCCL knows no other memory than that of its GPU."""
    return value.cuda() if value.device.type == "cpu" and dist.get_backend() == "nccl" else value
