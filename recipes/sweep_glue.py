"""Run recipes/finetune.py over tasks, methods and seeds, one after another; continue a sweep by starting it again.

    python recipes/sweep_glue.py data.dir=path/to/glue
    python recipes/sweep_glue.py data.dir=path/to/glue --tasks rte mrpc --methods snnk_relu16 lora_r8 --seeds 0 1 2

Each run goes to OUT/<task>/<method>/seed<k>. Finished runs (metrics.json) are skipped, interrupted ones resumed. The
last line of each run tells how long the rest will take. Settings given as section.key=value apply to every run.
"""

from __future__ import annotations

import sys

from _lib import sweep

TASKS = ("rte", "mrpc", "stsb", "cola", "sst2")
# A linear probe's model/ would be the whole pretrained model once more; its run folder evaluates without it.
METHODS = {
    "snnk_relu16": ["method.adapter={component: relu, num_features: 16}"],
    "snnk_cos16": ["method.adapter={component: cos, num_features: 16}"],
    # As many numbers as the Houlsby adapters and LoRA train, in half as many places.
    "snnk_relu32_parallel": ["method.adapter={component: relu, num_features: 32, placement: parallel}"],
    # The same number again with a learned projection: half the features, and W is trained with A.
    "snnk_relu8_free": ["method.adapter={component: relu, num_features: 8, projection: free}"],
    # In LoRA's place, with as many numbers: a learned projection beside the query and value projections.
    "snnk_relu8_query_value": [
        "method.adapter={component: relu, num_features: 8, projection: free, placement: query_value}"
    ],
    "lora_r8": ["method.name=lora", "method.lora.r=8", "method.lora.alpha=16"],
    "linear_probe": ["method.name=linear_probe", "output.save_model=false"],
    "pooler_cos": ["method.adapter=null", "method.pooler={component: cos}"],
    "pooler_dense": ["method.name=linear_probe", "method.pooler=dense", "output.save_model=false"],
}


def main(argv: list[str] | None = None) -> int:
    """Run what is missing; 0 all finished, 1 something failed, 130 or 143 stopped."""
    return sweep.main(__doc__, "finetune.py", "{task}_adapter.yaml", "glue", TASKS, METHODS, argv)


if __name__ == "__main__":
    sys.exit(main())
