"""How much do a model's answers hang on the draw of its features? Learned mixtures on sums over pairs, drawn anew.

    python recipes/papers/sweep_draws.py --seeds 0 1 2                               (a run: 2 to 5 CPU minutes)
    python recipes/papers/sweep_draws.py --methods posrf_gmm --draws 100

"On Learning the Transformer Kernel", section 4.1 and Fig. 5: rows ω of attention's feature maps are noise that a
learned mixture moves and scales; answers of fresh noise differ, and the majority of several draws may be right more
often than one. The models add up 50 pairs of which half count, as in sweep_sparsity.py, over 64 features of a mixture
for each head, positive or trigonometric; training draws anew every 100 steps, or they would learn one draw by heart.

Runs are of train_lra.py, in OUT/sparsity_50/<method>/seed<k>; each is then scored by `score.py --draws`, in its
evaluation.json. Finished ones are skipped, interrupted ones resumed. Settings given as section.key=value apply to every
run. table_draws.py makes a page of them, and papers/programs/spectra.py shows what the mixtures have learned.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from papers.lib.sweep import RECIPES, STOPPED, Task, ending, execute, run_tasks, task_parser

SETTINGS = ["data.max_length=50", "data.max_train_samples=75000", "data.max_validation_samples=500"]
SETTINGS += ["data.max_test_samples=1000", "model.dropout=0", "model.attention_dropout=0", "train.batch_size=50"]
SETTINGS += ["train.steps=1000", "train.eval_every=100", "train.stop_at_score=0.99", "train.learning_rate=5e-4"]
SETTINGS += ["output.tensorboard=false"]


def mixture(component: str) -> list[str]:
    """64 features over a mixture for each head."""
    fields = f"component: {component}, projection: gmm, num_features: 64, per_head: true"
    return [*SETTINGS, f"method.attention={{{fields}, projection_params: {{redraw_every: 100}}}}"]


TASKS = {
    "sparsity_50": Task(
        "train_lra.py", "lra/sparsity_50.yaml", {f"{name}_gmm": mixture(name) for name in ("posrf", "trigrf")}
    )
}


def main(argv: list[str] | None = None) -> int:
    """Run what is missing; 0 all finished, 1 something failed, 2 wrong input, 130 or 143 stopped, 3 both."""
    parser = task_parser(__doc__, "draws", TASKS)
    parser.add_argument("--draws", type=several, default=10, help="fresh ones for each model (%(default)s)")
    return run_tasks(parser, TASKS, lambda name, arguments: [], argv, after=score)


def several(text: str) -> int:
    """A number of draws."""
    if (number := int(text)) < 2:
        raise argparse.ArgumentTypeError(f"{number}; expected 2 or more, of which there is a majority")
    return number


def score(runs: list[Path], arguments: argparse.Namespace) -> int:
    """Score fresh draws of models that have no such scores yet; 1 if something failed, 130 or 143 if stopped."""
    failed, draws = 0, arguments.draws
    for folder in runs:
        if drawn(folder) == draws:
            continue
        code, stopped_by = execute([sys.executable, str(RECIPES / "score.py"), str(folder), f"--draws={draws}"])
        if stopped_by is not None or code in STOPPED:
            print("stopped; start the same command again to continue")
            return STOPPED.get(code, 143) if stopped_by is None else 128 + stopped_by
        if code:
            print(f"failed: draws of {folder} ({ending(code)})", file=sys.stderr, flush=True)
            failed = 1
    return failed


def drawn(run: Path) -> int:
    """How many fresh draws of it were scored."""
    from lib.files import read_json

    file = run / "evaluation.json"
    return read_json(file).get("draws", {}).get("number", 0) if file.is_file() else 0


if __name__ == "__main__":
    sys.exit(main())
