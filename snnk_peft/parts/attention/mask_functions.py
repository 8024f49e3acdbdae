"""Read transformers' mask functions, as far as linear attention can honour them.

A model describes its mask as a function of (example, head, query, key) that is put together from parts: the causal
triangle or everything, a band, and the documents of a packed row. Evaluating it for all pairs would cost O(L·N), so the
parts themselves are read: functions are known by their code, and what they were made with is in their closure.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
import transformers
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
from snnk_peft.functional.blocks import exporting


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
        found = [part.documents for part in parts if part.documents is not None]
        if len(found) < 2:
            return MaskPattern(any(part.causal for part in parts), found[0] if found else None)
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
