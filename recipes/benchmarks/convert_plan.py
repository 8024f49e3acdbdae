"""Plan a conversion for a budget, convert, and measure what came of it: accuracy, speed-up and seconds on SST-2.

    python recipes/benchmarks/convert_plan.py --model path/to/minilm-l6-sst2 --data path/to/glue

For every budget, `plan` measures candidates in all layers of the teacher and chooses among them, and `calibrate` fits
the choice, both on unlabelled training sentences; the seconds are those of both. Accuracy is that of the bundle on the
872 development sentences at 64 tokens; speed-up is the teacher's time over the bundle's for 32 x 64 tokens, taken in
turn in one process. Plans are written beside the figures, a folder for each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from _bench import parser
from _conversion import Conversion, compare_conversions
from convert_sst2 import accuracy, batches, load
from torch import nn
from transformers import logging

from snnk_peft import plan


def planned(
    budget: str, calibration: list[Any], inputs: Mapping[str, torch.Tensor], folder: Path, seed: int
) -> Callable[[nn.Module], Mapping[str, Any]]:
    """A function that plans for a teacher; what another budget measured is measured again."""

    def find(teacher: nn.Module) -> Mapping[str, Any]:
        timings = folder / "timings.json"
        timings.unlink(missing_ok=True)
        found = plan(teacher, calibration, budget, inputs=inputs, seed=seed, timings=timings)
        found.save(folder)
        print(found)
        return {"parts": found.config.parts, "seed": seed}

    return find


def main() -> None:
    """Measure and write."""
    options = parser(__doc__ or "", "convert_plan")
    options.add_argument("--model", type=Path, required=True, help="folder of the fine-tuned classifier")
    options.add_argument("--data", required=True, help="folder that holds SST-2/{train,dev}.tsv")
    options.add_argument("--sentences", type=int, default=2500, help="unlabelled training sentences (default 2500)")
    options.add_argument("--budgets", nargs="+", default=["1.5x", "2x", "2.5x"], help="default: 1.5x 2x 2.5x")
    options.add_argument("--seed", type=int, default=0, help="of the sentences and of all draws (default 0)")
    arguments = options.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()

    teacher, tokenizer, unlabelled, sentences, labels = load(
        arguments.model, arguments.data, arguments.sentences, arguments.seed
    )
    calibration = batches(tokenizer, unlabelled)
    ids = torch.randint(1000, 20000, (32, 64), generator=torch.Generator().manual_seed(0))
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    folder = arguments.output.parent
    compare_conversions(
        teacher,
        {
            f"plan {budget}": Conversion(
                planned(budget, calibration, inputs, folder / f"plan-{budget}", arguments.seed)
            )
            for budget in arguments.budgets
        },
        calibration,
        lambda model: accuracy(model, tokenizer, sentences, labels),
        inputs,
        arguments,
        title="SST-2 conversion by plan, without labels",
        timed="32x64 tokens",
    )


if __name__ == "__main__":
    main()
