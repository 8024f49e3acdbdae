"""Batching of examples: the base class `ExampleSet`, and the class for sentences, which are tokenised once.

Other kinds of examples have their own files next to this one (sequences.py, byte_windows.py).

The order of the examples is a pure function of (seed, epoch), and a position in it is a step number, so a run
resumed in the middle of an epoch sees exactly the batches that it would have seen.
"""

from __future__ import annotations

import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence, Sized
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from snnk_cli.settings import StepSettings
from snnk_peft.errors import ConfigError
from snnk_peft.tasks.base import IGNORED
from snnk_peft.tasks.texts import Tokens

_MEGABATCH = 50  # batches sorted together: long enough to find similar lengths, short enough to keep the order random


class ExampleSet(ABC):
    """Examples that can be drawn in batches.

    Attributes:
        lengths: tokens per example, for grouping batches.
        labels: labels of all examples, or of all their words; ignored ones are negative.
        pairs: whether the examples are pairs of texts.
    """

    lengths: list[int]
    pairs = False
    labels: torch.Tensor

    def __len__(self) -> int:
        return len(self.lengths)

    @abstractmethod
    def batch(self, indices: Sequence[int], device: torch.device | str = "cpu") -> dict[str, torch.Tensor]:
        """Return model inputs of the chosen examples, padded to the longest, and their labels."""

    def batches(
        self, wanted: Sequence[Sequence[int]], device: torch.device | str = "cpu", epoch: int | None = None
    ) -> Iterator[dict[str, torch.Tensor]]:
        """Yield the model inputs of each list of examples.

        Args:
            wanted: the examples of each batch.
            device: target device.
            epoch: training epoch, for random augmentation; None for evaluation.
        """
        return (self.batch(indices, device) for indices in wanted)

    def describe(self) -> str:
        """Describe the number and size of the examples, for the log."""
        return f"{len(self):,} examples of up to {max(self.lengths)} tokens"

    @abstractmethod
    def fingerprint(self) -> str:
        """Return a digest of all tokens and labels: equal if and only if training would see the same data."""

    def plan(self, batch_size: int, train: StepSettings, epoch: int) -> list[list[list[int]]]:
        """Return the optimizer steps of one epoch (see `epoch_plan`); `steps_per_epoch` gives their number."""
        return epoch_plan(self.lengths, batch_size, train, epoch)

    def by_length(self, batch_size: int) -> Iterator[list[int]]:
        """Yield batches of indices, longest first: the evaluation order with the least padding."""
        order = sorted(range(len(self)), key=lambda index: -self.lengths[index])
        for start in range(0, len(order), batch_size):
            yield order[start : start + batch_size]


class AroundExamples(ExampleSet):
    """A wrapper around other examples that changes only their batches.

    Args:
        examples: the wrapped examples.
    """

    def __init__(self, examples: ExampleSet):
        self.inner = examples
        self.lengths, self.labels, self.pairs = examples.lengths, examples.labels, examples.pairs

    def describe(self) -> str:
        return self.inner.describe()

    def fingerprint(self) -> str:
        return self.inner.fingerprint()

    def batch(self, indices: Sequence[int], device: torch.device | str = "cpu") -> dict[str, torch.Tensor]:
        return next(self.batches([indices], device))

    @abstractmethod
    def batches(
        self, wanted: Sequence[Sequence[int]], device: torch.device | str = "cpu", epoch: int | None = None
    ) -> Iterator[dict[str, torch.Tensor]]: ...


