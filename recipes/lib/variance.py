"""How much a random model's answers differ from draw to draw (Learning the Transformer Kernel, section 4.1).

    RSD = std over draws / |mean over draws|, of the continuous output; for two classes, the difference of the logits
    PI  = n − count of the majority label, of n draws (two classes: min(x, n − x), x of them positive), ≤ n − ⌈n/K⌉
    VA  = accuracy of the majority label;    AGV = VA / mean accuracy of a single draw

The standard deviation divides by n − 1. Where the mean over draws is 0, RSD is infinite, or 0 if all draws are 0. A tie
goes to the smallest class id among the tied labels, which is also what argmax of equal logits gives. AGV is NaN
where no draw is ever right (then the vote is not either).

Shapes: n draws, N examples, K classes. Cost: O(n N K) time, O(N K) memory beside the input.
"""

from __future__ import annotations

import numpy as np

from snnk_peft.errors import ConfigError


def relative_deviation(outputs: np.ndarray) -> np.ndarray:
    """RSD of each example, (N,).

    Args:
        outputs: (n, N) continuous outputs, n ≥ 2.
    """
    values = np.asarray(outputs, np.float64)
    if values.ndim != 2 or len(values) < 2:
        raise ConfigError(f"outputs have shape {values.shape}; expected (draws, examples) with at least 2 draws")
    deviation, mean = values.std(0, ddof=1), np.abs(values.mean(0))
    # 0/0, draws that are all 0, is no deviation at all.
    result = np.where(deviation > 0, np.inf, 0.0)
    np.divide(deviation, mean, out=result, where=mean > 0)
    return result


def counts(labels: np.ndarray, classes: int) -> np.ndarray:
    """How many draws gave each label, (N, K).

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
    """The label that most draws gave, (N,); the smallest of those that tie. Arguments as in `counts`."""
    return counts(labels, classes).argmax(-1)


def inconsistency(labels: np.ndarray, classes: int) -> np.ndarray:
    """PI of each example, (N,): draws without the majority label. Arguments as in `counts`."""
    return len(labels) - counts(labels, classes).max(-1)


def voting_accuracy(labels: np.ndarray, truth: np.ndarray, classes: int) -> float:
    """VA: the share of examples whose majority label is true.

    Args:
        labels: see `counts`.
        truth: (N,) class ids.
        classes: K.
    """
    return float((majority(labels, classes) == np.asarray(truth)).mean())


def voting_gain(labels: np.ndarray, truth: np.ndarray, classes: int) -> float:
    """AGV: voting accuracy over the mean accuracy of a draw; NaN if no draw is ever right. Arguments as above."""
    single = float((np.asarray(labels) == np.asarray(truth)).mean())
    return voting_accuracy(labels, truth, classes) / single if single > 0 else float("nan")


def variance_figures(logits: np.ndarray, truth: np.ndarray) -> dict[str, float | int | None]:
    """All figures of one split.

    Args:
        logits: (n, N, K), K ≥ 2, n ≥ 2.
        truth: (N,) class ids.

    Returns:
        rsd_mean and rsd_median over examples, and rsd_infinite, how many have mean 0 (None for more than two classes,
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
