"""Fresh draws of a trained model's random features, for evaluation; the saved draw is restored afterwards.

Only attention's feature maps are redrawn: there features are multiplied by features, and each draw estimates the same
kernel. Adapters and replaced layers keep theirs, because their readout was trained for exactly these rows. In learned
matrices the noise is redrawn and the parameters stay. Draw number i of a site depends on (seed, i, site) alone.

How much the answers differ from draw to draw (Learning the Transformer Kernel, section 4.1):

    RSD = std over draws / |mean over draws|, of the continuous output; for two classes, the difference of the logits
    PI  = n − count of the majority label, of n draws (two classes: min(x, n − x), x of them positive), ≤ n − ⌈n/K⌉
    VA  = accuracy of the majority label;    AGV = VA / mean accuracy of a single draw

The standard deviation divides by n − 1. Where the mean over draws is 0, RSD is infinite, or 0 if all draws are 0. A tie
goes to the smallest class id among the tied labels, which is also what argmax of equal logits gives. AGV is NaN
where no draw is ever right (then the vote is not either).

Shapes: n draws, N examples, K classes. Cost: O(n N K) time, O(N K) memory besides the input.
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

from snnk_cli.data import ExampleSet
from snnk_cli.evaluation import DivergedError, predict
from snnk_peft.errors import ConfigError
from snnk_peft.layers.kernel_attention import KernelAttention
from snnk_peft.projections.base import Projection
from snnk_peft.projections.base_drawn import site_generator


def resamplable(model: torch.nn.Module) -> list[Projection]:
    """Return the projection matrices of attention that are random samples.

    Raises:
        ConfigError: the model has none.
    """
    attentions = [module for module in model.modules() if isinstance(module, KernelAttention)]
    matrices = [m for attention in attentions for m in attention.modules() if isinstance(m, Projection)]
    found = {id(matrix): matrix for matrix in matrices if matrix.resamplable and matrix.seeded}
    if found:
        return list(found.values())
    kinds = ", ".join(sorted({type(matrix).__name__.lower() for matrix in matrices}))
    why = f"its attention has projection {kinds}, in which nothing is random" if kinds else "it has softmax attention"
    raise ConfigError(
        f"--draws: nothing in this model can be redrawn: {why}. Expected linear attention over random features, "
        "such as projection orf or gmm; leave --draws out for any other model"
    )


@contextmanager
def redrawn(model: torch.nn.Module, seed: int, number: int) -> Iterator[None]:
    """Use fresh draws inside the context, and restore the original tensors afterwards.

    Args:
        model: see `resamplable`.
        seed: seed of all draws.
        number: index of this draw, 0 or more.
    """
    with matrices_redrawn(resamplable(model), seed, number):
        yield


@contextmanager
def matrices_redrawn(matrices: Sequence[Projection], seed: int, number: int) -> Iterator[None]:
    """Redraw these matrices alone, as `redrawn` does for a model.

    Args:
        matrices: matrices found by `resamplable`.
        seed: seed of all draws.
        number: index of this draw, 0 or more.
    """
    saved: list[tuple[Projection, str, torch.Tensor]] = []
    try:
        for matrix in matrices:
            # A different key from that of training, whose draws would otherwise be repeated.
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
    """Score all draws; return the scores, their mean and standard deviation, and `variance_figures` of each split.

    Args:
        model: see `resamplable`.
        task: a task with class labels.
        splits: name -> examples.
        batch_size: examples per forward pass.
        accelerator: accelerator of this process.
        draws: number of draws, 2 or more.
        seed: seed of the draws.
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


def relative_deviation(outputs: np.ndarray) -> np.ndarray:
    """Compute the RSD of each example, (N,).

    Args:
        outputs: (n, N) continuous outputs, n ≥ 2.
    """
    values = np.asarray(outputs, np.float64)
    if values.ndim != 2 or len(values) < 2:
        raise ConfigError(f"outputs have shape {values.shape}; expected (draws, examples) with at least 2 draws")
    deviation, mean = values.std(0, ddof=1), np.abs(values.mean(0))
    # 0/0 means that all draws are 0: no deviation.
    result = np.where(deviation > 0, np.inf, 0.0)
    np.divide(deviation, mean, out=result, where=mean > 0)
    return result


def counts(labels: np.ndarray, classes: int) -> np.ndarray:
    """Count how many draws gave each label, (N, K).

    Args:
        labels: (n, N) predicted class ids.
        classes: K.
    """
    found = np.asarray(labels)
    if found.ndim != 2 or not len(found) or found.min(initial=0) < 0 or found.max(initial=0) >= classes:
        raise ConfigError(
            f"labels have shape {found.shape}; expected (draws, examples), at least one draw, ids 0 to {classes - 1}"
        )
    return np.stack([(found == label).sum(0) for label in range(classes)], -1)


def majority(labels: np.ndarray, classes: int) -> np.ndarray:
    """Return the label that most draws gave, (N,); ties go to the smallest. Arguments as in `counts`."""
    return counts(labels, classes).argmax(-1)


def inconsistency(labels: np.ndarray, classes: int) -> np.ndarray:
    """Compute the PI of each example, (N,): the draws without the majority label. Arguments as in `counts`."""
    return len(labels) - counts(labels, classes).max(-1)


def voting_accuracy(labels: np.ndarray, truth: np.ndarray, classes: int) -> float:
    """Compute VA: the share of examples whose majority label is correct.

    Args:
        labels: see `counts`.
        truth: (N,) class ids.
        classes: K.
    """
    return float((majority(labels, classes) == np.asarray(truth)).mean())


def voting_gain(labels: np.ndarray, truth: np.ndarray, classes: int) -> float:
    """Compute AGV: voting accuracy over mean accuracy of a draw; NaN if no draw is ever right. Arguments as above."""
    single = float((np.asarray(labels) == np.asarray(truth)).mean())
    return voting_accuracy(labels, truth, classes) / single if single > 0 else float("nan")


def variance_figures(logits: np.ndarray, truth: np.ndarray) -> dict[str, float | int | None]:
    """Compute all figures of one split.

    Args:
        logits: (n, N, K), K ≥ 2, n ≥ 2.
        truth: (N,) class ids.

    Returns:
        rsd_mean and rsd_median over examples, and rsd_infinite, the number with mean 0 (None for more than two classes,
        which have no single output; the mean leaves infinite ones out); pi (mean count), pi_share (of n),
        voting_accuracy, accuracy (mean over draws), voting_gain (None where it is undefined).
    """
    draws, _, classes = logits.shape
    labels = logits.argmax(-1)
    result: dict[str, float | int | None] = {"rsd_mean": None, "rsd_median": None, "rsd_infinite": None}
    if classes == 2:
        rsd = relative_deviation(logits[..., 1].astype(np.float64) - logits[..., 0])
        finite = rsd[np.isfinite(rsd)]
        result["rsd_infinite"] = int(len(rsd) - len(finite))
        if len(finite):
            result["rsd_mean"], result["rsd_median"] = float(finite.mean()), float(np.median(finite))
    changed, gain = float(inconsistency(labels, classes).mean()), voting_gain(labels, truth, classes)
    return {
        **result,
        "pi": changed,
        "pi_share": changed / draws,
        "accuracy": float((labels == truth).mean()),
        "voting_accuracy": voting_accuracy(labels, truth, classes),
        "voting_gain": gain if np.isfinite(gain) else None,
    }
