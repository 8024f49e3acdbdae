"""Peak memory of `calibrate` against that of a forward pass over the same batches, each in a fresh process.

    python recipes/benchmarks/calibrate_memory.py --model path/to/minilm-l6-sst2

Batches are `--tokens` random tokens: the memory kept must not grow with their number. "peak" is the resident memory of
the whole process, model, batches and libraries included; "growth" is its rise above what was resident before.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import torch
from _bench import parser, peak_of_process, report
from transformers import AutoModelForSequenceClassification, logging

from snnk_peft import (
    AttentionPart,
    FFNPart,
    LowRankPart,
    NarrowFFNPart,
    NarrowHeadsPart,
    SNNKConfig,
    calibrate,
    get_snnk_model,
)

STEPS = 20
NARROWER = 0.75  # share of hidden units, and of head dimensions, to keep
PARTS = ("forward pass", "6 FFNs", "attention", f"attention, {STEPS} steps", "narrow FFNs", "narrow heads", "low rank")


def prepared(model: Path, part: str, tokens: int, rows: int, length: int) -> Callable[[], object]:
    """Load the model and make the batches; return the function to measure.

    Args:
        model: folder of the classifier.
        part: one of `PARTS`.
        tokens: number of tokens in all batches.
        rows: rows per batch.
        length: tokens per row.
    """
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    teacher = AutoModelForSequenceClassification.from_pretrained(model, dtype=torch.float32).eval()
    sizes, generator = teacher.config, torch.Generator().manual_seed(0)
    batches = [
        {"input_ids": torch.randint(999, sizes.vocab_size, (rows, length), generator=generator)}
        for _ in range(-(-tokens // (rows * length)))
    ]

    @torch.no_grad()
    def forward() -> None:
        for batch in batches:
            teacher(**batch)

    head = sizes.hidden_size // sizes.num_attention_heads
    attention = AttentionPart(component="mixture", projection="centroids", num_features=64)
    made = {
        "6 FFNs": lambda: FFNPart(num_features=192),
        "attention": lambda: attention,
        f"attention, {STEPS} steps": lambda: attention,
        "narrow FFNs": lambda: NarrowFFNPart(keep=NARROWER),
        "narrow heads": lambda: NarrowHeadsPart(head_dim=int(NARROWER * head)),
        "low rank": lambda: LowRankPart(rank_scale=0.25),
    }
    if part == "forward pass":
        return forward
    patched = get_snnk_model(teacher, SNNKConfig(parts=[made[part]()], modules_to_save=[]))
    steps = STEPS if "steps" in part else 0
    return functools.partial(calibrate, patched, batches, steps=steps, progress=False)


def main() -> None:
    """Run the benchmark and write its results."""
    options = parser(__doc__ or "", "calibrate_memory")
    options.add_argument("--model", type=Path, required=True, help="folder of a classifier with token inputs")
    options.add_argument("--tokens", nargs="+", type=int, default=[25_000, 100_000], help="(default 25000 100000)")
    options.add_argument("--parts", nargs="+", default=list(PARTS), choices=PARTS, help="(default all)")
    options.add_argument("--batch-size", type=int, default=32, help="rows per batch (default 32)")
    options.add_argument("--length", type=int, default=64, help="tokens per row (default 64)")
    arguments = options.parse_args()
    rows = []
    for tokens in arguments.tokens:
        least = None
        for part in dict.fromkeys([PARTS[0], *arguments.parts]):
            given = arguments.model, part, tokens, arguments.batch_size, arguments.length
            before, growth = peak_of_process(prepared, *given)
            least = before + growth if least is None else least
            sizes = {"peak MB": (before + growth) / 1e6, "growth MB": growth / 1e6}
            rows.append({"tokens": tokens, "run": part, **sizes, "times forward": (before + growth) / least})
    settings = {"batch_size": arguments.batch_size, "length": arguments.length, "model": arguments.model.name}
    report(settings, rows, arguments.output, "Peak memory of calibrate")


if __name__ == "__main__":
    main()
