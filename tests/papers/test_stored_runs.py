"""Results as data: the reports of a study's runs are lines of one file, which is whole, in order, and one writer's."""

from __future__ import annotations

import json
import math
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
from papers.lib.reports import collect, read_reports, read_runs
from papers.study import main, written
from recipe_world import RECIPES

from snnk_peft.errors import ConfigError
from tests.fresh_process import run_python
from tests.stored_runs import put_run, stored

# What a line may break on: separators of lines in Unicode, quotes, empty texts, extreme numbers; keys out of order.
ODD: dict[str, Any] = {
    "z": 'a\u2028b\x85c\n"é" \\',
    "a": [5e-324, 1.7976931348623157e308, -0.0, 10**30],
    "": {"n": None},
}


def finish(runs: Path, task: str, method: str, seed: int, report: dict[str, Any]) -> None:
    """A finished run."""
    folder = runs / task / method / f"seed{seed}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.json").write_text(json.dumps(report))


def render(runs: Path, study: Path, write: Any = collect) -> int:
    """What `study.py page` does, without a page."""
    return written(study, lambda: write(runs, study))


def test_reports_come_back_as_they_were(tmp_path: Path) -> None:
    """Every figure and the order of its keys; lines by task, method and number of the seed, whatever came first."""
    runs, study = tmp_path / "runs", tmp_path / "cards/study"
    for seed in (10, 2):
        finish(runs, "b", "two", seed, {**ODD, "seed": seed})
    assert render(runs, study) == 0
    assert not study.exists()  # it holds no page yet
    for task, method in (("b", "one"), ("a", "two")):
        finish(runs, task, method, 0, ODD)
    finish(runs, "b", "two", 2, {"score": 1})
    assert render(runs, study) == 0
    expected = {("a", "two", 0): ODD, ("b", "one", 0): ODD, ("b", "two", 2): {"score": 1}}
    expected |= {("b", "two", 10): {**ODD, "seed": 10}}
    found = read_runs(study)
    assert json.dumps(list(found.items())) == json.dumps(list(expected.items()))
    assert math.copysign(1, found["a", "two", 0]["a"][2]) == -1
    file = tmp_path / "cards/study.jsonl"
    assert read_runs(file) == found
    assert [line.split(b'"report"')[0] for line in file.read_bytes().split(b"\n")[:2]] == [
        b'{"task":"a","method":"two","seed":0,',
        b'{"task":"b","method":"one","seed":0,',
    ]
    before = file.stat().st_mtime_ns, file.read_bytes()
    assert collect(runs, study) == 0
    assert (file.stat().st_mtime_ns, file.read_bytes()) == before  # nothing is new, nothing is written
    shutil.rmtree(runs)
    assert render(runs, study) == 0
    assert file.read_bytes() == before[1]


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ('{"task":"a","method":"b","seed":1,"rep', "Unterminated string"),
        ("", "Expecting value"),
        ("\xff", "can't decode"),
        ("[" * 100_000, "recursion"),
        ("[1]", "expected an object of task and method"),
        ('{"task":"a","method":"b","seed":true,"report":{}}', "expected an object of task and method"),
        ('{"task":"a","method":"b","report":{}}', "expected an object of task and method"),
        ('{"task":"a","method":"b","seed":0,"report":{}}', "a second report of a/b/0"),
    ],
)
def test_a_damaged_line_is_named(tmp_path: Path, line: str, fault: str, capsys: pytest.CaptureFixture[str]) -> None:
    """By whoever reads it, and no program changes the file."""
    study, file = tmp_path / "study", tmp_path / "study.jsonl"
    put_run(study, "a", "b", 0, {})
    file.write_bytes(file.read_bytes() + line.encode("latin-1") + b"\n")
    before = file.read_bytes()
    with pytest.raises(ConfigError, match=r"study\.jsonl, line 2: .*; restore the file, or delete the line") as told:
        read_reports(study, "a sweep")
    assert fault in str(told.value)
    finish(tmp_path / "runs", "a", "b", 5, {})
    assert render(tmp_path / "runs", study) == 2
    assert "study.jsonl, line 2: " in capsys.readouterr().err
    assert main(["run", "fmm", "--stored", str(file), "--out", str(tmp_path / "other")]) == 2
    assert "study.jsonl, line 2: " in capsys.readouterr().err
    assert file.read_bytes() == before


