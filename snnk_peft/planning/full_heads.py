"""Choice of the key heads of a decoder that need all their keys: the gain of opening a gate per head, by one gradient.

    out_h(a) = (1 − a_h) · softmax over window and sinks + a_h · softmax over all keys,      a = ½ everywhere
    need_h   = −∂/∂a_h KL(original ‖ gated)

The need is computed once on texts as they are, and once on texts in which a passage is repeated after another one, so
that the repetition can only be predicted by attending back. Both are divided by their sum and added. No labels are
needed, and no weights change.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm
from transformers.integrations.sdpa_attention import repeat_kv

from snnk_peft.arguments import number_faults
from snnk_peft.calibrating.batches import Batch
from snnk_peft.calibrating.guards import evaluating
from snnk_peft.errors import ConfigError, UnsupportedError
from snnk_peft.families import family_of
from snnk_peft.families.base import ModelFamily, head_sizes
from snnk_peft.functional.pairwise import causal_softmax_attention, pairwise_mask
from snnk_peft.parts.attention.interface import NAME
from snnk_peft.parts.attention.supported import check_attention
from snnk_peft.projections.base_drawn import site_generator

LENGTH = 1024  # tokens of a text as it is
PASSAGE, BETWEEN = 64, 640  # tokens of the repeated passage, and of the text in between
KNOWN = 16  # tokens of a passage by which it is recognised
DRAWS = 2  # texts of each kind


def decoder_family(model: nn.Module) -> ModelFamily:
    """Return the family of a decoder; raise UnsupportedError for other models."""
    family = family_of(model)
    if not family.causal or not cast(Any, model).can_generate():
        raise UnsupportedError(
            f"{type(model).__name__} (family {family.name!r}) is no decoder; expected a causal language model, whose "
            "attention looks back"
        )
    check_attention(model)
    return family


def choose_full_heads(
    model: nn.Module,
    batches: Sequence[Batch],
    share: float,
    *,
    near_field: int = 64,
    sinks: int = 4,
    seed: int = 0,
    progress: bool = True,
) -> list[list[int]]:
    """Return the key heads of a decoder that attend far back, for `AttentionPart(full_heads=...)`.

    Args:
        model: a pretrained causal language model of transformers. It is not changed.
        batches: model inputs with `input_ids`, texts much longer than `near_field`, with at least 1,500 tokens in
            total.
        share: share of all key heads to keep softmax, in (0, 1).
        near_field: width of the window of the others.
        sinks: number of first tokens that they see.
        seed: seed of the repeated passages.
        progress: show a progress bar.

    Returns:
        Pairs [layer, key head], those with the greatest need of far keys first.

    Raises:
        ConfigError: bad arguments; too little text.
        UnsupportedError: not a decoder, or one whose attention cannot be replaced.

    Example:
        >>> import torch
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from snnk_peft.planning.full_heads import choose_full_heads
        >>> tiny = LlamaConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64)
        >>> batches = [{"input_ids": torch.randint(0, 1000, (4, 800))}]
        >>> len(choose_full_heads(LlamaForCausalLM(tiny), batches, 0.25, near_field=16, progress=False))
        2
    """
    decoder_family(model)
    faults = number_faults("share", share, above=0, below=1)
    faults += [
        f"{name} is {value!r}; expected an integer >= {least}"
        for name, value, least in (("near_field", near_field, 1), ("sinks", sinks, 0))
        if type(value) is not int or value < least
    ]
    if faults:
        raise ConfigError(faults)
    how: dict[str, Any] = {"near_field": near_field, "sinks": sinks, "seed": seed, "progress": progress}
    needs = head_needs(model, batches, **how)
    heads = needs.shape[1]
    count = min(max(1, int(share * needs.numel())), needs.numel() - 1)
    order = needs.flatten().argsort(descending=True, stable=True)[:count].tolist()
    return [[index // heads, index % heads] for index in order]


def head_needs(
    model: nn.Module, batches: Sequence[Batch], *, near_field: int, sinks: int, seed: int, progress: bool
) -> Tensor:
    """Return each key head's need of far keys, (layers, key heads), at least 0."""
    family = family_of(model)
    modules: Any = [model.get_submodule(f"{path}.{family.attention}") for path in family.layer_paths(model)]
    config = family.config_of(model)
    heads = head_sizes(config)[1]
    device = next(model.parameters()).device
    with frozen(model), evaluating(model), torch.enable_grad():
        gates = torch.full((len(modules), heads), 0.5, device=device, requires_grad=True)
        total = torch.zeros(len(modules), heads)
        generator = site_generator(seed, "full_heads")
        given = _texts(batches, near_field, generator, getattr(config, "max_position_embeddings", None))
        for texts in tqdm(given, "heads that recall", disable=not progress):
            needs = torch.zeros_like(total)
            for ids, first in texts:
                needs += _needs(model, modules, gates, ids.to(device), first, near_field, sinks)
            needs = needs.clamp_min(0)
            total += needs / needs.sum().clamp_min(torch.finfo(needs.dtype).tiny)
    return total


@torch.no_grad()
def recall(model: nn.Module, batches: Sequence[Batch], seed: int = 0) -> float | None:
    """Return the share of a passage's tokens that are predicted correctly when it is repeated after other text.

    The first tokens, by which it is recognised, are not counted. None if there is too little text, or the model's
    maximum length is too short.

    Args:
        model: a causal language model, plain or converted.
        batches: model inputs with `input_ids`.
        seed: seed of the passages.
    """
    config: Any = getattr(model, "config", None)
    most = getattr(config, "max_position_embeddings", None) or LENGTH
    stream = torch.cat(token_rows(batches))
    between = min(BETWEEN, most - 2 * PASSAGE - 1, len(stream) - 2 * PASSAGE)
    if between < PASSAGE:
        return None
    device, right = next(model.parameters()).device, []
    for ids, first in _returning(stream, between, site_generator(seed, "recall")):
        likely = model(input_ids=ids.to(device), use_cache=False).logits[0, first:-1].argmax(-1)
        right.append(float((likely.cpu() == ids[0, first + 1 :]).float().mean()))
    return sum(right) / len(right)


