"""Attention over exponential features with this package's kernels, against flash attention and a copy, on a GPU.

    python recipes/benchmarks/attention_on_gpu.py
    python recipes/benchmarks/attention_on_gpu.py --device cpu --lengths 64 --batch-sizes 1 --output here/metrics.json

bf16, 12 heads of 64, 64 features: forward, causal, training (forward and backward) and causal training by length and
batch size, and the next token of a text (decode). The joint layer also has 64 near keys and 4 sinks. Wall time is from
call to result, including Python's overhead; device time is that of a replayed CUDA graph. For comparison: torch's fused
softmax (flash on a GPU), the torch form of the operation under torch.compile, a copy of the fewest bytes that forward
must move, and, where it is installed, fla-core, which reads features from memory. Rows that ran out of time are named.
The plot is written next to the figures.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import torch
from _bench import RESULTS, add_device, keep, synchronize
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from snnk_cli.plots import error_curves
from snnk_cli.terminal import show_table
from snnk_peft import build_feature_map
from snnk_peft.functional.backend import form_that_ran
from snnk_peft.functional.exponential_attention import exponential_attention
from snnk_peft.functional.exponential_causal import causal_exponential_attention
from snnk_peft.layers.attention_term import AttentionTerm, KeptMaps
from snnk_peft.layers.kernel_attention import KernelAttention, continue_attention

HEADS, DIM, FEATURES = 12, 64, 64
LENGTHS = (1024, 2048, 4096, 8192, 16384, 32768, 65536)
KINDS = ("forward", "causal", "training", "training, causal")
Run = Callable[[], object]
Function = Callable[..., torch.Tensor]


def wall(run: Run, device: str, most: float = 0.1) -> float:
    """Measure milliseconds from call to result, the median of many within `most` seconds."""
    run()
    found: list[float] = []
    began = time.perf_counter()
    while (len(found) < 30 and time.perf_counter() - began < most) or len(found) < 2:
        synchronize(device)
        start = time.perf_counter()
        run()
        synchronize(device)
        found.append(1e3 * (time.perf_counter() - start))
    return statistics.median(found)


def replayed(run: Run) -> float:
    """Measure milliseconds on the GPU alone, by graph replay."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    found = []
    for _ in range(5):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        found.append(start.elapsed_time(end))
    return statistics.median(found)


def layer_and_maps(device: str) -> tuple[KernelAttention, Any]:
    """Return a layer, and the logarithms of its maps in the form that its operation expects."""
    layer = KernelAttention([build_feature_map("posrf", "orf", DIM, FEATURES)], HEADS).to(device)
    with torch.no_grad():
        maps = cast(AttentionTerm, layer.terms[0]).logarithms({}, DIM**-0.25, torch.zeros((), device=device))
    assert maps is not None
    return layer, maps


def tensors(batch: int, length: int, device: str, count: int = 4) -> list[torch.Tensor]:
    """Draw tensors (batch, HEADS, length, DIM) in bf16."""
    made = torch.Generator(device=device).manual_seed(0)
    shape = batch, HEADS, length, DIM
    return [torch.randn(shape, generator=made, device=device, dtype=torch.bfloat16) for _ in range(count)]


def functions(device: str, causal: bool, compiled: bool) -> dict[str, Function]:
    """Return the candidates by name, as functions of queries, keys and values."""
    layer, maps = layer_and_maps(device)
    features = [build_feature_map("posrf", "orf", DIM, FEATURES)]
    joint = KernelAttention(features, HEADS, near_field=64, joint=True, sinks=4).to(device)
    operation: Any = causal_exponential_attention if causal else exponential_attention

    def flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION) if device != "cpu" else contextlib.nullcontext():
            return scaled_dot_product_attention(q, k, v, is_causal=causal)

    found: dict[str, Function] = {
        "layer": lambda q, k, v: layer(q, k, v, causal=causal),
        "joint_layer": lambda q, k, v: joint(q, k, v, causal=causal),
        "operation": lambda q, k, v: operation(q, k, v, *maps)[0],
        "flash": flash,
    }
    if compiled:
        form = torch.compile(operation.__wrapped__, dynamic=False)
        found["compiled torch form"] = lambda q, k, v: form(q, k, v, *maps)[0]
    with contextlib.suppress(ImportError):
        found |= of_fla(causal)
    return found


def of_fla(causal: bool) -> dict[str, Function]:
    """Return fla-core's causal linear attention; queries and keys stand for their features."""
    from fla.ops.linear_attn import chunk_linear_attn  # type: ignore[import-not-found]

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = chunk_linear_attn(*(x.transpose(1, 2) for x in (q, k, v)), normalize=False)[0]
        return out.transpose(1, 2)

    return {"fla": call} if causal else {}


