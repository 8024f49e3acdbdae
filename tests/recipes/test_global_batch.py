"""A training step depends on its examples, not on how they are divided into batches and among processes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from papers.programs import fit_potential
from safetensors.torch import load_file

from snnk_cli.config import load_config
from snnk_peft.errors import ConfigError
from tests.fresh_process import run_processes
from tests.global_batch import KINDS, batch_of, by_hand, mean_loss, model_of, one_step

ROOT = Path(__file__).resolve().parents[2]
WHOLE, PAIRS, UNEVEN = [list(range(8))], [[0, 1], [2, 3], [4, 5], [6, 7]], [[0, 1, 2], [3, 4, 5, 6], [7]]
CLOSE = {"rtol": 0.0, "atol": 1e-6}


@pytest.mark.parametrize("batches", [WHOLE, PAIRS, UNEVEN], ids=["1x8", "4x2", "uneven"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_in_parts_is_the_step_as_a_whole(kind: str, batches: list[list[int]]) -> None:
    loss, weights = by_hand(kind)
    found, given = one_step(kind, batches, Accelerator(cpu=True))
    assert found == pytest.approx(loss, abs=1e-6)
    torch.testing.assert_close(given, weights, **CLOSE)


def test_two_processes_take_the_step_of_one(tmp_path: Path) -> None:
    done = run_processes(
        ["-m", "tests.global_batch", str(tmp_path)], env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'recipes'}"}
    )
    assert [code for code, _ in done] == [0, 0], "".join(text for _, text in done)
    for kind in KINDS:
        loss, weights = by_hand(kind)
        for rank in (0, 1):
            found = load_file(tmp_path / f"{rank}.safetensors")
            assert found[f"{kind} loss"].item() == pytest.approx(loss, abs=1e-6), kind
            mine = {name: found[f"{kind}/{name}"] for name in weights}
            torch.testing.assert_close(mine, weights, **CLOSE, msg=lambda text, kind=kind: f"{kind}: {text}")

    for kind in ("words", "classes"):
        loss = mean_loss(model_of(kind), batch_of(kind, [7])).item()
        found = [load_file(tmp_path / f"{rank}.safetensors")[f"one of {kind}"].item() for rank in (0, 1)]
        assert found == pytest.approx([loss, loss], abs=1e-6)


def test_a_loss_that_is_no_mean_over_parts_is_not_taken_in_parts() -> None:
    """The spread of the local energy: refused for batches of a step here, and for several processes."""
    with pytest.raises(ConfigError, match=r"train\.gradient_accumulation is 2; expected 1.*Set train\.batch_size"):
        load_config(fit_potential.PotentialConfig, None, ["output.dir=x", "train.gradient_accumulation=2"])
    config = load_config(fit_potential.PotentialConfig, None, ["output.dir=x"])

    class Two:
        num_processes = 2

    with pytest.raises(ConfigError, match="there are 2 processes; expected one"):
        fit_potential.FitPotential(config).data(Two())
