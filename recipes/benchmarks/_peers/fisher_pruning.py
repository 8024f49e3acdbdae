"""Heads and FFN units pruned without retraining: mask search, rearrangement and tuning (Kwon et al., NeurIPS 2022).

"A fast post-training pruning framework for transformers", with a constraint on multiply-adds. A mask m = 1
multiplies every attention head and every FFN unit. With g the gradient of one labelled example's loss at m,

1. search: the loss of pruning a set Z is estimated as ½ Σ_{i in Z} E g_i²; for every number of heads, the most
   important heads are kept, and as many of the most important units as the budget then allows; the best number wins;
2. rearrange: within each sublayer ½ zᵀ (E g gᵀ) z, with z the indicator of pruning, is lowered by one round of greedy
   swaps that leave the number of pruned ones unchanged;
3. tune: front to back, the masks of what is kept become real numbers, by least squares against the original's output
   of the sublayer with its residual, damped around 1; if one leaves [−10, 10], tuning ends there.

Labels are needed for step 1.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from _peers.blocks import (
    Batch,
    Cost,
    behind_attention,
    behind_ffn,
    encoder_layers,
    entering,
    heads_of,
    keep_heads,
    keep_units,
    model_inputs,
)

DAMPING = 1.0
LIMIT = 10.0  # largest entry of a tuned mask


class Masks(NamedTuple):
    """Mask values of heads and units.

    Args:
        heads: (..., layers, heads).
        units: (..., layers, units).
    """

    heads: Tensor
    units: Tensor


def prune(teacher: nn.Module, batches: Sequence[Batch], share: float) -> nn.Module:
    """Return a copy of `teacher` with `share` of the multiply-adds of its heads and FFNs; batches need labels."""
    cost = Cost.of(teacher.config)
    fisher = fisher_blocks(teacher, batches)
    diagonal = Masks(*(blocks.diagonal(dim1=-2, dim2=-1) for blocks in fisher))
    kept = search(diagonal, cost.head, cost.unit, round(share * cost.total))
    kept = Masks(
        *(
            torch.stack([rearrange(*pair) for pair in zip(*each, strict=True)])
            for each in zip(fisher, kept, strict=True)
        )
    )
    model = copy.deepcopy(teacher)
    for layer, heads, units in zip(encoder_layers(model), *kept, strict=True):
        keep_heads(layer, heads.nonzero().flatten())
        keep_units(layer, units.nonzero().flatten())
    tune(model, teacher, batches)
    return model


def mask_gradients(model: nn.Module, batches: Sequence[Batch]) -> Iterator[Masks]:
    """Yield, per batch, the gradient of each example's loss with respect to all-ones masks: (examples, layers, ...)."""
    made: dict[nn.Module, Tensor] = {}

    def masked(groups: int) -> Any:
        def hook(module: nn.Module, given: tuple[Tensor, ...]) -> Tensor:
            (x,) = given
            made[module] = x.new_ones(len(x), groups, requires_grad=True)
            return x * made[module].repeat_interleave(x.shape[-1] // groups, 1)[:, None]

        return hook

    layers = encoder_layers(model)
    config: Any = model.config
    pairs = [(layer.attention.output.dense, layer.output.dense) for layer in layers]
    handles = [
        module.register_forward_pre_hook(masked(groups))
        for pair in pairs
        for module, groups in zip(pair, (config.num_attention_heads, config.intermediate_size), strict=True)
    ]
    try:
        for batch in batches:
            logits = model(**model_inputs(batch)).logits
            # Examples are independent, so each mask row gets the gradient of its own example.
            loss = nn.functional.cross_entropy(logits, batch["labels"], reduction="sum")
            flat = torch.autograd.grad(loss, [made[module] for pair in pairs for module in pair])
            yield Masks(torch.stack(flat[::2], 1), torch.stack(flat[1::2], 1))
    finally:
        for handle in handles:
            handle.remove()


def fisher_blocks(model: nn.Module, batches: Sequence[Batch]) -> Masks:
    """Compute E g gᵀ of each sublayer: (layers, heads, heads) and (layers, units, units)."""
    config: Any = model.config
    sizes = config.num_attention_heads, config.intermediate_size
    sums = [torch.zeros(config.num_hidden_layers, size, size, dtype=torch.float64) for size in sizes]
    count = 0
    for gradients in mask_gradients(model, batches):
        count += len(gradients.heads)
        for total, g in zip(sums, gradients, strict=True):
            total += g.transpose(0, 1).mT @ g.transpose(0, 1)
    return Masks(*(total / count for total in sums))


def search(importance: Masks, head: int, unit: int, budget: int) -> Masks:
    """Return boolean masks of what to keep, with the least sum of pruned importance within `budget`.

    Args:
        importance: E g² of each head and unit.
        head: cost of one head.
        unit: cost of one unit.
        budget: maximum cost of what is kept.
    """
    ranked = [each.flatten().double().sort(descending=True) for each in importance]
    kept = [torch.cat((torch.zeros(1).double(), each.values.cumsum(0))) for each in ranked]
    heads = torch.arange(min(len(kept[0]) - 1, budget // head) + 1)
    units = ((budget - heads * head) // unit).clamp(max=len(kept[1]) - 1)
    best = int((kept[0][heads] + kept[1][units]).argmax())
    counts = int(heads[best]), int(units[best])
    masks = [torch.zeros(each.numel(), dtype=torch.bool) for each in importance]
    for mask, rank, count in zip(masks, ranked, counts, strict=True):
        mask[rank.indices[:count]] = True
    return Masks(*(mask.view_as(each) for mask, each in zip(masks, importance, strict=True)))


def rearrange(block: Tensor, kept: Tensor) -> Tensor:
    """Run one round of swaps: restore each pruned one, and prune the one that then costs least.

    Args:
        block: E g gᵀ of a sublayer, (n, n).
        kept: booleans (n,).
    """
    kept = kept.clone()
    coupling = block[:, ~kept].sum(1)
    for index in (~kept).nonzero().flatten():
        kept[index] = True
        coupling = coupling - block[:, index]
        best = (block.diagonal() + 2 * coupling).masked_fill(~kept, torch.inf).argmin()
        kept[best] = False
        coupling = coupling + block[:, best]
    return kept


@torch.no_grad()
def tune(model: nn.Module, teacher: nn.Module, batches: Sequence[Batch]) -> int:
    """Scale the columns of the output matrices for what is kept; return the number of tuned sublayers."""
    states, targets = entering(model, batches), entering(teacher, batches)
    tuned, going = 0, True
    for layer, original in zip(encoder_layers(model), encoder_layers(teacher), strict=True):
        for attends in (True, False):
            inner = heads_of if attends else _hidden
            behind = behind_attention if attends else behind_ffn
            out = (layer.attention if attends else layer).output.dense
            wanted = (original.attention if attends else original).output.dense
            groups = _groups(layer) if attends else out.in_features
            values = [inner(layer, state) for state in states]
            given = [inner(original, target) for target in targets]
            if going and groups:
                equations: list[Any] = [0, 0]
                for value, aim, state, target in zip(values, given, states, targets, strict=True):
                    # Both outputs with their residuals, before the norm.
                    residual = target.x + wanted(aim) - state.x - out.bias
                    terms = normal_equations(value[state.real], out.weight, residual[state.real], groups)
                    equations = [a + b for a, b in zip(equations, terms, strict=True)]
                mask = damped(*equations)
                going = bool((mask.abs() <= LIMIT).all())
                if going:
                    out.weight.mul_(mask.to(out.weight).repeat_interleave(out.in_features // groups))
                    tuned += 1
            states = [behind(layer, state, value) for state, value in zip(states, values, strict=True)]
            targets = [behind(original, target, aim) for target, aim in zip(targets, given, strict=True)]
    return tuned


def _hidden(layer: Any, state: Any) -> Tensor:
    return layer.intermediate(state.x)


def _groups(layer: Any) -> int:
    return layer.attention.output.dense.in_features // getattr(layer.attention.self, "attention_head_size", 1)


def normal_equations(values: Tensor, weight: Tensor, target: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    """Return AᵀA and Aᵀb of min ‖A m − b‖², where column i of A is group i's output at all tokens; summed in fp64.

    Args:
        values: (tokens, columns), before the output matrix.
        weight: (dim, columns), the output matrix.
        target: b, (tokens, dim).
        groups: number of entries of m, each for equally many columns.
    """
    # Σ_t (w_i v_ti)·(w_j v_tj) = (VᵀV)_ij (WᵀW)_ij, so the tall matrix A is never formed.
    gram = (values.T @ values).double() * (weight.T @ weight).double()
    cross = (values * (target @ weight)).double().sum(0)
    size = values.shape[1] // groups
    return gram.view(groups, size, groups, size).sum((1, 3)), cross.view(groups, size).sum(1)


def damped(gram: Tensor, cross: Tensor) -> Tensor:
    """Compute m = 1 + s with s the minimiser of ‖A (1 + s) − b‖² + DAMPING² ‖s‖²."""
    one = gram.new_ones(len(gram))
    return one + torch.linalg.solve(gram + DAMPING**2 * torch.eye(len(gram)).to(gram), cross - gram @ one)
