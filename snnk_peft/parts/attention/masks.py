"""Masks that linear attention can honour: transformers' mask functions, bands, and packed documents.

A model describes its mask as a function of (example, head, query, key) that is put together from parts: the causal
triangle or everything, a band, and the documents of a packed row. Evaluating it for all pairs would cost O(L·N), so the
parts themselves are read: functions are known by their code, and what they were made with is in their closure.

Bands (sliding windows): a query sees keys at a distance below the width of the band. A softmax layer keeps to it; a
linear layer attends to all keys, unless a near field says that this is wanted.

Packed documents, several texts in one row, may not see each other. Each is attended to separately, like a row of its
own: for linear attention the sums restart with it, and components that adapt to an example adapt to the document.
Documents of similar length (within a factor of two) go together, so that at most half of a batch is padding: time O(L)
per row like attention itself, and one pass per power of two in the lengths.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, cast

import torch
import transformers
from torch import Tensor, nn
from transformers.masking_utils import (
    and_masks,
    bidirectional_mask_function,
    causal_mask_function,
    packed_sequence_mask_function,
    remap_positions_for_packed_sequence,
    sliding_window_bidirectional_overlay,
    sliding_window_overlay,
)

from snnk_peft.errors import UnsupportedError
from snnk_peft.functional.backend import exporting

CONSECUTIVE = "snnk_consecutive"  # attribute of position_ids: the version of them that does not restart
NUMBERS = torch.int32  # of documents in a mask; padding is bool, and masks that are neither are not from padding_mask


class MaskPattern(NamedTuple):
    """Who sees whom, padding aside.

    Attributes:
        causal: whether a query sees only keys at or before it.
        documents: (B, L), the same number for all tokens of a document, of which none sees another; None for one
            document per row.
    """

    causal: bool
    documents: torch.Tensor | None


def _code(function: Callable[..., Any]) -> Any:
    return getattr(function, "__code__", None)


# The functions are made with arguments that do not matter here: all that are made by one factory share their code.
ALL_OF = _code(and_masks())
REMAPPED = _code(remap_positions_for_packed_sequence(causal_mask_function, torch.empty(0)))
PACKED = _code(packed_sequence_mask_function(torch.empty(0)))
# The attention function is given the width of the band beside the mask, and keeps to it (interface.py).
BANDS = {_code(sliding_window_overlay(1)), _code(sliding_window_bidirectional_overlay(1))}


def read_mask_function(function: Callable[..., Any] | None, *, may_be_packed: bool) -> MaskPattern:
    """The pattern of a mask function, None standing for everything.

    Args:
        function: given to the mask interface.
        may_be_packed: whether it may hold documents: there is neither an attention mask nor a cache.

    Raises:
        UnsupportedError: it contains a part that linear attention cannot honour, or that is unknown.
    """
    if not torch.compiler.is_compiling():
        return _pattern(function)
    # A compiler cannot look into closures. Without documents it need not: such patterns never change.
    outside = may_be_packed and function is not causal_mask_function
    return _pattern_outside_graph(function) if outside else _constant_pattern(function)


def _pattern(function: Callable[..., Any] | None) -> MaskPattern:
    if function is None or function is bidirectional_mask_function:
        return MaskPattern(False, None)
    if function is causal_mask_function:
        return MaskPattern(True, None)
    code = _code(function)
    if code == ALL_OF:
        parts = [_pattern(part) for part in _made_with(function, "mask_functions")]
        packed = [part.documents for part in parts if part.documents is not None]
        if len(packed) < 2:
            return MaskPattern(any(part.causal for part in parts), packed[0] if packed else None)
    if code == REMAPPED:  # positions within documents, which differ by as much as those within the row
        return _pattern(_made_with(function, "mask_function"))
    if code == PACKED:
        documents = _made_with(function, "packed_sequence_mask")
        if exporting():
            raise UnsupportedError(
                "a graph is exported without an attention_mask, so that positions decide what is a document; linear "
                "attention needs their values. Export with an attention_mask among the inputs (ones where nothing is "
                "padded)"
            )
        return MaskPattern(False, documents if bool((documents != documents[:, :1]).any()) else None)
    if code in BANDS:
        return MaskPattern(False, None)
    raise UnsupportedError(
        f"the model masks pairs of tokens by {getattr(function, '__qualname__', function)!r} (transformers "
        f"{transformers.__version__}); linear attention can honour padding, causal attention and packed documents, but "
        "no prefix that is seen from both sides, no blocks of images, no chunks and no mask of one's own. Leave "
        "`attention` out for this model, or the arguments that ask for such a mask"
    )


_constant_pattern = torch.compiler.assume_constant_result(_pattern)
_pattern_outside_graph = torch.compiler.disable(
    _pattern,
    reason="without an attention_mask, positions decide what is a document, and linear attention needs their values; "
    "pass an attention_mask (ones where nothing is padded) to compile in one graph",
)


def _made_with(function: Callable[..., Any], name: str) -> Any:
    """The variable `name` that an inner function was made with."""
    made = cast(Any, function)
    return made.__closure__[made.__code__.co_freevars.index(name)].cell_contents


def band_width(module: nn.Module, options: dict[str, Any], keys: int) -> int | None:
    """The width of the band that a call asks for, or None for all keys.

    Raises:
        UnsupportedError: the model has a window that it does not pass on; its masks know of it, linear ones do not.
    """
    if "sliding_window" in options:
        return options["sliding_window"]
    configured = getattr(getattr(module, "config", None), "sliding_window", None)
    if configured and configured < keys:
        raise UnsupportedError(
            f"{type(module).__name__} has a window of {configured} tokens (config.sliding_window), which it does not "
            f"pass to its attention function, and there are {keys} keys; it would be ignored. Give inputs of at most "
            f"{configured} tokens, set config.sliding_window = None, or leave `attention` out for this model"
        )
    return None


def refuse_narrow_band(module: nn.Module, near_field: int | None, window: int | None, keys: int) -> None:
    """UnsupportedError if a linear layer would see beyond a band without having been asked to."""
    if window is not None and near_field is None and window < keys:
        raise UnsupportedError(
            f"{type(module).__name__} asks for a window of {window} tokens and there are {keys} keys, but this layer "
            f"has linear attention, which sees all of them. Set near_field={window} in the AttentionPart to keep the "
            f"window and add linear attention beyond it, leave the layer out (layers=[...]), give inputs of at most "
            f"{window} tokens, or set model.config.sliding_window = None before patching"
        )


def attend_per_document(attend: Callable[..., Tensor], documents: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """(B, L, H, D): attention within documents.

    Args:
        attend: attention of q (n, H, l, d), k (n, G, l, d), v (n, G, l, D) and a mask (n, l) -> (n, l, H, D).
        documents: (B, L); neighbours of the same number belong to one document.
        q: queries (B, H, L, d).
        k: keys (B, G, L, d).
        v: values (B, G, L, D).
    """
    tokens = [t.transpose(1, 2).flatten(0, 1) for t in (q, k, v)]
    places, rows = [], []
    for index, counts in _similar_documents(documents):
        out = attend(*(t[index].transpose(1, 2) for t in tokens), counts)
        places.append(index[counts])
        rows.append(out[counts])
    outputs = torch.cat(rows)
    return torch.empty_like(outputs).index_copy(0, torch.cat(places), outputs).unflatten(0, documents.shape)


def _similar_documents(documents: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Places (n, l) of the tokens of documents in the flattened batch, and which of them count, for each length."""
    first = torch.ones_like(documents, dtype=torch.bool)
    first[:, 1:] = documents[:, 1:] != documents[:, :-1]
    begins = first.flatten().nonzero().squeeze(1)
    lengths = torch.diff(begins, append=begins.new_tensor([documents.numel()]))
    kinds = torch.ceil(torch.log2(lengths.double()))
    for kind in kinds.unique().tolist():
        begin, length = begins[kinds == kind], lengths[kinds == kind]
        steps = torch.arange(int(length.max()), device=documents.device)
        counts = steps < length[:, None]
        yield torch.where(counts, begin[:, None] + steps, begin[:, None]), counts


