"""One loop for every recipe: a new kind of model and data is one class, and runs of earlier versions continue."""

from __future__ import annotations

import json
import os
import shlex
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from accelerate import Accelerator
from data.listops import write_listops
from papers.lib import lra_model
from papers.programs import tiny_llama, train_lra
from recipe_world import RECIPES, InterruptedRun, at_step, die, last_weights, same_tensors, stop
from safetensors.torch import load_file

from snnk_cli.config import option
from snnk_cli.data import ExampleSet
from snnk_cli.experiment import Data, Experiment, Finished, Schedule, learning_rate
from snnk_cli.launch import launch
from snnk_cli.processes import prepare, unwrapped
from snnk_cli.settings import StepSettings
from tests.releases import RELEASES

OLD = [release for release in RELEASES if (release / "train_lra").is_dir()]


# --- a kind of data and model that no recipe has: points, a mixture of two Gaussians, likelihood ---------------------


class Points(ExampleSet):
    def __init__(self, seed: int, count: int):
        generator = torch.Generator().manual_seed(seed)
        self.points = torch.randn(count, 2, generator=generator) + 3 * torch.randint(2, (count, 1), generator=generator)
        self.lengths = [2] * count

    def batch(self, indices: Sequence[int], device: torch.device | str = "cpu") -> dict[str, torch.Tensor]:
        return {"points": self.points[list(indices)].to(device)}

    def fingerprint(self) -> str:
        return str(self.points.double().sum().item())


