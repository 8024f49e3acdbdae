"""Learn the potential of two particles from their wave function alone, by conservation of energy (SNNK paper, 4.2).

    python recipes/papers/programs/fit_potential.py recipes/papers/configs/potential/two_bodies.yaml
    python recipes/papers/programs/fit_potential.py \\
        recipes/papers/configs/potential/two_bodies.yaml method.snnk=null  (all layers dense)

The network (QPNN, Sehanobish et al. 2021) never sees the potential: its loss is the spread of the local energy
−½ (∇²ψ)/ψ + V(x) over the points of a batch, with V(0) = 0. The result is compared with the exact potential, and so
are the lowest energies of two particles in it. output.dir receives metrics.json, learning_curve.png, potential.png and
checkpoints. A run killed at any moment continues with `--resume`.

Settings are `section.key=value`; `--help` lists them.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from papers.lib.layer_settings import SineMethod, SineModel, layer_faults
from papers.lib.plots import picture_grid
from papers.lib.sine_network import PotentialNetwork, SineNetwork
from papers.lib.training import Metrics, Splits, Stopped, Training
from papers.lib.two_bodies import LocalEnergies, TwoBodies, energies_in
from snnk_cli.config import option
from snnk_cli.experiment import Data, Finished
from snnk_cli.launch import launch
from snnk_cli.processes import unwrapped
from snnk_cli.settings import RunOutput, StepSettings
from snnk_peft.errors import ConfigError

LEVELS = 4  # energies to compare
PICTURE = "potential.png"


@dataclass
class PotentialData:
    """The system, and the region where its wave function is known."""

    frequency: float = option(1.0, "ω of the springs to the origin", above=0)
    spring: float = option(1.5, "k of the spring between the particles", low=0)
    reach: float = option(3.0, "points lie in [−reach, reach]²", above=0)
    points: int = option(4096, "to train on", low=2)


@dataclass
class PotentialModel(SineModel):
    """The dense network of the paper: one hidden layer of 128 × 128."""

    width: int = option(128, "of all layers", low=1)
    omega: float = option(1.0, "ω₀, the factor in every sine", above=0)


@dataclass
class PotentialTrain(StepSettings):
    """The optimisation."""

    batch_size: int = option(512, "points per step", low=2)
    weight_decay: float = option(0.0, "decoupled, of matrices", low=0, high=10)
    steps: int = option(3000, "optimizer steps", low=1)
    eval_every: int = option(250, "optimizer steps", low=1)
    schedule: str = option("cosine", "the learning rate", choices=("constant", "linear", "cosine"))


@dataclass
class PotentialConfig:
    """All settings of this recipe."""

    output: RunOutput
    task: str = option("two_bodies", "the system", choices=("two_bodies",))
    data: PotentialData = field(default_factory=PotentialData)
    model: PotentialModel = field(default_factory=PotentialModel)
    method: SineMethod = field(default_factory=SineMethod)
    train: PotentialTrain = field(default_factory=PotentialTrain)

    def check(self) -> list[str]:
        faults = layer_faults(self.model, self.method)
        if self.train.gradient_accumulation > 1:
            faults.append(
                f"train.gradient_accumulation is {self.train.gradient_accumulation}; expected 1: the loss is the "
                "spread of all points of a step, which is not a mean over its parts. Set train.batch_size instead"
            )
        return faults


class FitPotential(Training[PotentialConfig]):
    """Experiment that learns the potential of one system with one network."""

    settings, program = PotentialConfig, "papers/programs/fit_potential.py"
    leaves = (PICTURE,)

    def data(self, accelerator: Any) -> Data:
        if accelerator.num_processes > 1:
            raise ConfigError(
                f"there are {accelerator.num_processes} processes; expected one: the loss is the spread of all points "
                "of a step, which is not a mean over its parts"
            )
        data = self.config.data
        self.system, seed = TwoBodies(data.frequency, data.spring), self.config.train.seed
        train = LocalEnergies(self.system, data.points, data.reach, seed)
        return Data(train, {"held out": LocalEnergies(self.system, 2048, data.reach, seed + 1)})

    def model(self, data: Data, accelerator: Any, resumed: bool) -> torch.nn.Module:
        """Build the network; all of it is trained except the feature rows, unless these are learned."""
        return PotentialNetwork(SineNetwork.of(self.config, inputs=2, outputs=1))

    def score(self, model: torch.nn.Module, splits: Splits, accelerator: Any, stopped: Stopped) -> Metrics:
        """Return the explained share of the exact potential's variance (R²), with V(0) = 0 for both."""
        if stopped():
            return None

        points = next(iter(splits.values())).points.float().to(accelerator.device)  # type: ignore[attr-defined]
        bare: Any = unwrapped(accelerator, model)
        truth = self.system.potential(points)
        with torch.no_grad():
            missed = (bare.potential(points) - truth).square().sum() / (truth - truth.mean()).square().sum()
        return {"score": 1 - float(missed)}

    def report(self, done: Finished) -> dict[str, Any]:
        network: Any = done.model
        network = network.to("cpu")
        reach = self.config.data.reach

        def found(x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                return network.potential(x.float())  # type: ignore[no-any-return]

        axis = torch.linspace(-reach, reach, 100)
        at = torch.cartesian_prod(axis, axis)
        truth, learned = self.system.potential(at).reshape(100, 100), found(at).reshape(100, 100)
        rows = {"exact": (truth, torch.zeros_like(truth)), self.method: (learned, learned - truth)}
        columns = ("potential", "difference, ±0.1 of the range")
        limit = float(truth.max()) / 10
        picture_grid(rows, columns, done.folder / PICTURE, self.title, scales={1: (-limit, limit)})
        exact, ours = self.system.energies(LEVELS), energies_in(found, LEVELS, reach)
        return {
            "score": done.best["score"],
            "metrics": done.best["metrics"],
            "energies": ours,
            "exact_energies": exact,
            "energies_on_the_grid": energies_in(self.system.potential, LEVELS, reach),
            "largest_relative_error_of_an_energy": max(abs(a / b - 1) for a, b in zip(ours, exact, strict=True)),
            "seconds_per_step": done.state.train_seconds / done.state.step,
        }

    def summary(self, done: Finished, figures: Mapping[str, Any]) -> str:
        pairs = ", ".join(
            f"{ours:.4f} ({exact:.4f})"
            for ours, exact in zip(figures["energies"], figures["exact_energies"], strict=True)
        )
        return f"R² {figures['score']:.6f}; energies (exact): {pairs}; everything is in {done.folder}"


def main(argv: list[str] | None = None) -> int:
    """Fit the potential; return the exit code (0 done, 1 diverged, 2 wrong input, 130 or 143 stopped)."""
    return launch(FitPotential, __doc__, argv)


if __name__ == "__main__":
    sys.exit(main())
