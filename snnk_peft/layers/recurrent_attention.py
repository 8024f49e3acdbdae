"""KernelAttention token by token, with a state whose size does not grow with the number of tokens.

    S_i = S_{i-1} + ψ(k_i) v_iᵀ,  z_i = z_{i-1} + ψ(k_i),  out_i = φ(q_i) S_i / φ(q_i) z_i   (Katharopoulos et al. 2020)

and, with a near field of width w, the last w − 1 keys and values as they are (FMMformer); with one normalisation, the
last w and the sinks (layers/joint_attention.py). Shapes: q (B, H, L, d),
k (B, G, L, d) and v (B, G, L, D) for L new tokens, any number of them. Memory per example: G·m·(D + 1) values for the
sums, in at least fp32, and G·(w − 1)·(d + D) for the band. Cost per token: that of the feature map, and m·D per head.
"""

from __future__ import annotations

from typing import NamedTuple, cast

import torch
from torch import Tensor

from snnk_peft.errors import ConfigError
from snnk_peft.functional.at_hand import tensors_at_hand
from snnk_peft.functional.near_field import banded_softmax_attention
from snnk_peft.layers.attention_term import AttentionTerm, KeptMaps, State
from snnk_peft.layers.joint_attention import JointState
from snnk_peft.layers.kernel_attention import KernelAttention


class Band(NamedTuple):
    """The tokens that the next query's near field still sees.

    Attributes:
        keys: (B, G, t, d), t < width.
        values: (B, G, t, D).
        counts: (B, t) bool, False for padding.
    """

    keys: Tensor
    values: Tensor
    counts: Tensor


class KernelState(NamedTuple):
    """The state of a KernelAttention after all earlier tokens.

    Attributes:
        sums: of every feature map that is summed over, what it keeps of the keys.
        band: for the near field; None without one.
    """

    sums: tuple[State, ...]
    band: Band | None


@tensors_at_hand
def continue_attention(
    kernel: KernelAttention,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    state: KernelState | JointState | None = None,
    *,
    scaling: float | None = None,
    kept: KeptMaps | None = None,
) -> tuple[Tensor, KernelState | JointState]:
    """Causal attention of new tokens to each other and to all earlier ones.

    Args:
        kernel: the layer's attention.
        q: queries of the new tokens, (B, H, L, d).
        k: their keys, (B, G, L, d).
        v: their values, (B, G, L, D).
        mask: (B, L) bool, True where a new key counts.
        state: what the call before returned; None at the start.
        scaling: factor on q·k; None for d^-½.
        kept: where the caller keeps the feature maps' logarithms from call to call, while no weight changes; or None.

    Returns:
        (B, H, L, D), equal to the last L rows of the kernel's causal attention over all tokens, and the new state. Its
        tensors own their memory, so that they keep nothing else alive.

    Raises:
        ConfigError: a scaling that is not positive.
        UnsupportedError: a component that adapts to all tokens of an example.
    """
    scaling = q.shape[-1] ** -0.5 if scaling is None else scaling
    if scaling <= 0:
        raise ConfigError(f"attention scaling is {scaling}; expected a number above 0")
    if kernel.joint is not None:
        terms = [cast(AttentionTerm, term) for term in kernel.terms]
        earlier, reach = cast("JointState | None", state), kernel.fitted_length
        return kernel.joint.continued(terms, q, k, v, mask, earlier, scaling, kept, reach)
    state = cast("KernelState | None", state)
    root = scaling**0.5
    fields, band = [], None
    if kernel.near_field is not None:
        near, band = _band_behind_state(
            kernel.near_field, q, k, v, mask, None if state is None else state.band, scaling
        )
        fields.append(near)
    sums = []
    for number, term in enumerate(kernel.terms):
        before = None if state is None else state.sums[number]
        far, behind = term(q, k, v, mask, causal=True, root=root, state=before, kept=kept)
        fields.append(far)
        sums.append(type(behind)(*map(_owned, behind)))
    return kernel.blended(fields), KernelState(tuple(sums), band)


def _owned(tensor: Tensor) -> Tensor:
    """In memory that holds nothing else: a copy, if need be."""
    alone = not torch.compiler.is_compiling() and tensor.untyped_storage().nbytes() == tensor.nbytes
    return tensor if alone else tensor.clone()


def _band_behind_state(
    width: int, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, before: Band | None, scaling: float
) -> tuple[Tensor, Band]:
    length = q.shape[-2]
    counts = torch.ones(k.shape[0], length, dtype=torch.bool, device=k.device) if mask is None else mask
    if before is not None:
        k, v = torch.cat((before.keys, k), -2), torch.cat((before.values, v), -2)
        counts = torch.cat((before.counts, counts), -1)
        # A band needs as many queries as keys: zeros in front, whose results are cut off.
        q = torch.nn.functional.pad(q, (0, 0, k.shape[-2] - length, 0))
    near = banded_softmax_attention(q, k, v, width, counts, causal=True, scaling=scaling)
    first = max(0, k.shape[-2] - (width - 1))
    band = Band(k[:, :, first:].clone(), v[:, :, first:].clone(), counts[:, first:].clone())
    return near[:, :, -length:], band
