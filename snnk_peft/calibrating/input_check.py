"""Faults in batches of model inputs that can be found before the model runs.

Padding without a mask cannot be told from text in general. It can where the model or its tokenizer's convention names
a token for padding: two of them in a row at either end of a sequence are no text.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from snnk_peft.calibrating.as_tensors import EXAMPLE_AXES, as_tensors
from snnk_peft.tuner.slot_layer import active_module

Batch = Mapping[str, Any]

GIVES = 'gives with return_tensors="pt"'
SHOWN = 4  # faults that are listed; the others are counted
# Where tokens are told apart by other means than a mask over them.
APART = ("attention_mask", "position_ids", "cu_seq_lens_q")


class InputCheck:
    """Looks at one batch after the other.

    Args:
        model: a patched or plain model; without embeddings and config, nothing is known about tokens.
    """

    def __init__(self, model: nn.Module):
        self.vocabulary = _vocabulary(model)
        self.padding = _padding(model)
        self._found: list[str] = []

    def look(self, index: int | None, batch: Any, name: str = "batch", targets: str | None = None) -> Batch | None:
        """Convert a batch to tensors; None if it is not a dict of model inputs.

        Args:
            index: its number, None for one that stands alone.
            batch: whatever was given as one.
            name: what it is called in messages.
            targets: another name of labels.
        """
        where = name if index is None else f"{name} {index}"
        if not isinstance(batch, Mapping):
            self._found.append(
                f"{where} is {_in_words(batch)}; expected a dict of model inputs such as a tokenizer {GIVES}"
            )
            return None
        made, wrong = as_tensors(batch, targets)
        self._found += [f"{where} {text}" for text in wrong]
        if not wrong:
            self._found += self._of_tokens(where, made)
        return made

    def faults(self) -> list[str]:
        """Return the messages; beyond a limit only their number."""
        more = len(self._found) - SHOWN
        return self._found if more < 2 else [*self._found[:SHOWN], f"and {more} more faults of this kind"]

    def _of_tokens(self, where: str, batch: Batch) -> Iterator[str]:
        main = next((name for name in EXAMPLE_AXES if isinstance(batch.get(name), torch.Tensor)), None)
        if main is not None and not batch[main].numel():
            yield f"{where} holds {main} {tuple(batch[main].shape)}, no examples; expected one at least"
        ids, mask = batch.get("input_ids"), batch.get("attention_mask")
        if isinstance(mask, torch.Tensor) and mask.ndim == 2 and mask.numel() and not bool(mask.any()):
            yield (
                f"{where} is padding alone: its attention_mask {tuple(mask.shape)} is 0 everywhere; expected 1 at real "
                "tokens. Leave this batch out, or give the mask that the tokenizer returns"
            )
        if not isinstance(ids, torch.Tensor) or ids.is_floating_point() or ids.ndim != 2 or not ids.numel():
            return
        low, high = int(ids.min()), int(ids.max())
        if self.vocabulary is not None and (low < 0 or high >= self.vocabulary):
            wrong = low if low < 0 else high
            row, place = (ids == wrong).nonzero()[0].tolist()
            yield (
                f"{where} has token id {wrong} (row {row}, place {place}); the model's embeddings have "
                f"{self.vocabulary} rows, expected ids from 0 to {self.vocabulary - 1}. Tokenize with the model's own "
                "tokenizer"
            )
        if isinstance(mask, torch.Tensor) and mask.ndim == 2 and mask.shape != ids.shape:
            yield (
                f"{where} has an attention_mask {tuple(mask.shape)} for input_ids {tuple(ids.shape)}; expected "
                "the same shape, nonzero at real tokens"
            )
        if self.padding and all(batch.get(key) is None for key in APART):
            padded = padded_rows(ids, self.padding)
            if padded.any():
                yield (
                    f"{where} has no attention_mask, and {int(padded.sum())} of its {len(ids)} rows begin or end "
                    f"with padding (token {' or '.join(map(str, self.padding))}), which would be fitted as if it were "
                    "text; expected the attention_mask that the tokenizer returns. Give a mask of ones if these are "
                    "real tokens"
                )


def _in_words(given: Any) -> str:
    """Describe what was given in place of a batch, and how to make it one."""
    if isinstance(given, str):
        return f"the text {given[:30]!r} (texts are to be tokenized, and a batch alone given as [batch])"
    if isinstance(given, (list, tuple)) and given and all(isinstance(each, Mapping) for each in given):
        return (
            f"a list of {len(given)} dicts, one per example (DataLoader(..., collate_fn=DataCollatorWithPadding("
            "tokenizer)) makes one dict of them)"
        )
    if isinstance(given, (list, tuple)) and given:
        return f"a {type(given).__name__} of {len(given)} {type(given[0]).__name__}s"
    return f"a {type(given).__name__}"


def padded_rows(ids: torch.Tensor, padding: tuple[int, ...]) -> torch.Tensor:
    """(rows, length) -> (rows,), True where a sequence begins or ends with two padding tokens or more."""
    if ids.shape[1] < 3:
        return torch.zeros(len(ids), dtype=torch.bool)
    found = torch.zeros(len(ids), dtype=torch.bool, device=ids.device)
    for token in padding:
        is_padding = ids == token
        found |= is_padding[:, :2].all(1) | is_padding[:, -2:].all(1)
    return found


def _vocabulary(model: nn.Module) -> int | None:
    """Rows of the token embeddings; None where the model has none, or does not say which they are."""
    try:
        embeddings = active_module(model.get_input_embeddings())  # type: ignore[operator]
    except (AttributeError, NotImplementedError):
        return None
    return embeddings.num_embeddings if isinstance(embeddings, nn.Embedding) else None


def _padding(model: nn.Module) -> tuple[int, ...]:
    """Return the padding token; where the model names none, the end-of-text token, which is the usual choice."""
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "get_text_config"):
        return ()
    text = config.get_text_config()
    found = getattr(text, "pad_token_id", None)
    if found is None:
        found = getattr(text, "eos_token_id", None)
    return () if found is None else tuple(found) if isinstance(found, (list, tuple)) else (found,)
