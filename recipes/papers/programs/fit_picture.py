"""Fit an image as a function of its coordinates by a network of sines: dense, SNNK or low-rank (SNNK paper, 4.2).

    python recipes/papers/programs/fit_picture.py recipes/papers/configs/pictures/siren.yaml
    python recipes/papers/programs/fit_picture.py \\
        recipes/papers/configs/pictures/siren.yaml method.snnk=null  (all layers dense)
    python recipes/papers/programs/fit_picture.py \\
        recipes/papers/configs/pictures/siren.yaml method.kind=low_rank  (as many numbers)
    python recipes/papers/programs/fit_picture.py \\
        recipes/papers/configs/pictures/siren.yaml data.file=path/to/photograph.jpg

Only values are fitted; gradient and Laplacian of the network are then compared with differences of neighbouring
pixels. output.dir receives metrics.json, learning_curve.png (peak signal-to-noise ratio over steps),
pictures.png (image, gradient, Laplacian; above the truth, below the network), and checkpoints. A run killed at any
moment continues with `--resume`.

Settings are `section.key=value`; `--help` lists them.
"""

from __future__ import annotations

import hashlib
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
import torch
from PIL import Image
from sklearn.datasets import load_sample_image

from papers.lib.layer_settings import SineMethod, SineModel, layer_faults
from papers.lib.plots import picture_grid
from papers.lib.sine_network import SineNetwork, derivatives
from papers.lib.training import Metrics, Splits, Stopped, Training
from snnk_cli.config import option
from snnk_cli.data import ExampleSet
from snnk_cli.experiment import Data, Finished
from snnk_cli.launch import launch
from snnk_cli.settings import RunOutput, StepSettings
from snnk_peft.errors import ConfigError
from snnk_peft.tasks.base_image import FilePictures, UnreadableImageError, converted

RANGE = 2.0  # range of values in [−1, 1]
PICTURES = "pictures.png"


