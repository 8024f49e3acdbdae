"""Errors and samples over batches, and sums over the processes of torch.distributed, each of which may read its own
share of the data.

Every accumulator in this folder has a `reduce` made of these. A sum has the same bits in every process, and so has
everything that follows from it; without a process group, or with one process, nothing happens.
"""

from __future__ import annotations

import math
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

Value = TypeVar("Value")
Number = TypeVar("Number", int, float)


def processes() -> int:
    """Return the number of processes, 1 without a process group."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def process() -> int:
    """Return the number of this process, from 0."""
    return dist.get_rank() if processes() > 1 else 0


def global_index(index: int) -> int:
    """Return the position of this process's batch `index` among those of all, if they take turns."""
    return index * processes() + process()


def summed(value: Tensor) -> Tensor:
    """Return the sum over all processes, of the same shape, dtype and device as each summand."""
    if processes() == 1:
        return value
    total = _reachable(value).clone()
    dist.all_reduce(total)
    return total.to(value.device)


def summed_number(value: float) -> float:
    """Return the sum of a number over all processes; exact for integers below 2^53."""
    return float(summed(torch.tensor(value, dtype=torch.float64)))


def pooled_mean(count: Number, mean: Tensor) -> tuple[Number, Tensor]:
    """Return number (or weight) and mean of all processes' vectors, given those of this one; `mean` is (dim,)."""
    if processes() == 1:
        return count, mean
    total = type(count)(summed_number(count))
    return total, summed(mean * count) / (total or 1)


def gathered(value: Value) -> list[Value]:
    """Gather one small picklable value per process, ordered by rank."""
    if processes() == 1:
        return [value]
    found: list[Any] = [None] * processes()
    dist.all_gather_object(found, value)
    return found


@torch.no_grad()
def same_everywhere(module: nn.Module) -> None:
    """Set parameters and buffers of a module to their values in process 0."""
    if processes() == 1:
        return
    for value in (*module.parameters(), *module.buffers()):
        sent = _reachable(value.detach()).contiguous()
        dist.broadcast(sent, 0)
        value.copy_(sent)


def _reachable(value: Tensor) -> Tensor:
    """Return a tensor where the process group can read it: NCCL only reads the memory of its GPU."""
    return value.cuda() if value.device.type == "cpu" and dist.get_backend() == "nccl" else value


class ErrorMeter:
    """Σ‖W₂(y − ŷ)‖² / Σ‖W₂(y − ȳ)‖² over all vectors added, with W₂ the `output_weight` (o, l), None for the identity.

    Attributes:
        count: number of vectors so far.
    """

    def __init__(self, output_weight: Tensor | None = None):
        self.output_weight = output_weight
        self.count = 0
        self._weight = self._error = self._square = 0.0
        self._sum: Tensor | float = 0.0

    @torch.no_grad()
    def update(self, target: Tensor, estimate: Tensor, weight: Tensor | None = None) -> None:
        """Add target and estimate, both (n, l), weighted by `weight` (n,)."""
        if self.output_weight is not None:
            behind = self.output_weight.to(target.dtype).T
            target, estimate = target @ behind, estimate.to(target.dtype) @ behind
        target, estimate = target.double(), estimate.double()
        each = torch.ones_like(target[:, 0]) if weight is None else weight.to(target)
        self.count += len(target)
        self._weight += float(each.sum())
        self._error += float(each @ (target - estimate).square().sum(1))
        self._square += float(each @ target.square().sum(1))
        self._sum = self._sum + each @ target

    def reduce(self) -> None:
        """Add the vectors of all other processes; every process must call this, even one without any."""
        own = (self.count, self._weight, self._error, self._square, torch.as_tensor(self._sum).cpu())
        self.count, self._weight, self._error, self._square, self._sum = (
            sum(column) for column in zip(*gathered(own), strict=True)
        )

    def value(self) -> float:
        """Return the relative error; 1 is no better than the mean (for equal targets: than zero)."""
        if self.count == 0:
            raise ValueError("no vectors were given; call update() first")
        mean = torch.as_tensor(self._sum) / self._weight
        variance = self._square - self._weight * float(mean.square().sum())
        return relative_error(self._error, variance, self._square)


class TokenSample:
    """Keep at most `most` vectors of one length over all processes: reservoir sampling (Vitter 1985, algorithm R).

    Vector number i (from 0) takes a place j drawn from 0 to i if there is such a place, j < most; every vector is then
    kept with the same probability. Draws are made vector by vector, so the split into batches makes no difference.

    Attributes:
        count: number of vectors seen.
    """

    def __init__(self, most: int, generator: torch.Generator):
        self.most, self.generator = max(1, most // processes()), generator
        self.count = 0
        self._kept: list[Tensor] = []

    @torch.no_grad()
    def update(self, vectors: Tensor) -> None:
        """Add (n, dim) vectors; those that are kept are copied."""
        free = self.most - self.count
        if free > 0:
            self._kept.append(vectors[:free].clone())
            self.count += len(vectors[:free])
            vectors = vectors[free:]
        if len(vectors) == 0:
            return
        kept = self._joined()
        numbers = torch.arange(self.count, self.count + len(vectors), dtype=torch.float64)
        places = (torch.rand(len(vectors), generator=self.generator, dtype=torch.float64) * (numbers + 1)).long()
        # If two vectors draw the same place, the later one gets it, whatever order a device writes in.
        last = torch.full((self.most,), -1).scatter_reduce_(
            0, places.clamp_max(self.most - 1), torch.where(places < self.most, torch.arange(len(vectors)), -1), "amax"
        )
        taken = (last >= 0).nonzero().squeeze(1)
        kept[taken.to(kept.device)] = vectors[last[taken].to(vectors.device)].to(kept)
        self.count += len(vectors)

    def _joined(self) -> Tensor:
        if len(self._kept) > 1:
            self._kept = [torch.cat(self._kept)]
        return self._kept[0]

    def reduced(self) -> Tensor:
        """Gather the kept tokens of all processes by rank, (n, dim); every process must call this."""
        shares = [share for share in gathered(self._joined() if self._kept else None) if share is not None]
        if not shares:
            raise ValueError("no vectors were given; give at least one batch with an unmasked token")
        return shares[0] if len(shares) == 1 else torch.cat([share.to(shares[0].device) for share in shares])


CONSTANT = 1e-12  # relative to Σ‖y‖²: a smaller spread is that of equal numbers rounded to fp32


def relative_error(error: float, spread: float, square: float) -> float:
    """Return the error Σ‖y − ŷ‖² relative to the spread Σ‖y − ȳ‖² or, for equal targets, to their square Σ‖y‖².

    If all targets are zero, 0 for an error of zero, else infinity. NaN stays NaN.
    """
    if error <= 0:
        return 0.0
    if spread > CONSTANT * square:
        return error / spread
    return error / square if square > 0 else error * math.inf
