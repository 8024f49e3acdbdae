"""Run the papers' experiments and fill their tables as far as the time allows; start it again to continue.

    make experiments ARGS="--minutes 60"
    python recipes/papers/run_experiments.py --minutes 480 --data path/to/data --seeds 0 1 2
    python recipes/papers/run_experiments.py --only snnk lowrank
    python recipes/papers/run_experiments.py --minutes 6000 --data path/to/data --model path/to/encoder --into mine

`--data` holds folders of official files: glue, cifar10, imdb, mnist, covtype, higgs, hepmass; experiments
whose folder is missing are skipped with a note. All share the time: each program and sweep gets an equal part of what
is left; unfinished runs then save themselves, and unused time is left to the others. Experiments with a metrics.json,
including those stored in this repository, are not repeated: with `--into FOLDER`, which is then laid out like the
repository, everything is measured anew. Then the pages in model_cards/ are rendered from all reports, and
finally the page of claims and verdicts, by table_papers.py, and the README's table, by table_results.py.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from papers.lib.reports import read_runs
from snnk_cli.files import guarded

ROOT = Path(__file__).resolve().parents[2]
RECIPES = ROOT / "recipes"
GRACE = 120  # seconds that a run has to save itself


class Step(NamedTuple):
    """A sweep and its page.

    Args:
        study: name of the study, also below runs and model_cards.
        data: required folder below `--data`, passed as data.dir; None if there is none.
        settings: settings of every run, before the options of the sweep.
        options: options of the sweep.
        takes_data: whether it needs several folders and gets `--data` unchanged, if given.
    """

    study: str
    data: str | None = None
    settings: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    takes_data: bool = False


class Program(NamedTuple):
    """A measurement that is not a sweep: if stopped, it begins anew, unless it says otherwise.

    Args:
        file: program file below recipes/; its results are in results/<name>/metrics.json beside it.
        options: further options.
        of: its input: "model", `--model` and `--data`; "cards", the reports in model_cards; "runs", the runs
            themselves; None for none.
        patterns: patterns of the report files or the runs.
        made_of: the entry of its figures with one item per report or run.
    """

    file: str
    options: tuple[str, ...] = ()
    of: str | None = None
    patterns: tuple[str, ...] = ()
    made_of: str = ""

    def metrics(self, into: Path) -> Path:
        """Return the file of its figures."""
        file = Path(self.file)
        return into / "recipes" / file.parent / "results" / file.stem / "metrics.json"

    def output(self, into: Path) -> Path:
        """Return its `--output`: for experiments their folder, for benchmarks a file.

        Benchmarks write the file whenever a part is done; it becomes metrics.json at the end.
        """
        file = self.metrics(into)
        return file.with_name("begun.json") if self.file.startswith("benchmarks/") else file.parent


# Half of the benchmark's length, 15 minutes per run: softmax on all of it exhausts the memory of a small machine.
REVIEWS = ("train.max_cpu_minutes=15", "train.schedule=constant", "train.warmup_steps=50", "train.learning_rate=1e-3")
REVIEWS += ("train.batch_size=16", "train.eval_every=200", "model.attention_dropout=0", "data.max_length=2000")
REVIEWS += ("data.max_validation_samples=500", "data.max_test_samples=4000")
LONG = ("softmax", "posrf_orf", "posrf_mm", "saderf_orf", "posrf_fastfood_learned")
SMALL_PICTURES = ("train.epochs=8", "train.batch_size=50", "data.max_train_samples=2500", "data.max_eval_samples=2000")
# A part of the grid, one or two minutes per run; the study has all of it.
UPTRAINING = ("train.epochs=2", "data.max_train_samples=2000")
UPTRAINED = (
    *("--tasks", "mrpc", "--methods", "full", *(f"top{k}_m8_{start}" for k in (3, 6) for start in ("paper", "fitted"))),
    *("pooler_frozen", "pooler_dense", "pooler_cos", "pooler_tanh", "adapter_relu"),
)
# A small vocabulary and short windows give more steps in ten CPU minutes of pretraining; half a minute per fine-tuning.
KERNELS = ("train.max_cpu_minutes=10", "train.batch_size=16", "data.max_length=64", "data.vocabulary=2000")
KERNELS += ("finetune.data.max_length=64", "finetune.data.max_train_samples=2000")
# The paper's mixtures, over positive and trigonometric features, and kernels that are not learned.
SPARSITY = ("--tasks", "sparsity_10", "sparsity_90", "--methods", "softmax", "posrf_orf", "posrf_gmm", "trigrf_gmm")
STEPS = {
    "snnk": Step("snnk", takes_data=True),
    "glue": Step("glue", "glue"),
    "uptraining": Step("uptraining", "glue", UPTRAINING, UPTRAINED),
    "lowrank": Step("lowrank", "cifar10", SMALL_PICTURES),
    "fmm": Step("fmm"),
    "kernels": Step("kernels", "glue", KERNELS, takes_data=True),
    "sparsity": Step("sparsity", options=SPARSITY),
    "draws": Step("draws"),
    "pairs": Step("spectraformer", takes_data=True),
    "text": Step("lra", "imdb", REVIEWS, ("--tasks", "text", "--methods", *LONG)),
}
PROGRAMS = {
    "pointwise": Program("papers/programs/pointwise.py"),
    "parameter_tables": Program("papers/programs/parameter_tables.py"),
    "low_rank_samples": Program("papers/programs/low_rank_samples.py"),
    "snnk_layer": Program("benchmarks/snnk_layer.py"),
    "attention": Program("benchmarks/attention.py"),
    "attention_estimates": Program("papers/programs/attention_estimates.py", of="model"),
    "lowrank_init": Program("benchmarks/lowrank_init.py", ("--resume",)),
}
# These read the results of the sweeps and take a minute or two.
STARTS = ("lowrank.jsonl",)
MIXTURES = ("draws/sparsity_50/*_gmm/seed*", "kernels/pretraining/posrf_gmm/seed*")
BEHIND = {
    "low_rank_errors": Program("papers/programs/low_rank_errors.py", (), "cards", STARTS, "rows"),
    "spectra": Program("papers/programs/spectra.py", (), "runs", MIXTURES, "models"),
}


def main(argv: list[str] | None = None) -> int:
    """Run the experiments; returns 0 if all is well, finished or not, 1 if something failed, 130 if stopped."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0, help="for all sweeps together (default %(default)g)")
    parser.add_argument("--data", type=Path, help="folder of the data folders")
    parser.add_argument("--model", type=Path, help="folder of a trained encoder, for attention_estimates")
    every_one = [*PROGRAMS, *STEPS, *BEHIND]
    parser.add_argument(
        "--only", nargs="+", default=every_one, choices=every_one, metavar="NAME", help=" ".join(every_one)
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2], help="(default 0 1 2)")
    parser.add_argument("--runs", type=Path, help="folder of all runs (default runs, in --into)")
    parser.add_argument(
        "--into", type=Path, default=ROOT, help="folder of model_cards and recipes/*/results (default: this repository)"
    )
    parser.add_argument("--set", nargs="*", default=[], metavar="section.key=value", help="settings of every run")
    arguments = parser.parse_args(argv)
    if arguments.minutes <= 0:
        parser.error(f"--minutes is {arguments.minutes:g}; expected a number above 0")
    arguments.runs = arguments.runs or arguments.into / "runs"

    def work() -> int:
        try:
            return every(arguments)
        except KeyboardInterrupt:
            print("stopped; run the same command again to continue")
            return 130

    return guarded(work)


