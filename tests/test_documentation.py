"""What the documents promise runs: doctests, the README's blocks and commands as printed. And they stay short."""

from __future__ import annotations

import copy
import doctest
import importlib
import importlib.util
import json
import os
import pkgutil
import re
import shlex
import subprocess
import sys
from pathlib import Path

import data
import pytest
from data_files import sentences, write_task
from datasets import Dataset
from image_layouts import class_folders, draw
from peft import PeftModel
from recipe_world import write_world
from transformers import (
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
    PreTrainedModel,
    ViTConfig,
    ViTForImageClassification,
    ViTImageProcessorPil,
)

import snnk_peft
from snnk_cli.app import app
from snnk_peft import PARTS, Part
from snnk_peft.errors import ConfigError, UnsupportedError
from tests.fresh_process import run_python
from tests.tiny_families import build, main_head

# Triton need not be installed.
HIDDEN = None if importlib.util.find_spec("triton") else "device_kernels.triton_"
MODULES = sorted(
    module.name
    for package in (snnk_peft, data)
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
    if HIDDEN is None or HIDDEN not in module.name
)
# What `check_family` tries, one part of each kind; of adapters the place that all families have.
KINDS = ("adapter", "attention", "ffn", "narrow_ffn", "narrow_heads", "pooler")
PROBED = {type(part).__name__: part for part in (next(iter(PARTS[kind].probes().values())) for kind in KINDS)}
FENCE = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def blocks(root: Path, language: str) -> list[str]:
    found = [text for kind, text in FENCE.findall((root / "README.md").read_text()) if kind == language]
    assert found, f"README.md has no {language} block"
    return found


def test_modules_were_found():
    assert len(MODULES) > 40


@pytest.mark.slow
def test_doctests():
    attempted = 0
    for name in ("data", *MODULES):
        result = doctest.testmod(importlib.import_module(name), optionflags=doctest.NORMALIZE_WHITESPACE)
        assert result.failed == 0, f"{name}: {result.failed} of {result.attempted} examples failed"
        attempted += result.attempted
    assert attempted > 40


def test_every_public_name_is_documented():
    for name in snnk_peft.__all__:
        value = getattr(snnk_peft, name)
        assert (value.__doc__ or "").strip(), f"{name} has no docstring"


@pytest.mark.slow
def test_readme_python_blocks(root, minilm_dir, tmp_path):
    """All python blocks, in order, as one program of a new user: in a process of its own, with the threads it takes."""
    program = "\n".join(blocks(root, "python"))
    environment = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}
    environment["OMP_WAIT_POLICY"] = "passive"  # threads that wait leave the core to the other workers
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    for expected in ("trainable params", "same answer", "LABEL_"):
        assert expected in done.stdout


def test_readme_shell_commands_exist(root):
    targets = re.findall(r"^([a-z]+):", (root / "Makefile").read_text(), re.MULTILINE)
    opening = blocks(root, "bash")[0].splitlines()
    assert [line.split()[1] for line in opening] == ["quickstart", "test"]
    named = {line.split()[1] for line in opening} | set(re.findall(r"`make (\S+)`", (root / "README.md").read_text()))
    assert named <= {*targets, "test-all"}


def write_tables(folder: Path) -> None:
    """Stand-ins for the reader's own files."""
    rows = [(f"it was {word} {number}", word) for number in range(10) for word in ("good", "bad", "so so")]
    for name, part in (("reviews", rows), ("dev", rows[:6]), ("new", rows[:3])):
        (folder / f"{name}.csv").write_text("".join(f"{a},{b}\n" for a, b in [("text", "label"), *part]))
    (folder / "ratings.tsv").write_text("review\tstars\n" + "".join(f"very {n} times\t{n}\n" for n in range(30)))
    columns = {"question": ["a", "b"] * 15, "answer": ["a"] * 30, "fits": [True, False] * 15}
    Dataset.from_dict(columns).to_parquet(folder / "pairs.parquet")
    line = json.dumps({"tokens": ["Ada", "Byron", "wrote"], "tags": ["B-PER", "I-PER", "O"]})
    (folder / "names.jsonl").write_text(f"{line}\n" * 20)
    topics = ["maths", '"art, law"', "", "law"]
    papers = [f"{text} {number},{topics[number % 4]}" for number, text in enumerate(sentences() * 2)]
    (folder / "papers.csv").write_text("\n".join(["abstract,topics", *papers]) + "\n")


