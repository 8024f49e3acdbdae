"""FMMformer beside softmax and linear attention: near field 0, 16, 64 by rank 1, 2, 3, on ListOps and on copying.

    python recipes/papers/sweep_fmm.py --seeds 0 1 2                     (a seed: 10 to 25 CPU minutes per task)
    python recipes/papers/sweep_fmm.py --tasks copy_128 --methods softmax linear_1 fmm_64_1

Nguyen et al. 2021. Rank 1 is the classical linear attention, elu + 1 of queries and keys themselves; every further rank
adds an attention over elu + 1 of as many random orthogonal projections, with a draw of its own. `linear_<rank>` has no
near field, `fmm_<width>_<rank>` an exact softmax band beside it; there is no part that is a band alone.

Copying (train_copy.py; 128 or 256 tokens) has equal steps and tokens for all methods. ListOps (train_lra.py) has equal
processor time: 1 minute, on whole expressions of 50 to 250 tokens, which are written to OUT/listops_files. Each run
goes to OUT/<task>/<method>/seed<k>. Finished runs (metrics.json) are skipped, interrupted ones resumed. Settings given
as section.key=value apply to every run. table_fmm.py makes a page of them.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from papers.lib import short_listops
from papers.lib.sweep import Task, run_tasks, task_parser

ROWS = 32  # of every map: the dimension of a head, in both recipes
WIDTHS, RANKS = (16, 64), (1, 2, 3)


def attention(rank: int, width: int | None = None) -> str:
    """The setting of so many maps and a band of that width."""
    near = "" if width is None else f", near_field: {width}"
    further = ", ".join([f"{{projection: orf, num_features: {ROWS}}}"] * (rank - 1))
    return f"method.attention={{component: elu, projection: identity{near}, sum_of: [{further}]}}"


METHODS = {
    "softmax": ["method.attention=softmax"],
    **{f"linear_{rank}": [attention(rank)] for rank in RANKS},
    **{f"fmm_{width}_{rank}": [attention(rank, width)] for width in WIDTHS for rank in RANKS},
}
LISTOPS = [
    f"data.max_length={short_listops.BOUNDS['max_length']}",
    "data.max_validation_samples=500",
    "model.attention_dropout=0",
]
LISTOPS += ["train.max_cpu_minutes=1", "train.schedule=constant", "train.warmup_steps=50", "train.learning_rate=1e-3"]
# Equal tokens per step.
COPIES = {length: [f"data.length={length}", f"train.batch_size={4096 // length}"] for length in (128, 256)}


def _methods(settings: list[str]) -> dict[str, list[str]]:
    return {name: [*settings, *own] for name, own in METHODS.items()}


TASKS = {
    **{f"copy_{n}": Task("train_copy.py", "copy/copy.yaml", _methods(own)) for n, own in COPIES.items()},
    "listops": Task("train_lra.py", "lra/listops.yaml", _methods(LISTOPS)),
}


def main(argv: list[str] | None = None) -> int:
    """Run what is missing; 0 all finished, 1 something failed, 2 wrong input, 130 or 143 stopped, 3 both."""
    return run_tasks(task_parser(__doc__, "fmm", TASKS), TASKS, files, argv)


def files(name: str, arguments: argparse.Namespace) -> list[str]:
    """Short expressions are written before they are first needed."""
    return [short_listops.written(arguments.out)] if name == "listops" else []


if __name__ == "__main__":
    sys.exit(main())