def every(arguments: argparse.Namespace) -> int:
    """Run all programs and sweeps, then render all pages."""
    end = time.monotonic() + 60 * arguments.minutes
    cards = arguments.into / "model_cards"
    cards.mkdir(parents=True, exist_ok=True)
    steps = {name: STEPS[name] for name in STEPS if name in arguments.only and present(name, arguments.data)}
    wanted = {name: PROGRAMS[name] for name in PROGRAMS if name in arguments.only}
    commands = {name: words for name, program in wanted.items() if (words := measuring(name, program, arguments))}
    commands |= {name: command(step, arguments) for name, step in steps.items()}
    failed: list[str] = []
    for number, (name, words) in enumerate(commands.items()):
        share = max(0.0, end - time.monotonic()) / (len(commands) - number)
        print(f"== {name}: up to {share / 60:.1f} of {max(0.0, end - time.monotonic()) / 60:.1f} minutes", flush=True)
        code = timed(words, share)
        if code in (143, -signal.SIGTERM):  # its runs are saved, or it had only been starting
            if name in PROGRAMS:
                print(f"{name} did not finish in its share of the time and starts over next time: give more --minutes")
        elif code:
            failed.append(f"{name} (exit code {code})")
        elif name in PROGRAMS and (begun := PROGRAMS[name].output(arguments.into)).is_file():
            begun.replace(PROGRAMS[name].metrics(arguments.into))

    def rendered(program: str, *options: str, nothing: int = 0) -> None:
        code = subprocess.run([sys.executable, str(RECIPES / "papers" / program), *options], check=False).returncode
        if code not in (0, nothing):
            failed.append(f"{program} (exit code {code})")

    for study in (step.study for step in steps.values()):
        # 2: no run has finished yet, as it has reported.
        places = ("--runs", str(arguments.runs / study), "--out", str(cards / study))
        rendered("study.py", "page", study, *places, nothing=2)
    for name, program in BEHIND.items():
        if name in arguments.only and (words := measuring(name, program, arguments)):
            rendered(program.file.removeprefix("papers/"), *words[2:])
    rendered("table_papers.py", "--write", "--root", str(arguments.into))
    if arguments.into.resolve() == ROOT:
        rendered("table_results.py", "--write")
    if failed:
        print("failed: " + ", ".join(failed), file=sys.stderr)
    return 1 if failed else 0


