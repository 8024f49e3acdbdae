"""Render model_cards/README.md: every claim of the papers, our measurement, and a verdict.

    python recipes/papers/table_papers.py            (prints the page)
    python recipes/papers/table_papers.py --write    (writes it)
    python recipes/papers/table_papers.py --write --root mine  (of what run_experiments.py --into mine has measured)

Claims are in papers/claims/, one file per paper; figures come only from the metrics.json and .jsonl files in the
repository, and verdicts from them by the rules of `lib/verdicts.py`. Claims without stored figures name the command
that measures them.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from papers.claims import learned_kernels, lecture, low_rank, snnk, spectraformer
from papers.lib.verdicts import VERDICTS, Claim, Measured, NotMeasuredError, Store
from snnk_cli.files import guarded, write_text
from snnk_cli.tables import grid

ROOT = Path(__file__).resolve().parents[2]
PAPERS = (snnk, spectraformer, learned_kernels, low_rank, lecture)
OPEN = "not measured yet"
HEAD = """\
# The papers' claims, and what we measured

Rendered by `papers/table_papers.py` from the metrics.json and .jsonl files of this repository. Every row is a claim of
a paper, the paper's figure, ours, the scale of ours, and a verdict:

- **holds**: our interval excludes the contrary and the size is that of the paper, where it prints one;
- **holds in direction**: the effect is there and smaller, or “better” is “as good”;
- **does not hold**: our interval excludes it, or it is false by derivation;
- **not testable here**: runs of this size do not decide.

Intervals are mean ± t · standard error over seeds (95 %), n the number of seeds; a mean over tasks is taken first. Our
models are small and trained for minutes on a CPU, so that “does not hold” is said of this scale alone, except where it
follows by counting or from [ERRATA.md](../ERRATA.md). `DATA` is a folder with the official files (glue, cifar10, imdb,
mnist, covtype, higgs); `make experiments ARGS="--minutes 60 --data DATA"` runs what is missing, as far as the time
allows, and with `--into FOLDER` everything anew, for a page like this one in that folder.
"""


def main(argv: list[str] | None = None) -> int:
    """Print or write the page; returns 0 if done, 2 if a file is broken."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write model_cards/README.md")
    parser.add_argument("--root", type=Path, default=ROOT, help="folder of model_cards/ and recipes/*/results/")
    arguments = parser.parse_args(argv)

    def work() -> None:
        page = render(Store(arguments.root))
        if arguments.write:
            write_text(arguments.root / "model_cards" / "README.md", page)
        else:
            print(page, end="")

    return guarded(work)


def render(store: Store, papers: tuple[Any, ...] = PAPERS) -> str:
    """Render the whole page."""
    found = {paper.TITLE: [(claim, measured(claim, store)) for claim in paper.CLAIMS] for paper in papers}
    lines = [HEAD, *summary(found)]
    for title, rows in found.items():
        header = ["where", "claim", "the paper", "here", "scale", "verdict", "details, command"]
        lines += ["", f"## {title}", "", *table(header, [row(*each) for each in rows])]
    return "\n".join(lines) + "\n"


def table(header: list[str], rows: list[list[str]]) -> list[str]:
    """Return the lines of a Markdown table of words."""
    return ["| " + " | ".join(line) + " |" for line in (header, ["---"] * len(header), *rows)]


def measured(claim: Claim, store: Store) -> Measured:
    """Return our result for a claim, or that there is none yet."""
    try:
        return claim.measure(store)
    except NotMeasuredError:
        return Measured("–", OPEN)


def row(claim: Claim, found: Measured) -> list[str]:
    """Return the cells of a claim."""
    verdict = f"**{found.verdict}**" if found.verdict in VERDICTS else found.verdict
    link = f"[{claim.page.rpartition('/')[2]}](../{claim.page}/), `{claim.command}`"
    return [claim.where, claim.claim, claim.printed, found.ours, claim.scale, verdict, link]


def summary(found: dict[str, list[tuple[Claim, Measured]]]) -> list[str]:
    """Return a table of how often each verdict was given, by paper."""
    kinds = [*VERDICTS, *([OPEN] if any(m.verdict == OPEN for rows in found.values() for _, m in rows) else [])]
    counts = [
        [title, *(str(sum(each.verdict == kind for _, each in rows)) for kind in kinds)]
        for title, rows in found.items()
    ]
    return grid(["paper", *kinds], counts)


if __name__ == "__main__":
    sys.exit(main())