def runs(kind: str, batch: int, length: int, device: str, compiled: bool) -> Iterator[tuple[str, Run]]:
    """Yield the candidates timed for one row, by name."""
    q, k, v, g = tensors(batch, length, device)

    def forward(function: Function) -> Run:
        return torch.no_grad()(lambda: function(q, k, v))

    def training(function: Function) -> Run:
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        return lambda: torch.autograd.grad(function(*leaves), leaves, g)

    made = training if kind.startswith("training") else forward
    for name, function in functions(device, "causal" in kind, compiled).items():
        yield name, made(function)
    if kind == "forward":
        yield "copy", torch.stack((q, k)).clone


def decoding(batch: int, device: str) -> Iterator[tuple[str, Run]]:
    """Yield the decoding of one token after 64, with a layer's cache."""
    layer, _ = layer_and_maps(device)
    kept = KeptMaps()
    with torch.no_grad():
        _, state = continue_attention(layer, *tensors(batch, 64, device, 3), kept=kept)
    token = tensors(batch, 1, device, 3)
    yield "layer", torch.no_grad()(lambda: continue_attention(layer, *token, None, state, kept=kept))


def timed(row: dict[str, Any], candidates: Iterator[tuple[str, Run]], device: str) -> dict[str, Any]:
    """Return the row with the times of all candidates, or the error of those that failed."""
    for name, run in candidates:
        try:
            row[f"{name}_ms"] = wall(run, device)
            if device != "cpu":
                row[f"{name}_device_ms"] = replayed(run)
        except Exception as error:  # any error is reported, and the others are still measured
            row[f"{name}_error"] = f"{type(error).__name__}: {str(error)[:160]}"
    return row


def plot(rows: list[dict[str, Any]], file: Path, card: str) -> None:
    """Plot wall time of layer and flash by length, at the smallest batch."""
    smallest = min(row["batch"] for row in rows)
    curves = {
        f"{kind}: {name}": points
        for kind in KINDS
        for name in ("layer", "flash")
        if (
            points := [
                (row["length"], row[f"{name}_ms"], 0.0)
                for row in rows
                if row["kind"] == kind and row["batch"] == smallest and f"{name}_ms" in row
            ]
        )
    }
    error_curves(curves, file, f"attention on {card}, batch {smallest}, bf16", ("tokens", "ms"), 1e-3)


def main() -> None:
    """Run the benchmark, print and write its results."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_device(options, "cuda, or cpu to try the program")
    options.set_defaults(device="cuda")
    options.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    options.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 8])
    options.add_argument("--compiled", type=int, nargs="*", default=[4096], help="lengths to compile at (default 4096)")
    options.add_argument("--seconds", type=float, default=75.0, help="start no new measurement after this time")
    options.add_argument("--output", type=Path, default=RESULTS / "gpu" / "attention_on_gpu" / "metrics.json")
    given = options.parse_args()
    card = torch.cuda.get_device_name() if given.device != "cpu" else "cpu"
    rows: list[dict[str, Any]] = []
    left_out: list[str] = []
    began = time.perf_counter()
    for batch in given.batch_sizes:
        for kind, length in [("decode", 1), *((kind, length) for length in given.lengths for kind in KINDS)]:
            if time.perf_counter() - began > given.seconds:
                left_out.append(f"{kind}, {length} tokens, batch {batch}")
                continue
            compiled = length in given.compiled and batch == given.batch_sizes[0]
            row = {"kind": kind, "length": length, "batch": batch}
            made = (
                decoding(batch, given.device) if kind == "decode" else runs(kind, batch, length, given.device, compiled)
            )
            rows.append(timed(row, made, given.device))
    forms = {name: form_that_ran(name) for name in ("exponential_attention", "causal_exponential_attention")}
    shown = ("kind", "length", "batch", "layer_ms", "layer_device_ms", "operation_device_ms", "flash_ms", "copy_ms")
    cells = [[f"{x:.3f}" if isinstance(x, float) else str(x) for x in map(row.get, shown)] for row in rows]
    show_table(f"attention on {card}", shown, cells, ("kind",))
    print(*(f"left out: {each}" for each in left_out), sep="\n")
    keep({"card": card, "forms": forms, "rows": rows, "left_out": left_out}, given.output)
    plot([row for row in rows if row["kind"] != "decode"], given.output.with_name("attention_on_gpu.png"), card)


if __name__ == "__main__":
    main()
