"""The study spectraformer: all pairs of the paper at equal processor time, on short whole expressions."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from data.listops import write_listops
from papers import study
from papers.claims import lecture, spectraformer
from papers.lib import printed_pairs, study_runs
from papers.lib.study import load
from papers.lib.verdicts import DIRECTION, FAILS, HOLDS, Measured, NotMeasuredError, Store
from scipy.stats import spearmanr

from tests.stored_runs import drop_run, put_figures, put_run

FEW = {"train": 64, "validation": 16, "test": 16}


def test_the_pairs_are_those_of_table_2() -> None:
    components, matrices = ("posrf", "oprf", "saderf"), ("orf", "sorf", "qmc", "mm", "sgq", "fastfood_learned")
    pairs = {f"{component}_{matrix}" for component in components for matrix in matrices}
    assert len(pairs) == 18
    assert set(load("spectraformer").tasks["listops"].methods) - {"performer_pytorch"} == {"softmax", *pairs}
    for task in load("spectraformer").tasks.values():
        budgets = {tuple(each for each in own if "max_cpu_minutes" in each) for own in task.methods.values()}
        assert len(budgets) == 1


def test_from_expressions_to_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Expressions are written once and whole; without its files Text is left out; the page has what has run."""
    written: list[Path] = []

    def few(place: Path, **bounds: int) -> None:
        written.append(place)
        write_listops(place, FEW, **bounds)

    monkeypatch.setattr("papers.lib.study_runs.write_listops", few)
    runs, cards = tmp_path / "runs", tmp_path / "cards"
    settings = ["train.steps=2", "train.eval_every=2", "model.dim=8", "model.hidden_dim=8", "train.device=cpu"]
    given = ["--methods", "posrf_mm", "saderf_orf", "--seeds", "0", "--out", str(runs)]
    assert study.main(["run", "spectraformer", *settings, *given]) == 0
    assert "text is left out" in capfd.readouterr().out
    assert study.main(["run", "spectraformer", *settings, *given]) == 0
    assert capfd.readouterr().out.count("2 runs, 2 finished; 0 runs left") == 1
    assert len(written) == 1
    low, high = study_runs.BOUNDS.values()
    lengths = [len(row.split("\t")[0].split()) for row in _rows(runs / "listops_files")]
    assert lengths
    assert low <= min(lengths)
    assert max(lengths) <= high
    report = json.loads((runs / "listops/posrf_mm/seed0/metrics.json").read_text())
    assert report["config"]["data"]["max_length"] == high
    assert report["device"] == "cpu"  # whether memory can be compared hangs on it
    assert study.main(["page", "lra", "--runs", str(runs), "--out", str(cards)]) == 0
    page = (cards / "README.md").read_text()
    assert "| posrf_mm | 1 |" in page
    assert "PosRF-MM against SADERF-ORF" in page
    assert "computed on CPU;" in page


def test_the_printed_figures_give_the_printed_means() -> None:
    """With those of Retrieval, which is not run here, from Table 2; means over matrices as section 4.2 has them."""
    retrieval = {
        "posrf": (80.53, 65.52, 80.71, 78.37, 80.67, 76.37),
        "oprf": (80.90, 77.47, 80.80, 79.29, 80.45, 78.32),
        "saderf": (80.87, 76.43, 80.65, 77.31, 80.48, 77.61),
    }
    hours = {
        "posrf": (2.89, 2.83, 2.89, 2.89, 2.89, 5.61),
        "oprf": (3.50, 3.41, 3.51, 3.47, 3.51, 5.86),
        "saderf": (3.58, 3.49, 3.58, 3.57, 3.58, 5.92),
    }
    means = {"posrf": (57.50, 2.71), "oprf": (58.53, 3.17), "saderf": (58.82, 3.21)}
    for component, expected in means.items():
        names = [f"{component}_{matrix}" for matrix in printed_pairs.MATRICES]
        both = [[printed_pairs.PRINTED[task][name] for name in names] for task in ("listops", "text")]
        accuracy = [sum(each) / 3 for each in zip(*([p.accuracy for p in row] for row in both), retrieval[component])]
        time = [sum(each) / 3 for each in zip(*([p.hours for p in row] for row in both), hours[component])]
        assert (sum(accuracy) / 6, sum(time) / 6) == pytest.approx(expected, abs=0.011)
    assert len({p.gigabytes for p in printed_pairs.PRINTED["text"].values()}) == 6  # learned Fastfood, and all others