def packed_documents(mask: Tensor | None, query: Tensor, key: Tensor, options: dict[str, Any]) -> Tensor | None:
    """(B, L) numbers of documents, or None where no row is packed.

    Args:
        mask: int32 if `padding_mask` found documents, else bool or None.
        query: (B, H, L, d).
        key: (B, G, N, d).
        options: of the attention function. `cu_seq_lens_q`, from DataCollatorWithFlattening, says where each document
            of the only row ends: (documents + 1,), 0 first and L last.

    Raises:
        UnsupportedError: `cu_seq_lens_q` does not say so of these tokens.
    """
    documents = mask if mask is not None and mask.dtype == NUMBERS else None
    ends, of_keys = options.get("cu_seq_lens_q"), options.get("cu_seq_lens_k")
    if ends is None:
        return documents
    batch, length = query.shape[0], query.shape[2]
    flat = ends.flatten()
    same = of_keys is None or torch.equal(flat, of_keys.flatten())
    padded = mask is not None and documents is None and not bool(mask.all())
    if batch != 1 or key.shape[2] != length or padded or not same or flat[0] != 0 or flat[-1] != length:
        raise UnsupportedError(
            f"cu_seq_lens_q is {flat.tolist()} for {batch} rows of {length} queries and {key.shape[2]} keys; expected "
            f"one row, as DataCollatorWithFlattening makes it, without padding and without a cache, and numbers from 0 "
            f"to {length}, the same for queries and keys. Leave these arguments out for padded batches"
        )
    own = torch.bucketize(torch.arange(length, device=flat.device), flat[1:].contiguous(), right=True)[None]
    return own if documents is None else documents * len(flat) + own


def refuse_restarts(position_ids: Tensor | None) -> None:
    """Raise UnsupportedError if positions restart within a row that is not divided into documents.

    transformers looks for documents only where there is no cache, and says nothing of them otherwise.
    """
    if position_ids is None or position_ids.dim() != 2 or position_ids.shape[1] < 2:
        return
    if torch.compiler.is_compiling() or torch.jit.is_tracing() or position_ids.device.type == "meta":
        return
    version = None if position_ids.is_inference() else position_ids._version
    if version is not None and getattr(position_ids, CONSECUTIVE, None) == version:
        return  # the layer before has asked; asking waits for the accelerator
    if (position_ids.diff(dim=-1) != 1).any():
        raise UnsupportedError(
            "position_ids restart within a row, as in packed documents, while a cache is in use: transformers does not "
            "tell documents apart then, and each would see those before it. Pass use_cache=False (or set "
            "model.config.use_cache = False) to keep them apart, or an attention_mask if the row is one text"
        )
    setattr(position_ids, CONSECUTIVE, version)