Texts = list[tuple[Tensor, int]]  # tokens (1, L), and the first position whose prediction counts


def token_rows(batches: Sequence[Batch]) -> list[Tensor]:
    """Return the tokens of each text, without padding."""
    rows = []
    for batch in batches:
        ids, mask = batch["input_ids"].cpu(), batch.get("attention_mask")
        rows += [row if mask is None else row[mask[i].bool().cpu()] for i, row in enumerate(ids)]
    return rows


def _returning(stream: Tensor, between: int, generator: torch.Generator) -> Texts:
    """Build texts in which a passage is repeated after `between` other tokens."""
    found = []
    for _ in range(DRAWS):
        begin = int(torch.randint(len(stream) - PASSAGE - between + 1, (), generator=generator))
        passage, rest = stream[begin : begin + PASSAGE + between].split((PASSAGE, between))
        ids = torch.cat((stream[:1], passage, rest, passage))
        found.append((ids[None], len(ids) - PASSAGE + KNOWN - 1))
    return found


def _texts(batches: Sequence[Batch], near: int, generator: torch.Generator, most: int | None) -> list[Texts]:
    """Return texts as they are, and texts with a repeated passage."""
    rows = token_rows(batches)
    longest = LENGTH if most is None else min(LENGTH, most)
    plain, stream = sorted(rows, key=len, reverse=True)[:DRAWS], torch.cat(rows)
    between = min(BETWEEN, longest - 2 * PASSAGE - 1)
    need = DRAWS * (PASSAGE + between)
    if len(plain[0]) <= 2 * near or len(stream) < need or between <= near:
        raise ConfigError(
            f"the longest text has {len(plain[0])} tokens, all together {len(stream)}, and the model reads {most}; "
            f"expected a text of more than {2 * near} (twice near_field), {need} tokens in all, and room for "
            f"{2 * PASSAGE + near} of them. Give longer texts, read more of their tokens (max_length; of a recipe "
            "data.max_length), or take a narrower near_field"
        )
    return [[(row[None, :longest], near) for row in plain], _returning(stream, between, generator)]


def _needs(
    model: nn.Module, modules: Sequence[Any], gates: Tensor, ids: Tensor, first: int, width: int, sinks: int
) -> Tensor:
    """Compute the gain in divergence at positions from `first` on by opening each gate, (layers, key heads)."""
    with torch.no_grad():
        original = model(input_ids=ids, use_cache=False).logits[:, first:].float().log_softmax(-1)
    with gated(model, modules, gates, width, sinks):
        found = model(input_ids=ids, use_cache=False).logits[:, first:].float().log_softmax(-1)
    divergence = (original.exp() * (original - found)).sum(-1).mean()
    return -torch.autograd.grad(divergence, gates)[0].detach().cpu()


class Gated:
    """Stand-in for a KernelAttention: a mixture of attention to near and to all keys per key head."""

    near_field = None

    def __init__(self, gates: Tensor, width: int, sinks: int):
        self.gates, self.width, self.sinks = gates, width, sinks

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None = None,
        *,
        causal: bool = False,
        scaling: float | None = None,
        positions: Tensor | None = None,
    ) -> Tensor:
        """Compute (B, H, L, D); arguments as in `KernelAttention.forward`."""
        scaling, repeats = q.shape[-1] ** -0.5 if scaling is None else scaling, q.shape[1] // k.shape[1]
        counts = torch.ones(k.shape[0], k.shape[-2], dtype=torch.bool, device=k.device) if mask is None else mask
        first = counts & (counts.cumsum(-1) <= self.sinks)
        every, band = (pairwise_mask(counts, q, k, True, width) for width in (None, self.width))
        assert every is not None
        assert band is not None
        near = band | (every & first[:, None, None])
        local = nn.functional.scaled_dot_product_attention(
            q, repeat_kv(k, repeats), repeat_kv(v, repeats), attn_mask=near, scale=scaling
        )
        gates = self.gates.repeat_interleave(repeats)[:, None, None].to(local.dtype)
        return local + gates * (causal_softmax_attention(q, k, v, mask, scaling) - local)


@contextmanager
def gated(model: Any, modules: Sequence[Any], gates: Tensor, width: int, sinks: int) -> Iterator[None]:
    """Gate each layer's key heads in a context: open gates (layers, key heads) let them see all keys."""
    before = model.config._attn_implementation
    try:
        model.set_attn_implementation(NAME)
        for module, own in zip(modules, gates, strict=True):
            if getattr(module, "sliding_window", None) is None:
                module.snnk_owner = partial(_itself, Gated(own, width, sinks))
        yield
    finally:
        model.set_attn_implementation(before)
        for module in modules:
            vars(module).pop("snnk_owner", None)


def _itself(gate: Gated) -> Gated:
    return gate


@contextmanager
def frozen(model: nn.Module) -> Iterator[None]:
    """Freeze all parameters in a context, so that no activations are kept for their gradients."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    try:
        for parameter in trained:
            parameter.requires_grad_(False)
        yield
    finally:
        for parameter in trained:
            parameter.requires_grad_(True)