def test_the_pairs_beside_the_paper() -> None:
    """Accuracies, and times as multiples of posrf_orf's; nothing of other tasks, or of a few pairs."""
    names = [f"{c}_{m}" for c in printed_pairs.COMPONENTS for m in printed_pairs.MATRICES]
    row = {
        name: [{"accuracy": 0.3 + number / 100 + extra, "cpu_seconds_per_step": 1 + number / 4} for extra in (0, 0.02)]
        for number, name in enumerate(names)
    }
    page = printed_pairs.beside("text", row)
    assert "| sorf | 32.0 ± 1.0 (63.3) | 38.0 ± 1.0 (64.3) | 44.0 ± 1.0 (64.5) |" in page
    assert "| fastfood_learned | 2.25 (1.97) | 3.75 (2.06) | 5.25 (2.07) |" in page
    printed = [printed_pairs.PRINTED["text"][name].accuracy for name in names]
    expected = spearmanr(range(18), printed).statistic
    assert any(f"over 18 pairs, text: ρ = {expected:+.2f} " in line for line in page)
    assert printed_pairs.beside("image", row) == []
    assert printed_pairs.beside("text", dict(list(row.items())[:8])) == []
    assert printed_pairs.beside("text", {name: row[name] for name in names[1:]}) == []
    lacking = printed_pairs.beside("text", {name: row[name] for name in names if name != "oprf_sorf"})
    assert "| sorf | 32.0 ± 1.0 (63.3) |  | 44.0 ± 1.0 (64.5) |" in lacking
    once = printed_pairs.beside("text", row | {"posrf_sorf": row["posrf_sorf"][:1]})
    assert "| sorf | 31.0 (63.3) | 38.0 ± 1.0 (64.3) | 44.0 ± 1.0 (64.5) |" in once  # one run says nothing of others


def test_claims_about_means_over_pairs(tmp_path: Path) -> None:
    """Of runs made so that each part of a pair adds its own; tasks and seeds that some pair lacks do not count."""
    components = {"posrf": 0.0, "oprf": 0.02, "saderf": 0.021}
    matrices = {"orf": 0.0, "sorf": -0.05, "qmc": 0.0, "sgq": 0.0, "mm": -0.01, "fastfood_learned": 0.0}
    study = tmp_path / "model_cards/spectraformer"
    with pytest.raises(NotMeasuredError):
        spectraformer.components(Store(tmp_path))
    for task, base in (("listops", 0.4), ("text", 0.6)):
        for component, more in components.items():
            for matrix, other in matrices.items():
                for seed in range(3):
                    accuracy = base + more + other + seed / 100 + (seed / 1e4 if component == "saderf" else 0)
                    put_run(study, task, f"{component}_{matrix}", seed, {"accuracy": accuracy})
    store = Store(tmp_path)
    found = spectraformer.components(store)
    assert found.ours.startswith("listops and text: saderf − oprf (printed +0.8) +0.1 points")
    assert "oprf − posrf (printed +0.3) +2.0 points (+2.0 to +2.0; n = 3)" in found.ours
    assert found.verdict == DIRECTION
    # Of Table 2: 37.40 against 29.13 on ListOps, 60.77 against 64.05 on Text.
    expected = "listops and text: orf − sorf (printed +2.5) +5.0 points (+5.0 to +5.0; n = 3)"
    assert spectraformer.hadamard(store) == Measured(expected, HOLDS)
    assert spectraformer.matched(store).verdict == FAILS
    drop_run(study, "text", "saderf_mm", 2)
    assert "n = 2" in spectraformer.hadamard(Store(tmp_path)).ours
    drop_run(study, "text", "saderf_mm")
    found = spectraformer.hadamard(Store(tmp_path))
    assert "listops: orf − sorf (printed +8.3) +5.0 points (+5.0 to +5.0; n = 3)" in found.ours


