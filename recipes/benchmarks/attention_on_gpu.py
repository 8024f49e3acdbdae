"""Attention over exponential features by the kernels of this package, against flash attention and a copy, on a GPU.

    python recipes/benchmarks/attention_on_gpu.py

bf16, 12 heads of 64, 64 features, batch 1: forward, causal, training (forward and backward) and causal training by
length. Wall time is from call to result, with everything that Python does; device time is that of a graph replayed. The
copy moves the bytes that forward must at least (queries, keys and values read, results written). Two minutes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
from _bench import RESULTS
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from snnk_peft import build_feature_map
from snnk_peft.functional.exponential_attention import exponential_attention
from snnk_peft.functional.exponential_causal import causal_exponential_attention
from snnk_peft.layers.attention_term import AttentionTerm
from snnk_peft.layers.kernel_attention import KernelAttention

HEADS, DIM, FEATURES = 12, 64, 64
LENGTHS = (1024, 2048, 4096, 8192, 16384, 32768, 65536)
Run = Callable[[], object]


def wall(run: Run, most: float = 0.25) -> float:
    """Milliseconds from call to result, the median of many within `most` seconds."""
    for _ in range(3):
        run()
    found: list[float] = []
    began = time.perf_counter()
    while (len(found) < 30 and time.perf_counter() - began < most) or len(found) < 3:
        torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        torch.cuda.synchronize()
        found.append(1e3 * (time.perf_counter() - start))
    return statistics.median(found)


def replayed(run: Run) -> float:
    """Milliseconds of the device alone."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    found = []
    for _ in range(7):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        found.append(start.elapsed_time(end))
    return statistics.median(found)


def candidates(length: int, causal: bool, training: bool) -> dict[str, Run]:
    """Linear attention as a layer calls it, its operation alone, flash attention, and a copy."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, g = (torch.randn(1, HEADS, length, DIM, generator=generator).to("cuda", torch.bfloat16) for _ in range(4))
    layer = KernelAttention([build_feature_map("posrf", "orf", DIM, FEATURES)], HEADS).cuda()
    with torch.no_grad():
        maps = cast(AttentionTerm, layer.terms[0]).logarithms({}, DIM**-0.25, torch.zeros((), device="cuda"))
    assert maps is not None
    operation = causal_exponential_attention if causal else exponential_attention

    def call(function: Callable[..., torch.Tensor]) -> Run:
        if not training:

            def forward() -> object:
                with torch.no_grad():
                    return function(q, k, v)

            return forward
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        return lambda: torch.autograd.grad(function(*leaves), leaves, g)

    def flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return scaled_dot_product_attention(q, k, v, is_causal=causal)

    found = {
        "layer": call(lambda q, k, v: layer(q, k, v, causal=causal)),
        "operation": call(lambda q, k, v: operation(q, k, v, *maps)[0]),
        "flash": call(flash),
    }
    if not training and not causal:
        read = torch.stack((q, k))
        found["copy"] = read.clone
    return found


def main() -> None:
    """Measure, print, write."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    options.add_argument("--output", type=Path, default=RESULTS / "gpu" / "attention_on_gpu.json")
    given = options.parse_args()
    rows: list[dict[str, Any]] = []
    for length in given.lengths:
        for causal, training in ((False, False), (True, False), (False, True), (True, True)):
            row: dict[str, Any] = {"length": length, "causal": causal, "training": training}
            for name, run in candidates(length, causal, training).items():
                try:
                    row[f"{name}_ms"] = wall(run)
                    row[f"{name}_device_ms"] = replayed(run)
                except Exception as error:
                    row[f"{name}_error"] = f"{type(error).__name__}: {str(error)[:160]}"
            rows.append(row)
            shown = {key: round(value, 3) if isinstance(value, float) else value for key, value in row.items()}
            print(*(f"{key}={value}" for key, value in shown.items()), flush=True)
    given.output.parent.mkdir(parents=True, exist_ok=True)
    given.output.write_text(json.dumps({"card": torch.cuda.get_device_name(), "rows": rows}))


if __name__ == "__main__":
    main()
