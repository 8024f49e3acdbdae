"""Convert a user's batch to tensors where the conversion is unambiguous, and report what is wrong otherwise.

Lists of equal length and arrays become tensors, and a row of a data set (whose `input_ids` have one axis) a batch of
one example. Rows of several lengths are not padded here: what padding is, only the tokenizer knows. Nor are lists of
tensors stacked: torch's default_collate makes them of columns, so that examples and tokens would change places.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

# Inputs that must be tensors, and how many axes one example has. Models take other things by other names (a cache).
EXAMPLE_AXES = {"input_ids": 1, "inputs_embeds": 2, "pixel_values": 3, "input_features": 2}
INPUTS = {*EXAMPLE_AXES, "attention_mask", "token_type_ids", "position_ids", "input_values", "pixel_mask"}
LABELS = ("label", "labels")
FLOATS = {"inputs_embeds", "pixel_values", "input_features", "input_values"}
TAKEN = (torch.int32, torch.int64, torch.bool)  # integer inputs that every model takes
ASKED = (
    'a tensor (examples, tokens), as tokenizer(texts, padding=True, return_tensors="pt") gives it, or a DataLoader '
    "whose collate_fn pads (DataCollatorWithPadding(tokenizer))"
)
IMAGES = 'a tensor, as processor(images, return_tensors="pt") gives it'


def as_tensors(batch: Mapping[str, Any], targets: str | None = None) -> tuple[dict[str, Any], list[str]]:
    """Convert a batch to tensors with one batch axis; also returns what is wrong with it ("holds ...").

    Args:
        batch: model inputs by name.
        targets: another name of labels. Non-numeric labels are kept as they are.
    """
    found: dict[str, Any] = {}
    wrong: dict[tuple[str, str], list[str]] = {}
    labels = {*LABELS, *([] if targets is None else [targets])}
    for name, value in batch.items():
        made = _tensor(value)
        if isinstance(made, torch.Tensor):
            found[name] = _whole(made) if name in labels else made
            if name not in labels and (fault := _type_fault(name, made)):
                wrong.setdefault((fault, ASKED if name == "input_ids" else IMAGES), []).append(name)
            elif name in INPUTS and made.dtype not in TAKEN and not made.is_floating_point():
                found[name] = made.long()
        elif made is None or name in labels:
            found[name] = value
        elif name in INPUTS or isinstance(value, str) or (isinstance(value, (list, tuple)) and _texts(value)):
            asked = IMAGES if name in FLOATS else ASKED
            if name not in INPUTS:
                asked = f'model inputs alone: leave it out (dataset.remove_columns(["{name}"])), or tokenize it'
            wrong.setdefault((made, asked), []).append(name)
        else:
            found[name] = value
    faults = [f"holds {', '.join(names)} as {said}; expected {asked}" for (said, asked), names in wrong.items()]
    if not (set(batch) - labels):
        faults.append(f"holds {', '.join(batch) or 'nothing'}; expected model inputs, such as input_ids")
    return (found, faults) if faults else (_of_one_example(found, labels), [])


def _tensor(value: Any) -> torch.Tensor | str | None:
    """Convert a value to a tensor; a description if that is ambiguous; None if it is no data."""
    if isinstance(value, torch.Tensor):
        if value.is_nested:
            return "a nested tensor"
        # Tensors of inference_mode cannot take part in a graph; a copy can.
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
    """Return True if nested lists hold a text."""
    return any(isinstance(each, str) or (isinstance(each, (list, tuple)) and _texts(each)) for each in value)


def _whole(labels: torch.Tensor) -> torch.Tensor:
    """Convert class labels to the dtype that losses take."""
    return labels if labels.is_floating_point() or labels.dtype == torch.bool else labels.long()


def _type_fault(name: str, value: torch.Tensor) -> str | None:
    """Describe a tensor of the wrong dtype."""
    kind = str(value.dtype).removeprefix("torch.")
    if (name == "input_ids" and value.is_floating_point()) or (name in FLOATS and not value.is_floating_point()):
        return f"a tensor of {kind}"
    return None


def _of_one_example(batch: dict[str, Any], labels: set[str]) -> dict[str, Any]:
    """Add a batch axis to a single example without one."""
    main = next((name for name in EXAMPLE_AXES if isinstance(batch.get(name), torch.Tensor)), None)
    if main is None or batch[main].ndim != EXAMPLE_AXES[main] or "cu_seq_lens_q" in batch:
        return batch
    found = {name: value[None] if isinstance(value, torch.Tensor) else value for name, value in batch.items()}
    for name in labels & found.keys():
        if isinstance(value := found[name], (int, float)):
            found[name] = torch.tensor([value])
    return found
