"""Fill the tables of the papers' experiments as far as the time allows; start it again to go on.

    make experiments ARGS="--minutes 60"
    python recipes/run_experiments.py --minutes 480 --data path/to/data --seeds 0 1 2
    python recipes/run_experiments.py --only snnk lowrank

`--data` holds folders of official files: glue, cifar10, imdb, mnist, covtype, higgs, hepmass; what needs an absent one
is left out and named. The sweeps share the time: each gets an equal part of what is left; runs that are not done then
save themselves, and what one does not need is left to the others. Finished runs, also those stored in model_cards/,
are not repeated. Then the pages in model_cards/ (or `--cards`) are rendered from all reports there are, and last the
page of claims and verdicts, by table_papers.py, and the README's table, by table_results.py.
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
RECIPES = ROOT / "recipes"
SUMMARIES = ("table_papers.py", "table_results.py")  # what is rendered from the pages of this repository
GRACE = 120  # seconds that a run has to save itself


class Step(NamedTuple):
    """A sweep and its page.

    Args:
        sweep: program in recipes/.
        table: program in recipes/.
        folder: below runs and model_cards.
        data: folder below `--data` that it cannot do without, given as data.dir; None if there is none.
        settings: of every run, before the options of the sweep.
        options: of the sweep.
        takes_data: it looks for several folders itself and is given `--data` as it is, where there is one.
    """

    sweep: str
    table: str
    folder: str
    data: str | None = None
    settings: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    takes_data: bool = False


# Half of what the benchmark reads of a review, a quarter of an hour a run: softmax on all of it fills a small machine.
REVIEWS = ("train.max_cpu_minutes=15", "train.schedule=constant", "train.warmup_steps=50", "train.learning_rate=1e-3")
REVIEWS += ("train.batch_size=16", "train.eval_every=200", "model.attention_dropout=0", "data.max_length=2000")
REVIEWS += ("data.max_validation_samples=500", "data.max_test_samples=4000")
LONG = ("softmax", "posrf_orf", "posrf_mm", "saderf_orf", "posrf_fastfood_learned")
SMALL_PICTURES = ("train.epochs=8", "train.batch_size=50", "data.max_train_samples=2500", "data.max_eval_samples=2000")
# A part of the grid, one or two minutes a run: all of it is `sweep_uptraining.py`.
UPTRAINING = ("train.epochs=2", "data.max_train_samples=2000")
UPTRAINED = (
    *("--tasks", "mrpc", "--methods", "full", *(f"top{k}_m8_{start}" for k in (3, 6) for start in ("paper", "fitted"))),
    *("pooler_frozen", "pooler_dense", "pooler_cos", "pooler_tanh", "adapter_relu"),
)
# Small pieces and short windows: more steps in ten CPU minutes of pretraining. Half a minute for each fine-tuning.
KERNELS = ("train.max_cpu_minutes=10", "train.batch_size=16", "data.max_length=64", "data.vocabulary=2000")
KERNELS += ("finetune.data.max_length=64", "finetune.data.max_train_samples=2000")
# The paper's mixtures, over positive and trigonometric features, and what does not learn.
SPARSITY = ("--tasks", "sparsity_10", "sparsity_90", "--methods", "softmax", "posrf_orf", "posrf_gmm", "trigrf_gmm")
STEPS = {
    "snnk": Step("sweep_snnk.py", "table_snnk.py", "snnk", takes_data=True),
    "glue": Step("sweep_glue.py", "table_glue.py", "glue", "glue"),
    "uptraining": Step("sweep_uptraining.py", "table_uptraining.py", "uptraining", "glue", UPTRAINING, UPTRAINED),
    "lowrank": Step("sweep_lowrank.py", "table_lowrank.py", "lowrank", "cifar10", SMALL_PICTURES),
    "fmm": Step("sweep_fmm.py", "table_fmm.py", "fmm"),
    "kernels": Step("sweep_kernels.py", "table_kernels.py", "kernels", "glue", KERNELS, takes_data=True),
    "sparsity": Step("sweep_sparsity.py", "table_sparsity.py", "sparsity", options=SPARSITY),
    "draws": Step("sweep_draws.py", "table_draws.py", "draws"),
    "pairs": Step("sweep_pairs.py", "table_lra.py", "spectraformer", takes_data=True),
    "text": Step("sweep_lra.py", "table_lra.py", "lra", "imdb", REVIEWS, ("--tasks", "text", "--methods", *LONG)),
}


def main(argv: list[str] | None = None) -> int:
    """Run what the time allows; 0 all is well, finished or not, 1 something failed, 130 stopped."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0, help="for all sweeps together (default %(default)g)")
    parser.add_argument("--data", type=Path, help="folder of the data folders")
    parser.add_argument("--only", nargs="+", default=list(STEPS), choices=STEPS, metavar="SWEEP", help=" ".join(STEPS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2], help="(default 0 1 2)")
    parser.add_argument("--runs", type=Path, default=ROOT / "runs", help="folder of all runs (default runs)")
    parser.add_argument("--cards", type=Path, default=ROOT / "model_cards", help="folder of the pages")
    parser.add_argument("--set", nargs="*", default=[], metavar="section.key=value", help="settings of every run")
    arguments = parser.parse_args(argv)
    if arguments.minutes <= 0:
        parser.error(f"--minutes is {arguments.minutes:g}; expected a number above 0")
    try:
        return every(arguments)
    except KeyboardInterrupt:
        print("stopped; start the same command again to go on")
        return 130