class Examples(ExampleSet):
    """Tokenised sentences or sentence pairs with their labels, or words with one label each.

    The label of a word is at its first token; other tokens have `IGNORED`. Words beyond `max_length` are dropped.

    Args:
        rows: a `datasets.Dataset` with the columns sentence1, optionally sentence2, and label; or words and label.
        tokenizer: a transformers tokenizer.
        max_length: tokens per example; longer ones are cut.
    """

    def __init__(self, rows: Any, tokenizer: PreTrainedTokenizerBase, max_length: int):
        check_not_empty(rows)
        of_words = "words" in rows.column_names
        names = [name for name in ("words", "sentence1", "sentence2") if name in rows.column_names]
        self.pairs = "sentence2" in names
        encoded = tokenizer(
            *(list(rows[name]) for name in names),
            is_split_into_words=of_words,
            truncation=True,
            max_length=max_length,
            return_attention_mask=False,
        )
        self._tokens = Tokens(encoded, tokenizer)
        self.columns, self.lengths = self._tokens.columns, self._tokens.lengths
        if of_words:
            self.columns["labels"] = _at_first_tokens(encoded, list(rows["label"]))
            self.labels = torch.from_numpy(np.concatenate(self.columns["labels"]))
        else:
            labels = np.asarray(list(rows["label"]))
            self.labels = torch.from_numpy(labels.astype(np.float32 if labels.dtype.kind == "f" else np.int64))
        self._tokens.fillers["labels"] = IGNORED

    def batch(self, indices: Sequence[int], device: torch.device | str = "cpu") -> dict[str, torch.Tensor]:
        """Return model inputs of the chosen examples: input_ids, attention_mask, ... (batch, longest).

        Labels are (batch,), or (batch, longest) if words are labelled.
        """
        inputs = self._tokens.batch(indices)
        if "labels" not in inputs:
            inputs["labels"] = self.labels[list(indices)]
        return {name: values.to(device) for name, values in inputs.items()}

    def fingerprint(self) -> str:
        """Return a digest of all tokens and labels: equal if and only if training would see the same data."""
        labels = b"" if "labels" in self.columns else self.labels.numpy().tobytes()
        return digest(labels, sorted(self.columns.items()), np.int64)


def check_not_empty(rows: Sized) -> None:
    """Raise a ConfigError if the split has no examples."""
    if len(rows) == 0:
        raise ConfigError("the data contain no examples; expected at least one row per split")


def digest(labels: bytes, columns: Iterable[tuple[str, Sequence[np.ndarray]]], dtype: type[np.integer[Any]]) -> str:
    """Return the SHA-256 of the labels and each column: name, lengths of the arrays, and values as `dtype`."""
    found = hashlib.sha256(labels)
    for name, values in columns:
        found.update(name.encode())
        found.update(np.array([len(ids) for ids in values], dtype=np.int64).tobytes())
        for ids in values:
            found.update(ids.astype(dtype, copy=False).tobytes())
    return found.hexdigest()


def _at_first_tokens(encoded: Any, labels: Sequence[Sequence[int]]) -> list[np.ndarray]:
    """Convert labels of words to labels of tokens, (length,) each."""
    found = []
    for row, of_words in enumerate(labels):
        words = encoded.word_ids(row)
        first = [word is not None and word != before for before, word in zip([None, *words], words, strict=False)]
        found.append(np.asarray([of_words[word] if new else IGNORED for word, new in zip(words, first, strict=True)]))
        if all(found[-1] == IGNORED):
            raise ConfigError(
                f"example {row} of the data: the tokenizer produces no tokens from its words; leave the row out"
            )
    return found


def epoch_plan(lengths: Sequence[int], batch_size: int, train: StepSettings, epoch: int) -> list[list[list[int]]]:
    """Return the optimizer steps of one epoch: lists of batches of indices, in which every example occurs once.

    Args:
        lengths: tokens per example.
        batch_size: examples per forward pass, over all processes.
        train: seed, gradient_accumulation and group_by_length.
        epoch: counted from 0; with the seed it determines the order.
    """
    accumulation, group_by_length = train.gradient_accumulation, train.group_by_length
    generator = torch.Generator().manual_seed((train.seed << 20) + epoch)
    order = torch.randperm(len(lengths), generator=generator).tolist()
    if group_by_length:
        size = _MEGABATCH * batch_size
        chunks = [order[start : start + size] for start in range(0, len(order), size)]
        order = [index for chunk in chunks for index in sorted(chunk, key=lambda item: -lengths[item])]
    batches = [order[start : start + batch_size] for start in range(0, len(order), batch_size)]
    if group_by_length:
        batches = [batches[index] for index in torch.randperm(len(batches), generator=generator).tolist()]
    return [batches[start : start + accumulation] for start in range(0, len(batches), accumulation)]


def steps_per_epoch(examples: int, batch_size: int, accumulation: int) -> int:
    """Return the length of `epoch_plan` without building it."""
    return math.ceil(math.ceil(examples / batch_size) / accumulation)


def share(batch: Sequence[int], rank: int, world: int) -> tuple[list[int], int]:
    """Return this process's part of a batch, and how many of its examples count.

    A process without examples repeats the first one with weight 0, because every process must take part.
    """
    mine = list(batch[rank::world])
    return (mine, len(mine)) if mine else ([batch[0]], 0)
