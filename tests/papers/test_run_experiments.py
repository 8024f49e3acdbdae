"""recipes/papers/run_experiments.py: sweeps share the time, stop when it is over, and end in pages."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from papers import run_experiments
from papers.lib.study import load
from recipe_world import RECIPES

from tests.stored_runs import put_figures, put_run, stored


@pytest.fixture
def only_two_bodies(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The same sweep with one experiment of one method."""
    step = run_experiments.STEPS["snnk"]._replace(options=("--tasks", "two_bodies", "--methods", "dense"))
    monkeypatch.setitem(run_experiments.STEPS, "snnk", step)


@pytest.fixture
def rendered(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Commands of pages and of what reads runs, of which none is executed."""
    found: list[list[str]] = []
    done = type("Done", (), {"returncode": 0})
    monkeypatch.setattr(run_experiments.subprocess, "run", lambda words, **known: found.append(words[1:]) or done)
    return found


def places(tmp_path: Path) -> list[str]:
    return ["--runs", str(tmp_path / "runs"), "--into", str(tmp_path / "mine"), "--seeds", "0"]


def test_it_stops_in_time_and_renders_what_is_finished(
    only_two_bodies: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    run, waited = tmp_path / "runs/snnk/two_bodies/dense/seed0", []

    class Quickly(subprocess.Popen):
        """A sweep that is told that its time is over as soon as its run trains."""

        def wait(self, timeout: float | None = None) -> int:
            if timeout in (None, run_experiments.GRACE):
                return super().wait(timeout)
            waited.append(timeout)
            end = time.monotonic() + timeout
            while time.monotonic() < end and not (run / "log.jsonl").is_file():
                time.sleep(0.05)
            raise subprocess.TimeoutExpired(self.args, timeout)

    long = ["--only", "snnk", "--minutes", "1.5", "--set", "train.steps=1000000", "train.device=cpu"]
    with monkeypatch.context() as patched:
        patched.setattr(subprocess, "Popen", Quickly)
        assert run_experiments.main([*long, *places(tmp_path)]) == 0
    assert waited == [pytest.approx(90, abs=1)]
    assert list((run / "checkpoints").glob("step-*/model.safetensors"))
    assert not (run / "metrics.json").exists()
    said = capfd.readouterr()
    assert "run the same command again to continue" in said.out
    assert "no finished run" in said.err

    short = ["--only", "snnk", "--minutes", "5", "--set", "train.steps=2", "train.device=cpu"]
    assert run_experiments.main([*short, "--runs", str(tmp_path / "others"), *places(tmp_path)[2:]]) == 0
    assert list(stored(tmp_path / "mine/model_cards/snnk")) == [("two_bodies", "dense", 0)]
    assert "QPNN" in (tmp_path / "mine/model_cards/snnk/README.md").read_text()


def test_commands_are_those_of_the_sweeps(tmp_path: Path, rendered: list[list[str]], monkeypatch, capsys) -> None:
    called: list[list[str]] = []
    monkeypatch.setattr(run_experiments, "timed", lambda words, seconds: called.append([*words[1:], seconds]) or 0)
    for name in ("glue", "imdb"):
        (tmp_path / "data" / name).mkdir(parents=True)
    assert run_experiments.main(["--minutes", "4", "--data", str(tmp_path / "data"), *places(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "lowrank is left out: --data has no folder cifar10" in said
    assert "attention_estimates is left out: there is no --model" in said
    for name in run_experiments.BEHIND:
        assert f"{name} is left out: there is no finished run of those that it reads" in said
    results = tmp_path / "mine/recipes"
    assert [[Path(words[0]).name, *words[1:-1]] for words in called[:6]] == [
        ["pointwise.py", "--output", str(results / "papers/programs/results/pointwise")],
        ["parameter_tables.py", "--output", str(results / "papers/programs/results/parameter_tables")],
        ["low_rank_samples.py", "--output", str(results / "papers/programs/results/low_rank_samples")],
        ["snnk_layer.py", "--output", str(results / "benchmarks/results/snnk_layer/begun.json")],
        ["attention.py", "--output", str(results / "benchmarks/results/attention/begun.json")],
        ["lowrank_init.py", "--resume", "--output", str(results / "benchmarks/results/lowrank_init/begun.json")],
    ]
    studies = ["snnk", "glue", "uptraining", "fmm", "kernels", "sparsity", "draws", "spectraformer", "lra"]
    assert [[Path(words[0]).name, *words[1:3]] for words in called[6:]] == [
        ["study.py", "run", name] for name in studies
    ]
    # Nobody needed any.
    assert [round(words[-1], 1) for words in called] == pytest.approx(
        [240 / n for n in range(len(called), 0, -1)], abs=0.2
    )
    text = called[-1]
    assert f"data.dir={tmp_path / 'data/imdb'}" in text
    assert text[text.index("--tasks") + 1] == "text"
    assert text[text.index("--stored") + 1] == str(tmp_path / "mine/model_cards/lra.jsonl")
    for several in (called[6], called[10], called[13]):
        assert several[several.index("--data") + 1] == str(tmp_path / "data")
        assert not any(str(word).startswith("data.dir=") for word in several)
    pages = [["study.py", "page", name] for name in studies]
    assert [[Path(words[0]).name, *words[1:3]] for words in rendered[:-1]] == pages
    assert Path(rendered[-1][0]).name == "table_papers.py"
    assert rendered[-1][1:] == ["--write", "--root", str(tmp_path / "mine")]
    # The README's table is of the repository's own pages.
    monkeypatch.setattr(run_experiments, "ROOT", tmp_path)
    assert run_experiments.main(["--only", "fmm"]) == 0
    last = [[Path(words[0]).name, *words[1:]] for words in rendered[-2:]]
    assert last == [["table_papers.py", "--write", "--root", str(tmp_path)], ["table_results.py", "--write"]]


def test_what_this_repository_has_is_not_measured_again(rendered: list[list[str]], monkeypatch, tmp_path: Path) -> None:
    called: list[Sequence[str]] = []
    monkeypatch.setattr(run_experiments, "timed", lambda words, seconds: called.append(words) or 0)
    only = [*run_experiments.PROGRAMS, *run_experiments.BEHIND]
    assert run_experiments.main(["--only", *only, "--runs", str(tmp_path), "--model", "there"]) == 0
    assert called == []
    assert [Path(words[0]).name for words in rendered] == ["table_papers.py", "table_results.py"]


def test_programs_measure_for_a_page_of_claims_elsewhere(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    sizes = ("--inputs", "20", "--draws", "3", "--projections", "8", "512")
    small = run_experiments.Program("papers/programs/pointwise.py", sizes)
    monkeypatch.setitem(run_experiments.PROGRAMS, "pointwise", small)
    given = ["--only", "pointwise", "--minutes", "5", *places(tmp_path)]
    assert run_experiments.main(given) == 0
    figures = json.loads((tmp_path / "mine/recipes/papers/programs/results/pointwise/metrics.json").read_text())
    assert {row["projections"] for row in figures["rows"]} == {8, 512}
    page = (tmp_path / "mine/model_cards/README.md").read_text()
    (row,) = [line for line in page.splitlines() if "Few random features estimate a layer" in line]
    assert " with 8, " in row
    assert " with 512 projections" in row
    assert page.count("| not measured yet |") > 30
    capfd.readouterr()
    assert run_experiments.main(given) == 0
    assert "== pointwise" not in capfd.readouterr().out


@pytest.mark.usefixtures("rendered")
def test_a_benchmark_is_done_when_all_its_parts_are(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It writes after each of them."""
    folder = tmp_path / "mine/recipes/benchmarks/results/attention"
    called = []

    def measure(words: Sequence[str], seconds: float) -> int:
        Path(words[-1]).parent.mkdir(parents=True, exist_ok=True)
        Path(words[-1]).write_text("{}")
        called.append(words)
        return -15 if len(called) == 1 else 0

    monkeypatch.setattr(run_experiments, "timed", measure)
    for parts in (["begun.json"], ["metrics.json"], ["metrics.json"]):
        assert run_experiments.main(["--only", "attention", *places(tmp_path)]) == 0
        assert [file.name for file in folder.iterdir()] == parts
    assert len(called) == 2


def test_what_reads_runs_is_measured_again_when_there_are_more(tmp_path: Path, rendered: list[list[str]]) -> None:
    runs, mine = tmp_path / "runs", tmp_path / "mine"
    results = mine / "recipes/papers/programs/results"

    def called() -> list[list[str]]:
        rendered.clear()
        assert run_experiments.main(["--only", "spectra", "low_rank_errors", *places(tmp_path)]) == 0
        return [[Path(words[0]).stem, *words[1:]] for words in rendered[:-1]]

    first, second = (runs / f"draws/sparsity_50/posrf_gmm/seed{seed}" for seed in (0, 1))
    for run in (first, second, runs / "draws/sparsity_50/posrf_orf/seed0"):
        run.mkdir(parents=True)
    assert called() == []
    (first / "metrics.json").write_text("{}")
    assert called() == [["spectra", str(first), "--output", str(results / "spectra")]]
    put_figures(results / "spectra/metrics.json", {"models": [{}]})
    assert called() == []
    (second / "metrics.json").write_text("{}")
    assert called() == [["spectra", str(first), str(second), "--output", str(results / "spectra")]]

    put_figures(results / "spectra/metrics.json", {"models": [{}, {}]})
    reports = mine / "model_cards/lowrank"
    put_run(reports, "cifar10", "dense", 0, {})
    assert called() == []
    put_run(reports, "cifar10", "data_0.1", 0, {})
    assert called() == [["low_rank_errors", "--runs", f"{reports}.jsonl", "--output", str(results / "low_rank_errors")]]


@pytest.mark.usefixtures("rendered")
@pytest.mark.parametrize(("name", "code"), [("fmm", 143), ("fmm", -15), ("pointwise", -15)])
def test_what_was_stopped_has_not_failed(name: str, code: int, tmp_path: Path, monkeypatch, capsys) -> None:
    """By its own word, or while it was still starting; a program says that it does not go on."""
    monkeypatch.setattr(run_experiments, "timed", lambda words, seconds: code)
    assert run_experiments.main(["--only", name, *places(tmp_path)]) == 0
    said = capsys.readouterr()
    assert "failed" not in said.err
    again = "pointwise did not finish in its share of the time and starts over next time"
    assert (again in said.out) == (name == "pointwise")


CARDS = RECIPES.parent / "model_cards"


def differing(run: tuple[str, str, int], report: dict[str, Any], settings: Sequence[str]) -> list[str]:
    """Settings that a stored run has otherwise; what its recipe does not know is left out."""
    config, found = report["config"], []
    for setting in settings:
        name, _, value = setting.partition("=")
        read, kept = yaml.safe_load(value), config
        for key in name.split("."):
            kept = kept.get(key) if isinstance(kept, dict) else None
        if isinstance(kept, float) and isinstance(read, str):
            read = float(read)  # 1e-3 is a string in YAML
        if kept is not None and not isinstance(read, dict) and kept != read:
            found.append(f"{run}: {setting}, stored {kept}")
    return found


@pytest.mark.parametrize("name", [name for name, step in run_experiments.STEPS.items() if step.settings])
def test_further_runs_have_the_settings_of_the_stored_ones(name: str) -> None:
    """Otherwise a page would mix runs that cannot be compared."""
    step = run_experiments.STEPS[name]
    task = {"kernels": "pretraining"}.get(name, step.options[1] if "--tasks" in step.options else None)
    runs = {run: report for run, report in stored(CARDS / step.study).items() if task in (None, run[0])}
    assert runs
    assert [each for run, report in runs.items() for each in differing(run, report, step.settings)] == []


@pytest.mark.parametrize("name", ["snnk", "pairs", "fmm", "sparsity", "draws"])
def test_stored_runs_are_those_of_their_sweep(name: str) -> None:
    step = run_experiments.STEPS[name]
    tasks = load(step.study).tasks
    found = [
        (run, report, tasks[run[0]].methods[run[1]])
        for run, report in stored(CARDS / step.study).items()
        if run[0] in tasks and run[1] in tasks[run[0]].methods
    ]
    assert found
    assert [each for run in found for each in differing(*run)] == []


@pytest.mark.usefixtures("rendered")
def test_a_failure_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setattr(run_experiments, "timed", lambda words, seconds: 1)
    assert run_experiments.main(["--only", "snnk", *places(tmp_path)]) == 1
    assert "failed: snnk (exit code 1)" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        run_experiments.main(["--minutes", "0"])
