"""CITATION.cff, the workflow and the issue forms: valid, of this version, and naming what is there."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import typer.main
import yaml

import snnk_peft
from snnk_cli.app import app

ROOT = Path(__file__).resolve().parents[1]
FORMS = sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml"))
# Python 3.10 reads no TOML.
PROJECT = dict(re.findall(r'^([a-z-]+) = "(.*)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE))


def read(file: Path) -> dict[Any, Any]:
    return yaml.safe_load(file.read_text(encoding="utf-8"))


def test_the_version_stands_once():
    assert PROJECT["version"] == snnk_peft.__version__


def test_citation():
    cited = read(ROOT / "CITATION.cff")
    assert cited["cff-version"] == "1.2.0"
    assert (cited["title"], cited["version"]) == ("snnk_peft", snnk_peft.__version__)
    assert cited["license"] == PROJECT["license"]
    assert cited["authors"] == [{"name": "The snnk_peft authors"}]
    assert cited["message"]
    allowed = {"type", "title", "authors", "year", "url", "institution"}
    for paper in cited["references"]:
        assert {"type", "title", "authors", "year"} <= set(paper) <= allowed, paper["title"]
        assert paper["type"] in {"article", "slides"}
        assert all(set(author) == {"family-names", "given-names"} for author in paper["authors"])
        assert paper["year"] in range(2021, 2030)


def words(title: str) -> set[str]:
    return set(re.findall(r"[\w-]+", title.lower()))


def test_citation_has_the_papers_of_the_errata():
    papers = re.findall(r"^## (?!Lecture)(.*)$", (ROOT / "ERRATA.md").read_text(encoding="utf-8"), re.MULTILINE)
    cited = [paper["title"] for paper in read(ROOT / "CITATION.cff")["references"] if paper["type"] == "article"]
    assert len(papers) == len(cited)
    assert all(any(words(paper) <= words(title) for title in cited) for paper in papers)


def test_the_workflow_runs_what_a_change_must_pass():
    workflow = read(ROOT / ".github/workflows/ci.yml")
    assert set(workflow[True]) == {"push", "pull_request"}  # YAML reads the key `on` as a truth value
    (job,) = workflow["jobs"].values()
    assert job["runs-on"] == "ubuntu-latest"
    assert job["timeout-minutes"] == 90
    program = ROOT / next(step["run"] for step in job["steps"] if "run" in step)
    assert program == ROOT / ".ci/run"
    assert os.access(program, os.X_OK)
    actions = [step["uses"] for step in job["steps"] if "uses" in step]
    assert [re.fullmatch(r"actions/(checkout|setup-python)@v\d+", action)[1] for action in actions] == [
        "checkout",
        "setup-python",
    ]
    setup = job["steps"][1]["with"]
    assert all((ROOT / name).is_file() for name in setup["cache-dependency-path"].split())
    version = tuple(map(int, setup["python-version"].split(".")))
    assert version >= tuple(map(int, PROJECT["requires-python"].removeprefix(">=").split(".")))


@pytest.mark.parametrize("form", [form for form in FORMS if form.name != "config.yml"], ids=lambda form: form.stem)
def test_issue_forms(form):
    asked = read(form)
    assert asked["name"]
    assert asked["description"]
    fields = [field for field in asked["body"] if field["type"] != "markdown"]
    assert {field["type"] for field in fields} <= {"input", "textarea"}
    assert len({field["id"] for field in fields}) == len(fields)
    assert all(field["attributes"]["label"] for field in fields)
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    named = re.findall(r"`snnk ([a-z]+) ([A-Z]+) (--[a-z]+)`", form.read_text())
    assert ("check", "MODEL", "--json") in named
    for name, _, option in named:
        assert option in {each for parameter in commands[name].params for each in parameter.opts}
    assert "snnk --version" in form.read_text()


def test_issues_start_from_a_form():
    assert read(ROOT / ".github/ISSUE_TEMPLATE/config.yml") == {"blank_issues_enabled": False}
    assert {form.stem for form in FORMS} == {"bug_report", "new_family", "config"}
