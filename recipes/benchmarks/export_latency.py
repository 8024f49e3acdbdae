"""A classifier and its conversion as files: accuracy, bytes and latency in torch, in ONNX, and with int8 Linears.

    python recipes/benchmarks/export_latency.py --model path/to/minilm-l6-sst2 --data path/to/glue

All six FFN blocks are converted without labels and bundled. Original and bundle are exported twice, and every candidate
is scored on the 872 development sentences of SST-2 at 64 tokens. Times are for 32 x 64 tokens and for one sentence of
32 tokens, taken in turn in one process, with as many threads for ONNX Runtime as for torch.
"""

from __future__ import annotations

import copy
import statistics
import tempfile
from pathlib import Path

import torch
from _bench import parser, ratio, report
from _conversions.finetuned import FineTuned, timed
from _peers.blocks import model_inputs
from torch import nn
from transformers import logging

from snnk_cli.exporting import ExportedFile
from snnk_cli.timing import forward_seconds
from snnk_peft import ExportReport, FFNPart, SNNKConfig, bundle, calibrate, export, get_snnk_model

SHAPES = ("32x64", "1x32")


def main() -> None:
    """Run the benchmark and write its results."""
    options = parser(__doc__, "export_latency")
    options.add_argument("--model", type=Path, required=True, help="folder of the fine-tuned classifier")
    options.add_argument("--data", required=True, help="folder that holds SST-2/{train,dev}.tsv")
    options.add_argument("--sentences", type=int, default=2500, help="unlabelled training sentences (default 2500)")
    arguments = options.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()

    one = FineTuned("sst2", arguments.model, arguments.data, max_length=64, batch_size=64)
    config = SNNKConfig(ffn=FFNPart(num_features=256), modules_to_save=[])
    patched = get_snnk_model(copy.deepcopy(one.teacher), config)
    calibration = [model_inputs(batch) for batch in one.batches(arguments.sentences, seed=0)]
    calibrate(patched, calibration, progress=False)
    small = bundle(patched)

    torch_models: dict[str, nn.Module] = {"original": one.teacher, "bundle": small}
    checked = [{name: batch[name] for name in ("input_ids", "attention_mask")} for batch in calibration[::10]]
    models: dict[str, nn.Module] = {}
    made: dict[str, ExportReport] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, model in torch_models.items():
            models[f"{name}, torch"] = model
            for key in (f"{name}, ONNX", f"{name}, ONNX, int8"):
                file = Path(folder) / f"{len(made)}.onnx"
                made[key] = export(model, "onnx", file, batches=checked, int8=key.endswith("int8"))
                models[key] = ExportedFile(file)
        seconds = {}
        for name in SHAPES:
            seconds[name] = forward_seconds(models, timed(one.teacher, name), arguments.repetitions)
        rows = [
            {
                "model": key,
                "accuracy": one.figures(model)["score"],
                "MB": (made[key].bytes if key in made else sum(t.nbytes for t in model.state_dict().values())) / 2**20,
                **{f"ms per {name}": 1000 * statistics.median(seconds[name][key]) for name in SHAPES},
                **{f"speed-up {name}": ratio(seconds[name]["original, torch"], seconds[name][key]) for name in SHAPES},
            }
            for key, model in models.items()
        ]
        exports = {key: {**one.to_dict(), "files": {}} for key, one in made.items()}
    figures = {"teacher": arguments.model.name, "threads": torch.get_num_threads(), "exports": exports}
    report(figures, rows, arguments.output, "SST-2: original and bundle as files")


if __name__ == "__main__":
    main()
