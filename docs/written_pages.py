"""Pages that are written as a whole: studies and claims of model_cards/, and the errata; their tables become lists."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CARDS, BENCHMARKS = ROOT / "model_cards", ROOT / "recipes/benchmarks/results"
STUDIES = sorted(page.parent.name for page in CARDS.glob("*/README.md"))
LINK = re.compile(r"(?<!!)\[([^\]]+)\]\((?!https?:|#)([^)]+)\)")
PICTURE = re.compile(r"!\[([^\]]*)\]\(([^)]+)\)")

CLAIM = ("where", "claim", "the paper", "here", "scale", "verdict", "details, command")
ERRATUM = ("#", "printed", "true", "here", "tests")
BAR = re.compile(r"(?<!\\)\|")


def pages() -> dict[str, str]:
    """Path below docs/ -> Markdown."""
    studies = {f"results/{name}.md": card(CARDS / name / "README.md") for name in STUDIES}
    return {"errata.md": errata(), "results/claims.md": as_list(card(CARDS / "README.md")), **studies}


def card(page: Path) -> str:
    """A page of model_cards/: its links lead to pages of this site, or become paths."""

    def linked(found: re.Match[str]) -> str:
        target = (page.parent / found[2]).resolve()
        if not target.exists():
            raise FileNotFoundError(f"{page} links to {found[2]}, which is not there")
        if target == ROOT / "ERRATA.md":
            return f"[{found[1]}](../errata.md)"
        if target.parent == CARDS and target.name in STUDIES:
            return f"[{found[1]}]({target.name}.md)"
        return f"{found[1]} in `{target.relative_to(ROOT).as_posix()}`"

    text = PICTURE.sub(rf"![\1]({page.parent.name}/\2)", page.read_text(encoding="utf-8"))
    return LINK.sub(linked, text)


def as_list(page: str) -> str:
    """The claims, whose tables have seven columns of text, as a list that a phone can show."""
    found = []
    for line in page.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if not line.startswith("| ") or len(cells) != len(CLAIM):
            found.append(line)
        elif cells[0] not in (CLAIM[0], "---"):
            where, claim, theirs, ours, scale, verdict, details = cells
            found += ["", f"**{where}.** {claim}", "", f"- verdict: {verdict}", f"- the paper: {theirs}"]
            found += [f"- here: {ours}", f"- scale: {scale}", f"- details, command: {details}"]
    return "\n".join(found) + "\n"


def pictures() -> dict[str, Path]:
    """Path below docs/ -> the picture that is shown there."""
    shown = {f"results/{name}/{file.name}": file for name in STUDIES for file in sorted((CARDS / name).glob("*.png"))}
    shown["results/curve.png"] = BENCHMARKS / "convert_curve/sst2.png"
    shown["results/attention_on_gpu.png"] = BENCHMARKS / "gpu/attention_on_gpu/attention_on_gpu.png"
    return shown


def errata(text: str | None = None) -> str:
    """ERRATA.md with a section for each row of its wide tables: a phone can show it, and a link can reach it.

    Args:
        text: instead of the file's.

    Raises:
        ValueError: a row that has not the five columns.
    """
    found: list[str] = []
    for line in ((ROOT / "ERRATA.md").read_text(encoding="utf-8") if text is None else text).splitlines():
        if not line.startswith("|"):
            found.append(line)
            continue
        cells = [cell.strip().replace(r"\|", "|") for cell in BAR.split(line.strip()[1:-1])]
        if len(cells) != len(ERRATUM):
            raise ValueError(f"ERRATA.md has a row of {len(cells)} cells; expected {', '.join(ERRATUM)}: {line}")
        if cells[0] != ERRATUM[0] and set(cells[0]) - set("-: "):
            told = zip(("Printed", "True", "Here", "Tests"), cells[1:], strict=True)
            found += [f"### {cells[0]}", *(f"\n**{word}.** {cell}".replace("` `", "`, `") for word, cell in told), ""]
    return "\n".join(found) + "\n"


def title_of(study: str) -> str:
    """The heading of a study's page."""
    first = (CARDS / study / "README.md").read_text(encoding="utf-8").splitlines()[0]
    return f"{first.removeprefix('# ')} (`{study}`)"


TABLES: dict[str, Callable[[], str]] = {
    "studies": lambda: "\n".join(f"- [{title_of(name)}]({name}.md)" for name in STUDIES),
}
