"""Pretrain a small BERT with every attention, fine-tune each on GLUE tasks; continue a sweep by starting it again.

    python recipes/papers/sweep_kernels.py --data path/to/data  (glue, and imdb if it is there)
    python recipes/papers/sweep_kernels.py \\
        --data path/to/data --text stdlib_docs --methods softmax posrf_gmm --tasks rte

`--data` holds the folder glue and that of the text (imdb, wikitext, film_reviews; stdlib_docs needs none). Each
pretraining goes to OUT/pretraining/<method>/seed<k>, and what is fine-tuned from it, with three seeds, to
OUT/<task>/<method>/seed<k>. Finished runs (metrics.json) are skipped, interrupted ones resumed. Settings given as
section.key=value apply to the pretrainings; for those behind, write `finetune.section.key=value`. table_kernels.py
makes a page of them.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from papers.lib.mlm_settings import FILES, TEXTS
from papers.lib.sweep import FAILED_THEN_STOPPED, PAPERS, Run, Sweep, read_settings, stored_runs, sweep

PRETRAINING = "pretraining"
TASKS = ("mrpc", "rte", "cola", "stsb")


def _features(projection: str, per_head: bool) -> list[str]:
    fields = f"component: posrf, projection: {projection}, num_features: 64, per_head: {str(per_head).lower()}"
    return [f"method.attention={{{fields}}}"]


# The paper's learners: for each head but the generator, which the heads of a layer share; and rows that do not learn.
METHODS = {
    "softmax": ["method.attention=softmax"],
    "posrf_gmm": _features("gmm", per_head=True),
    "posrf_fastfood_learned": _features("fastfood_learned", per_head=True),
    "posrf_generative": _features("generative", per_head=False),
    "posrf_orf": _features("orf", per_head=False),
}
BEHIND = "finetune."


def main(argv: list[str] | None = None) -> int:
    """Run what is missing; 0 all finished, 1 something failed, 2 wrong input, 130 or 143 stopped, 3 both."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="settings for every pretraining")
    parser.add_argument("--data", type=Path, required=True, help="folder of glue and of the text")
    parser.add_argument("--text", choices=TEXTS, help="default: imdb where --data has it, or else stdlib_docs")
    parser.add_argument("--out", type=Path, default=Path("runs/kernels"), help="folder of all runs (%(default)s)")
    parser.add_argument("--stored", type=Path, help="also skip what has its reports here (model_cards/kernels.jsonl)")
    parser.add_argument("--tasks", nargs="*", default=TASKS, choices=TASKS, metavar="TASK", help=" ".join(TASKS))
    parser.add_argument(
        "--methods", nargs="+", default=list(METHODS), choices=METHODS, metavar="METHOD", help=" ".join(METHODS)
    )
    parser.add_argument("--pretraining-seeds", nargs="+", type=int, default=[0], help="default: 0")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2], help="of fine-tuning; default: 0 1 2")
    arguments, given = read_settings(parser, argv)
    needed = [*(["glue"] if arguments.tasks else []), *([arguments.text] if arguments.text in FILES else [])]
    if absent := [name for name in needed if not (arguments.data / name).is_dir()]:
        parser.error(f"--data {arguments.data} has no folder {' and none '.join(absent)}")
    from lib.guard import guarded

    return guarded(lambda: every(arguments, given))


def every(arguments: argparse.Namespace, given: Sequence[str]) -> int:
    """A pretraining and what is fine-tuned from it, one method after the other; stops where a run was asked to."""
    data, out, configs = arguments.data, arguments.out, PAPERS / "configs"
    text = arguments.text or ("imdb" if (data / "imdb").is_dir() else "stdlib_docs")
    of_text = [f"task={text}", *([f"data.dir={data / text}"] if (data / text).is_dir() else [])]
    before = [*of_text, *(setting for setting in given if not setting.startswith(BEHIND))]
    behind = [setting.removeprefix(BEHIND) for setting in given if setting.startswith(BEHIND)]
    shared = ["output.save_model=false", "output.tensorboard=false", f"data.dir={data / 'glue'}", *behind]
    failed, stored = 0, stored_runs(arguments)
    for method in arguments.methods:
        before_it = [Run(PRETRAINING, method, seed) for seed in arguments.pretraining_seeds]
        behind_it = [Run(task, method, seed) for seed in arguments.seeds for task in arguments.tasks]
        model = out / before_it[0].name / "model"
        start = {method: [f"model.name_or_path={model}"]}
        grid = Sweep("finetune_kernel.py", "kernels/{task}.yaml", start, shared, configs, out, stored)
        # A stored report of a pretraining is no model to go on from.
        kept = stored if all(map(grid.finished, behind_it)) else ()
        code = sweep(Sweep("pretrain_mlm.py", "pretrain_mlm.yaml", METHODS, before, configs, out, kept), before_it)
        if code == 0:
            code = sweep(grid, behind_it)
        if code > 1:
            return FAILED_THEN_STOPPED if failed else code
        failed += code
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