def write_pictures(folder: Path) -> Path:
    """Stand-ins for the reader's own pictures, and a tiny model in place of the one from the Hub: its folder."""
    class_folders(folder / "birds", draw(("train", "val"), 2, side=16, per_class=8), ("owl", "tit"))
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    ViTForImageClassification(ViTConfig(image_size=8, patch_size=4, **sizes)).save_pretrained(folder / "vit")
    ViTImageProcessorPil(size={"height": 8, "width": 8}).save_pretrained(folder / "vit")
    return folder / "vit"


def write_classifier(folder: Path, glue: Path) -> None:
    """A tiny classifier in place of the reader's fine-tuned one, and texts without labels."""
    tokenizer = AutoTokenizer.from_pretrained(write_world(folder / "world") / "bert")
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    config = BertConfig(vocab_size=len(tokenizer), id2label=dict(enumerate(("negative", "positive"))), **sizes)
    BertForSequenceClassification(config).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    write_task(glue, "sst2", n_train=48, n_dev=16)
    (folder / "reviews.txt").write_text("\n".join(sentences()))


def commands(root: Path) -> list[list[str]]:
    """Every command of the README's text blocks, as words."""
    return [shlex.split(line) for block in blocks(root, "text") for line in block.splitlines()]


def test_readme_commands_are_of_three_kinds(root):
    kinds = [words[0] for words in commands(root)]
    assert set(kinds) == {"pip", "snnk", "python"}
    assert kinds.count("python") == 6


def extras(root: Path) -> list[str]:
    section = (root / "pyproject.toml").read_text().split("[project.optional-dependencies]")[1].split("\n[")[0]
    return re.findall(r"^(\w+) = \[", section, re.MULTILINE)


def test_readme_installs_extras_that_there_are(root):
    named = re.findall(r"(?:snnk-peft|\.)\[([\w,]+)\]", (root / "README.md").read_text())
    assert len(named) == 2
    assert set(",".join(named).split(",")) <= set(extras(root))


@pytest.mark.slow
def test_readme_recipe_commands(root, minilm_dir, tmp_path):
    """The recipe commands as printed, on a small stand-in for the official files."""
    write_task(tmp_path / "glue", "rte", n_train=32, n_dev=16)
    write_tables(tmp_path)
    vit = write_pictures(tmp_path)
    write_classifier(tmp_path, tmp_path / "glue")
    (tmp_path / "recipes").symlink_to(root / "recipes")
    environment = {**os.environ, "PYTHONPATH": str(root)}
    for program, *given in commands(root):
        if program != "python":
            continue
        line = " ".join(given)
        words = [
            word.replace("path/to/glue", str(tmp_path / "glue")).replace("path/to/model", "model") for word in given
        ]
        if "finetune.py" in line:
            words.append("train.epochs=1")
        if "convert.py" in line:
            words += ["convert.ffn.num_features=8", "convert.batch_size=4", "timing.repetitions=1"]
        if "image_folder" in line:
            words += [f"model.name_or_path={vit}", "data.workers=0"]
        done = run_python(words, cwd=tmp_path, env=environment)
        assert done.returncode == 0, f"{line}\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}"


@pytest.mark.slow
def test_readme_snnk_commands(root, tmp_path):
    """The commands of the wheel as printed, in an order in which each finds what those before it wrote."""
    write_classifier(tmp_path, tmp_path / "glue")
    rows = [f"{text},{label}" for text, label in zip(sentences(), ["negative", "positive"] * 8, strict=False)]
    (tmp_path / "labelled.csv").write_text("\n".join(["text,label", *rows]) + "\n")
    environment = {**os.environ, "PYTHONPATH": str(root)}
    for program, *given in commands(root):
        if program != "snnk":
            continue
        words = [word.replace("path/to/model", "model") for word in given]
        if given[0] == "convert":  # a plan of latency would need a larger model
            words += ["convert.of=macs", "convert.budget=0.9", "convert.batch_size=4", "timing.repetitions=1"]
        done = run_python(["-m", "snnk_cli", *words], cwd=tmp_path, env=environment)
        assert done.returncode == 0, f"{given}\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}"


