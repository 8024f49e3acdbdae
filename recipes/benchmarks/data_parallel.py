"""Gain from a second process: examples per second of one process and of two under DDP, and the bytes they send.

    python recipes/benchmarks/data_parallel.py
    python recipes/benchmarks/data_parallel.py --processes 4 --batch-size 8

Training steps (forward, backward, AdamW) of MiniLM at 128 tokens with SNNK adapters, PEFT's LoRA with as many
parameters, and everything trained; gloo on CPUs, one thread per process, the same batch size in each. Efficiency is the
examples per second of all processes together over those of the first one alone times their number, 1 at best; both
are measured in turn by the same processes, with the others idle. `cost` gives the bytes that a process sends per step,
`sent` those of DDP's buckets.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from _bench import parser, ratio, report
from adapter_step import TARGETS, adapted, step_of
from torch import distributed
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoConfig, AutoModelForSequenceClassification, logging

from snnk_cli.files import read_json, write_json
from snnk_cli.models import resolve_model
from snnk_peft import AdapterPart, SNNKConfig
from snnk_peft.cost import estimate_cost

METHODS = ("snnk", "lora", "full")
LENGTH = 128


def model_of(method: str) -> torch.nn.Module:
    """Return MiniLM, prepared for training with a method."""
    torch.manual_seed(0)
    base = AutoModelForSequenceClassification.from_pretrained(resolve_model("minilm"), num_labels=2)
    if method == "full":
        return base
    return adapted(base, method, TARGETS, task_type="SEQ_CLS")


def measured(method: str, rank: int, processes: int, batch_size: int, repetitions: int) -> dict[str, Any]:
    """Measure seconds of a step alone and together, in turn, and bytes of DDP's buckets; run in each process."""
    ids = torch.randint(1000, 20000, (batch_size, LENGTH), generator=torch.Generator().manual_seed(rank))
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids[:, 0] % 2}
    alone = step_of(model_of(method), batch, "cpu", "float32") if rank == 0 else lambda: None
    model = DistributedDataParallel(model_of(method))
    buckets: list[int] = []

    def hook(state, bucket):  # type: ignore[no-untyped-def]  # DDP reads annotations and wants the classes
        buckets.append(bucket.buffer().nbytes)
        return allreduce_hook(None, bucket)

    model.register_comm_hook(None, hook)
    together = step_of(model, batch, "cpu", "float32")
    seconds: dict[str, list[float]] = {"alone": [], "together": []}
    for repetition in range(-2, repetitions):
        for name, step in (("alone", alone), ("together", together)):
            distributed.barrier()
            buckets.clear()
            start = time.perf_counter()
            step()
            distributed.barrier()
            if repetition >= 0:
                seconds[name].append(time.perf_counter() - start)
    # An all-reduce in a ring of n sends 2 (n - 1) / n of the whole.
    sent = 2 * (processes - 1) / processes * sum(buckets)
    return {"seconds": seconds, "sent": sent, "trained": together.trainable}  # type: ignore[attr-defined]


def work(rank: int, processes: int, batch_size: int, repetitions: int, methods: Sequence[str], folder: str) -> None:
    """Run one process: join the group and measure all methods; the first one writes the results."""
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    store = f"file://{folder}/store"
    distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=processes)
    found = {method: measured(method, rank, processes, batch_size, repetitions) for method in methods}
    if rank == 0:
        write_json(Path(folder) / "found.json", found)
    distributed.destroy_process_group()


def main() -> None:
    """Run the benchmark and write its results."""
    options = parser(__doc__ or "", "data_parallel")
    options.add_argument("--processes", type=int, default=2, help="number of processes (default 2)")
    options.add_argument("--batch-size", type=int, default=16, help="texts per process and step (default 16)")
    options.add_argument("--methods", nargs="+", default=METHODS, choices=METHODS, help="default: all")
    arguments = options.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        given = (arguments.processes, arguments.batch_size, arguments.repetitions, arguments.methods, folder)
        torch.multiprocessing.spawn(work, given, nprocs=arguments.processes)
        found = read_json(Path(folder) / "found.json")

    config = AutoConfig.from_pretrained(resolve_model("minilm"), num_labels=2)
    predicted = estimate_cost(
        config,
        SNNKConfig(adapter=AdapterPart(num_features=16)),
        task="sequence-classification",
        batch_size=arguments.batch_size,
        length=LENGTH,
        processes=arguments.processes,
    )
    rows = [
        {
            "method": method,
            "trained parameters": entry["trained"],
            "s alone": statistics.median(entry["seconds"]["alone"]),
            "s together": statistics.median(entry["seconds"]["together"]),
            "efficiency": ratio(entry["seconds"]["alone"], entry["seconds"]["together"]),
            "MB sent": entry["sent"] / 1e6,
            "MB by cost": predicted.row(method).ddp_bytes / 1e6,
        }
        for method, entry in found.items()
    ]
    figures = {**found, "processes": arguments.processes, "batch_size": arguments.batch_size}
    report(figures, rows, arguments.output, f"{arguments.processes} processes under DDP, MiniLM, gloo on processors")


if __name__ == "__main__":
    main()
