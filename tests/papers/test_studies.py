"""recipes/papers/studies: every file is read whole, and all that it names is there."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pytest
from papers import study
from papers.lib.study import PAPERS, STUDIES, entries, expanded, load

KEYS = {"about", "program", "config", "settings", "methods", "tasks", "further", "seeds", "page", "shared", "draws"}
KEYS |= {"rates_from", "rates", "rates_of", "only", "without", "needs", "pretraining"}


@pytest.mark.parametrize("name", STUDIES)
def test_it_names_what_there_is(name: str) -> None:
    given = entries(name)
    assert given.keys() <= KEYS
    assert set(given.get("only", ())) <= given["methods"].keys()
    found = load(name)
    assert set(found.chosen) <= found.tasks.keys()
    assert not found.page or (PAPERS / "pages" / f"{found.page}.py").is_file()
    for task in found.tasks.values():
        assert task.program.is_file()
        assert task.config.is_file()
        for method, settings in task.methods.items():
            assert all(re.fullmatch(r"[a-z_.0-9]+=.+", setting) for setting in settings), method
            assert "<" not in "".join([method, *settings])


def test_a_name_with_places_stands_for_all_combinations() -> None:
    of = {"a": ["x", "y"], "b": {"": {"n": 1}, "_two": {"n": 2}}}
    settings = ["s=<a>", ["t=<b.n>"]]
    assert expanded({"<a><b>": {"for": of, "settings": settings}, "z": ["u=1", ["v=2"]]}) == {
        "x": ["s=x", "t=1"],
        "x_two": ["s=x", "t=2"],
        "y": ["s=y", "t=1"],
        "y_two": ["s=y", "t=2"],
        "z": ["u=1", "v=2"],
    }


@pytest.mark.parametrize("words", [["run", "none"], ["page"], ["show", "glue"]])
def test_what_is_no_study_is_refused(words: Sequence[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        study.main([*words])
    assert stop.value.code == 2
    assert "usage: study.py" in capsys.readouterr().err


def test_a_study_without_a_page_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert study.main(["page", "glue_rates"]) == 2
    assert "glue_rates has no page of its own" in capsys.readouterr().err
