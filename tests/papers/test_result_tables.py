"""Tables of the README and of the papers' claims: figures of stored reports, verdicts of statistics."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from papers import table_papers, table_results
from papers.claims import learned_kernels, lecture, snnk
from papers.lib.verdicts import (
    DIRECTION,
    FAILS,
    HOLDS,
    UNTESTED,
    VERDICTS,
    Claim,
    Measured,
    NotMeasuredError,
    Store,
    all_of,
    as_good,
    gain,
    interval,
    ratio,
    unchanged,
)
from PIL import Image
from scipy import stats

from snnk_peft.errors import ConfigError
from tests.stored_runs import put_figures, put_run, put_runs

ROOT = Path(__file__).resolve().parents[2]


def test_intervals_are_those_of_student() -> None:
    values = [1.0, 2.5, 0.5, 3.0]
    mean, low, high = interval(values)
    expected = stats.t.interval(0.95, 3, loc=np.mean(values), scale=stats.sem(values))
    assert (mean, low, high) == pytest.approx((np.mean(values), *expected))


@pytest.mark.parametrize(
    ("values", "least", "verdict"),
    [
        ([2.0, 2.1, 2.2], 1.0, HOLDS),
        ([2.0, 2.1, 2.2], 3.0, DIRECTION),
        ([-2.0, -2.1, -2.2], 0.0, FAILS),
        ([-2.0, 2.1, 0.3], 0.0, UNTESTED),
        ([5.0], 0.0, UNTESTED),
        ([0.0, 0.0, 0.0], 0.0, FAILS),
    ],
)
def test_gains(values: list[float], least: float, verdict: str) -> None:
    found = gain(values, least)
    assert found.verdict == verdict
    assert ("do not decide" in found.ours) == (verdict == UNTESTED)
    assert f"{np.mean(values):+.1f}" in found.ours


@pytest.mark.parametrize(
    ("values", "verdict"),
    [([-0.5, -0.4, -0.6], HOLDS), ([-5.0, -5.1, -4.9], FAILS), ([-0.5, -4.0, 2.0], UNTESTED), ([3.0], UNTESTED)],
)
def test_as_good(values: list[float], verdict: str) -> None:
    assert as_good(iter(values), 1.0).verdict == verdict


@pytest.mark.parametrize(
    ("values", "verdict"),
    [([1.0, 0.0, -1.0], HOLDS), ([40.0, 41.0, 42.0], FAILS), ([-40.0, -41.0, -42.0], FAILS), ([0.0, 30.0], UNTESTED)],
)
def test_unchanged(values: list[float], verdict: str) -> None:
    assert unchanged(values, 25).verdict == verdict


@pytest.mark.parametrize(("value", "verdict"), [(30.0, HOLDS), (5.0, DIRECTION), (-5.0, FAILS)])
def test_ratios(value: float, verdict: str) -> None:
    found = ratio(value, 20.0, "time")
    assert found.verdict == verdict
    assert found.ours == f"{abs(value):.1f} % {'more' if value < 0 else 'less'} time"


def test_several_figures_have_the_least_favourable_verdict() -> None:
    parts = [Measured(name, name) for name in (HOLDS, DIRECTION, UNTESTED, FAILS)]
    for number, expected in enumerate((HOLDS, DIRECTION, UNTESTED, FAILS), 1):
        found = all_of(*reversed(parts[:number]))
        assert found.verdict == expected
        assert found.ours.split("; ") == [part.ours for part in reversed(parts[:number])]


def test_differences_are_of_equal_seeds(tmp_path: Path) -> None:
    study = tmp_path / "model_cards/page"
    for seed, score in ((0, 0.5), (1, 0.7), (10, 0.9)):
        put_run(study, "task", "one", seed, {"metrics": {"f1": score}})
    for seed, score in ((1, 0.6), (0, 0.1), (2, 0.0)):
        put_run(study, "task", "other", seed, {"metrics": {"f1": score}})
    store = Store(tmp_path)
    assert store.differences("page", "task", "one", "other", "metrics.f1", 100) == pytest.approx({0: 40, 1: 10})
    assert store.methods("page", "task") == ["one", "other"]
    with pytest.raises(NotMeasuredError):
        store.reports("page", "task", "absent")
    with pytest.raises(NotMeasuredError):
        store.figures("benchmarks/results/absent")
    put_run(study, "task", "third", 7, {"metrics": {"f1": 1.0}})
    with pytest.raises(NotMeasuredError):
        Store(tmp_path).differences("page", "task", "one", "third", "metrics.f1")


def test_a_page_from_a_few_reports(tmp_path: Path) -> None:
    """The numbers come from the reports, and what is absent is said."""
    for method, scores in {"one": (0.80, 0.81, 0.82), "other": (0.70, 0.70, 0.73)}.items():
        put_runs(tmp_path / "model_cards/page", "task", method, *({"score": score} for score in scores))

    def claim(method: str) -> Claim:
        def measure(store: Store) -> Measured:
            return gain(store.differences("page", "task", method, "other", "score", 100).values())

        return Claim("Table 9", f"{method} wins", "+1", measure, "tiny", "model_cards/page", "sweep.py")

    paper = SimpleNamespace(TITLE="A paper", CLAIMS=[claim("one"), claim("absent")])
    page = table_papers.render(Store(tmp_path), (paper,))
    assert "| A paper | 1 | 0 | 0 | 0 | 1 |" in page
    assert "| Table 9 | one wins | +1 | +10.0 points (" in page
    assert "| **holds** | [page](../model_cards/page/), `sweep.py` |" in page
    assert f"| Table 9 | absent wins | +1 | – | tiny | {table_papers.OPEN} |" in page
    # The other way round.
    put_runs(tmp_path / "model_cards/page", "task", "one", *({"score": score} for score in (0.10, 0.11, 0.12)))
    assert "**does not hold**" in table_papers.render(Store(tmp_path), (paper,)).split("## A paper")[1]


def test_half_of_the_layers_decides_and_what_is_beyond_is_told(tmp_path: Path) -> None:
    study = tmp_path / "model_cards/uptraining"
    for method, score in {"full": 0.83, "top6_m8_paper": 0.70}.items():
        put_runs(study, "mrpc", method, *[{"metrics": {"f1": score}}] * 3)
    with pytest.raises(NotMeasuredError):
        snnk.uptraining(Store(tmp_path))
    put_runs(study, "mrpc", "top3_m8_fitted", *[{"metrics": {"f1": 0.831}}] * 3)
    found = snnk.uptraining(Store(tmp_path))
    assert found.verdict == HOLDS
    assert found.ours.startswith("3 of 6, fitted start +0.1 points")
    assert "and beyond half: 6 of 6, paper start -13.0 points" in found.ours


def test_adapters_are_compared_with_lora_on_both_machines(tmp_path: Path) -> None:
    measure = snnk.beside_lora("mine")
    with pytest.raises(NotMeasuredError):
        measure(Store(tmp_path))

    def run(page: str, method: str, scores: list[float]) -> None:
        for task in snnk.GLUE:
            put_runs(tmp_path / "model_cards" / page, task, method, *({"score": score} for score in scores))

    run("glue", "lora_r8", [0.6, 0.7, 0.8])
    run("glue", "mine", [0.5, 0.7, 0.9])
    assert measure(Store(tmp_path)).verdict == UNTESTED
    assert "GPU" not in measure(Store(tmp_path)).ours
    run("glue_gpu", "lora_r8", [0.6, 0.7, 0.8, 0.9])
    run("glue_gpu", "mine", [0.57, 0.66, 0.77, 0.86])
    assert measure(Store(tmp_path)).verdict == FAILS  # the other machine's seeds decide
    assert measure(Store(tmp_path)).ours.endswith("GPU -3.5 points (-4.4 to -2.6; n = 4)")


def test_further_maps_cannot_gain_where_one_is_always_right(tmp_path: Path) -> None:
    for method, score in {"linear_1": 0.3, "linear_3": 0.4, "fmm_64_1": 1.0, "fmm_64_3": 1.0}.items():
        put_runs(tmp_path / "model_cards/fmm", "copy", method, *[{"accuracy": score}] * 3)
    found = lecture.further_ranks("copy")(Store(tmp_path))
    assert found.verdict == UNTESTED
    assert found.ours.startswith("linear +10.0 points")
    assert found.ours.endswith("where one is always right")
    put_run(tmp_path / "model_cards/fmm", "copy", "fmm_64_1", 2, {"accuracy": 0.9})
    assert "always right" not in lecture.further_ranks("copy")(Store(tmp_path)).ours
    with pytest.raises(NotMeasuredError):
        lecture.further_ranks("listops")(Store(tmp_path))


def test_votes_are_compared_with_one_draw_over_models(tmp_path: Path) -> None:
    with pytest.raises(NotMeasuredError):
        learned_kernels.voting(Store(tmp_path))
    for method, gains in {"posrf_gmm": (1.2, 1.21, 1.22), "trigrf_gmm": (1.0, 1.6, 0.9)}.items():
        for seed, value in enumerate(gains):
            split = {"voting_gain": value, "accuracy": 0.5, "voting_accuracy": 0.5 * value, "pi_share": 0.25}
            report = {"evaluation": {"draws": {"splits": {"test": split}}}}
            put_run(tmp_path / "model_cards/draws", "sparsity_50", method, seed, report)
    found = learned_kernels.voting(Store(tmp_path))
    positive, trigonometric = found.ours.split("; trigrf_gmm ")
    low, high = stats.t.interval(0.95, 2, loc=21, scale=stats.sem([20, 21, 22]))
    assert positive.startswith(f"posrf_gmm +21 % ({low:+.0f} to {high:+.0f}; n = 3): 50.0 to 60.5 % right, 25.0 % of")
    assert "do not decide" in trigonometric
    assert found.verdict == UNTESTED


def test_eigenvalues_are_compared_over_seeds(tmp_path: Path) -> None:
    def model(name: str, kind: str, *heads: tuple[float, float]) -> dict[str, Any]:
        return {"model": name, "layers": [{"map": kind, "heads": [{"maximum": a, "mean": b} for a, b in heads]}]}

    models = [
        model("a/seed0", "posrf-gmm", (0.4, 0.2), (0.3, 0.1)),
        model("a/seed1", "posrf-gmm", (0.2, 0.2), (0.3, 0.2)),
        model("b/seed0", "posrf-generative", (9.0, 9.0)),
    ]
    file, store = tmp_path / "recipes/papers/programs/results/spectra/metrics.json", Store(tmp_path)
    put_figures(file, {"models": models})
    found = learned_kernels.eigenvalues(store)
    assert found == Measured("a: largest 0.35 ± 0.05, mean 0.18 ± 0.02 (2 seeds)", HOLDS)
    put_figures(file, {"models": [*models, model("c/seed0", "trigrf-gmm", (1.2, 0.9))]})
    assert learned_kernels.eigenvalues(store).verdict == DIRECTION
    put_figures(file, {"models": [*models, model("c/seed0", "trigrf-gmm", (1.2, 1.1))]})
    assert learned_kernels.eigenvalues(store).verdict == FAILS
    put_figures(file, {"models": models[2:]})
    with pytest.raises(NotMeasuredError):
        learned_kernels.eigenvalues(store)


def test_the_stored_page_is_that_of_the_stored_reports() -> None:
    assert (ROOT / "model_cards/README.md").read_text(encoding="utf-8") == table_papers.render(Store(ROOT))


def test_every_claim_leads_somewhere() -> None:
    """Programs exist; folders exist where something is measured; every paper has claims with each part filled in."""
    store = Store(ROOT)
    for paper in table_papers.PAPERS:
        for claim in paper.CLAIMS:
            assert all(claim)
            for program in claim.command.split(";"):
                assert (ROOT / "recipes" / program.split()[0]).is_file(), claim.command
            found = table_papers.measured(claim, store)
            assert found.verdict in (*VERDICTS, table_papers.OPEN)
            if found.verdict != table_papers.OPEN:
                assert (ROOT / claim.page).is_dir(), claim.page


FAR, STEP = "convert_llama/metrics", "adapter_step/metrics"


@pytest.fixture
def copied(root: Path, tmp_path: Path) -> Path:
    """The stored figures in a folder of their own."""
    shutil.copytree(root / "recipes/benchmarks/results", tmp_path / "recipes/benchmarks/results")
    shutil.copytree(root / "model_cards", tmp_path / "model_cards")
    return tmp_path


def stored(root: Path, name: str) -> Any:
    return json.loads((root / f"recipes/benchmarks/results/{name}.json").read_text())


def test_readme_has_the_measured_results(root: Path) -> None:
    text = (root / "README.md").read_text()
    rendered = table_results.render(root)
    assert table_results.replaced(text, rendered) == text, "run recipes/papers/table_results.py --write"
    other = text.replace("LoRA's seconds |", "LoRA's minutes |")
    assert other != text
    assert table_results.replaced(other, rendered) == text
    assert f"]({table_results.PICTURE})" in text
    assert (root / table_results.PICTURE).stat().st_size < 100_000


def test_rows_have_the_figures_of_the_files(root: Path) -> None:
    header, _, *rows = table_results.render(root).splitlines()
    assert header == "| task | before | after | cost |"
    assert len(rows) == 9
    curve = {(row["point"], row["as"]): row for row in stored(root, "convert_curve/sst2")["rows"]}
    for row, point in zip(rows[:2], (("original", "int8"), ("plan 2x", "fp32")), strict=True):
        told = curve[point]
        assert f"| {100 * told['score']:.1f} at {told['speed-up']:.1f} × the speed, " in row
        assert f" {100 * told['agreement']:.1f} % the same answers |" in row
    models = {row["model"]: row for row in stored(root, "convert_embeddings/metrics")["rows"]}
    original, int8, small = (models[name] for name in ("original", "original int8", "2x"))
    assert f"| Spearman on STS-B {100 * original['spearman']:.1f} | {100 * small['spearman']:.1f} at " in rows[4]
    assert f" cosine {small['cosine']:.3f}; " in rows[4]
    assert f" {int8['speed-up']:.1f} ×, {int8['cosine']:.3f} |" in rows[4]
    ours = next(row for row in stored(root, FAR)["rows"] if row["model"] == "converted, 0.1")
    told = ours["cache bytes behind 8192"] / 1e6, ours["reviews, to 2048"], 100 * ours["copied after 640"]
    assert "| {:.0f} MB; {:.1f}; {:.0f} % |".format(*told) in rows[5]
    page = (root / "model_cards/glue_gpu/README.md").read_text()
    for method in ("lora_r8", "rows6_fitted_head", "full"):
        line = next(line for line in page.splitlines() if line.startswith(f"| {method} |"))
        assert f" {line.split('|')[7].strip()}" in rows[7]  # its average


def test_curves_begin_at_the_original_and_keep_every_size(root: Path) -> None:
    curves = table_results.curves(root)
    rows = stored(root, "convert_curve/sst2")["rows"]
    for way in ("plan", "svd", "distilled"):
        sizes = [(row["speed-up"], 100 * row["agreement"]) for row in rows if row["point"].startswith(f"{way} ")]
        kinds = [row["as"] for row in rows if row["point"].startswith(f"{way} ")]
        full = sorted(size for size, kind in zip(sizes, kinds, strict=True) if kind == "fp32")
        assert curves[way, "fp32"] == [(1.0, 100.0), *full]
    assert len(curves["original", "int8"]) == 1
    assert curves["plan", "int8"]


def test_the_picture_fits_a_phone(root: Path, tmp_path: Path) -> None:
    table_results.draw(table_results.curves(root), tmp_path / "picture.png")
    width, height = Image.open(tmp_path / "picture.png").size
    assert 600 <= width <= 800
    assert height <= 1.1 * width


def test_changed_figures_change_the_table(copied: Path) -> None:
    before = table_results.render(copied)
    file = copied / f"recipes/benchmarks/results/{STEP}.json"
    figures = json.loads(file.read_text())
    next(row for row in figures["rows"] if row["method"] == "rows")["time / LoRA"] = 7.0
    file.write_text(json.dumps(figures))
    assert "a step: 7.00 × LoRA's time" in table_results.render(copied)
    assert "a step: 7.00 × LoRA's time" not in before


def test_what_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no lines"):
        table_results.replaced("no marks", "table")
    with pytest.raises(ConfigError, match="cannot be read"):
        table_results.render(tmp_path)
