"""Run a study of the papers, or render its page.

    python recipes/papers/study.py run glue data.dir=path/to/glue --seeds 0 1 2
    python recipes/papers/study.py page glue                                     (runs/glue -> model_cards/glue)

`run NAME --help` says what a study is. Each run goes to OUT/<task>/<method>/seed<k>. Finished runs (metrics.json) are
skipped, interrupted ones resumed: start it again to continue. The last line of each run estimates the remaining
time. Settings given as section.key=value apply to every run.

`page` stores RUNS/<task>/<method>/seed<k>/metrics.json as lines of OUT.jsonl, then writes OUT/README.md and its figures
from all lines. Without runs, the page is rendered from the stored lines alone.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from papers.lib.reports import collect, read_reports
from papers.lib.study import STUDIES, Study, load
from papers.lib.study_runs import SHAPE, run
from snnk_cli.files import guarded, write_text
from snnk_cli.lock import alone

ROOT = Path(__file__).resolve().parents[2]


def main(argv: list[str] | None = None) -> int:
    """Parse the command line; returns the exit code of `run` or `page`."""
    words = sys.argv[1:] if argv is None else argv
    verbs = {"run": run, "page": page}
    if len(words) > 1 and words[0] in verbs and words[1] in STUDIES:
        return verbs[words[0]](load(words[1]), words[2:])
    told = "\n".join(f"  {name:15} {load(name).about.splitlines()[0]}" for name in STUDIES)
    parser = argparse.ArgumentParser("study.py", description=__doc__, formatter_class=SHAPE, epilog=f"studies:\n{told}")
    parser.add_argument("verb", choices=verbs, metavar="VERB", help="run or page")
    parser.add_argument("study", choices=STUDIES, metavar="STUDY", help=" ".join(STUDIES))
    parser.parse_known_args(words)
    return 2  # argparse has reported the fault and exited


def page(study: Study, argv: list[str]) -> int:
    """Store the reports of finished runs, then render page and figures; returns 0 if done, 2 without any report."""
    name = study.name
    if not study.page:
        print(f"error: {name} has no page of its own; its runs are on the page of another study", file=sys.stderr)
        return 2
    shown = import_module(f"papers.pages.{study.page}")
    parser = argparse.ArgumentParser(prog=f"study.py page {name}", description=shown.__doc__, formatter_class=SHAPE)
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / name, help="folder of all runs (%(default)s)")
    cards = ROOT / "model_cards" / name
    parser.add_argument("--out", type=Path, default=cards, help="folder of the page; the reports go to OUT.jsonl")
    further = getattr(shown, "FURTHER", {})
    for option, (file, text) in further.items():
        parser.add_argument(f"--{option}", type=Path, default=file, help=text)
    arguments = parser.parse_args(argv)

    def write() -> None:
        copied = collect(arguments.runs, arguments.out, beside=getattr(shown, "BESIDE", None))
        given = {option: getattr(arguments, option) for option in further}
        if hasattr(shown, "store"):
            shown.store(arguments.out, **given)
        table = read_reports(arguments.out, name)
        text, figures = shown.page(table, arguments.out, **given)
        write_text(arguments.out / "README.md", text)
        told = ", ".join([str(arguments.out / "README.md"), *figures])
        print(f"{copied} new or changed reports; wrote {told}")

    return written(arguments.out, write)


def written(out: Path, write: Callable[[], object]) -> int:
    """Write reports and page under a lock; returns the exit code."""

    def work() -> None:
        with alone(out / "README.md", "--out"):
            write()

    return guarded(work)


if __name__ == "__main__":
    sys.exit(main())
