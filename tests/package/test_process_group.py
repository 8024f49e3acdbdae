"""Several processes: statistics are summed over them, and random and learned matrices stay in step."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests import group_job
from tests.fresh_process import run_processes


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory, root: Path) -> list[tuple[dict[str, torch.Tensor], dict[str, Any]]]:
    """Tensors and reports of each of two processes; the first has six batches to calibrate on, the second five."""
    folder = tmp_path_factory.mktemp("group")
    done = run_processes(["-m", "tests.group_job", str(folder)], env={**os.environ, "PYTHONPATH": str(root)})
    assert [code for code, _ in done] == [0, 0], "".join(output for _, output in done)
    return [
        (load_file(folder / f"{rank}.safetensors"), json.loads((folder / f"{rank}.json").read_text()))
        for rank in range(2)
    ]


def test_every_process_has_the_same_bits(group) -> None:
    (first, one), (second, two) = group
    assert first.keys() == second.keys()
    assert [key for key, value in first.items() if not torch.equal(value, second[key])] == []
    assert one == two


@pytest.mark.parametrize("name", group_job.PARTS)
def test_shares_are_calibrated_as_the_whole_is(group, name: str) -> None:
    tensors, reports = group[0]
    expected, report = group_job.calibrated(name, slice(None))
    assert len(report) == 3  # two layers and the pooler
    # Directions of heads are searched for, and rounding of 1e-13 moves where the search ends by a percent of the error.
    searched = name == "heads"
    for mine, whole in zip(reports[name], report, strict=True):
        for exact in ("path", "num_features", "tokens", "held_out_tokens", "ridge"):
            assert mine[exact] == whole[exact], exact
        assert mine["error_before"] == pytest.approx(whole["error_before"], rel=1e-3 if searched else 1e-5)
        assert mine["error_after"] == pytest.approx(whole["error_after"], rel=0.03 if searched else 1e-4, abs=1e-9)
    for key, value in () if searched else expected.items():
        torch.testing.assert_close(tensors[f"{name}/{key}"], value, rtol=1e-3, atol=1e-4, msg=key)


def test_steps_see_the_tokens_of_all_processes(group) -> None:
    """In another order than one process does, so the rows differ; each error is well below that without steps."""
    reports = group[0][1]
    _, whole = group_job.calibrated("units", slice(None), steps=group_job.STEPS)
    for moved, plain, one in zip(reports["steps"][:2], reports["units"][:2], whole[:2], strict=True):
        assert moved["tokens"] == one["tokens"]
        assert moved["held_out_tokens"] == one["held_out_tokens"]
        assert moved["error_after"] < 0.95 * plain["error_after"]
        assert moved["error_after"] == pytest.approx(one["error_after"], rel=0.2)


def test_shares_make_the_rows_of_the_whole(group) -> None:
    expected, report = group_job.informed(slice(None))
    for tensors, reports in group:
        for key, value in expected.items():
            torch.testing.assert_close(tensors[f"informed/{key}"], value, rtol=1e-3, atol=1e-4)
        assert [slot["taken"] for slot in reports["informed"]] == [slot["taken"] for slot in report]
        for found, wanted in zip(reports["informed"], report, strict=True):
            assert found["tokens"] == wanted["tokens"]
            assert found["slope_after"] == pytest.approx(wanted["slope_after"], rel=1e-3, abs=1e-9)
    first, second = group
    for key, value in expected.items():
        assert torch.equal(first[0][f"informed/{key}"], second[0][f"informed/{key}"]), key
    assert any(slot["taken"] for slot in report)


def test_shares_fit_the_head_that_the_whole_fits(group) -> None:
    tensors, reports = group[0]
    expected, report = group_job.closed_form(slice(None))
    assert reports["closed form"].pop("head") == report.pop("head")
    assert reports["closed form"] == pytest.approx(report, rel=1e-6)
    assert report["examples"] == 7 * group_job.EXAMPLES
    for key, value in expected.items():
        torch.testing.assert_close(tensors[f"closed form/{key}"], value, rtol=1e-5, atol=1e-6)


def test_shares_make_the_head_of_the_whole_and_forget_alike(group) -> None:
    """A hundred shards in two processes are one process that read them, and sums differ in their order alone."""
    expected = group_job.pooled_head(slice(None))
    for tensors, _ in group:
        assert float(tensors["pooled head/temperature"]) == pytest.approx(float(expected["temperature"]), rel=1e-4)
        for key in ("weight", "bias"):
            difference = (tensors[f"pooled head/{key}"] - expected[key]).abs().max()
            assert difference < 1e-9 * expected[key].abs().max()


def test_what_was_forgotten_before_sharing_leaves_no_rounding(group) -> None:
    expected = group_job.forgotten(slice(None))
    for tensors, _ in group:
        assert tensors["forgotten/gram"][1, 1] == 0
        torch.testing.assert_close(tensors["forgotten/gram"], expected["gram"])
        assert torch.equal(tensors["forgotten/digests"], expected["digests"])


def test_what_cannot_be_shared_is_refused_in_every_process(group) -> None:
    for _, reports in group:
        empty, alone = reports["faults"]
        assert "batches is empty in processes [1] of 2" in empty
        assert "LeastSquares" in alone
        assert "expected a Fitter with reduces = True" in alone


@pytest.mark.parametrize("name", ["orf", "fastfood_learned", "free"])
def test_matrices_that_change_do_so_in_step(group, name: str) -> None:
    """That they are equal is tested above."""
    tensors, _ = group[0]
    after = [value for key, value in tensors.items() if key.startswith(f"{name} after")]
    assert len(after) >= 2
    assert (after[0] - tensors[f"{name} before"]).abs().max() > 1e-3
