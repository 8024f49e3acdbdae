"""Latency of bundles against the ratio of multiply-accumulates, their file sizes and loading times, on MiniLM.

    python recipes/benchmarks/bundle_latency.py

3 and 6 of the 6 FFN blocks are replaced by 8, 32 and 128 features and bundled. Models are timed as they load, with
fused attention; the ratio of multiply-accumulates (MACs) is counted with torch's FLOP counter on the same forward pass
with eager attention, which does the same products where the counter sees them. A speed-up below it means overhead.
"""

from __future__ import annotations

import copy
import statistics
import tempfile
from functools import partial
from pathlib import Path

import torch
from _bench import alternate, parser, ratio, report
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForSequenceClassification, logging

from snnk_cli.models import resolve_model
from snnk_peft import FFNPart, SNNKConfig, bundle, get_snnk_model

LAYERS, FEATURES, TOKENS = (3, 6), (8, 32, 128), (16, 128)


def macs(model, inputs) -> int:
    """Count the multiply-accumulates of one forward pass."""
    timed = model.config._attn_implementation
    model.set_attn_implementation("eager")  # on a CPU, the counter cannot see into fused attention
    counter = FlopCounterMode(display=False)
    with counter, torch.no_grad():
        model(**inputs)
    model.set_attn_implementation(timed)
    return counter.get_total_flops() // 2


def size(folder: Path) -> int:
    """Return the bytes of the weights in a folder."""
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def first_answer(load, inputs):
    """Return a function that loads a model and runs it once."""

    def run() -> None:
        with torch.inference_mode():
            load()(**{name: value[:1, :16] for name, value in inputs.items()})

    return run


def main() -> None:
    """Run the benchmark and write its results."""
    arguments = parser(__doc__, "bundle_latency").parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    original = AutoModelForSequenceClassification.from_pretrained(resolve_model("minilm"), num_labels=2).eval()
    models = {"original": original}
    for layers in LAYERS:
        for features in FEATURES:
            part = FFNPart(layers=f"top-{layers}", num_features=features)
            patched = get_snnk_model(copy.deepcopy(original), SNNKConfig(ffn=part, modules_to_save=[]))
            models[f"{layers} FFNs, {features} features"] = bundle(patched).eval()

    ids = torch.randint(1000, 20000, TOKENS, generator=torch.Generator().manual_seed(0))
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    operations = {name: macs(model, inputs) for name, model in models.items()}

    def forward(model):
        def run() -> None:
            with torch.inference_mode():
                model(**inputs)

        return run

    with tempfile.TemporaryDirectory() as temporary:
        folders = {name: Path(temporary) / str(index) for index, name in enumerate(models)}
        for name, model in models.items():
            model.save_pretrained(folders[name])
        seconds = alternate({name: forward(model) for name, model in models.items()}, arguments.repetitions)
        # A loaded model's weights are mapped but not yet read, so both the bare call and the first answer are timed.
        load = {
            name: partial(AutoModelForSequenceClassification.from_pretrained, path) for name, path in folders.items()
        }
        loading = alternate(load, arguments.repetitions)
        answering = alternate({name: first_answer(call, inputs) for name, call in load.items()}, arguments.repetitions)
        rows = [
            {
                "model": name,
                "MACs (millions)": operations[name] / 1e6,
                "MAC ratio": operations["original"] / operations[name],
                "speed-up": ratio(seconds["original"], seconds[name]),
                "speed-up / MAC ratio": ratio(seconds["original"], seconds[name])
                * operations[name]
                / operations["original"],
                "ms": 1000 * statistics.median(seconds[name]),
                "weights MB": size(folders[name]) / 2**20,
                "loading / original": ratio(loading[name], loading["original"]),
                "loading + first answer / original": ratio(answering[name], answering["original"]),
            }
            for name in models
        ]
    figures = {
        "smallest_speedup_over_mac_ratio": min(row["speed-up / MAC ratio"] for row in rows),
        "largest_loading_ratio": max(row["loading / original"] for row in rows),
        "largest_first_answer_ratio": max(row["loading + first answer / original"] for row in rows),
        "seconds": seconds,
    }
    report(figures, rows, arguments.output, f"Bundled MiniLM, {TOKENS[0]} x {TOKENS[1]} tokens")


if __name__ == "__main__":
    main()
