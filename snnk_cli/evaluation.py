"""Scores of a classifier on a task's evaluation splits, and notes about examples that are trained on and scored."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn.functional import pad

from snnk_cli.data import ExampleSet, share
from snnk_peft.errors import ConfigError
from snnk_peft.repeats import label_note, repeat_note
from snnk_peft.tasks.base import IGNORED, held_back


class DivergedError(ArithmeticError):
    """Loss, gradient or predictions are no longer finite numbers."""


@dataclass(frozen=True)
class Alone:
    """What `predict` asks of an accelerator, where one process computes by itself.

    Args:
        device: of the model.
    """

    device: torch.device
    num_processes: int = 1
    process_index: int = 0


def evaluation_splits(
    task: Any, dataset: Mapping[str, Any], limit: int | None, names: Sequence[str] | None = None
) -> dict[str, Any]:
    """The splits that are evaluated, cut to `limit` rows: the first ones.

    Of images, which stand in folders by class, rows at equal distances.

    Args:
        task: has validation splits, MNLI two.
        dataset: the splits that were read.
        limit: rows of each, or None for all.
        names: other splits than those.
    """
    splits = {name: dataset[name] for name in names or task.validation_splits if name in dataset}
    if limit is None:
        return splits

    def chosen(count: int) -> Iterable[int]:
        size = min(limit, count)
        return [i * count // size for i in range(size)] if task.modality == "image" else range(size)

    return {name: rows.select(chosen(len(rows))) for name, rows in splits.items()}


def held_back_rows(rows: Any, share: float, seed: int = 0) -> tuple[Any, Any]:
    """(rows to train on, rows to choose the epoch on): of every class its share, of other labels of all rows.

    Args:
        rows: a `datasets.Dataset` with the column label.
        share: part that is held back.
        seed: decides which ones.
    """
    labels = rows["label"][:]
    groups = np.asarray(labels) if isinstance(labels[0], int | np.integer) else np.zeros(len(rows), int)
    held = held_back(groups, share, seed)
    if not held:
        raise ConfigError(
            f"train.choose_share is {share}: none of {len(rows)} training examples can be held back (no class has two)"
        )
    return rows.select(np.setdiff1d(np.arange(len(rows)), held).tolist()), rows.select(held)


def matched_threshold(logits: torch.Tensor, labels: torch.Tensor) -> float:
    """The difference of two classes' logits above which there are as many examples as are of the second class.

    Rates of both classes are then right on these examples, where the larger logit neglects the rarer one. 0 where all
    are of one class.

    Args:
        logits: (n, 2).
        labels: (n,) of 0 and 1.
    """
    margins = (logits[:, 1] - logits[:, 0]).double().sort(descending=True).values
    count = int(labels.sum())
    return 0.0 if count in (0, len(margins)) else float(margins[count - 1 : count + 1].mean())


@torch.no_grad()
def predict(
    model: torch.nn.Module,
    examples: ExampleSet,
    batch_size: int,
    accelerator: Any,
    stopped: Callable[[], bool] = lambda: False,
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Logits (n, classes) in fp32 and labels (n,), on the CPU, of all examples; None if `stopped` became true.

    Where every word has a label: (n, longest, classes) and (n, longest), padded with zeros and `IGNORED`; of several
    labels per example both (n, classes).

    With several processes each takes part of every batch and all receive the whole result.
    """
    was_training = model.training
    model.eval()
    logits: list[torch.Tensor] = []
    labels: list[torch.Tensor] = []
    world, longest = accelerator.num_processes, max(examples.lengths)
    plan = list(examples.by_length(batch_size * world))
    shares = [share(indices, accelerator.process_index, world) for indices in plan]
    feed = iter(examples.batches([mine for mine, _ in shares], accelerator.device))
    for indices, (_, count) in zip(plan, shares, strict=True):
        # With several processes only an agreed stop is safe, and that comes at the next step boundary.
        if world == 1 and stopped():
            model.train(was_training)
            return None
        inputs = next(feed)
        target = inputs.pop("labels")
        output = model(**inputs).logits.float()
        if target.dim() == 2 and not target.is_floating_point():
            missing = longest - target.shape[1]
            output, target = pad(output, (0, 0, 0, missing)), pad(target, (0, missing), value=IGNORED)
        if world > 1:
            sizes = accelerator.gather(torch.tensor([count], device=output.device))
            size = max(1, -(-len(indices) // world))
            padded = torch.zeros(size, *output.shape[1:], device=output.device)
            wanted = torch.zeros(size, *target.shape[1:], device=output.device, dtype=target.dtype)
            padded[: len(output)], wanted[: len(target)] = output, target
            parts = zip(
                accelerator.gather(padded).split(size), accelerator.gather(wanted).split(size), sizes, strict=True
            )
            pairs = [(values[:kept], names[:kept]) for values, names, kept in parts]
            output, target = (torch.cat(column) for column in zip(*pairs, strict=True))
        logits.append(output.cpu())
        labels.append(target.cpu())
    model.train(was_training)
    every_logit, every_label = torch.cat(logits), torch.cat(labels)
    if every_label.dim() == 1 and (kept := every_label != IGNORED).logical_not().any():
        return every_logit[kept], every_label[kept]  # what could not be read does not count
    return every_logit, every_label


def score(
    model: torch.nn.Module,
    task: Any,
    splits: Mapping[str, ExampleSet],
    batch_size: int,
    accelerator: Any,
    stopped: Callable[[], bool] = lambda: False,
) -> dict[str, float] | None:
    """All metrics and "score"; of several splits their means, and each under "split/metric".

    Returns None if `stopped` became true on the way.
    """
    results: dict[str, dict[str, float]] = {}
    for name, examples in splits.items():
        predictions = predict(model, examples, batch_size, accelerator, stopped)
        if predictions is None:
            return None
        logits, labels = predictions
        if not torch.isfinite(logits).all():
            raise DivergedError(f"the model's predictions on {name} are not finite")
        results[name] = task.compute(logits, labels)
    return task.summarize(results)


MOST_IMAGES = 100_000
"""Images whose content is compared; reading those of larger sets takes longer than a note is worth."""


def repeat_notes(task: Any, train: Any, splits: Mapping[str, Any], labelled: bool = True) -> list[str]:
    """Sentences about examples of `splits` that are among those of `train`, and about examples with two labels.

    Args:
        task: of texts or of images, which are compared by their content.
        train: the examples that are fitted.
        splits: name -> the examples that are scored.
        labelled: whether the labels of `train` mean something.
    """
    every = {"train": train, **splits}
    number = sum(map(len, every.values()))
    if task.modality == "image" and number > MOST_IMAGES:
        return [
            f"{number:,} images were not compared with each other (up to {MOST_IMAGES:,} are): whether some that "
            "are scored were trained on is not known"
        ]
    keys = {name: _keys(task, rows) for name, rows in every.items()}
    found = [repeat_note(name, keys[name], "train", keys["train"]) for name in splits]
    if labelled and task.label_names is not None:
        labels = [tuple(label) if isinstance(label, list) else int(label) for label in train["label"][:]]
        found.append(label_note("train", keys["train"], labels))
    return [note for note in found if note is not None]


def _keys(task: Any, rows: Any) -> list[Hashable]:
    if task.modality == "image":
        digests = [rows.digest(index) for index in range(len(rows))]
        return [(index, None) if digest is None else digest for index, digest in enumerate(digests)]
    columns = [rows[name][:] for name in ("words", "sentence1", "sentence2") if name in rows.column_names]
    return [
        tuple(tuple(part) if isinstance(part, list) else part for part in row) for row in zip(*columns, strict=True)
    ]
