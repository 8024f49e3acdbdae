"""Three decompositions of the blocks of a Transformer, without gradients (MoDeGPT, Lin et al., ICLR 2025).

With C the uncentred second moment of the input of a pair of matrices, a layer of sparsity φ keeps 1 − φ of

- FFN (type I, Nyström): the units of largest ridge leverage [C (C + λ)⁻¹]_ii, C that of the activations, and the
  contraction becomes W₂ C[:, S] C[S, S]⁺; λ = Σ_{i>k} λ_i(C) / k, the tail beyond the k kept;
- queries and keys (type II, CR): the dimensions of each head with the largest ‖q_i‖ ‖k_i‖ over all tokens;
- values and outputs (type III, SVD): W_o W_v of each head as the best rank-k product on inputs, C^½ W_vᵀ W_oᵀ.

φ_l = L φ̄ softmax_l(−s_l / ε), with s_l = 1 − E cos(x_l, x_{l+1}) the change made by layer l. Biases, which the paper's
Llama does not have, are exact: those of queries and keys count as an input of one, and W_o b_v joins the output's,
because attention weights sum to one. Moments come from the stack as converted so far.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from _peers.blocks import (
    Batch,
    behind_attention,
    behind_ffn,
    encoder_layers,
    entering,
    keep_units,
    linear,
)

TEMPERATURE = 1.0  # ε
MOST = 0.9  # largest sparsity of a layer


@torch.no_grad()
def decompose(
    teacher: nn.Module, batches: Sequence[Batch], share: float, temperature: float = TEMPERATURE
) -> nn.Module:
    """Return a copy of `teacher` with `share` of the multiply-adds of its heads and FFNs; labels are not read."""
    model = copy.deepcopy(teacher)
    sparsity = allocate(influence(teacher, batches), 1 - share, temperature)
    states = entering(model, batches)
    for layer, removed in zip(encoder_layers(model), sparsity.tolist(), strict=True):
        size, units = layer.attention.self.attention_head_size, layer.intermediate.dense.out_features
        kept = max(1, round((1 - removed) * size))
        if kept < size:
            narrow_heads(layer, sum(_second_moment(_with_one(state.x[state.real])) for state in states), kept)
        states = [behind_attention(layer, state) for state in states]
        kept = max(1, round((1 - removed) * units))
        if kept < units:
            moment = sum(_second_moment(layer.intermediate(state.x)[state.real]) for state in states)
            chosen = leverage_units(moment, kept)
            keep_units(layer, chosen, nystrom_contraction(layer.output.dense.weight, moment, chosen))
        states = [behind_ffn(layer, state) for state in states]
    return model


def _with_one(x: Tensor) -> Tensor:
    return torch.cat((x, x.new_ones(len(x), 1)), 1)


def _second_moment(x: Tensor) -> Any:
    return x.double().T @ x.double()


def influence(model: nn.Module, batches: Sequence[Batch]) -> Tensor:
    """Return 1 − the mean cosine between input and output of each layer."""
    states, found = entering(model, batches), []
    for layer in encoder_layers(model):
        after = [behind_ffn(layer, behind_attention(layer, state)) for state in states]
        cosines = [
            torch.cosine_similarity(a.x[a.real], b.x[b.real], dim=-1) for a, b in zip(states, after, strict=True)
        ]
        found.append(1 - torch.cat(cosines).mean())
        states = after
    return torch.stack(found).double()


def allocate(influences: Tensor, mean: float, temperature: float) -> Tensor:
    """Compute sparsities with this mean, larger where a layer changes less; none above MOST unless the mean is.

    Args:
        influences: (layers,).
        mean: mean of the result.
        temperature: ε; infinity gives equal sparsities.
    """
    weight = torch.softmax(-influences / temperature, 0)
    most, free = max(MOST, mean), torch.ones_like(weight, dtype=torch.bool)
    result = weight * len(weight) * mean
    while (result > most + 1e-12).any():
        free &= result <= most
        # What layers at the limit cannot remove is removed from the others, in the same proportions.
        left = mean * len(weight) - most * float((~free).sum())
        result = torch.where(free, weight / weight[free].sum() * left, torch.full_like(weight, most))
    return result


def leverage_units(moment: Tensor, count: int) -> Tensor:
    """Return the units with the largest ridge leverage scores, ascending.

    Args:
        moment: C (units, units) of the activations.
        count: number of units.
    """
    values, vectors = torch.linalg.eigh(moment)
    values = values.clamp_min(0)
    ridge = values[: len(values) - count].sum() / count
    scores = (vectors.square() * (values / (values + ridge).clamp_min(1e-300))).sum(1)
    return scores.topk(count).indices.sort().values


def nystrom_contraction(weight: Tensor, moment: Tensor, chosen: Tensor) -> Tensor:
    """Compute W₂ C[:, S] C[S, S]⁺, (dim, kept)."""
    inverse = torch.linalg.pinv(moment[chosen][:, chosen], hermitian=True)
    return weight.double() @ moment[:, chosen] @ inverse


def cr_dimensions(query: Tensor, key: Tensor, count: int) -> Tensor:
    """Return the dimensions of a head with the largest ‖q_i‖ ‖k_i‖, ascending, from the second moments of q and k."""
    return (query.diagonal() * key.diagonal()).topk(count).indices.sort().values


def square_roots(moment: Tensor) -> tuple[Tensor, Tensor]:
    """Return R with R Rᵀ = C, and B such that B Rᵀ projects onto the range of C (dim, dim)."""
    values, vectors = torch.linalg.eigh(moment)
    values = values.clamp_min(0)
    inverse = torch.where(values > 1e-12 * values.max(), values.clamp_min(1e-300).rsqrt(), 0.0)
    return vectors * values.sqrt(), vectors * inverse


def svd_pair(value: Tensor, out: Tensor, roots: tuple[Tensor, Tensor], rank: int) -> tuple[Tensor, Tensor]:
    """Return the W_v' (rank, dim) and W_o' (dim, rank) that minimise tr (W_o'W_v' − W_oW_v) C (W_o'W_v' − W_oW_v)ᵀ.

    Args:
        value: W_v (size, dim) of a head.
        out: W_o (dim, size) of that head.
        roots: `square_roots` of C.
        rank: rank, at most size.
    """
    root, back = roots
    left, middle, right = torch.linalg.svd(root.T @ value.T, full_matrices=False)
    inner, strength, end = torch.linalg.svd(middle[:, None] * (right @ out.T), full_matrices=False)
    return (back @ left @ inner[:, :rank]).T, (strength[:rank, None] * end[:rank]).T


def narrow_heads(layer: Any, moment: Tensor, count: int) -> None:
    """Narrow every head of a layer to `count` dimensions; the scale of the softmax stays.

    Args:
        layer: layer of a BERT.
        moment: second moment of its inputs with a one appended, (dim + 1, dim + 1).
        count: number of dimensions.
    """
    attention, out = layer.attention.self, layer.attention.output.dense
    size, roots = attention.attention_head_size, square_roots(moment[:-1, :-1])
    extended = {
        name: torch.cat((getattr(attention, name).weight, getattr(attention, name).bias[:, None]), 1).double()
        for name in ("query", "key")
    }
    value, weight = attention.value.weight.double(), out.weight.double()
    chosen, pairs = [], []
    for start in range(0, len(value), size):
        rows = slice(start, start + size)
        moments = [each[rows] @ moment @ each[rows].T for each in extended.values()]
        chosen.append(start + cr_dimensions(*moments, count))
        pairs.append(svd_pair(value[rows], weight[:, rows], roots, count))
    bias = out.bias.double() + weight @ attention.value.bias.double()
    for name, each in extended.items():
        kept = each[torch.cat(chosen)]
        setattr(attention, name, linear(kept[:, :-1], kept[:, -1]))
    values, outs = (torch.cat(each, dim) for each, dim in zip(zip(*pairs, strict=True), (0, 1), strict=True))
    attention.value = linear(values, values.new_zeros(len(values)))
    layer.attention.output.dense = linear(outs, bias)
    attention.attention_head_size, attention.all_head_size = count, len(values)
