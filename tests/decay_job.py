"""What each process of a group does in tests/package/test_frobenius_decay.py: `python -m tests.decay_job FOLDER`."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from snnk_peft.low_rank.frobenius_decay import FrobeniusDecay


class Factored(nn.Module):
    """x V Uᵀ + bias: a low-rank layer as anybody may write it."""

    def __init__(self, inputs: int, outputs: int, rank: int, frobenius_decay: float | None = None):
        super().__init__()
        generator = torch.Generator().manual_seed(inputs)
        self.U = nn.Parameter(torch.randn(outputs, rank, generator=generator, dtype=torch.float64))
        self.V = nn.Parameter(torch.randn(inputs, rank, generator=generator, dtype=torch.float64))
        self.bias = nn.Parameter(torch.zeros(outputs, dtype=torch.float64))
        self.frobenius_decay = frobenius_decay

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.V @ self.U.T + self.bias


def network() -> nn.Sequential:
    """Two low-rank layers, always the same."""
    return nn.Sequential(Factored(6, 5, 2), nn.Tanh(), Factored(5, 3, 2))


def examples(count: int = 24) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs (count, 6) and targets (count, 3)."""
    generator = torch.Generator().manual_seed(1)
    made = [torch.randn(count, width, generator=generator, dtype=torch.float64) for width in (6, 3)]
    return made[0], made[1]


def loss(model: nn.Module, rows: slice | list[int]) -> torch.Tensor:
    """Mean squared error over some of the examples."""
    x, y = examples()
    return (model(x[rows]) - y[rows]).square().mean()


def trained(rank: int, world: int, strength: float = 0.3) -> dict[str, torch.Tensor]:
    """Five steps of AdamW with Frobenius decay, in DDP if there are several processes; each sees its share of rows."""
    model = network()
    # Two processes that begin apart would end apart: DDP starts them with the parameters of the first.
    whole: nn.Module = DistributedDataParallel(model) if world > 1 else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    FrobeniusDecay(whole, strength=strength).attach(optimizer)
    for _ in range(5):
        for half in (slice(rank, 12, world), slice(12 + rank, 24, world)):  # two batches are accumulated
            (loss(whole, half) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    return dict(model.state_dict())


def main(folder: Path) -> None:
    """The trained tensors, in FOLDER."""
    dist.init_process_group("gloo")
    save_file(trained(dist.get_rank(), dist.get_world_size()), folder / f"{dist.get_rank()}.safetensors")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[-1]))
