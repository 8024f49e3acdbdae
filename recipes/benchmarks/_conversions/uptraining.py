"""A short training of a converted language model after calibration, on unlabelled texts."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm

from snnk_cli.teacher import logit_loss
from snnk_peft.solvers.descent import falling_adam


def add_uptraining(options: argparse.ArgumentParser, steps: int) -> None:
    """Add the options of a conversion with uptraining."""
    options.add_argument("--uptraining", type=int, default=steps, help=f"steps on further texts (default {steps})")
    options.add_argument("--learning-rate", type=float, default=4e-4, help="of the first of these steps (default 4e-4)")
    options.add_argument("--autocast", action="store_true", help="matrix products in bf16, if the CPU supports it")


def bf16(wanted: bool) -> contextlib.AbstractContextManager[object]:
    """Run matrix products in bf16 in a context, if wanted."""
    return torch.autocast("cpu", torch.bfloat16) if wanted else contextlib.nullcontext()


def all_but_embedding(model: Any) -> list[Tensor]:
    """Return the parameters of a language model to train.

    The embedding is left out: it was not converted, and a tied output reads it.
    """
    embedded = model.get_input_embeddings().weight
    return [parameter for parameter in model.parameters() if parameter is not embedded]


def next_token_divergence(teacher: Any, student: Any, ids: Tensor) -> Tensor:
    """Compute KL(p ‖ p') of the original's next-token distributions p and the student's p', mean over tokens, in nats.

    Args:
        teacher: the original.
        student: the converted model.
        ids: (rows, length).
    """
    with torch.no_grad():
        wanted = teacher(input_ids=ids, use_cache=False).logits
    given = student(input_ids=ids, use_cache=False).logits
    return logit_loss(wanted.float().flatten(0, 1), given.float().flatten(0, 1), 1.0)


def uptrain(
    teacher: Any, student: Any, trained: Sequence[Tensor], batches: Sequence[Tensor], learning_rate: float
) -> None:
    """Run one step of Adam on the divergence per batch; the learning rate falls linearly to zero.

    Args:
        teacher: the original.
        student: the model to train, in place.
        trained: parameters of the student to train.
        batches: token ids, (rows, length) each.
        learning_rate: learning rate of the first step.

    Raises:
        NumericalError: the divergence is no longer finite.
    """
    coming = iter(tqdm(batches, desc="uptraining", unit="step"))
    student.requires_grad_(False)
    for parameter in trained:
        parameter.requires_grad_(True)
    falling_adam(
        trained,
        [learning_rate] * len(trained),
        lambda: next_token_divergence(teacher, student, next(coming)),
        len(batches),
        "divergence from the original",
    )
    student.requires_grad_(True)
