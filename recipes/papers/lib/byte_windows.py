"""Language modelling on bytes: windows of a text, and the loss in bits per byte."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from snnk_cli.data import ExampleSet, steps_per_epoch
from snnk_cli.settings import StepSettings
from snnk_peft.errors import ConfigError
from snnk_peft.tasks.stdlib_docs import load_sentences


class ByteWindows(ExampleSet):
    """Windows of a text, one token per byte. A window is identified by its start.

    Args:
        text: text in UTF-8.
        width: bytes per window.
    """

    def __init__(self, text: bytes, width: int):
        self.text = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
        self.lengths = [width] * (len(text) // width)  # without overlap

    def batch(self, indices: Sequence[int], device: torch.device | str = "cpu") -> dict[str, Any]:
        """Return model inputs: input_ids and labels (batch, width), of the windows that begin at `indices`."""
        ids = self.text[torch.tensor(indices)[:, None] + torch.arange(self.lengths[0])].to(device)
        return {"input_ids": ids, "labels": ids, "use_cache": False}

    def plan(self, batch_size: int, train: StepSettings, epoch: int) -> list[list[list[int]]]:
        """Draw windows anywhere in the text, for as many steps as one pass over the text takes."""
        generator = torch.Generator().manual_seed((train.seed << 20) + epoch)
        steps = steps_per_epoch(len(self), batch_size, train.gradient_accumulation)
        shape = (steps, train.gradient_accumulation, batch_size)
        return torch.randint(len(self.text) - self.lengths[0], shape, generator=generator).tolist()

    def spread(self, count: int) -> list[int]:
        """Return the starts of at most `count` windows, evenly spread over the text."""
        return (torch.linspace(0, len(self) - 1, min(count, len(self))).long() * self.lengths[0]).tolist()

    def fingerprint(self) -> str:
        return hashlib.sha256(self.text.numpy().tobytes() + bytes(str(self.lengths[0]), "ascii")).hexdigest()


def read_texts(file: str | None, width: int) -> tuple[bytes, bytes]:
    """Read a training and a test text: a file with its last tenth held out, or modules of Python's standard library.

    Raises:
        ConfigError: the file cannot be read, or one of its parts has at most `width` bytes.
    """
    if file is None:
        train, test = ("\n".join(sentence.text for sentence in half).encode() for half in load_sentences())
        return train, test
    try:
        whole = Path(file).read_bytes()
    except OSError as error:
        raise ConfigError(f"--text {file}: cannot be read ({error.strerror})") from error
    train, test = whole[: len(whole) * 9 // 10], whole[len(whole) * 9 // 10 :]
    if min(len(train), len(test)) <= width:
        raise ConfigError(f"--text {file}: too short; expected more than {10 * (width + 1)} bytes")
    return train, test


@torch.no_grad()
def bits_per_byte(
    model: torch.nn.Module,
    windows: ByteWindows,
    count: int,
    batch_size: int,
    device: torch.device,
    stopped: Callable[[], bool],
) -> float | None:
    """Return the mean loss over `count` windows, evenly spread over the text; None if `stopped` became true."""
    was_training, starts, total = model.training, windows.spread(count), 0.0
    model.eval()
    for begin in range(0, len(starts), batch_size):
        if stopped():
            break
        part = starts[begin : begin + batch_size]
        total += model(**windows.batch(part, device)).loss.item() * len(part)
    model.train(was_training)
    return None if stopped() else total / len(starts) / math.log(2)