def test_the_cost_of_components(tmp_path: Path) -> None:
    """Of a bench in which OPRF takes twice the time of PosRF and SADERF less memory."""
    seconds, memory = {"posrf": 1.0, "oprf": 2.0, "saderf": 3.0}, {"posrf": 10.0, "oprf": 20.0, "saderf": 9.0}
    rows = [
        {"pair": f"{c}-{m}", "seconds_per_step": seconds[c], "peak_MiB": memory[c]}
        for c in printed_pairs.COMPONENTS
        for m in printed_pairs.MATRICES
    ]
    file = tmp_path / "recipes/benchmarks/results/attention/metrics.json"
    put_figures(file, {"pairs": rows})
    found = spectraformer.cost_of_components(Store(tmp_path))
    assert found == Measured(
        "oprf 2.00 × the time, 2.00 × the memory; saderf 3.00 × the time, 0.90 × the memory", FAILS
    )
    memory["saderf"] = 10.5
    rows[-6:] = [{**row, "peak_MiB": memory["saderf"]} for row in rows[-6:]]
    put_figures(file, {"pairs": rows})
    assert spectraformer.cost_of_components(Store(tmp_path)).verdict == DIRECTION


def test_the_bench_of_a_gpu_has_its_say(tmp_path: Path) -> None:
    """Beside that of a processor, under the name of the card; the less favourable of both decides."""
    step = {"seconds_per_step": 8.0, "peak_MiB": 80.0, "time_of_softmax": 0.5, "memory_of_softmax": 1.5}
    before = {"pair": "saderf-orf", "seconds_per_step": 10.0, "peak_MiB": 100.0}
    rows = [{"pair": "posrf-mm", **step}, before]
    rows += [{"pair": "softmax", "time_of_softmax": 1.0, "memory_of_softmax": 1.0}]
    formed = {"pair": "softmax, weights formed", "time_of_softmax": 2.0, "memory_of_softmax": 20.0}
    bench, card = (tmp_path / f"recipes/benchmarks/results/{name}/metrics.json" for name in ("attention", "gpu"))
    put_figures(bench, {"pairs": rows, "training": [{"length": 8, "speed_up": 1}, {"length": 64, "speed_up": 6}]})
    store = Store(tmp_path)
    assert spectraformer.time_of_best(store) == Measured("20.0 % less time", HOLDS)
    other = [rows[0] | {"seconds_per_step": 9.0}, *rows[1:], formed]
    steps = [{"step": "tests", "figures": {}}, {"step": "pairs", "status": "failed"}]
    put_figures(card, {"card": {"name": "A1"}, "steps": steps})
    assert spectraformer.time_of_best(store) == Measured("20.0 % less time", HOLDS)  # it failed there
    lengths = {"training": [{"length": 8, "speed_up": 0.5}, {"length": 64, "speed_up": 1.5}]}
    steps = [{"step": "pairs", "figures": {"pairs": other}}, {"step": "attention", "figures": lengths}]
    put_figures(card, {"card": {"name": "A1"}, "steps": steps})
    assert spectraformer.time_of_best(store) == Measured("20.0 % less time; A1: 10.0 % less time", DIRECTION)
    assert spectraformer.memory_of_best(store).verdict == DIRECTION  # 20.0 of 20.2
    assert spectraformer.beside_softmax(store).ours.endswith(
        "A1: 0.50 × the time, 1.50 × the memory of fused softmax, "
        "0.25 × the time, 0.07 × the memory of softmax whose weights are formed"
    )
    found = lecture.quicker(store)
    assert found == Measured("1.0 × at 8, 6.0 × at 64; A1, bf16, flash attention: 0.5 × at 8, 1.5 × at 64", DIRECTION)
    lengths["training"][1]["speed_up"] = 0.5  # no gain
    put_figures(card, {"card": {"name": "A1"}, "steps": steps})
    assert lecture.quicker(store).verdict == FAILS


def _rows(folder: Path) -> list[str]:
    return [line for file in folder.glob("*.tsv") for line in file.read_text().splitlines()[1:]]
