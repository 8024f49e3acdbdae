"""What is generated for docs/ is what the code and the stored results hold, and every page is in the navigation."""

from __future__ import annotations

import collections
import importlib.util
import json
import re
import statistics
from collections.abc import Iterator
from types import ModuleType

import pytest
import yaml

import snnk_peft
from snnk_peft import COMPONENTS, FAMILIES, LOW_RANK_INITS, PARTS, PROJECTIONS
from snnk_peft.options import options_of
from tests.test_docs_pages import DOCS, PAGES, ROOT


@pytest.fixture(scope="module")
def hooks() -> Iterator[ModuleType]:
    """docs/hooks.py, as MkDocs loads it: with its folder on the path."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(DOCS))
        spec = importlib.util.spec_from_file_location("docs_hooks", DOCS / "hooks.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        yield module


def nav_pages(nav: object) -> Iterator[str]:
    """Every page below an entry of the navigation."""
    if isinstance(nav, str):
        yield nav
    else:
        for each in nav.values() if isinstance(nav, dict) else nav:  # type: ignore[attr-defined]
            yield from nav_pages(each)


def test_every_page_is_in_the_navigation(hooks):
    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    assert sorted(nav_pages(config["nav"])) == sorted([*PAGES, *hooks.written_pages.pages()])
    assert config["strict"] is True
    assert {"omitted_files", "unrecognized_links", "anchors"} <= {
        k for k, v in config["validation"].items() if v == "warn"
    }


def test_every_table_is_on_a_page_and_every_name_known(hooks):
    named = {name for page in PAGES for name in hooks.TABLE.findall((DOCS / page).read_text(encoding="utf-8"))}
    assert named == set(hooks.TABLES)
    with pytest.raises(KeyError, match="no_such"):
        hooks.on_page_markdown("*Here `make docs` puts the table `no_such`.*\n")


@pytest.mark.parametrize(
    ("table", "registry"),
    [
        ("components", COMPONENTS),
        ("projections", PROJECTIONS),
        ("families", FAMILIES),
        ("low_rank_inits", LOW_RANK_INITS),
    ],
)
def test_reference_has_every_member(hooks, table, registry):
    assert re.findall(r"^\| `([^`]+)`", hooks.TABLES[table](), re.MULTILINE) == registry.names()


def test_reference_has_every_option(hooks):
    """Of parts, components and projections, with default and help."""
    parts = hooks.TABLES["parts"]()
    for name in PARTS:
        section = parts.split(f"## {PARTS[name].__name__}\n")[1].split("\n## ")[0]
        told = re.findall(r"^\| `(\w+)`<br>", section, re.MULTILINE)
        assert told == [key for key, known in options_of(PARTS[name]).items() if known.help]
    assert "| `num_features`<br>`16` | rows of W" in parts.split("## AdapterPart\n")[1]
    for table, registry in (("component_members", COMPONENTS), ("projection_members", PROJECTIONS)):
        assert re.findall(r"^### (\w+)$", hooks.TABLES[table](), re.MULTILINE) == registry.names()
    assert re.search(
        r"^\| `order`<br>`1` \| .*<br>\*0, 1 or 2\* \|$", hooks.TABLES["component_members"](), re.MULTILINE
    )
    assert "| `norms`<br>`'chi'` |" in hooks.TABLES["projection_members"]()


def test_reference_has_every_public_name():
    """Functions and classes by their docstrings, parts in their table, registries by their members."""
    shown = {name for page in PAGES for name in re.findall(r"^::: .*\b(\w+)$", (DOCS / page).read_text(), re.MULTILINE)}
    parts = {PARTS[name].__name__ for name in PARTS}
    registries = {name for name in snnk_peft.__all__ if name.isupper()}
    assert set(snnk_peft.__all__) - shown - parts - registries == set()


def test_results_are_the_stored_ones(hooks):
    """Figures of a table are those of the file, and so is the page of a study."""
    stored = hooks.result_tables.read("convert_curve/sst2.json")["rows"]
    rows = hooks.TABLES["curve"]().splitlines()[2:]
    assert [row.split(" | ")[3] for row in rows] == [f"{100 * row['agreement']:.1f}" for row in stored]
    assert [row.split(" | ")[2] for row in rows] == [f"{row['speed-up']:.2f} ×" for row in stored]
    for name, table in hooks.result_tables.TABLES.items():
        assert len([line for line in table().splitlines() if line.startswith("| ")]) > 2, name
    card = (ROOT / "model_cards/vision/README.md").read_text(encoding="utf-8")
    assert hooks.written_pages.pages()["results/vision.md"] == card.replace("](digits", "](vision/digits").replace(
        "](cifar", "](vision/cifar"
    )


def test_means_on_glue_are_those_of_the_runs(hooks):
    """From the lines that the runs wrote: the mean over tasks of the mean over seeds."""
    rows = [line.strip("| ").split(" | ") for line in hooks.TABLES["glue_means"]().splitlines()[2:]]
    assert len(rows) > 10
    for column, study in ((1, "glue"), (2, "glue_gpu")):
        scores = collections.defaultdict(lambda: collections.defaultdict(list))
        for line in (ROOT / f"model_cards/{study}.jsonl").read_text(encoding="utf-8").splitlines():
            run = json.loads(line)
            scores[run["method"]][run["task"]].append(run["report"]["score"])
        for row in rows:
            means = [statistics.mean(seeds) for seeds in scores[row[3].strip("`")].values()]
            assert row[column].strip() == (f"{100 * statistics.mean(means):.1f}" if means else "")


def test_claims_page_has_every_claim(hooks):
    rows = (ROOT / "model_cards/README.md").read_text(encoding="utf-8").split("| where |", 1)[1].splitlines()
    verdicts = [line.split(" | ")[5] for line in rows if line.startswith("| ") and line.count(" | ") == 6]
    verdicts = [verdict for verdict in verdicts if verdict.startswith("**")]
    page = hooks.written_pages.pages()["results/claims.md"]
    assert len(verdicts) > 40
    assert re.findall(r"^- verdict: (.*)$", page, re.MULTILINE) == verdicts


def test_pictures_of_pages_are_there(hooks):
    shown = hooks.written_pages.pictures()
    pages = {**hooks.written_pages.pages(), "results/index.md": (DOCS / "results/index.md").read_text(encoding="utf-8")}
    named = {f"results/{file}" for text in pages.values() for file in re.findall(r"!\[[^\]]*\]\(([^)]+)\)", text)}
    assert named == set(shown)
    assert all(file.is_file() for file in shown.values())


def test_errata_page_has_every_row(hooks):
    text = (ROOT / "ERRATA.md").read_text(encoding="utf-8")
    numbers = re.findall(r"^\| ([A-Z]\d+) \|", text, re.MULTILINE)
    page = hooks.written_pages.pages()["errata.md"]
    assert re.findall(r"^### (\w+)$", page, re.MULTILINE) == numbers
    assert not re.search(r"^\|", page, re.MULTILINE)
    assert "**True.** Holds for n ≤ 1." in page
    with pytest.raises(ValueError, match="row of 2 cells"):
        hooks.written_pages.errata("| A1 | printed |\n")


def test_links_of_cards_lead_somewhere(hooks, tmp_path):
    page = tmp_path / "README.md"
    page.write_text("[gone](../nowhere.md)")
    with pytest.raises(FileNotFoundError, match=r"nowhere\.md"):
        hooks.written_pages.card(page)
    assert "](glue.md)" in hooks.written_pages.pages()["results/claims.md"]


def test_formulas_become_mathml(hooks):
    pytest.importorskip("latex2mathml", reason="pip install snnk-peft[docs]")
    found = hooks.on_page_markdown("$$x^2$$ and `$$x$$`\n\n```text\n$$y$$\n```\n")
    assert found.count("<math") == 1
    assert "<msup>" in found
    assert "`$$x$$`" in found
    assert "\n$$y$$\n" in found


def test_pages_fetch_nothing():
    """No picture, script or font from elsewhere, nor a link into the void."""
    for page in PAGES:
        text = (DOCS / page).read_text(encoding="utf-8")
        assert not re.search(r"!\[[^\]]*\]\(https?:|<(?:script|img|link|iframe)\b", text), page
    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    assert config["theme"]["font"] is False
    assert not any(str(url).startswith("http") for url in [*config["extra_css"], *config.get("extra_javascript", [])])
