"""Inputs of other shapes: an exported program must be right for more than its sample."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from snnk_peft.bundling.report import text_room
from snnk_peft.calibrating.batches import checked_one
from snnk_peft.errors import ConfigError

Inputs = dict[str, torch.Tensor]

LONG = 160  # tokens: more than one chunk of causal linear attention, which is 128
PER_TOKEN = ("input_ids", "attention_mask", "token_type_ids", "position_ids", "inputs_embeds")


def only_tensors(model: nn.Module, batch: Any, what: str) -> Inputs:
    """A batch without its labels.

    Args:
        model: what it is for.
        batch: model inputs.
        what: the argument that it was given as, for messages.

    Raises:
        ConfigError: no mapping, nothing in it, or something that is no tensor or has no axis for the examples.
    """
    given = checked_one(model, batch, what)
    kept = {name: value for name, value in given.items() if name not in ("labels", "label", "label_ids")}
    wrong = {name: value for name, value in kept.items() if not isinstance(value, torch.Tensor) or not value.dim()}
    if wrong:
        raise ConfigError(
            f"{what}[{name!r}] is {type(value).__name__}; expected a tensor whose first axis counts examples"
            for name, value in wrong.items()
        )
    return {name: value.detach() for name, value in kept.items()}


class Axes:
    """Which axes of a model's inputs vary from call to call: the examples, and the tokens of texts.

    Args:
        sample: inputs of the model.

    Attributes:
        examples: in the sample.
        tokens: in the sample; None where there are no texts.
        free: name -> its axes that vary.
    """

    def __init__(self, sample: Inputs):
        main = next((name for name in ("input_ids", "inputs_embeds") if name in sample), None)
        first = sample[main] if main else next(iter(sample.values()))
        # Of a choice among several texts, (examples, choices, tokens), the number of choices stays.
        last = first.dim() - (2 if main == "inputs_embeds" else 1)
        self.examples = first.shape[0]
        self.tokens = first.shape[last] if main else None
        self._token_axis = {
            name: last
            for name, value in sample.items()
            if self.tokens is not None and name in PER_TOKEN and value.dim() > last and value.shape[last] == self.tokens
        }
        self.free = {
            name: {
                *([0] if value.shape[0] == self.examples else []),
                *([self._token_axis[name]] if name in self._token_axis else []),
            }
            for name, value in sample.items()
        }

    def resized(self, sample: Inputs, examples: int, tokens: int | None) -> Inputs:
        """The sample with another number of examples and tokens: some of its own, or the same several times.

        Tokens are spread evenly, so that padding stays on its side; a text of padding alone becomes one without.
        """
        found = {}
        for name, value in sample.items():
            if 0 in self.free[name]:
                value = value[torch.arange(examples, device=value.device) % self.examples]
            if tokens is not None and name in self._token_axis:
                assert self.tokens is not None
                spread = torch.arange(tokens, device=value.device) * self.tokens // tokens
                value = value.index_select(self._token_axis[name], spread)
            found[name] = value.contiguous()
        if "attention_mask" in self._token_axis:
            mask = found["attention_mask"]
            found["attention_mask"] = torch.where(mask.any(-1, keepdim=True), mask, torch.ones_like(mask))
        return found

    def traced(self, sample: Inputs) -> Inputs:
        """The sample with two examples and two tokens at least: an axis of length one would be taken for fixed."""
        tokens = None if self.tokens is None else max(2, self.tokens)
        return self.resized(sample, max(2, self.examples), tokens)

    def others(self, sample: Inputs, model: PreTrainedModel) -> Iterator[Inputs]:
        """Inputs of other shapes, as far as the model takes them: single examples, a single token, many tokens."""
        yield sample
        if self.tokens is None:
            for examples in (1, self.examples + 1):
                yield self.resized(sample, examples, None)
            return
        room = text_room(model.config) or LONG
        longest = min(room, max(LONG, 2 * self.tokens + 1))
        for examples, tokens in ((1, 1), (1, min(room, self.tokens + 3)), (self.examples + 1, longest)):
            yield self.resized(sample, examples, tokens)
