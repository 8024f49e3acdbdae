"""The pages of glue and vision show every run that is stored; the README names every method that ran."""

from __future__ import annotations

from pathlib import Path

from papers import study
from papers.lib.reports import chosen_rates, rates, read_reports
from papers.lib.study import load
from papers.pages import glue as glue_page

from tests.stored_runs import put_figures, put_run, put_runs, report


def store(root: Path, scores: dict[tuple[str, str], list[float]]) -> None:
    sizes = {"processor_seconds_per_epoch": 1.0, "trainable_parameters": 7, "examples": {"train": 10}}
    for (task, method), values in scores.items():
        reports = [report(score=score, seed=seed, **sizes) for seed, score in enumerate(values)]
        put_runs(root / "model_cards/glue", task, method, *reports)


def test_every_seed_is_listed_and_plateaus_are_marked(tmp_path: Path) -> None:
    store(tmp_path, {("stsb", "lora_r8"): [0.8, 0.07, -0.03, 0.4], ("cola", "lora_r8"): [0.0], ("stsb", "mine"): [0.5]})
    page = glue_page.render(glue_page.in_order(read_reports(tmp_path / "model_cards/glue", "glue")), {})
    lines = page.split("Every seed.")[1].splitlines()
    assert any(line.startswith("| method |") for line in lines)
    # The best CoLA run is no better than a constant answer, and has stayed there like any other.
    assert "| lora_r8 | 0.0* | 80.0, 7.0*, -3.0*, 40.0 |" in lines
    assert "| mine | – | 50.0 |" in lines


def test_differences_are_between_runs_of_one_seed(tmp_path: Path) -> None:
    store(tmp_path, {("stsb", "lora_r8"): [0.8, 0.6], ("stsb", "full"): [0.9, 0.75, 0.1], ("stsb", "ia3"): [0.7]})
    store(tmp_path, {("cola", "lora_r8"): [0.2], ("cola", "full"): [0.1]})
    rows = glue_page.differences(glue_page.in_order(read_reports(tmp_path / "model_cards/glue", "glue")))
    assert rows == [["ia3", "–", "-10.0", "–"], ["full", "-10.0", "+12.5 ± 2.5 (2)", "+1.2"]]


def test_the_rate_is_that_of_the_best_mean_over_all_tasks(tmp_path: Path) -> None:
    """A rate that has not run everywhere yet is no candidate; the dev score plays no part."""
    scores = {"lora_r8@0.001": [0.5, 0.3], "lora_r8@0.002": [0.4, 0.6], "lora_r8@0.004": [0.9], "full@5e-05": [0.1, 0]}
    for method, values in scores.items():
        for task, value in zip(("mrpc", "cola"), values, strict=False):
            put_run(tmp_path / "tuned", task, method, 100, {"score_held_back": value, "score": 1 - value})
    assert chosen_rates(tmp_path / "tuned") == {"lora_r8": 0.002, "full": 5e-05}
    assert chosen_rates(tmp_path / "none") == {}
    assert glue_page.tuning(rates(tmp_path / "tuned")) == [
        ["lora_r8", "0.001: 40.0, **0.002: 50.0**"],
        ["full", "**5e-05: 5.0**"],
    ]


def test_every_method_is_tuned_with_equal_effort() -> None:
    """As many rates for each, and nothing else differs from the runs of the table."""
    runs, tried = load("glue").tasks["cola"], load("glue_rates").tasks["cola"]
    assert (runs.program, runs.config) == (tried.program, tried.config)
    trained = [name for name, settings in runs.methods.items() if "train.epochs=0" not in settings]
    assert len(tried.methods) == 3 * len(trained)
    for name, settings in tried.methods.items():
        method, _, rate = name.rpartition("@")
        same = [each for each in runs.methods[method] if not each.startswith("train.learning_rate=")]
        assert settings == [*same, f"train.learning_rate={float(rate):g}"]
        assert len(runs.methods[method]) - len(same) in (0, 1)


def test_every_method_of_the_sweep_has_a_name() -> None:
    other_program = {"adapters_seq_bn", "adapters_double_seq_bn"}  # recipes/papers/peers/adapters_glue.py
    assert glue_page.NAMES.keys() == load("glue").tasks["cola"].methods.keys() | other_program


def test_the_page_shows_what_is_stored(tmp_path: Path, root: Path) -> None:
    for method, scores in {"lora_r4": [0.8, 0.9], "full": [0.95]}.items():
        for seed, score in enumerate(scores):
            sizes = {"trainable_parameters": 7, "trainable_parameters_without_classifier": 5}
            config = {"model": {"name_or_path": "vit"}, "train": {"epochs": 3, "eval_every": "end"}}
            examples = {"train": 10, "test": 50}
            figures = report(score=score, seconds_per_epoch=2.0 - seed, examples=examples, config=config, **sizes)
            put_figures(tmp_path / "runs/digits" / method / f"seed{seed}/metrics.json", figures)
    assert study.main(["page", "vision", "--runs", str(tmp_path / "runs"), "--out", str(tmp_path / "out")]) == 0
    lines = (tmp_path / "out/README.md").read_text().splitlines()
    rows = [line for line in lines if line.startswith(("| full", "| lora"))]
    assert rows == [
        "| full | 95.0 | 95.0 | 7 | 5 | 10 | 3 | at end | 2.0 |",
        "| lora_r4 | 85.0 ± 7.1 (2) | 80.0, 90.0 | 7 | 5 | 10 | 3 | at end | 1.0 |",
    ]
    assert (tmp_path / "out/digits.png").stat().st_size > 1000


def test_stored_runs_are_of_methods_of_the_study(root: Path) -> None:
    table = read_reports(root / "model_cards/vision", "vision")
    assert all(row.keys() <= load("vision").tasks["digits"].methods.keys() for row in table.values())
