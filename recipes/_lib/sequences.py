"""Long token sequences to batches: padded to the longest of the batch."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import torch

from _lib.data import ExampleSet
from snnk_peft.errors import ConfigError
from snnk_peft.tasks import Sequences


class SequenceExamples(ExampleSet):
    """One split of a `SequenceTask`.

    Args:
        rows: the examples; of pairs, both documents have the same place in their lists.
    """

    def __init__(self, rows: Sequences):
        if len(rows) == 0:
            raise ConfigError("the data hold no example; expected at least one row per split")
        self._documents = rows.tokens
        self.labels = torch.from_numpy(rows.labels.astype(np.int64))
        self.lengths = [max(len(ids) for ids in example) for example in zip(*rows.tokens, strict=True)]

    def batch(self, indices: Sequence[int], device: torch.device | str = "cpu") -> dict[str, torch.Tensor]:
        """Model inputs: input_ids and attention_mask (batch, documents, longest), labels (batch,)."""
        longest = max(self.lengths[index] for index in indices)
        ids = np.zeros((len(indices), len(self._documents), longest), dtype=np.int64)
        for row, index in enumerate(indices):
            for document, part in enumerate(self._documents):
                ids[row, document, : len(part[index])] = part[index]
        tokens = torch.from_numpy(ids).to(device)
        return {
            "input_ids": tokens,
            "attention_mask": (tokens != 0).long(),
            "labels": self.labels[list(indices)].to(device),
        }

    def fingerprint(self) -> str:
        """A digest of all tokens and labels: equal if and only if training would see the same data."""
        digest = hashlib.sha256(self.labels.numpy().tobytes())
        for part in self._documents:
            digest.update(np.array([len(ids) for ids in part], dtype=np.int64).tobytes())
            for ids in part:
                digest.update(ids.astype(np.uint16).tobytes())
        return digest.hexdigest()
