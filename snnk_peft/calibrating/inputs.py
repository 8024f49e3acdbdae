"""The tensors of one batch: converted where that is unambiguous, with messages about what is wrong otherwise.

Lists of equal length and arrays become tensors, and a row of a data set (whose `input_ids` have one axis) a batch of
one example. Rows of different lengths are not padded here: only the tokenizer knows the padding token. Nor are lists of
tensors stacked: torch's default_collate builds them from columns, so examples and tokens would be swapped.

In general, padding without a mask cannot be distinguished from text. If the model or its tokenizer's convention defines
a padding token, it can: two of them in a row at either end of a sequence are not text.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from snnk_peft.arguments import in_words
from snnk_peft.repeats import LABELS
from snnk_peft.tuner.slot_layer import active_module, root_of

Batch = Mapping[str, Any]

GIVES = 'gives with return_tensors="pt"'
SHOWN = 4  # faults that are listed; the others are counted
# Inputs by which a model recognises padding or packed texts.
APART = ("attention_mask", "position_ids", "cu_seq_lens_q")
# Inputs that must be tensors, and how many axes one example has. Under other names, others are accepted (a cache).
EXAMPLE_AXES = {"input_ids": 1, "inputs_embeds": 2, "pixel_values": 3, "input_features": 2}
INPUTS = {*EXAMPLE_AXES, "attention_mask", "token_type_ids", "position_ids", "input_values", "pixel_mask"}
FLOATS = {"inputs_embeds", "pixel_values", "input_features", "input_values"}
TAKEN = (torch.int32, torch.int64, torch.bool)  # integer inputs that every model accepts
ASKED = (
    'a tensor (examples, tokens), as tokenizer(texts, padding=True, return_tensors="pt") gives it, or a DataLoader '
    "whose collate_fn pads (DataCollatorWithPadding(tokenizer))"
)
IMAGES = 'a tensor, as processor(images, return_tensors="pt") gives it'


class InputCheck:
    """Checker of batches, one after the other."""

    def __init__(self, model: nn.Module):
        self.model = root_of(model)
        self.forward = inspect.signature(self.model.forward)
        self.vocabulary = _vocabulary(model)
        self.padding = _padding(model)
        self._found: list[str] = []

    def look(self, index: int | None, batch: Any, name: str = "batch", targets: str | None = None) -> Batch | None:
        """Convert a batch to tensors; return None if it is not a dict of model inputs."""
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
            self._found += self._of_model(where, [name for name in made if name not in {*LABELS, targets}])
        return made

    def faults(self) -> list[str]:
        """Return the messages; beyond a limit, only their number."""
        more = len(self._found) - SHOWN
        return self._found if more < 2 else [*self._found[:SHOWN], f"and {more} more faults of this kind"]

    def _of_model(self, where: str, names: list[str]) -> Iterator[str]:
        """Yield messages about inputs that are missing or that the model does not accept; `names` excludes labels."""
        name, known = type(self.model).__name__, self.forward.parameters
        main = getattr(self.model, "main_input_name", None)
        if main in known and not {main, *(each for each in EXAMPLE_AXES if each in known)} & set(names):
            giver = "an image processor" if main == "pixel_values" else "its tokenizer"
            yield f"{where} holds {', '.join(names)}; expected {main}, which {name} reads and {giver} gives"
            return
        try:
            self.forward.bind(**dict.fromkeys(names))
        except TypeError as error:
            reads = ", ".join(each for each, kind in known.items() if kind.kind is not kind.VAR_KEYWORD)
            yield f"{where} holds {', '.join(names)}; expected what {name} reads, of {reads} ({error})"

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
    return in_words(given)


def padded_rows(ids: torch.Tensor, padding: tuple[int, ...]) -> torch.Tensor:
    """Return, for ids (rows, length), a mask (rows,) of sequences that begin or end with two or more padding tokens."""
    if ids.shape[1] < 3:
        return torch.zeros(len(ids), dtype=torch.bool)
    padded = torch.zeros(len(ids), dtype=torch.bool, device=ids.device)
    for token in padding:
        is_padding = ids == token
        padded |= is_padding[:, :2].all(1) | is_padding[:, -2:].all(1)
    return padded


def _vocabulary(model: nn.Module) -> int | None:
    """Return the number of rows of the token embeddings; None if the model has none or does not expose them."""
    try:
        embeddings = active_module(model.get_input_embeddings())  # type: ignore[operator]
    except (AttributeError, NotImplementedError):
        return None
    return embeddings.num_embeddings if isinstance(embeddings, nn.Embedding) else None


def _padding(model: nn.Module) -> tuple[int, ...]:
    """Return the padding token; if the model defines none, the end-of-text token, the usual choice."""
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "get_text_config"):
        return ()
    text = config.get_text_config()
    token = getattr(text, "pad_token_id", None)
    if token is None:
        token = getattr(text, "eos_token_id", None)
    return () if token is None else tuple(token) if isinstance(token, (list, tuple)) else (token,)


def as_tensors(batch: Mapping[str, Any], targets: str | None = None) -> tuple[dict[str, Any], list[str]]:
    """Convert a batch to tensors with one batch axis; also returns what is wrong with it ("holds ...")."""
    tensors: dict[str, Any] = {}
    wrong: dict[tuple[str, str], list[str]] = {}
    labels = {*LABELS, *([] if targets is None else [targets])}
    for name, value in batch.items():
        made = _tensor(value)
        if isinstance(made, torch.Tensor):
            tensors[name] = _whole(made) if name in labels else made
            if name not in labels and (fault := _type_fault(name, made)):
                wrong.setdefault((fault, ASKED if name == "input_ids" else IMAGES), []).append(name)
            elif name in INPUTS and made.dtype not in TAKEN and not made.is_floating_point():
                tensors[name] = made.long()
        elif made is None or name in labels:
            tensors[name] = value
        elif name in INPUTS or isinstance(value, str) or (isinstance(value, (list, tuple)) and _texts(value)):
            asked = IMAGES if name in FLOATS else ASKED
            if name not in INPUTS:
                asked = f'model inputs alone: leave it out (dataset.remove_columns(["{name}"])), or tokenize it'
            wrong.setdefault((made, asked), []).append(name)
        else:
            tensors[name] = value
    faults = [f"holds {', '.join(names)} as {said}; expected {asked}" for (said, asked), names in wrong.items()]
    if not (set(batch) - labels):
        faults.append(f"holds {', '.join(batch) or 'nothing'}; expected model inputs, such as input_ids")
    return (tensors, faults) if faults else (_of_one_example(tensors, labels), [])


def _tensor(value: Any) -> torch.Tensor | str | None:
    """Convert a value to a tensor; return a description if that is ambiguous, None if it holds no data."""
    if isinstance(value, torch.Tensor):
        if value.is_nested:
            return "a nested tensor"
        # Inference tensors cannot be recorded by autograd; a copy can.
        return value.clone() if value.is_inference() and not torch.is_inference_mode_enabled() else value
    if isinstance(value, str):
        return f"the text {value[:30]!r}"
    if isinstance(value, (list, tuple)):
        return _of_list(value)
    if hasattr(value, "__array__") and not np.isscalar(value):
        array = np.asarray(value)
        if array.dtype.kind in "biuf":
            return torch.tensor(array.astype(np.int64) if array.dtype.kind == "u" else array)
        return _of_list(array.tolist()) if array.ndim else f"a {type(value).__name__}"
    return None


def _of_list(value: Any) -> torch.Tensor | str:
    if not len(value):
        return "an empty list"
    if _texts(value):
        return "a list of texts"
    if any(isinstance(each, torch.Tensor) for each in value):
        shapes = sorted({tuple(each.shape) if isinstance(each, torch.Tensor) else () for each in value})
        if shapes == [()]:
            return torch.stack([torch.as_tensor(each) for each in value])
        return (
            f"a list of {len(value)} tensors {', '.join(map(str, shapes[:3]))} (of examples, or of columns, as torch's "
            "default_collate makes them)"
        )
    try:
        return torch.tensor(np.stack([np.asarray(each) for each in value]))
    except (TypeError, ValueError):
        lengths = [len(each) if hasattr(each, "__len__") else None for each in value]
        if None in lengths or len(set(lengths)) == 1:
            return f"a list of {type(value[0]).__name__}s that make no tensor"
        return f"a list of rows of {min(lengths)} to {max(lengths)} entries"  # type: ignore[type-var]


def _texts(value: Any) -> bool:
    return any(isinstance(each, str) or (isinstance(each, (list, tuple)) and _texts(each)) for each in value)


def _whole(labels: torch.Tensor) -> torch.Tensor:
    """Convert class labels to the dtype that losses expect."""
    return labels if labels.is_floating_point() or labels.dtype == torch.bool else labels.long()


def _type_fault(name: str, value: torch.Tensor) -> str | None:
    kind = str(value.dtype).removeprefix("torch.")
    if (name == "input_ids" and value.is_floating_point()) or (name in FLOATS and not value.is_floating_point()):
        return f"a tensor of {kind}"
    return None


def _of_one_example(batch: dict[str, Any], labels: set[str]) -> dict[str, Any]:
    """Add a batch axis to a single example without one."""
    main = next((name for name in EXAMPLE_AXES if isinstance(batch.get(name), torch.Tensor)), None)
    if main is None or batch[main].ndim != EXAMPLE_AXES[main] or "cu_seq_lens_q" in batch:
        return batch
    made = {name: value[None] if isinstance(value, torch.Tensor) else value for name, value in batch.items()}
    for name in labels & made.keys():
        if isinstance(value := made[name], (int, float)):
            made[name] = torch.tensor([value])
    return made


def masked_tokens(batch: Mapping[str, Any]) -> set[int]:
    """Return the token ids at masked positions."""
    ids, mask = batch.get("input_ids"), batch.get("attention_mask")
    if not isinstance(ids, torch.Tensor) or not isinstance(mask, torch.Tensor) or ids.shape != mask.shape:
        return set()
    return set(ids[mask.to(ids.device) == 0].unique().tolist())
