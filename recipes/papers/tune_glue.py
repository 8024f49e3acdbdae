"""Find the learning rate of every method of recipes/papers/sweep_glue.py: equal effort, on a seed of its own.

    python recipes/papers/tune_glue.py data.dir=path/to/glue
    python recipes/papers/tune_glue.py data.dir=path/to/glue --methods lora_r8@0.001 lora_r8@0.002 lora_r8@0.004

Every method tries three rates on CoLA, and the better two of them or all on MRPC (`--tasks`, `--methods`); what counts
is the mean score on held-back training rows, so the dev sets stay unseen. Runs go to
OUT/<task>/<method>@<rate>/seed<k>; papers/table_glue.py keeps their reports, and papers/sweep_glue.py takes the best
rate of each method from there.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from papers.lib import sweep
from papers.sweep_glue import METHODS, RECIPE

TASKS = ("mrpc", "cola")
SEED = 100
RATES = (1e-3, 2e-3, 4e-3)
# Where all weights move, a tenth to a fiftieth of what a few new ones need is usual.
RATES_OF = {"full": (5e-5, 1e-4, 2e-4)}


def points() -> dict[str, list[str]]:
    """The settings of every method at every rate, by <method>@<rate>."""
    return {
        f"{name}@{rate:g}": [*RECIPE, *settings, f"train.learning_rate={rate:g}"]
        for name, settings in METHODS.items()
        for rate in RATES_OF.get(name, RATES)
    }


def main(argv: list[str] | None = None) -> int:
    """Run what is missing; 0 all finished, 1 something failed, 130 or 143 stopped, 3 both."""
    return sweep.main(
        __doc__, "finetune.py", "{task}_adapter.yaml", "glue_rates", TASKS, points(), argv, "glue", (SEED,)
    )


if __name__ == "__main__":
    sys.exit(main())
