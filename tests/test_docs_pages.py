"""The pages of docs/: their Python and their commands run as printed."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterable
from pathlib import Path

import pytest
from data_files import sentences, write_task
from transformers import AutoTokenizer, BertConfig, BertForSequenceClassification
from typer.testing import CliRunner

from snnk_cli.app import app
from tests.fresh_process import run_python
from tests.test_documentation import FENCE, write_classifier, write_pictures, write_tables

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md"))
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
    "convert.py": ["convert.ffn.num_features=8", "convert.batch_size=4", "convert.recover=0.2", "timing.repetitions=1"],
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
    small = ["convert.of=macs", "convert.budget=0.9", "convert.batch_size=4", "convert.recover=0.2"]
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
