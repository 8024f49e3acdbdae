"""Masks that linear attention supports: transformers' mask functions, bands, and packed documents.

A model describes its mask as a function of (example, head, query, key) composed of parts: causal or bidirectional, a
band, and the documents of a packed row. Evaluating it for all pairs would cost O(L·N), so the parts themselves are
inspected: functions are identified by their code, and their arguments are in the closure.

Bands (sliding windows): a query sees keys at a distance below the width of the band. A softmax layer respects it; a
linear layer attends to all keys, which is only accepted with a near field.

Packed documents, several texts in one row, may not see each other. Each is processed separately, like its own row: for
linear attention the sums restart, and components that adapt to an example adapt to the document. Documents of similar
length (within a factor of two) are batched, so that at most half of a batch is padding: time O(L) per row like
attention itself, and one pass per power of two in the lengths.
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
NUMBERS = torch.int32  # dtype of document numbers in a mask; padding is bool, all else is not from padding_mask


class MaskPattern(NamedTuple):
    """Pattern of a mask, padding aside.

    Attributes:
        causal: whether a query sees only keys at or before it.
        documents: (B, L), document numbers of the tokens; tokens of different documents do not see each other. None for
            one document per row.
    """

    causal: bool
    documents: torch.Tensor | None


def _code(function: Callable[..., Any]) -> Any:
    return getattr(function, "__code__", None)


# The arguments of the factories do not matter here: all functions of one factory share their code.
ALL_OF = _code(and_masks())
REMAPPED = _code(remap_positions_for_packed_sequence(causal_mask_function, torch.empty(0)))
PACKED = _code(packed_sequence_mask_function(torch.empty(0)))
# The attention function receives the width of the band in addition to the mask, and respects it (interface.py).
BANDS = {_code(sliding_window_overlay(1)), _code(sliding_window_bidirectional_overlay(1))}


def read_mask_function(function: Callable[..., Any] | None, *, may_be_packed: bool) -> MaskPattern:
    """Return the pattern of a mask function; a function of None is bidirectional.

    Args:
        function: the one given to the mask interface.
        may_be_packed: whether it may hold documents, i.e. there is neither an attention mask nor a cache.

    Raises:
        UnsupportedError: it contains a part that linear attention does not support, or that is unknown.
    """
    if not torch.compiler.is_compiling():
        return _pattern(function)
    # A compiler cannot inspect closures. Without documents it need not: such patterns never change.
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
    """Return the variable `name` in the closure of a function."""
    made = cast(Any, function)
    return made.__closure__[made.__code__.co_freevars.index(name)].cell_contents


def band_width(module: nn.Module, options: dict[str, Any], keys: int) -> int | None:
    """Return the width of the band that a call asks for, or None for all keys.

    Raises:
        UnsupportedError: the model has a window in its masks that it does not pass to the attention function.
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
    """Raise UnsupportedError if a linear layer would see beyond a band without being asked to."""
    if window is not None and near_field is None and window < keys:
        raise UnsupportedError(
            f"{type(module).__name__} asks for a window of {window} tokens and there are {keys} keys, but this layer "
            f"has linear attention, which sees all of them. Set near_field={window} in the AttentionPart to keep the "
            f"window and add linear attention beyond it, leave the layer out (layers=[...]), give inputs of at most "
            f"{window} tokens, or set model.config.sliding_window = None before patching"
        )


def attend_per_document(attend: Callable[..., Tensor], documents: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Compute attention within documents, (B, L, H, D).

    Args:
        attend: attention of q (n, H, l, d), k (n, G, l, d), v (n, G, l, D) and a mask (n, l) -> (n, l, H, D).
        documents: (B, L); adjacent tokens with the same number belong to one document.
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
    """Yield, for each length, indices (n, l) of the documents' tokens in the flattened batch, and a mask of real
    ones."""
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
    """Return the document numbers (B, L), or None if no row is packed.

    Args:
        mask: int32 if `padding_mask` found documents, else bool or None.
        query: (B, H, L, d).
        key: (B, G, N, d).
        options: options of the attention function. `cu_seq_lens_q`, from DataCollatorWithFlattening, gives the
            boundaries of the documents of the only row: (documents + 1,), 0 first and L last.

    Raises:
        UnsupportedError: `cu_seq_lens_q` does not match these tokens.
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

    transformers only looks for documents if there is no cache, and otherwise does not report them.
    """
    if position_ids is None or position_ids.dim() != 2 or position_ids.shape[1] < 2:
        return
    if torch.compiler.is_compiling() or torch.jit.is_tracing() or position_ids.device.type == "meta":
        return
    version = None if position_ids.is_inference() else position_ids._version
    if version is not None and getattr(position_ids, CONSECUTIVE, None) == version:
        return  # an earlier layer has checked; checking waits for the accelerator
    if (position_ids.diff(dim=-1) != 1).any():
        raise UnsupportedError(
            "position_ids restart within a row, as in packed documents, while a cache is in use: transformers does not "
            "tell documents apart then, and each would see those before it. Pass use_cache=False (or set "
            "model.config.use_cache = False) to keep them apart, or an attention_mask if the row is one text"
        )
    setattr(position_ids, CONSECUTIVE, version)
