"""Reports of finished runs as a study keeps them, a line each, written and read without the recipes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def report(**figures: Any) -> dict[str, Any]:
    """What every run reports, of one on a processor, with these figures."""
    about = {"device": "cpu", "environment": {"torch_threads": 1}, "config": {"model": {"name_or_path": "minilm"}}}
    return {**about, **figures}


def put_run(study: Path, task: str, method: str, seed: int, report: dict[str, Any]) -> None:
    """Add a report to <study>.jsonl, or put it in the place of that of the same run."""
    found = {**stored(study), (task, method, seed): report}
    study.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"task": t, "method": m, "seed": s, "report": r}) for (t, m, s), r in found.items()]
    study.with_name(f"{study.name}.jsonl").write_text("".join(f"{line}\n" for line in lines))


def put_runs(study: Path, task: str, method: str, *reports: dict[str, Any]) -> None:
    """A report for each seed from 0."""
    for seed, report in enumerate(reports):
        put_run(study, task, method, seed, report)


def put_figures(file: Path, figures: Any) -> None:
    """A metrics.json, in folders that are made."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(figures))


def drop_run(study: Path, task: str, method: str, *seeds: int) -> None:
    """Delete the lines of a method, or of some of its seeds."""
    file = study.with_name(f"{study.name}.jsonl")
    kept = [
        line
        for line in file.read_text().splitlines(keepends=True)
        if (entry := json.loads(line))["task"] != task
        or entry["method"] != method
        or (seeds and entry["seed"] not in seeds)
    ]
    file.write_text("".join(kept))


def stored(study: Path) -> dict[tuple[str, str, int], dict[str, Any]]:
    """(task, method, seed) -> report, as the lines stand."""
    file = study.with_name(f"{study.name}.jsonl")
    entries = [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []
    return {(entry["task"], entry["method"], entry["seed"]): entry["report"] for entry in entries}
