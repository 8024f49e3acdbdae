"""Forward and backward of a low-rank layer against the dense one, side by side.

    python recipes/benchmarks/lowrank_speed.py
    python recipes/benchmarks/lowrank_speed.py --widths 768 --rank-scales 0.1 0.25 0.5 --device cuda --dtype bfloat16

Square layers of the given widths on 2,048 tokens; one call = the output, and the gradients of the input, of both
factors (or of the weight) and of the bias. `MAC ratio` is the speed-up if only multiplications counted,
1 / (2 · rank scale). Medians over alternating repetitions; ratios are taken within one repetition.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch
from _bench import add_device, alternate, parser, ratio, report, synchronize
from torch import nn

from snnk_peft.layers.low_rank import LowRankLinear


def both_ways(layer: nn.Module, x: torch.Tensor, device: str) -> Callable[[], None]:
    """Return a function that computes the output of `layer` and all gradients."""
    leaf = x.detach().requires_grad_()
    slope = torch.ones_like(x)

    def run() -> None:
        leaf.grad = None
        layer.zero_grad(set_to_none=True)
        layer(leaf).backward(slope)
        synchronize(device)

    return run


def main() -> None:
    """Run the benchmark and write its results."""
    options = parser(__doc__ or "", "lowrank_speed")
    add_device(options, "cpu, cuda or cuda:N")
    options.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"), help="of weights and inputs")
    options.add_argument("--widths", nargs="+", type=int, default=[1024, 2048, 3072, 4096], help="inputs and outputs")
    options.add_argument("--rank-scales", nargs="+", type=float, default=[0.1], help="rank over width, each in (0, 1]")
    options.add_argument("--tokens", type=int, default=2048, help="rows of the input")
    arguments = options.parse_args()
    if not all(0 < scale <= 1 for scale in arguments.rank_scales):
        options.error(f"--rank-scales are {arguments.rank_scales}; expected numbers above 0 and at most 1")

    place = {"device": arguments.device, "dtype": getattr(torch, arguments.dtype)}
    rows, every = [], {}
    for width in arguments.widths:
        torch.manual_seed(0)
        x = torch.randn(arguments.tokens, width).to(**place)
        ranks = {scale: max(1, round(scale * width)) for scale in arguments.rank_scales}
        layers: dict[str, nn.Module] = {"dense": nn.Linear(width, width)}
        layers |= {f"rank {rank}": LowRankLinear(width, width, rank) for rank in ranks.values()}
        runs = {name: both_ways(layer.to(**place), x, arguments.device) for name, layer in layers.items()}
        every[str(width)] = seconds = alternate(runs, arguments.repetitions)
        rows += [
            {
                "width": width,
                "rank": rank,
                "rank scale": scale,
                "dense ms": 1000 * statistics.median(seconds["dense"]),
                "low-rank ms": 1000 * statistics.median(seconds[f"rank {rank}"]),
                "speed-up": ratio(seconds["dense"], seconds[f"rank {rank}"]),
                "MAC ratio": width / (2 * rank),
            }
            for scale, rank in ranks.items()
        ]
    figures = {
        "smallest_speed_up": {
            str(scale): min(row["speed-up"] for row in rows if row["rank scale"] == scale)
            for scale in arguments.rank_scales
        },
        "tokens": arguments.tokens,
        "device": arguments.device,
        "dtype": arguments.dtype,
        "seconds": every,
    }
    title = f"Forward and backward, {arguments.tokens} tokens, {arguments.device}, {arguments.dtype}"
    report(figures, rows, arguments.output, title)


if __name__ == "__main__":
    main()
