"""Batching of long token sequences, padded to the longest of the batch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from data import Sequences

from snnk_cli.data import ExampleSet, check_not_empty, digest
from snnk_peft.tasks.texts import padded


class SequenceExamples(ExampleSet):
    """A split of a `SequenceTask`.

    Args:
        rows: the examples; the two documents of a pair have the same index in their lists.
        max_length: tokens per document; longer ones are cut.
    """

    def __init__(self, rows: Sequences, max_length: int):
        check_not_empty(rows)
        self._documents = [[ids[:max_length] for ids in part] for part in rows.tokens]
        self.labels = torch.from_numpy(rows.labels.astype(np.int64))
        self.lengths = [max(map(len, example)) for example in zip(*self._documents, strict=True)]

    def batch(self, indices: Sequence[int], device: torch.device | str = "cpu") -> dict[str, torch.Tensor]:
        """Return model inputs: input_ids and attention_mask (batch, documents, longest), labels (batch,)."""
        documents = [part[index] for index in indices for part in self._documents]
        tokens = padded(documents).unflatten(0, (len(indices), -1)).to(device)
        return {
            "input_ids": tokens,
            "attention_mask": (tokens != 0).long(),
            "labels": self.labels[list(indices)].to(device),
        }

    def fingerprint(self) -> str:
        return digest(self.labels.numpy().tobytes(), [("", part) for part in self._documents], np.uint16)
