"""How soon does attention learn to leave out what does not count? Sums over pairs of which 10, 50 or 90 % are relevant.

    python recipes/papers/sweep_sparsity.py --seeds 0 1 2                            (a run: 1 to 5 CPU minutes)
    python recipes/papers/sweep_sparsity.py --tasks sparsity_10 --methods softmax posrf_gmm

"On Learning the Transformer Kernel", section 4.2: of pairs (v, a), v = ±1, a model predicts Σ v·a, −4 to 4. All learn
it in the end; what is compared are the steps to an accuracy. Model and features are the paper's (appendix E.2); so that
a run takes minutes on a processor, sequences have 100 pairs instead of 200, a step has 50 of them instead of 400, and
the rate is 5e-4 instead of 5e-6. There is no dropout, and a run ends when 99 % of the validation sequences are right.
Features keep their draw; the paper draws anew in training ("method.attention.projection_params={redraw_every: 100}",
without softmax).

Runs are of train_lra.py, in OUT/<task>/<method>/seed<k>. Finished ones (metrics.json) are skipped, interrupted ones
resumed. Settings given as section.key=value apply to every run. table_sparsity.py makes a page of them.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from papers.lib.sweep import Task, run_tasks, task_parser


def features(component: str, projection: str, per_head: bool) -> list[str]:
    """The setting of 64 features, as in the paper."""
    fields = f"component: {component}, projection: {projection}, num_features: 64, per_head: {str(per_head).lower()}"
    return [f"method.attention={{{fields}}}"]


# The paper's learners, for each head but the generator, which the heads of a layer share; rows that do not learn.
METHODS = {
    "softmax": ["method.attention=softmax"],
    "posrf_orf": features("posrf", "orf", per_head=False),
    "posrf_gmm": features("posrf", "gmm", per_head=True),
    "posrf_fastfood_learned": features("posrf", "fastfood_learned", per_head=True),
    "posrf_generative": features("posrf", "generative", per_head=False),
    "trigrf_gmm": features("trigrf", "gmm", per_head=True),
}
SETTINGS = ["data.max_length=100", "data.max_train_samples=75000"]
SETTINGS += ["data.max_validation_samples=500", "data.max_test_samples=2000", "model.dropout=0"]
SETTINGS += ["model.attention_dropout=0", "train.batch_size=50", "train.steps=1500", "train.eval_every=25"]
SETTINGS += ["train.stop_at_score=0.99", "train.learning_rate=5e-4", "output.tensorboard=false"]
TASKS = {
    name: Task("train_lra.py", f"lra/{name}.yaml", {method: [*SETTINGS, *own] for method, own in METHODS.items()})
    for name in ("sparsity_10", "sparsity_50", "sparsity_90")
}


def main(argv: list[str] | None = None) -> int:
    """Run what is missing; 0 all finished, 1 something failed, 2 wrong input, 130 or 143 stopped, 3 both."""
    return run_tasks(task_parser(__doc__, "sparsity", TASKS), TASKS, lambda name, arguments: [], argv)


if __name__ == "__main__":
    sys.exit(main())
