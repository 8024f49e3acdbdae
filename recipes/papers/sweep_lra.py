"""Run train_lra.py over tasks, attention methods and seeds; continue a sweep by starting it again.

    python recipes/papers/sweep_lra.py \\
        --tasks listops train.max_cpu_minutes=15 train.schedule=constant train.warmup_steps=50
    python recipes/papers/sweep_lra.py --tasks text data.dir=path/to/imdb --methods softmax posrf_orf --seeds 0 1 2

Each run goes to OUT/<task>/<method>/seed<k>. Finished runs (metrics.json) are skipped, interrupted ones resumed. The
last line of each run tells how long the rest will take. Settings given as section.key=value apply to every run: tasks
with different data folders are one command each. The method performer_pytorch needs `pip install performer-pytorch`.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from papers.lib import sweep
from papers.lib.printed_pairs import COMPONENTS, MATRICES

TASKS = ("listops",)  # the one that needs no data folder; also text, retrieval, image
_LEARNED = "num_features: 128, per_head: true"
# Spectraformer, Table 2: every component over every matrix.
PAIRS = [f"{component}_{projection}" for component in COMPONENTS for projection in MATRICES]


def _pair(name: str) -> list[str]:
    """Settings of one pair: 128 rows; the learned matrix is learned for each head, sgq has 2 d + 1 rows by itself."""
    component, projection = name.split("_", 1)
    size = {"fastfood_learned": _LEARNED, "sgq": "num_features: null"}.get(projection, "num_features: 128")
    return [f"method.attention={{component: {component}, projection: {projection}, {size}}}"]


METHODS = {
    "softmax": ["method.attention=softmax"],
    **{name: _pair(name) for name in PAIRS},
    "posrf_gmm": [f"method.attention={{component: posrf, projection: gmm, {_LEARNED}}}"],
    # As many features as random ones in the papers; the classical form has W = I.
    "elu": ["method.attention={component: elu, projection: orf, num_features: 128}"],
    # The same estimator by another library, as it is used there: new features every 1000 steps.
    "performer_pytorch": ["method.attention=performer_pytorch", "method.performer.nb_features=128"],
}


def main(argv: list[str] | None = None) -> int:
    """Run what is missing; 0 all finished, 1 something failed, 130 or 143 stopped, 3 both."""
    return sweep.main(__doc__, "train_lra.py", "{task}.yaml", "lra", TASKS, METHODS, argv)


if __name__ == "__main__":
    sys.exit(main())
