"""The part of the batches that a plan uses, some of it held out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn

from snnk_peft.calibrating.batches import Batches, Survey, examples_in, is_held_out, model_inputs, tokens_of
from snnk_peft.errors import ConfigError

HELD_OUT = 0.4


class Sample:
    """Evenly spaced batches with about `tokens` tokens in total; some of them are held out.

    Raises:
        ConfigError: fewer than three batches, or batches that `calibrate` would reject.

    Attributes:
        batches: (held out or not, model inputs).
        middle: the batch of median size among all.
        tokens: approximate number of tokens in these batches.
        examples: number of examples in these batches.
        padding: token ids at masked positions.
    """

    def __init__(self, model: nn.Module, batches: Batches, tokens: int):
        survey = Survey(model, batches, HELD_OUT)
        if survey.faults:
            raise ConfigError(survey.faults)
        total = survey.total
        if total < 3:
            raise ConfigError(
                f"batches holds {total}; expected three at least, of which one is held out, and better a few dozen, "
                "such as a list of tokenized sentences of the kind that the model will see"
            )
        sizes = [tokens_of(batch) for _, batch in survey]
        wanted = min(total, max(3, round(tokens * total / max(1, sum(sizes)))))
        chosen = {round((step + 0.5) * total / wanted - 0.5) for step in range(wanted)}
        middle = sorted(range(total), key=lambda index: (sizes[index], index))[total // 2]
        kept = {index: batch for index, batch in survey if index in chosen or index == middle}
        self.padding = survey.padding
        self.middle = kept[middle]
        self.batches = [(is_held_out(number, HELD_OUT), kept[index]) for number, index in enumerate(sorted(chosen))]

        self.tokens = sum(tokens_of(batch) for _, batch in self.batches)
        self.examples = sum(examples_in(batch) for _, batch in self.batches)

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        return ((number, batch) for number, (_, batch) in enumerate(self.batches))

    def inputs(self, model: nn.Module, held_out: bool) -> Iterable[dict[str, Any]]:
        return (model_inputs(model, batch) for out, batch in self.batches if out == held_out)
