"""Packed documents: several texts in one row, none of which may see another.

Every document is attended to separately, like a row of its own: for linear attention the sums restart with
it, and components that adapt to an example adapt to the document. Documents of similar length (within a factor of two)
go together, so that at most half of a batch is padding: time O(L) per row like attention itself, and one pass per power
of two in the lengths.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from snnk_peft.errors import UnsupportedError

CONSECUTIVE = "snnk_consecutive"  # attribute of position_ids: the version of them that does not restart
NUMBERS = torch.int32  # of documents in a mask; padding is bool, and masks that are neither are not from padding_mask


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
    found = torch.cat(rows)
    return torch.empty_like(found).index_copy(0, torch.cat(places), found).unflatten(0, documents.shape)


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