def test_readme_is_one_page(root):
    lines = (root / "README.md").read_text().splitlines()
    assert len(lines) <= 200
    cells = [cell.strip() for line in lines if line.startswith("|") for cell in line.strip("|").split("|")]
    assert [cell for cell in cells if len(cell) > 120] == []
    rendered = "\n".join(lines).split("<!-- results: begin")[1].split("<!-- results: end")[0].splitlines()[1:]
    assert [len(row.strip("|").split("|")) for row in rendered] == [4] * (2 + 9)


def test_readme_links_lead_to_files(root):
    links = re.findall(r"\]\(([^)]+)\)", (root / "README.md").read_text())
    assert len(links) > 5
    assert [link for link in links if "://" not in link and not (root / link.partition("#")[0]).exists()] == []


def test_readme_names_what_there_is(root):
    """Names of the package in running text, and the variables that it reads."""
    text = FENCE.sub("", (root / "README.md").read_text())
    classes = set(re.findall(r"`([A-Z][a-z]*[A-Z]\w*)`", text))
    assert len(classes) > 8
    assert [name for name in classes if not hasattr(snnk_peft, name)] == []
    others = set(re.findall(r"`([a-z_]+)`", text)) - {"snnk", *extras(root)}
    assert len(others) > 3
    assert [name for name in others if not hasattr(snnk_peft, name) and not hasattr(PeftModel, name)] == []
    verbs = {command.name or command.callback.__name__ for command in app.registered_commands}
    assert set(re.findall(r"`snnk (\w+)", text)) <= verbs
    sources = "".join(file.read_text() for file in (root / "snnk_peft/functional").glob("*.py"))
    assert [name for name in set(re.findall(r"`(SNNK_\w+)=", text)) if name not in sources] == []


def told_of_families(root: Path) -> list[tuple[list[str], set[str]]]:
    """Rows of the README's table: words of the families, without hyphens, and the names of the parts that they take."""
    table = (root / "README.md").read_text().split("## Families and parts")[1].split("\n\n")[1]
    found = []
    for line in table.splitlines()[2:]:
        families, told = line.strip("| ").split(" | ")
        words = re.findall(r"\w+", families.lower().replace("-", "").replace(" 2", "2"))
        named = set(re.findall(r"`(\w+Part)`", told))
        rest = set(PROBED) - named
        found.append(
            (words, set(PROBED) if told.startswith("every") else rest if told.startswith("all but") else named)
        )
    return found


def takes(model: PreTrainedModel, part: Part) -> bool:
    """Whether a model is patched with a part."""
    try:
        snnk_peft.get_snnk_model(model, snnk_peft.SNNKConfig(parts=[part]))
    except (ConfigError, UnsupportedError):
        return False
    return True


@pytest.mark.parametrize("family", sorted(snnk_peft.FAMILIES))
def test_readme_says_what_a_family_takes(root, family):
    short = re.sub("[-_]", "", re.split("_with|_text|[-_]vision", family)[0])
    encoder = family.endswith(("_text_model", "_vision_model")) or family == "whisper"
    rows = [taken for words, taken in told_of_families(root) if short in words and ("encoders" in words) == encoder]
    assert len(rows) == 1
    changes = {"use_relative_position_bias": False} if family == "beit" else {}
    found = {
        name for name, part in PROBED.items() if takes(build(family, main_head(family), **changes), copy.deepcopy(part))
    }
    assert found == rows[0]


def test_changelog_has_at_most_60_lines_a_version(root):
    _, *versions = re.split(r"^## ", (root / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    lengths = {version.split()[0]: len(version.splitlines()) for version in versions}
    assert list(lengths)[-2:] == ["0.2.0", "0.1.0"]
    assert {version: lines for version, lines in lengths.items() if lines > 60} == {}