def test_two_writers_do_not_lose_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The second is refused while the first one works, and finds its runs behind it."""
    first, second, study = tmp_path / "first", tmp_path / "second", tmp_path / "study"
    finish(first, "task", "one", 0, {})
    finish(second, "task", "other", 0, {})

    def while_another_begins(runs: Path, out: Path) -> None:
        assert render(second, study) == 2
        assert "is being written by process" in capsys.readouterr().err
        assert collect(runs, out) == 1

    assert render(first, study, while_another_begins) == 0
    assert stored(study) == {("task", "one", 0): {}}
    assert render(second, study) == 0
    assert set(stored(study)) == {("task", "one", 0), ("task", "other", 0)}


def test_a_killed_writer_leaves_the_old_lines(tmp_path: Path) -> None:
    """Killed with all lines written and not yet renamed; the next one removes what it left."""
    runs, study, file = tmp_path / "runs", tmp_path / "study", tmp_path / "study.jsonl"
    put_run(study, "task", "one", 0, {"score": 1})
    before = file.read_bytes()
    finish(runs, "task", "one", 1, {"score": 2})
    code = (
        f"import os, signal, sys; from pathlib import Path; sys.path.append({str(RECIPES)!r}); "
        "from papers.study import written; from papers.lib.reports import collect; "
        "os.replace = lambda *names: os.kill(os.getpid(), signal.SIGKILL); "
        f"written(Path({str(study)!r}), lambda: collect(Path({str(runs)!r}), Path({str(study)!r})))"
    )
    assert run_python(["-c", code]).returncode == -signal.SIGKILL
    assert file.read_bytes() == before
    assert len(list(tmp_path.glob(".study.jsonl.*.tmp"))) == 1
    assert render(runs, study) == 0
    assert set(stored(study)) == {("task", "one", 0), ("task", "one", 1)}
    assert not list(tmp_path.glob(".*"))


def test_reports_of_the_earlier_layout_are_told_of_and_taken_over(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file each, in a folder of the study's name."""
    study, renamed = tmp_path / "study", tmp_path / "earlier"
    (study / "task/one").mkdir(parents=True)
    (study / "task/one/seed3.json").write_text(json.dumps(ODD))
    for code in (
        main(["run", "fmm", "--stored", str(study), "--out", str(tmp_path / "other")]),
        render(tmp_path / "none", study),
    ):
        assert code == 2
    assert capsys.readouterr().err.count("Rename the folder and give its new name once as --runs") == 2
    study.rename(renamed)
    assert render(renamed, study) == 0
    assert stored(study) == {("task", "one", 3): ODD}


def test_a_run_whose_name_has_no_number_is_refused(tmp_path: Path) -> None:
    (tmp_path / "runs/task/one/seed0_copy").mkdir(parents=True)
    (tmp_path / "runs/task/one/seed0_copy/metrics.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"seed0_copy.*: expected seed and its number as the name of a run"):
        collect(tmp_path / "runs", tmp_path / "study")


def test_stored_lines_are_finished_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Named by the file or by the study; those of other seeds are still to run."""
    put_run(tmp_path / "study", "listops", "softmax", 0, {})
    put_run(tmp_path / "study", "listops", "softmax", 7, {})
    asked = ["--tasks", "listops", "--methods", "softmax", "--seeds", "0", "--out", str(tmp_path / "runs")]
    for name in ("study.jsonl", "study"):
        assert main(["run", "fmm", *asked, "--stored", str(tmp_path / name)]) == 0
        assert "1 runs, 1 finished; 0 runs left" in capsys.readouterr().out


def test_the_stored_studies_are_as_they_would_be_written(tmp_path: Path, root: Path) -> None:
    """Byte for byte: an edit by hand, or a merge that mixed lines up, is seen."""
    files = sorted((root / "model_cards").glob("*.jsonl"))
    assert files
    for file in files:
        runs = read_runs(file)
        copy = tmp_path / file.stem
        for (task, method, seed), report in runs.items():
            finish(copy, task, method, seed, report)
        collect(copy, tmp_path / file.name)
        assert [*runs] == sorted(runs)
        assert (tmp_path / file.name).read_bytes() == file.read_bytes(), file.name
