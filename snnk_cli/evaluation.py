"""Scoring of a classifier on a task's evaluation splits, and notes about examples both trained on and scored."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import pad

from snnk_cli.data import ExampleSet, share
from snnk_peft.repeats import label_note, repeat_note
from snnk_peft.tasks.base import IGNORED


class DivergedError(ArithmeticError):
    """Loss, gradient or predictions are no longer finite numbers."""


@dataclass(frozen=True)
class Alone:
    """The part of an accelerator's interface that `predict` needs, for a single process.

    Args:
        device: device of the model.
    """

    device: torch.device
    num_processes: int = 1
    process_index: int = 0


def evaluation_splits(
    task: Any, dataset: Mapping[str, Any], limit: int | None, names: Sequence[str] | None = None
) -> dict[str, Any]:
    """Return the splits to evaluate, each cut to its first `limit` rows.

    Images are stored in folders by class, so evenly spaced rows are used instead.

    Args:
        task: has one validation split, or two like MNLI.
        dataset: the splits that were read.
        limit: rows of each, or None for all.
        names: splits to use instead of the validation splits.
    """
    splits = {name: dataset[name] for name in names or task.validation_splits if name in dataset}
    if limit is None:
        return splits

    def chosen(count: int) -> Iterable[int]:
        size = min(limit, count)
        return [i * count // size for i in range(size)] if task.modality == "image" else range(size)

    return {name: rows.select(chosen(len(rows))) for name, rows in splits.items()}


@torch.no_grad()
def predict(
    model: torch.nn.Module,
    examples: ExampleSet,
    batch_size: int,
    accelerator: Any,
    stopped: Callable[[], bool] = lambda: False,
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return logits (n, classes) in fp32 and labels (n,) of all examples, on the CPU; None if `stopped` became true.

    If every word has a label: (n, longest, classes) and (n, longest), padded with zeros and `IGNORED`; for multi-label
    tasks both (n, classes).

    With several processes, each handles part of every batch and all receive the whole result.
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
        # With several processes only an agreed stop is safe, and it comes at the next step boundary.
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
        return every_logit[kept], every_label[kept]  # unreadable examples do not count
    return every_logit, every_label


def score(
    model: torch.nn.Module,
    task: Any,
    splits: Mapping[str, ExampleSet],
    batch_size: int,
    accelerator: Any,
    stopped: Callable[[], bool] = lambda: False,
) -> dict[str, float] | None:
    """Compute all metrics and "score"; for several splits their means, and each split's under "split/metric".

    Return None if `stopped` became true meanwhile.
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
    """Return notes about examples of `splits` that are also in `train`, and about examples with two labels.

    Args:
        task: a task of texts or images, which are compared by content.
        train: the training examples.
        splits: name -> the scored examples.
        labelled: whether the labels of `train` are meaningful.
    """
    every = {"train": train, **splits}
    number = sum(map(len, every.values()))
    if task.modality == "image" and number > MOST_IMAGES:
        return [
            f"{number:,} images were not compared with each other (at most {MOST_IMAGES:,} are): whether any "
            "scored image was also trained on is not known"
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
