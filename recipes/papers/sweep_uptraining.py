"""Uptraining and poolers of the SNNK paper on GLUE: how many upper FFNs can become SNNK layers, and from which start?

    python recipes/papers/sweep_uptraining.py data.dir=path/to/glue
    python recipes/papers/sweep_uptraining.py \\
        data.dir=path/to/glue --tasks mrpc --methods full top{3,6}_m8_{paper,fitted}

Figure 12 and Tables 6, 1, 3, 4 at the scale of MiniLM-L6. `top<k>_m<m>_<start>`: expansion and GELU of the upper k FFNs
become m random ReLU features and a readout, and everything that stays in use is trained with them. The start of the
readout is the paper's A = Φ(W), Nyström's (closed form, no data), or fitted to what the layer gave on 1,024 training
texts by `calibrate`; `landmarks` is the package's default instead, GELU of rows of the pretrained layer, and fitted.
`full` is k = 0. Poolers and adapters are trained in front of a frozen model, at the learning rates of the paper.

A run is one epoch, scored once, at its end: a few processor minutes at most. Each goes to OUT/<task>/<method>/seed<k>.
Finished runs (metrics.json) are skipped, interrupted ones resumed: start it again to continue. Settings given as
section.key=value apply to every run (train.epochs=5). table_uptraining.py makes a page of them.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from papers.lib import sweep

TASKS = ("rte", "mrpc", "stsb", "cola")
LAYERS = (6, 5, 4, 3, 2, 1)
FEATURES = (8, 32)
RANDOM = "component: relu, projection: gaussian"
# Fields of the part, and whether calibrate fits it.
STARTS = {
    "paper": (f"{RANDOM}, init: paper", "false"),
    "nystrom": (f"{RANDOM}, init: nystrom", "false"),
    "fitted": (f"{RANDOM}, init: nystrom", "true"),
    "landmarks": ("component: gelu, projection: landmark, init: nystrom", "true"),
}
# The pretrained model stays as it is; rate and decay are those of H.1 and H.2.
FROZEN = ["method.ffn=null", "method.train_base=false", "train.learning_rate=1e-3", "train.weight_decay=1e-4"]
POOLER = [*FROZEN, "method.pooling=first"]
METHODS = {
    "full": ["method.name=full", "method.train_base=false"],
    **{
        f"top{layers}_m{features}_{start}": [
            f"method.ffn={{{fields}, num_features: {features}, layers: top-{layers}}}",
            f"method.calibrate={fitted}",
        ]
        for layers in LAYERS
        for start, (fields, fitted) in STARTS.items()
        for features in FEATURES
    },
    "pooler_frozen": [*FROZEN, "method.name=linear_probe"],
    "pooler_dense": [*FROZEN, "method.name=linear_probe", "method.pooler=dense"],
    "pooler_cos": [*POOLER, "method.pooler={component: cos, init: paper}"],
    "pooler_cos_nystrom": [*POOLER, "method.pooler={component: cos, init: nystrom}"],
    # By brute force (App. L): products of random signs for every power of the series.
    "pooler_tanh": [
        *POOLER,
        "method.pooler={component: taylor, projection: rademacher, component_params: {series: tanh}, init: paper}",
    ],
    "adapter_cos": [*FROZEN, "method.adapter={component: cos, num_features: 16, init: paper}"],
    "adapter_relu": [*FROZEN, "method.adapter={component: relu, num_features: 16, init: paper}"],
}


def main(argv: list[str] | None = None) -> int:
    """Run what is missing; 0 all finished, 1 something failed, 130 or 143 stopped, 3 both."""
    methods = {name: [*settings, "output.save_model=false"] for name, settings in METHODS.items()}
    return sweep.main(__doc__, "finetune.py", "{task}.yaml", "uptraining", TASKS, methods, argv)


if __name__ == "__main__":
    sys.exit(main())
