"""Is a base model the one that an adapter was trained on? A digest of a sample of its weights, for every precision.

The sample is taken in memory, where it costs milliseconds, from the model as it is: the files of a name may change, and
so may a model after loading. Embeddings are left out, which grow with the vocabulary, and so are the modules that the
adapter saves in full, such as a new head.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from snnk_peft.config import SNNKConfig
from snnk_peft.digests import notes, tensor_digest
from snnk_peft.tuner.slot_layer import original_path

SAMPLE = 16  # values of every tensor: training moves nearly all of them
INSIDE = (".snnk_slots.", ".modules_to_save.")
# What a model of this precision may have been rounded to.
COARSER = {
    torch.float64: (torch.float32, torch.bfloat16, torch.float16),
    torch.float32: (torch.float32, torch.bfloat16, torch.float16),
    torch.bfloat16: (torch.bfloat16,),
    torch.float16: (torch.float16,),
}


def base_digests(model: nn.Module, saved: Sequence[str] | None) -> dict[str, str] | None:
    """Digests of a sample of the base model, by the precision to which it was rounded before.

    Args:
        model: the base, perhaps with adapters in it.
        saved: the modules that the adapter saves in full.

    Returns:
        None for a model whose weights are not at hand.
    """
    embeddings = {id(weight) for weight in _embeddings(model)}
    chosen = {
        original_path(name).replace(".original_module.", "."): parameter
        for name, parameter in model.named_parameters()
        if not any(mark in f".{name}" for mark in INSIDE) and id(parameter) not in embeddings and parameter.numel()
    }
    chosen = {name: p for name, p in chosen.items() if not any(f".{own}." in f".{name}" for own in saved or ())}
    dtypes = {parameter.dtype for parameter in chosen.values()}
    if not chosen or not dtypes <= COARSER.keys() or any(parameter.is_meta for parameter in chosen.values()):
        return None
    sample = torch.cat([_sample(chosen[name]) for name in sorted(chosen)])
    coarsest = min((COARSER[dtype] for dtype in dtypes), key=len)
    return {str(dtype).removeprefix("torch."): tensor_digest(sample.to(dtype)) for dtype in coarsest}


@torch.no_grad()
def _sample(parameter: torch.Tensor) -> torch.Tensor:
    flat = parameter.detach().reshape(-1)
    count = min(SAMPLE, flat.numel())
    places = torch.arange(count, device=flat.device) * (flat.numel() // count)
    return flat[places].float().cpu()


def _embeddings(model: Any) -> list[nn.Parameter]:
    found: list[nn.Parameter] = []
    for getter in (model.get_input_embeddings, model.get_output_embeddings) if hasattr(model, "config") else ():
        try:
            embedding = getter()
        except (NotImplementedError, AttributeError):  # how transformers says that a model has none
            continue
        found += [] if embedding is None else list(embedding.parameters())
    return found


def note_another_base(config: SNNKConfig, found: dict[str, str] | None, model: nn.Module) -> None:
    """Say so if an adapter comes into another base model than it was trained on.

    Args:
        config: of the adapter.
        found: the digests of the base model.
        model: the base model.
    """
    saved = config.base_digests
    comparable = [name for name in found or () if name in (saved or ())]
    if saved is None or found is None or not comparable or saved[comparable[0]] == found[comparable[0]]:
        return
    name = config.base_model_name_or_path or "its base model"
    known = f"at revision {config.revision!r}" if config.revision else "as it was then (no revision was recorded)"
    notes.warning(
        "the adapter was trained on other weights than this %s has: on %s %s. What it computes here was never trained. "
        "Load that base, from_pretrained(name, revision=...), or train the adapter again",
        type(model).__name__,
        name,
        known,
    )
