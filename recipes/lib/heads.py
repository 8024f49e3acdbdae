"""A linear head on a frozen encoder: every example is encoded once, and only the head is trained."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
from torch import nn
from transformers.modeling_outputs import SequenceClassifierOutput

from snnk_cli.data import ExampleSet
from snnk_cli.terminal import bar


class Vectors(ExampleSet):
    """Examples encoded once by a frozen encoder.

    Args:
        examples: texts with one label each.
        encode: model inputs of a batch -> (batch, width).
        title: title of the progress bar.

    Attributes:
        vectors: (n, width), in the order of the examples.
        seconds: seconds spent encoding.
    """

    def __init__(self, examples: ExampleSet, encode: Callable[[dict[str, torch.Tensor]], torch.Tensor], title: str):
        self._examples, self.labels, self.lengths = examples, examples.labels, examples.lengths
        batches, parts, start = list(examples.by_length(64)), [], time.perf_counter()
        for indices in bar(batches, title):
            inputs = examples.batch(indices)
            del inputs["labels"]
            parts.append(encode(inputs))
        order = torch.tensor([index for indices in batches for index in indices])
        self.vectors = torch.cat(parts)[order.argsort()]
        self.seconds = time.perf_counter() - start

    def batch(self, indices: Sequence[int], device: torch.device | str = "cpu") -> dict[str, torch.Tensor]:
        """Return the inputs of `Head`."""
        chosen = list(indices)
        return {"vectors": self.vectors[chosen].to(device), "labels": self.labels[chosen].to(device)}

    def fingerprint(self) -> str:
        """Return the fingerprint of the examples, because the vectors' last bits depend on the number of threads."""
        return self._examples.fingerprint()


class Head(nn.Module):
    """A zero-initialised Linear with its loss: squared error for float labels, else cross-entropy."""

    def __init__(self, width: int, outputs: int):
        super().__init__()
        self.linear = nn.Linear(width, outputs)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, vectors: torch.Tensor, labels: torch.Tensor | None = None) -> SequenceClassifierOutput:
        """Return logits (batch, outputs), in float32 whatever the run's precision, as the encoder is not included."""
        with torch.autocast(vectors.device.type, enabled=False):
            logits = self.linear(vectors)
            if labels is None:
                return SequenceClassifierOutput(logits=logits)
            if labels.is_floating_point():
                loss = nn.functional.mse_loss(logits.squeeze(-1), labels)
            else:
                loss = nn.functional.cross_entropy(logits, labels)
            return SequenceClassifierOutput(loss=loss, logits=logits)
