"""One SNNK layer against the Linear and activation it replaces, over widths: time and peak memory.

    python recipes/benchmarks/snnk_layer.py
    python recipes/benchmarks/snnk_layer.py --widths 1024 4096 8192 --features 32 --shape 32x128
    python recipes/benchmarks/snnk_layer.py --device cuda --shape 32x128

Width d to width d. `layer`: ReLU features over a Gaussian matrix and a readout, m·d + d·m MACs per token, against
Linear + ReLU and Linear + GELU, d². `pair`: with a Linear after it, which folds into the readout of the SNNK layer
(2·m·d as before), against Linear + GELU + Linear, 2·d². Timed in turn, without gradients ("forward") and with those of
the input and of all parameters ("training"); speed-ups are over Linear + GELU (+ Linear). Peak memory is what one
call allocates beyond weights and input, gradients included: by the growth of a process's resident memory, which Linux
counts to about a quarter of a MiB (null elsewhere); on a GPU, of its tensors. About a minute on one core.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import statistics
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from _bench import add_device, allocated_growth, alternate, parser, peak_bytes, ratio, report, synchronize
from torch import nn

from snnk_peft import build_feature_map
from snnk_peft.layers.feature_stage import FeatureStage
from snnk_peft.layers.snnk_linear import SNNKLinear

WIDTHS = [256, 512, 1024, 2048, 4096]
FEATURES = [32, 128]
PASSES = ("forward", "training")
YARDSTICK = "linear, gelu"
M_MMAP_THRESHOLD = -3  # from glibc's mallopt
Rows = list[dict[str, Any]]
Key = tuple[str, str, str]  # section, pass, name


def snnk(width: int, features: int) -> SNNKLinear:
    """Build the replacement of a Linear of this width and its ReLU."""
    stage = FeatureStage(build_feature_map("relu", "gaussian", width, features))
    generator = torch.Generator().manual_seed(0)
    return SNNKLinear.from_linear(nn.Linear(width, width), torch.relu, stage, init="random", generator=generator)


def layers(width: int, features: Sequence[int]) -> dict[str, dict[str, nn.Module]]:
    """Return the modules compared in both sections."""
    linear, following = nn.Linear(width, width), nn.Linear(width, width)
    made = {m: snnk(width, m) for m in features}
    single = {
        YARDSTICK: nn.Sequential(linear, nn.GELU()),
        "linear, relu": nn.Sequential(linear, nn.ReLU()),
        **{f"snnk, {m}": layer for m, layer in made.items()},
    }
    pairs = {
        YARDSTICK: nn.Sequential(linear, nn.GELU(), following),
        **{f"snnk, {m}": nn.Sequential(*layer.fold(following)) for m, layer in made.items()},
    }
    return {"layer": single, "pair": pairs}


@dataclass(frozen=True)
class Pass:
    """A pass through a layer.

    Args:
        layer: the layer to measure.
        x: its input; if it requires a gradient, the pass includes backward.
        device: device to synchronise.
    """

    layer: nn.Module
    x: torch.Tensor
    device: str

    def forget(self) -> None:
        """Release the gradients of an earlier pass."""
        for tensor in (self.x, *self.layer.parameters()):
            tensor.grad = None

    def __call__(self) -> None:
        """Run forward, and backward if the input requires a gradient."""
        if self.x.requires_grad:
            self.forget()
            self.layer(self.x).sum().backward()
        else:
            with torch.no_grad():
                self.layer(self.x)
        synchronize(self.device)


def runs(width: int, features: Sequence[int], shape: Sequence[int], device: str) -> dict[Key, Pass]:
    """Return all calls at one width, by section, pass and name."""
    torch.manual_seed(0)
    x = torch.randn(*shape, width, device=device)
    return {
        (section, kind, name): Pass(layer.to(device), x.detach().requires_grad_(kind == "training"), device)
        for section, members in layers(width, features).items()
        for kind in PASSES
        for name, layer in members.items()
    }


def memory(widths: Sequence[int], features: Sequence[int], shape: Sequence[int], device: str) -> list[int | None]:
    """Return peak bytes of every call in the order of `runs`, by width; None if the system does not report them."""
    if not device.startswith("cuda"):
        # Return freed memory to the system at once, so that the next call's allocation is visible.
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
        if mallopt is None or not mallopt(M_MMAP_THRESHOLD, 1 << 14):
            return [None for width in widths for _ in runs(width, features, shape, device)]
    found = []
    for width in widths:
        for run in runs(width, features, shape, device).values():
            run()  # allocates what the kernels keep
            run.forget()
            found.append(allocated_growth(run, device) if device.startswith("cuda") else peak_bytes(run))
    return found


def measure(width: int, features: Sequence[int], shape: Sequence[int], device: str, repetitions: int) -> Rows:
    """Time all calls at one width; those of a section and pass run in turn."""
    made, rows = runs(width, features, shape, device), []
    for section, kind in dict.fromkeys((section, kind) for section, kind, _ in made):
        mine = {name: run for (where, how, name), run in made.items() if (where, how) == (section, kind)}
        seconds = alternate(mine, repetitions, warmup=1)
        for name, run in mine.items():
            own = {"section": section, "width": width, "pass": kind, "layer": name}
            trained = sum(parameter.numel() for parameter in run.layer.parameters() if parameter.requires_grad)
            times = {"ms": 1e3 * statistics.median(seconds[name]), "speed-up": ratio(seconds[YARDSTICK], seconds[name])}
            rows.append({**own, "trained numbers": trained, **times})
            run.forget()
    return rows


def main() -> None:
    """Run the benchmark and write its results."""
    options = parser(__doc__ or "", "snnk_layer")
    add_device(options, "cpu, cuda or cuda:N")
    options.add_argument("--widths", type=int, nargs="+", default=WIDTHS, help=f"d (default {WIDTHS})")
    options.add_argument("--features", type=int, nargs="+", default=FEATURES, help=f"m (default {FEATURES})")
    options.add_argument("--shape", default="4x64", help="batch x tokens (default 4x64)")
    arguments = options.parse_args()
    shape = [int(size) for size in arguments.shape.split("x")]
    given = (arguments.features, shape, arguments.device)
    rows = [found for width in arguments.widths for found in measure(width, *given, repetitions=arguments.repetitions)]
    # In a separate process: returning memory at once would slow the timed calls.
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        peaks = pool.submit(memory, arguments.widths, *given).result()
    for row, peak in zip(rows, peaks, strict=True):
        row["peak MiB"] = None if peak is None else peak / 2**20
    figures = {"shape": shape, "device": arguments.device}
    report(figures, rows, arguments.output, f"One layer, {arguments.shape} tokens, {arguments.device}")


if __name__ == "__main__":
    main()
