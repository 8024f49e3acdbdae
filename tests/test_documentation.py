"""What the documents promise runs: doctests of every module, and the README's blocks and commands as printed."""

from __future__ import annotations

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
from datasets import Dataset
from glue_files import sentences, write_task
from image_layouts import class_folders, draw
from recipe_world import write_world
from transformers import (
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
    ViTConfig,
    ViTForImageClassification,
    ViTImageProcessorPil,
)

import snnk_peft
from snnk_peft.errors import ConfigError
from snnk_peft.feature_map.describe import component_table, projection_table
from tests.fresh_process import run_python

# Triton need not be installed.
HIDDEN = None if importlib.util.find_spec("triton") else "device_kernels.triton_"
MODULES = sorted(
    module.name
    for package in (snnk_peft, data)
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
    if HIDDEN is None or HIDDEN not in module.name
)
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
    for expected in ("trainable params", "error before -> after", "estimates", "LABEL_"):
        assert expected in done.stdout


def test_readme_shell_commands_exist(root):
    targets = re.findall(r"^([a-z]+):", (root / "Makefile").read_text(), re.MULTILINE)
    for line in blocks(root, "bash")[0].splitlines():
        command = shlex.split(line, comments=True)
        assert command[0] == "make"
        assert command[1] in targets


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
    BertForSequenceClassification(BertConfig(vocab_size=len(tokenizer), **sizes)).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    write_task(glue, "sst2", n_train=48, n_dev=16)
    (folder / "reviews.txt").write_text("\n".join(sentences()))


@pytest.mark.slow
def test_readme_recipe_commands(root, minilm_dir, tmp_path):
    """The recipe commands as printed, on a small stand-in for the official files."""
    write_task(tmp_path / "glue", "rte", n_train=32, n_dev=16)
    write_tables(tmp_path)
    vit = write_pictures(tmp_path)
    write_classifier(tmp_path, tmp_path / "glue")
    (tmp_path / "recipes").symlink_to(root / "recipes")
    commands = [line for line in "\n".join(blocks(root, "text")).splitlines() if line.startswith("python ")]
    assert len(commands) >= 12
    environment = {**os.environ, "PYTHONPATH": str(root)}
    for line in commands:
        words = shlex.split(line.replace("path/to/glue", str(tmp_path / "glue")).replace("path/to/model", "model"))
        if "finetune.py" in line:
            words.append("train.epochs=1")
        if "convert.py" in line:
            words += ["convert.ffn.num_features=8", "convert.batch_size=4", "timing.repetitions=1"]
        if "texts.yaml" in line:  # a plan of latency would need a larger model
            words += ["convert.of=macs", "convert.budget=0.9"]
        if "image_folder" in line:
            words += [f"model.name_or_path={vit}", "data.workers=0"]
        if "train_lra.py" in line:
            words += ["train.steps=2", "train.warmup_steps=1", "train.batch_size=2"]
            words += [f"data.max_{split}_samples=4" for split in ("train", "validation", "test")]
        if "tiny_llama.py" in line:
            words += ["--steps", "2"]
        if "fit_p" in line:
            words += ["train.steps=2"]
        if "pointwise.py" in line:
            words += ["--draws", "2", "--projections", "2", "--output", "pointwise"]
        if "write_listops.py" in line:
            words += ["--train", "60", "--validation", "5", "--test", "5"]
        done = run_python(words[1:], cwd=tmp_path, env=environment)
        assert done.returncode == 0, f"{line}\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}"


def test_readme_tables_are_the_generated_ones(root):
    text = (root / "README.md").read_text()
    begin = "<!-- feature maps: begin (python -m snnk_peft.feature_map table) -->\n"
    shown = text.split(begin)[1].split("\n<!-- feature maps: end -->")[0]
    assert shown == f"{component_table()}\n\n{projection_table()}", "paste what the command prints"


def test_readme_results_are_the_measured_ones(root, monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(root / "recipes"))
    table_results = importlib.import_module("papers.table_results")
    text = (root / "README.md").read_text()
    assert table_results.replaced(text, table_results.render(root)) == text, (
        "run recipes/papers/table_results.py --write"
    )
    assert "benchmarks/attention.py" in table_results.render(root)
    programs = set(re.findall(r"`(benchmarks/\w+\.py)", table_results.render(root)))
    assert programs, "no benchmark is named"
    assert [name for name in sorted(programs) if not (root / "recipes" / name).is_file()] == []
    other = text.replace("× faster at 4,096 tokens", "× slower at 4,096 tokens")
    assert table_results.replaced(other, table_results.render(root)) == text
    with pytest.raises(ConfigError, match="has no lines"):
        table_results.replaced("no marks", "table")
    with pytest.raises(ConfigError, match="cannot be read"):
        table_results.render(tmp_path)