class Mixture(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.centers = torch.nn.Parameter(torch.randn(2, 2))
        self.dropout = torch.nn.Dropout(0.1)  # random numbers, which a continued run must repeat

    def forward(self, points: torch.Tensor) -> Any:
        distances = (points[:, None] - self.dropout(self.centers)).square().sum(-1)
        return type("Output", (), {"loss": -torch.logsumexp(-distances / 2, -1).mean()})


@dataclass
class PointsData:
    count: int = option(64, "points", low=2)


@dataclass
class PointsTrain(StepSettings):
    steps: int = option(24, "optimizer steps", low=1)


@dataclass
class PointsOutput:
    dir: str = option(MISSING, "the run folder")
    tensorboard: bool = option(False, "event files")


@dataclass
class PointsConfig:
    output: PointsOutput
    task: str = option("points", "what is learned")
    data: PointsData = field(default_factory=PointsData)
    train: PointsTrain = field(default_factory=PointsTrain)


class Likelihood(Experiment[PointsConfig]):
    settings, program = PointsConfig, "likelihood.py"
    advice = "Take fewer points."
    method = "mixture"

    def data(self, accelerator: Any) -> Data:
        return Data(Points(0, self.config.data.count), {"dev": Points(1, 40)}, {"test": Points(2, 40)})

    def model(self, data: Data, accelerator: Any, resumed: bool) -> torch.nn.Module:
        return Mixture()

    def schedule(self, per_epoch: int) -> Schedule:
        steps, peak = self.config.train.steps, self.config.train.learning_rate
        return Schedule(steps, 4, learning_rate("cosine", peak, 2, steps), eval_first=True)

    def score(
        self,
        model: torch.nn.Module,
        splits: Mapping[str, ExampleSet],
        accelerator: Any,
        stopped: Callable[[], bool],
    ) -> dict[str, float]:
        model.eval()
        with torch.no_grad():
            loss = [model(**part.batch(range(len(part)))).loss.item() for part in splits.values()]
        model.train()
        return {"score": -sum(loss)}

    def report(self, done: Finished) -> dict[str, Any]:
        return {"likelihood": done.test["score"], "centers": done.model.centers.tolist()}


def arguments(folder: Path, name: str) -> list[str]:
    file = folder / f"{name}.yaml"
    train = {"batch_size": 16, "learning_rate": 0.2, "save_every_steps": 3, "log_every": 1}
    file.write_text(yaml.safe_dump({"train": train, "output": {"dir": str(folder / name)}}))
    return [str(file)]


def test_a_new_kind_of_model_and_data_is_one_class(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert launch(Likelihood, None, arguments(tmp_path, "straight")) == 0
    report = json.loads((tmp_path / "straight/metrics.json").read_text())
    low, high = sorted(sum(center) / 2 for center in report["centers"])
    assert low < 1 < 2 < high < 3.5  # the points lie around (0, 0) and (3, 3)
    assert report["examples"] == {"train": 64, "dev": 40, "test": 40}
    assert (report["task"], report["method"]) == ("points", "mixture")
    rows = [json.loads(line) for line in (tmp_path / "straight/log.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "score" in row] == [0, 4, 8, 12, 16, 20, 24]
    assert report["likelihood"] > rows[0]["score"] + 1

    killed = arguments(tmp_path, "killed")
    with monkeypatch.context() as patched:
        at_step(patched, 9, die)
        with pytest.raises(InterruptedRun):
            launch(Likelihood, None, killed)
    assert launch(Likelihood, None, [*killed, "--resume"]) == 0
    assert same_tensors(last_weights(tmp_path / "killed"), last_weights(tmp_path / "straight"))


def test_the_advice_is_the_experiments(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = [*arguments(tmp_path, "run"), "train.learning_rate=10", "train.max_grad_norm=null"]

    class Broken(Likelihood):
        def model(self, data: Data, accelerator: Any, resumed: bool) -> torch.nn.Module:
            model = Mixture()
            with torch.no_grad():
                model.centers.fill_(1e30)
            return model

    assert launch(Broken, None, given) == 1
    error = capsys.readouterr().err
    assert "the score is -inf at step 0" in error
    assert error.rstrip().endswith("Take fewer points.")


# --- the language model ----------------------------------------------------------------------------------------------


def test_a_stopped_language_model_continues_to_the_same_weights(
    short_text: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(short_text.parent)
    given = ["--text", short_text.name, "--steps", "30", "--num-features", "4"]
    assert tiny_llama.main([*given, "--output", "straight"]) == 0
    with monkeypatch.context() as patched:
        at_step(patched, 13, stop)
        assert tiny_llama.main([*given, "--output", "run"]) == 143
    command = shlex.split(capsys.readouterr().out.splitlines()[-1])
    assert command[1:] == [
        os.path.relpath(RECIPES / "papers/programs/tiny_llama.py"),
        *given,
        "--output",
        "run",
        "--resume",
    ]
    assert tiny_llama.main([*given, "--output", "run", "--seed", "1", "--resume"]) == 2
    assert "train.seed was 0 and is now 1" in capsys.readouterr().err
    assert tiny_llama.main(command[2:]) == 0
    assert same_tensors(last_weights(Path("run")), last_weights(Path("straight")))


# --- runs of earlier versions ----------------------------------------------------------------------------------------


@pytest.fixture(params=OLD, ids=lambda release: release.name)
def old(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a run that a version began and did not end, and its data; the current folder."""
    shutil.copytree(request.param / "train_lra", tmp_path / "train_lra")
    sizes = {"train": 64, "validation": 16, "test": 16}
    write_listops(tmp_path / "listops", sizes, 0, min_length=4, max_length=24, max_depth=3, max_args=4)
    monkeypatch.chdir(tmp_path)
    return request.param


def test_a_run_of_an_earlier_version_continues_to_the_same_end(old: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train_lra.main(["train_lra/config.yaml", "--resume"]) == 0
    assert "continuing after step 4" in capsys.readouterr().out
    ours, theirs = last_weights(Path("train_lra")), load_file(old / "train_lra_end.safetensors")
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():  # the other version ran on another processor
        torch.testing.assert_close(value, theirs[name], rtol=1e-3, atol=1e-5)


def test_settings_that_an_earlier_version_did_not_have_are_the_defaults(old: Path) -> None:
    file = Path("train_lra/config.yaml")
    given = yaml.safe_load(file.read_text())
    del given["model"]["pooling"]
    file.write_text(yaml.safe_dump(given))
    assert train_lra.main([str(file), "--resume", "model.pooling=cls"]) == 2
    assert train_lra.main([str(file), "--resume"]) == 0


@pytest.mark.parametrize("what", ["setting", "tensor"])
def test_a_run_that_cannot_be_continued_is_refused_with_its_version(
    old: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], what: str
) -> None:
    folder = Path("train_lra")
    environment = json.loads((folder / "environment.json").read_text())
    environment["packages"]["snnk-peft"] = "0.0.7"
    environment["git_commit"] = "abc"
    (folder / "environment.json").write_text(json.dumps(environment))
    shutil.copy(folder / "config.yaml", "now.yaml")
    if what == "setting":
        with (folder / "config.yaml").open("a") as stream:
            stream.write("flavour: sweet\n")
        fault = "unknown setting 'flavour'"
    else:
        build = lra_model.build_classifier

        def otherwise(*given: Any) -> torch.nn.Module:
            model = build(*given)
            model.gate = torch.nn.Parameter(torch.zeros(3))
            return model

        monkeypatch.setattr(train_lra, "build_classifier", otherwise)
        fault = "tensor gate is missing"
    assert train_lra.main(["now.yaml", "--resume"]) == 2
    error = capsys.readouterr().err
    assert "it was written by version 0.0.7, git commit abc: continue it with that one, or start again with" in error
    assert fault in error
    assert not (folder / "metrics.json").exists()


def test_a_model_that_was_trained_before_computes_in_the_asked_precision() -> None:
    """The quickstart's recovery trains what an earlier stage has trained; it did so in float32, at half the speed."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4))
    seen: list[torch.dtype] = []
    model[0].register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    for _ in range(2):
        accelerator = Accelerator(cpu=True, mixed_precision="bf16")
        prepared, _ = prepare(accelerator, model, torch.optim.SGD(model.parameters()))
        prepared(torch.ones(2, 4))
        unwrapped(accelerator, prepared)(torch.ones(2, 4))
    assert seen == [torch.bfloat16, torch.float32] * 2
