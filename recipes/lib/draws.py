"""Fresh draws of a trained model's random features, for evaluation; the saved draw comes back afterwards.

Only feature maps of attention are drawn anew: there features meet features, and each draw estimates the same kernel.
Adapters and replaced layers keep theirs, because their readout was trained for these very rows. Of learned matrices the
noise is drawn anew, the parameters stay. Draw number i of a site follows from (seed, i, site) alone.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import track

from lib.data import ExampleSet
from lib.evaluation import DivergedError, predict
from lib.variance import variance_figures
from snnk_peft.errors import ConfigError
from snnk_peft.layers.kernel_attention import KernelAttention
from snnk_peft.projections.base import Projection
from snnk_peft.projections.base_drawn import site_generator


def resamplable(model: torch.nn.Module) -> list[Projection]:
    """The matrices of attention whose randomness is a sample.

    Raises:
        ConfigError: there are none.
    """
    attentions = [module for module in model.modules() if isinstance(module, KernelAttention)]
    matrices = [m for attention in attentions for m in attention.modules() if isinstance(m, Projection)]
    found = {id(matrix): matrix for matrix in matrices if matrix.resamplable and matrix.seeded}
    if found:
        return list(found.values())
    kinds = ", ".join(sorted({type(matrix).__name__.lower() for matrix in matrices}))
    why = f"its attention has projection {kinds}, in which nothing is a sample" if kinds else "it has softmax attention"
    raise ConfigError(
        f"--draws: nothing in this model can be drawn anew: {why}. Expected linear attention over random features, "
        "such as projection orf or gmm; leave --draws out for any other model"
    )


@contextmanager
def redrawn(model: torch.nn.Module, seed: int, number: int) -> Iterator[None]:
    """Inside, the model has fresh draws; afterwards the very tensors that it had before.

    Args:
        model: see `resamplable`.
        seed: of all draws.
        number: of this one, 0 or more.
    """
    with matrices_redrawn(resamplable(model), seed, number):
        yield


@contextmanager
def matrices_redrawn(matrices: Sequence[Projection], seed: int, number: int) -> Iterator[None]:
    """`redrawn` for these matrices alone.

    Args:
        matrices: resamplable ones.
        seed: of all draws.
        number: of this one, 0 or more.
    """
    saved: list[tuple[Projection, str, torch.Tensor]] = []
    try:
        for matrix in matrices:
            # Not the text by which training draws, whose draws would come again.
            generator = site_generator(seed, f"evaluation:{matrix.site}", number)
            for name, drawn in matrix.draw_buffers(generator).items():
                old = getattr(matrix, name)
                saved.append((matrix, name, old))
                setattr(matrix, name, drawn.to(old.device, old.dtype))
        yield
    finally:
        for matrix, name, old in saved:
            setattr(matrix, name, old)


def draw_figures(
    model: torch.nn.Module,
    task: Any,
    splits: Mapping[str, ExampleSet],
    batch_size: int,
    accelerator: Any,
    draws: int,
    seed: int,
) -> dict[str, Any]:
    """Scores of all draws, their mean and standard deviation, and by split the figures of `variance_figures`.

    Args:
        model: see `resamplable`.
        task: with class labels.
        splits: name -> examples.
        batch_size: examples per forward pass.
        accelerator: of this process.
        draws: 2 or more.
        seed: of the draws.
    """
    found: dict[str, list[np.ndarray]] = {name: [] for name in splits}
    truth: dict[str, np.ndarray] = {}
    scores = []
    for number in track(range(draws), "draws", console=Console(stderr=True)):
        results = {}
        with redrawn(model, seed, number):
            for name, examples in splits.items():
                predictions = predict(model, examples, batch_size, accelerator)
                assert predictions is not None
                if not torch.isfinite(predictions[0]).all():
                    raise DivergedError(f"the model's predictions on {name} are not finite in draw {number}")
                found[name].append(predictions[0].numpy())
                truth[name] = predictions[1].numpy()
                results[name] = task.compute(*predictions)
        scores.append(task.summarize(results)["score"])
    return {
        "number": draws,
        "seed": seed,
        "scores": scores,
        "score_mean": statistics.mean(scores),
        "score_std": statistics.stdev(scores),
        "splits": {name: variance_figures(np.stack(found[name]), truth[name]) for name in splits},
    }
