"""Search for the block sizes that make the Triton kernels fastest on this GPU, each kernel alone, by graph replay.

    python recipes/benchmarks/kernel_sizes.py --output gpu/kernel_sizes.json

Every attention kernel with every number of rows, warps and pipeline stages and every length of a part of the sequence,
in bf16, 12 heads of 64, 64 features. The winners go into the tables in triton_shared/launching.py and
triton_linear/launches.py. Several processes compile the kernels first. Two minutes on an H200.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from _bench import RESULTS
from lib.kernel_launches import Launch, every_launch, every_linear_launch, parts_of

BLOCKS, WARPS, STAGES = (16, 32, 64, 128), (4, 8), (1, 2, 3)
CAUSAL = "causal_forward", "causal_query_back", "causal_key_back"  # these spill with many rows
CAUSAL += "linear_forward_pass", "linear_query_back", "linear_key_back"
SKIPPED = {"combine", "token_pass", "linear_combine", "linear_token_pass"}


def shapes(name: str) -> list[tuple[int, int, int]]:
    """Return the (rows, warps, stages) worth trying."""
    blocks = BLOCKS[:3] if name in CAUSAL else BLOCKS[1:]
    return list(itertools.product(blocks, WARPS, STAGES))


def resized(launch: Launch, shape: tuple[int, int, int]) -> dict[str, Any]:
    """Return the options of a launch, with other sizes."""
    block, warps, stages = shape
    rows = "BLOCK" if "BLOCK" in launch.options else "C"
    return {**launch.options, rows: block, "num_warps": warps, "num_stages": stages}


def compile_some(work: tuple[int, int, Sequence[str]]) -> int:
    """Compile every `of`-th kernel by launching it once."""
    first, of, kinds = work
    tried = 0
    with parts_of(512):
        launches = chosen(1024, kinds)[0]
    for launch, shape in list(itertools.chain(*([(x, s) for s in shapes(x.name)] for x in launches)))[first::of]:
        try:
            launch.kernel[launch.grid](*launch.args, **resized(launch, shape))
            tried += 1
        except Exception as error:  # any error: sizes that do not fit this GPU are left out, with a message
            print(f"{launch.name} {shape} is left out: {str(error).splitlines()[0] if str(error) else type(error)}")
    torch.cuda.synchronize()
    return tried


def chosen(length: int, kinds: Sequence[str]) -> tuple[list[Launch], list[Launch]]:
    """Return the first launch of each kernel whose name begins with one of `kinds`, and those that combine parts."""
    found = every_launch("cuda", torch.bfloat16, length) + every_linear_launch("cuda", torch.bfloat16, length)
    wanted = [launch for launch in found if launch.name.startswith(tuple(kinds))]
    sized = {launch.name: launch for launch in reversed(wanted) if launch.name not in SKIPPED}
    return list(sized.values()), [launch for launch in wanted if launch.name == "combine"]


def microseconds(launch: Launch, options: dict[str, Any], times: int = 8, replays: int = 5) -> float:
    """Measure microseconds on the device, the median of graph replays."""

    def run() -> None:
        launch.kernel[launch.grid](*launch.args, **options)

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(times):
            run()
    found = []
    for _ in range(replays):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        found.append(1e3 * start.elapsed_time(end) / times)
    return sorted(found)[len(found) // 2]


def main() -> None:
    """Run the search, print the best sizes of each kernel, and write all results."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--lengths", type=int, nargs="+", default=[4096, 65536])
    options.add_argument("--parts", type=int, nargs="+", default=[128, 256, 512, 1024, 2048, 4096])
    options.add_argument("--kernels", nargs="+", default=[""], help="name prefixes: near, linear, causal, ...")
    options.add_argument("--processes", type=int, default=min(14, os.cpu_count() or 1))
    options.add_argument("--seconds", type=float, default=150.0, help="start no new measurement after this time")
    options.add_argument("--output", type=Path, default=RESULTS / "gpu" / "kernel_sizes.json")
    given = options.parse_args()
    started = time.time()
    with multiprocessing.get_context("spawn").Pool(given.processes) as pool:
        work = [(i, given.processes, given.kernels) for i in range(given.processes)]
        print(sum(pool.imap_unordered(compile_some, work)), "kernels")
    print(f"compiled after {time.time() - started:.0f} s", flush=True)
    rows: list[dict[str, Any]] = []
    for length in given.lengths:
        for tokens in given.parts:
            if not length // 128 <= tokens <= length:
                continue
            with parts_of(tokens):
                launches, combining = chosen(length, given.kernels)
            for combine in combining:
                row = {"kernel": "combine" + "_prefix" * combine.options["PREFIX"], "length": length, "part": tokens}
                rows.append({**row, "shape": None, "us": microseconds(combine, combine.options)})
            for launch, shape in itertools.chain(*([(x, s) for s in shapes(x.name)] for x in launches)):
                row = {"kernel": launch.name, "length": length, "part": tokens, "shape": shape}
                if time.time() - started > given.seconds:
                    continue
                try:
                    rows.append({**row, "us": microseconds(launch, resized(launch, shape))})
                except Exception as error:
                    rows.append({**row, "us": None, "error": f"{type(error).__name__}: {str(error)[:120]}"})
    given.output.parent.mkdir(parents=True, exist_ok=True)
    given.output.write_text(json.dumps({"card": torch.cuda.get_device_name(), "rows": rows}))
    for length, name in itertools.product(given.lengths, sorted({row["kernel"] for row in rows})):
        best = sorted(
            (r for r in rows if (r["kernel"], r["length"]) == (name, length) and r["us"]), key=lambda r: r["us"]
        )
        print(length, name, *(f"{r['us']:.0f} us {r['shape']} /{r['part']};" for r in best[:4]), flush=True)
    print(f"{time.time() - started:.0f} s")


if __name__ == "__main__":
    main()