def every(arguments: argparse.Namespace) -> int:
    """All sweeps, then all pages."""
    end = time.monotonic() + 60 * arguments.minutes
    steps = {name: STEPS[name] for name in STEPS if name in arguments.only and present(name, arguments.data)}
    failed: list[str] = []
    for number, (name, step) in enumerate(steps.items()):
        share = max(0.0, end - time.monotonic()) / (len(steps) - number)
        print(f"== {name}: up to {share / 60:.1f} of {max(0.0, end - time.monotonic()) / 60:.1f} minutes", flush=True)
        code = timed(command(step, arguments), share)
        if code not in (0, 143, -signal.SIGTERM):  # stopped: its runs are saved, or it was still starting
            failed.append(f"{name} (exit code {code})")
    for table in dict.fromkeys((step.table, step.folder) for step in steps.values()):
        program, folder = table
        places = ["--runs", str(arguments.runs / folder), "--out", str(arguments.cards / folder)]
        code = subprocess.run([sys.executable, str(RECIPES / program), *places], check=False).returncode
        if code not in (0, 2):  # 2: no run has finished yet, which it said
            failed.append(f"{program} (exit code {code})")
    if arguments.cards.resolve() == ROOT / "model_cards":
        for program in SUMMARIES:
            code = subprocess.run([sys.executable, str(RECIPES / program), "--write"], check=False).returncode
            if code:
                failed.append(f"{program} (exit code {code})")
    if failed:
        print("failed: " + ", ".join(failed), file=sys.stderr)
    return 1 if failed else 0


def present(name: str, data: Path | None) -> bool:
    """Whether the files of a sweep are there."""
    wanted = STEPS[name].data
    if wanted is None or (data is not None and (data / wanted).is_dir()):
        return True
    print(f"note: {name} is left out: --data has no folder {wanted}", flush=True)
    return False


def command(step: Step, arguments: argparse.Namespace) -> list[str]:
    """The sweep as one would type it."""
    given = [*step.settings, *arguments.set]
    if step.data is not None and not step.takes_data:
        given.append(f"data.dir={arguments.data / step.data}")
    options = ["--out", str(arguments.runs / step.folder), "--stored", str(arguments.cards / step.folder)]
    if step.takes_data and arguments.data is not None:
        options += ["--data", str(arguments.data)]
    seeds = [str(seed) for seed in arguments.seeds]
    return [sys.executable, str(RECIPES / step.sweep), *given, *options, *step.options, "--seeds", *seeds]


def timed(words: Sequence[str], seconds: float) -> int:
    """Run a command for so long at most, then ask it to stop; its exit code."""
    process = subprocess.Popen(words)
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.terminate()
    except KeyboardInterrupt:
        process.terminate()
        process.wait(GRACE)
        raise
    try:
        return process.wait(GRACE)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


if __name__ == "__main__":
    sys.exit(main())