class PictureRows(ExampleSet):
    """Rows of a grey image, values in [−1, 1] at coordinates in [−1, 1]².

    Args:
        values: (height, width).
    """

    def __init__(self, values: torch.Tensor):
        self.values = values
        height, width = values.shape
        self.axes = torch.linspace(-1, 1, height), torch.linspace(-1, 1, width)
        self.lengths = [width] * height

    @property
    def coordinates(self) -> torch.Tensor:
        """Coordinates (height, width, 2): down, right."""
        return torch.stack(torch.meshgrid(*self.axes, indexing="ij"), -1)

    def batch(self, indices: Sequence[int], device: torch.device | str = "cpu") -> dict[str, torch.Tensor]:
        """Return coordinates (rows, width, 2) and values (rows, width, 1)."""
        chosen = list(indices)
        inputs = {"coordinates": self.coordinates[chosen], "values": self.values[chosen].unsqueeze(-1)}
        return {name: tensor.to(device) for name, tensor in inputs.items()}

    def describe(self) -> str:
        return "a picture of {} × {} pixels".format(*self.values.shape)

    def fingerprint(self) -> str:
        return hashlib.sha256(f"{tuple(self.values.shape)}".encode() + self.values.numpy().tobytes()).hexdigest()

    def gradient(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return central differences (height, width, 2), and their own differences, the Laplacian (height, width)."""
        steps = [float(axis[1] - axis[0]) for axis in self.axes]
        first = torch.gradient(self.values, spacing=steps)
        second = [torch.gradient(part, spacing=steps)[axis] for axis, part in enumerate(first)]
        return torch.stack(first, -1), second[0] + second[1]


def read_picture(name: str, file: str | Path | None, size: int) -> PictureRows:
    """Read the central square, in grey at size × size pixels, of a file or of a sample image of scikit-learn.

    Raises:
        ConfigError: there is no such image, or it cannot be read.
    """
    if file is None:
        picture = Image.fromarray(load_sample_image(f"{name}.jpg"))
    else:
        try:
            picture = converted(FilePictures(Path(file).parent, [Path(file).name]).open(0), 3)
        except UnreadableImageError as error:
            raise ConfigError(f"data.file: {file} cannot be read as an image: {error}") from error
    side = min(picture.size)
    left, top = ((length - side) // 2 for length in picture.size)
    square = picture.convert("L").crop((left, top, left + side, top + side)).resize((size, size))
    return PictureRows(torch.from_numpy(np.asarray(square, dtype=np.float32) / 127.5 - 1))


@dataclass
class PictureData:
    """The image."""

    file: str | None = option(None, "a picture file; null: the one that the task names, of scikit-learn")
    size: int = option(128, "pixels on each side, of the middle square", low=8)


@dataclass
class PictureTrain(StepSettings):
    """The optimisation; SIREN uses Adam with rate 1e-4 and all pixels in every step."""

    batch_size: int = option(4096, "rows of pixels per step", low=1)
    learning_rate: float = option(1e-4, "of AdamW", above=0, high=10)
    weight_decay: float = option(0.0, "decoupled, of matrices", low=0, high=10)
    steps: int = option(500, "optimizer steps", low=1)
    eval_every: int = option(50, "optimizer steps", low=1)
    schedule: str = option("constant", "the learning rate", choices=("constant", "linear", "cosine"))


@dataclass
class PictureConfig:
    """All settings of this recipe."""

    output: RunOutput
    task: str = option("china", "a picture of scikit-learn", choices=("china", "flower"))
    data: PictureData = field(default_factory=PictureData)
    model: SineModel = field(default_factory=SineModel)
    method: SineMethod = field(default_factory=SineMethod)
    train: PictureTrain = field(default_factory=PictureTrain)

    def check(self) -> list[str]:
        return layer_faults(self.model, self.method)


class FitPicture(Training[PictureConfig]):
    """Experiment that fits one image by one network."""

    settings, program = PictureConfig, "papers/programs/fit_picture.py"
    leaves = (PICTURES,)

    @property
    def name(self) -> str:
        """The name of the image: its file name without the folder."""
        config = self.config
        return config.task if config.data.file is None else Path(config.data.file).name

    @property
    def title(self) -> str:
        return f"{self.name}, {self.method}"

    def data(self, accelerator: Any) -> Data:
        self.picture = read_picture(self.config.task, self.config.data.file, self.config.data.size)
        return Data(self.picture, {"picture": self.picture})

    def model(self, data: Data, accelerator: Any, resumed: bool) -> torch.nn.Module:
        """Build the network; all of it is trained except the feature rows, unless these are learned."""
        return SineNetwork.of(self.config, inputs=2, outputs=1)

    def score(self, model: torch.nn.Module, splits: Splits, accelerator: Any, stopped: Stopped) -> Metrics:
        """Return the peak signal-to-noise ratio in decibels, 10 lg(range²/mean squared error)."""
        if stopped():
            return None
        training = model.training
        model.eval()
        with torch.no_grad():
            error = float(model(**self.picture.batch(range(len(self.picture)), accelerator.device)).loss)
        model.train(training)
        return {"score": 10 * math.log10(RANGE**2 / max(error, 1e-30))}

    def report(self, done: Finished) -> dict[str, Any]:
        """Return decibels, and the errors of gradient and Laplacian against differences of pixels."""
        shape = self.picture.values.shape
        network: Any = done.model
        found = derivatives(network, self.picture.coordinates.reshape(-1, 2).to(done.device))
        values, gradient, laplacian = (part.cpu().reshape(*shape, *part.shape[1:]) for part in found)
        true_gradient, true_laplacian = self.picture.gradient()
        rows = {
            "picture": (self.picture.values, true_gradient.norm(dim=-1), true_laplacian),
            self.method: (values, gradient.norm(dim=-1), laplacian),
        }
        picture_grid(rows, ("values", "length of the gradient", "Laplacian"), done.folder / PICTURES, self.title)

        def relative(part: torch.Tensor, truth: torch.Tensor) -> float:
            return float((part - truth)[1:-1, 1:-1].norm() / truth[1:-1, 1:-1].norm())

        return {
            "score": done.best["score"],
            "metrics": done.best["metrics"],
            "picture": self.name,
            "gradient_error": relative(gradient, true_gradient),
            "laplacian_error": relative(laplacian, true_laplacian),
            "seconds_per_step": done.state.train_seconds / done.state.step,
            "processor_seconds_per_step": done.state.cpu_seconds / done.state.step,
        }

    def summary(self, done: Finished, figures: Mapping[str, Any]) -> str:
        return (
            f"{figures['score']:.2f} dB; gradient off by {figures['gradient_error']:.1%} of its length; "
            f"the images are in {done.folder / PICTURES}"
        )


def main(argv: list[str] | None = None) -> int:
    """Fit the image; return the exit code (0 done, 1 diverged, 2 wrong input, 130 or 143 stopped)."""
    return launch(FitPicture, __doc__, argv)


if __name__ == "__main__":
    sys.exit(main())
