"""What is wrong with batches of model inputs, as far as it shows before a model runs.

Padding without a mask cannot be told from text in general. It can where the model or its tokenizer's convention names
a token for padding: two of them in a row at either end of a sequence are no text.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from snnk_peft.tuner.slot_layer import active_module

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

    def look(self, index: int, batch: Any) -> bool:
        """Whether batch number `index` is a dict of model inputs; further faults do not end a look at all batches."""
        if not isinstance(batch, Mapping):
            hint = " A batch alone is to be given as [batch]" if isinstance(batch, str) else ""
            self._found.append(
                f"batch {index} is a {type(batch).__name__}; expected a dict of model inputs such as a tokenizer "
                f"returns.{hint}"
            )
            return False
        self._found += self._of_tokens(index, batch)
        return True

    def faults(self) -> list[str]:
        """The messages, shortened."""
        more = len(self._found) - SHOWN
        return self._found if more < 2 else [*self._found[:SHOWN], f"and {more} more faults of this kind"]

    def _of_tokens(self, index: int, batch: Mapping[str, Any]) -> Iterator[str]:
        ids = batch.get("input_ids")
        if not isinstance(ids, torch.Tensor) or ids.is_floating_point() or ids.ndim != 2 or not ids.numel():
            return
        low, high = int(ids.min()), int(ids.max())
        if self.vocabulary is not None and (low < 0 or high >= self.vocabulary):
            wrong = low if low < 0 else high
            row, place = (ids == wrong).nonzero()[0].tolist()
            yield (
                f"batch {index} has token id {wrong} (row {row}, place {place}); the model's embeddings have "
                f"{self.vocabulary} rows, expected ids from 0 to {self.vocabulary - 1}. Tokenize with the model's own "
                "tokenizer"
            )
        mask = batch.get("attention_mask")
        if isinstance(mask, torch.Tensor) and mask.ndim == 2 and mask.shape != ids.shape:
            yield (
                f"batch {index} has an attention_mask {tuple(mask.shape)} for input_ids {tuple(ids.shape)}; expected "
                "the same shape, nonzero at real tokens"
            )
        if self.padding and all(batch.get(key) is None for key in APART):
            padded = padded_rows(ids, self.padding)
            if padded.any():
                yield (
                    f"batch {index} has no attention_mask, and {int(padded.sum())} of its {len(ids)} rows begin or end "
                    f"with padding (token {' or '.join(map(str, self.padding))}), which would be fitted as if it were "
                    "text; expected the attention_mask that the tokenizer returns. Give a mask of ones if these are "
                    "real tokens"
                )


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
    """The token that stands for padding; where the model names none, the one that ends a text usually does."""
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "get_text_config"):
        return ()
    text = config.get_text_config()
    found = getattr(text, "pad_token_id", None)
    if found is None:
        found = getattr(text, "eos_token_id", None)
    return () if found is None else tuple(found) if isinstance(found, (list, tuple)) else (found,)
