"""The pages of docs/: their Python and their commands run as printed; what is generated is what the code holds."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
import yaml
from glue_files import sentences, write_task
from transformers import AutoTokenizer, BertConfig, BertForSequenceClassification
from typer.testing import CliRunner

import snnk_peft
from snnk_cli.app import app
from snnk_peft import COMPONENTS, FAMILIES, LOW_RANK_INITS, PARTS, PROJECTIONS
from snnk_peft.options import options_of
from tests.fresh_process import run_python
from tests.test_documentation import write_classifier, write_pictures, write_tables

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md"))
FENCE = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
# Those that take a real encoder through many passes.
SLOW = {
    "guides/adapt.md",
    "guides/embeddings.md",
    "guides/heads.md",
    "guides/long-inputs.md",
    "start/quickstart.md",
}
# Settings that make the commands small, by a part of the command.
SMALL = {
    "finetune.py": ["train.epochs=1"],
    "convert.py": ["convert.ffn.num_features=8", "convert.batch_size=4", "timing.repetitions=1"],
    "texts.yaml": ["convert.of=macs", "convert.budget=0.9"],  # a plan of latency would need a larger model
    "image_folder": ["model.name_or_path=vit", "data.workers=0"],
    "train_lra.py": ["train.steps=2", "train.warmup_steps=1", "train.batch_size=2"]
    + [f"data.max_{split}_samples=4" for split in ("train", "validation", "test")],
    "tiny_llama.py": ["--steps", "2"],
    "fit_p": ["train.steps=2"],
    "pointwise.py": ["--draws", "2", "--projections", "2", "--output", "pointwise"],
    "write_listops.py": ["--train", "60", "--validation", "5", "--test", "5"],
}


def blocks(pages: Iterable[str], language: str) -> list[str]:
    """The fenced blocks of a language, in order."""
    found = (FENCE.findall((DOCS / page).read_text(encoding="utf-8")) for page in pages)
    return [text for page in found for kind, text in page if kind == language]


def commands(program: str) -> list[list[str]]:
    """Every command of that program on the pages, as words, each once."""
    lines = [line for block in blocks(PAGES, "text") for line in block.splitlines()]
    return [shlex.split(line) for line in dict.fromkeys(lines) if line.startswith(f"{program} ")]


WITH_CODE = [page for page in PAGES if blocks([page], "python")]


@pytest.fixture(scope="module")
def world(tmp_path_factory, minilm_dir) -> Path:
    """A folder with what the pages name: the model from the Hub, a classifier, unlabelled texts, tables, images."""
    folder = tmp_path_factory.mktemp("pages")
    (folder / "sentence-transformers").mkdir()
    (folder / "sentence-transformers/all-MiniLM-L6-v2").symlink_to(minilm_dir)
    write_task(folder / "glue", "rte", n_train=32, n_dev=16)
    write_classifier(folder, folder / "glue")
    write_tables(folder)
    write_pictures(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 256}
    BertForSequenceClassification(BertConfig(vocab_size=len(tokenizer), **sizes)).save_pretrained(
        folder / "path/to/model"
    )
    tokenizer.save_pretrained(folder / "path/to/model")
    (folder / "path/to/glue").symlink_to(folder / "glue")
    (folder / "recipes").symlink_to(ROOT / "recipes")
    return folder


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


def copied(world: Path, folder: Path) -> Path:
    """Links to all that is in `world`: what a page writes stays in its own folder."""
    for each in world.iterdir():
        (folder / each.name).symlink_to(each)
    return folder


def test_every_chapter_has_code():
    chapters = {page.partition("/")[0] for page in WITH_CODE}
    assert {"index.md", "start", "guides", "concepts", "extend"} <= chapters
    assert [page for page in PAGES if page.startswith("extend/") and page not in WITH_CODE] == []
    assert set(WITH_CODE) >= SLOW


@pytest.mark.parametrize("page", [pytest.param(page, marks=[pytest.mark.slow] * (page in SLOW)) for page in WITH_CODE])
def test_python_of_the_page_runs(page, world, tmp_path):
    """All blocks from top to bottom in one namespace, in a process and a folder of their own."""
    run(["-c", "\n".join(blocks([page], "python"))], copied(world, tmp_path))


@pytest.mark.slow
def test_recipe_commands_run(world, tmp_path):
    """As printed, on small stand-ins; what scores or bundles comes after what trains."""
    found = commands("python")
    assert len(found) >= 20
    named = {part for part in SMALL if any(part in shlex.join(words) for words in found)}
    assert named == set(SMALL), "a command is gone from the pages, or is called otherwise"
    copied(world, tmp_path)
    for words in sorted(found, key=lambda words: words[1].endswith(("score.py", "bundle.py"))):
        more = [word for part, given in SMALL.items() if part in shlex.join(words) for word in given]
        run([*words[1:], *more], tmp_path)


@pytest.mark.slow
def test_snnk_commands_run(world, tmp_path):
    """Those that name files, as printed; a plan of latency would need a larger model."""
    found = [words[1:] for words in commands("snnk") if "MODEL" not in words]
    assert {words[0] for words in found} >= {"convert", "score", "export"}
    copied(world, tmp_path)
    rows = [f"{text},{label}" for text, label in zip(sentences(), ["LABEL_0", "LABEL_1"] * 8, strict=False)]
    (tmp_path / "labelled.csv").write_text("\n".join(["text,label", *rows]) + "\n")
    small = ["convert.of=macs", "convert.budget=0.9", "convert.batch_size=4", "timing.repetitions=1"]
    for words in sorted(found, key=lambda words: words[0] != "convert"):
        run(["-m", "snnk_cli", *words, *(small if words[0] == "convert" else [])], tmp_path)


def test_code_fits_the_width_of_a_page():
    lines = [(page, line) for page in PAGES for block in blocks([page], "python") for line in block.splitlines()]
    assert [(page, line) for page, line in lines if len(line) > 88] == []


def test_snnk_commands_and_options_exist():
    """What pages name is in the help of the command."""
    for words in commands("snnk"):
        shown = CliRunner().invoke(app, [words[1], "--help"])
        assert shown.exit_code == 0, shown.output
        assert {word for word in words if word.startswith("--")} <= set(re.findall(r"--[\w-]+", shown.output)), words


def run(arguments: list[str], folder: Path) -> str:
    """A program in a process of its own, which must end well; its output."""
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'recipes'}", "HF_HUB_OFFLINE": "1"}
    done = run_python(arguments, cwd=folder, env=environment)
    assert done.returncode == 0, f"{shlex.join(arguments)}\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}"
    return done.stdout


def nav_pages(nav: object) -> Iterator[str]:
    """Every page below an entry of the navigation."""
    if isinstance(nav, str):
        yield nav
    else:
        for each in nav.values() if isinstance(nav, dict) else nav:  # type: ignore[attr-defined]
            yield from nav_pages(each)


def test_every_page_is_in_the_navigation(hooks):
    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    assert sorted(nav_pages(config["nav"])) == sorted([*PAGES, *hooks.pages()])
    assert config["strict"] is True
    assert {"omitted_files", "unrecognized_links", "anchors"} <= {
        k for k, v in config["validation"].items() if v == "warn"
    }


def test_every_table_is_on_a_page_and_every_name_known(hooks):
    named = {name for page in PAGES for name in hooks.TABLE.findall((DOCS / page).read_text(encoding="utf-8"))}
    assert named == set(hooks.TABLES)
    with pytest.raises(KeyError, match="no_such"):
        hooks.on_page_markdown("<!-- table: no_such -->\n")


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
    stored = hooks.result_tables.read("convert_sst2/metrics.json")["rows"]
    rows = hooks.TABLES["sst2"]().splitlines()[2:]
    assert [row.split(" | ")[1] for row in rows] == [f"{100 * row['accuracy']:.1f}" for row in stored]
    assert [row.split(" | ")[2] for row in rows] == [f"{row['speed-up']:.2f} ×" for row in stored]
    for name, table in hooks.result_tables.TABLES.items():
        widths = {line.count(" | ") for line in table().splitlines() if line.startswith("| ")}
        assert widths or name == "studies", name
    card = (ROOT / "model_cards/vision/README.md").read_text(encoding="utf-8")
    assert hooks.pages()["results/vision.md"] == card.replace("](digits", "](vision/digits").replace(
        "](cifar", "](vision/cifar"
    )


def test_claims_page_has_every_claim(hooks):
    rows = (ROOT / "model_cards/README.md").read_text(encoding="utf-8").split("| where |", 1)[1].splitlines()
    verdicts = [line.split(" | ")[5] for line in rows if line.startswith("| ") and line.count(" | ") == 6]
    verdicts = [verdict for verdict in verdicts if verdict.startswith("**")]
    page = hooks.pages()["results/claims.md"]
    assert len(verdicts) > 40
    assert re.findall(r"^- verdict: (.*)$", page, re.MULTILINE) == verdicts


def test_pictures_of_pages_are_there(hooks):
    shown = hooks.result_tables.pictures()
    pages = {**hooks.pages(), "results/index.md": (DOCS / "results/index.md").read_text(encoding="utf-8")}
    named = {f"results/{file}" for text in pages.values() for file in re.findall(r"!\[[^\]]*\]\(([^)]+)\)", text)}
    assert named == set(shown)
    assert all(file.is_file() for file in shown.values())


def test_errata_page_has_every_row(hooks):
    text = (ROOT / "ERRATA.md").read_text(encoding="utf-8")
    numbers = re.findall(r"^\| ([A-Z]\d+) \|", text, re.MULTILINE)
    page = hooks.pages()["errata.md"]
    assert re.findall(r"^### (\w+)$", page, re.MULTILINE) == numbers
    assert not re.search(r"^\|", page, re.MULTILINE)
    assert "**True.** Holds for n ≤ 1." in page
    with pytest.raises(ValueError, match="row of 2 cells"):
        hooks.reference_tables.errata("| A1 | printed |\n")


def test_links_of_cards_lead_somewhere(hooks, tmp_path):
    page = tmp_path / "README.md"
    page.write_text("[gone](../nowhere.md)")
    with pytest.raises(FileNotFoundError, match=r"nowhere\.md"):
        hooks.result_tables.card(page)
    assert "](glue.md)" in hooks.pages()["results/claims.md"]


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