def measuring(name: str, program: Program, arguments: argparse.Namespace) -> list[str] | None:
    """Return a program's command; None if its figures exist, or, with a note, if something it needs is missing."""
    file, given, lacks = program.metrics(arguments.into), list(program.options), ""
    if program.of == "model":
        given += ["--model", str(arguments.model)]
        given += ["--data", str(arguments.data / "glue")] if arguments.data is not None else []
        lacks = "" if arguments.model is not None else "no --model"
    elif program.of == "cards":
        given += ["--runs", *(str(arguments.into / "model_cards" / name) for name in program.patterns)]
    elif program.of == "runs":
        given += map(str, sources(program, arguments))
    if program.patterns and not sources(program, arguments):
        lacks = "no finished run of those that it reads"
    if file.is_file() and not outdated(program, file, arguments):
        return None
    if lacks:
        print(f"note: {name} is left out: there is {lacks}", flush=True)
        return None
    return [sys.executable, str(RECIPES / program.file), *given, "--output", str(program.output(arguments.into))]


def sources(program: Program, arguments: argparse.Namespace) -> list[Path]:
    """Return the runs that a program reads: those whose reports are stored, or the finished ones."""
    if program.of == "cards":
        cards = arguments.into / "model_cards"
        found = [Path(*map(str, run)) for name in program.patterns for run in read_runs(cards / name)]
    else:
        found = sorted(path for pattern in program.patterns for path in arguments.runs.glob(pattern))
        found = [path for path in found if (path / "metrics.json").is_file()]
    return [path for path in found if path.parent.name != "dense"]  # dense runs have no low-rank start


def outdated(program: Program, file: Path, arguments: argparse.Namespace) -> bool:
    """Return whether there are more runs to read than its figures were made from."""
    if not program.patterns:
        return False
    figures = json.loads(file.read_text(encoding="utf-8"))
    return len(sources(program, arguments)) > len(figures[program.made_of])


def present(name: str, data: Path | None) -> bool:
    """Return whether the files of a sweep exist."""
    wanted = STEPS[name].data
    if wanted is None or (data is not None and (data / wanted).is_dir()):
        return True
    print(f"note: {name} is left out: --data has no folder {wanted}", flush=True)
    return False


def command(step: Step, arguments: argparse.Namespace) -> list[str]:
    """Return the command of a sweep."""
    given = [*step.settings, *arguments.set]
    if step.data is not None and not step.takes_data:
        given.append(f"data.dir={arguments.data / step.data}")
    stored = arguments.into / "model_cards" / f"{step.study}.jsonl"
    options = ["--out", str(arguments.runs / step.study), "--stored", str(stored)]
    if step.takes_data and arguments.data is not None:
        options += ["--data", str(arguments.data)]
    seeds = [str(seed) for seed in arguments.seeds]
    return [
        sys.executable,
        str(RECIPES / "papers/study.py"),
        "run",
        step.study,
        *given,
        *options,
        *step.options,
        "--seeds",
        *seeds,
    ]


def timed(words: Sequence[str], seconds: float) -> int:
    """Run a command for at most `seconds`, then ask it to stop; returns its exit code."""
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
