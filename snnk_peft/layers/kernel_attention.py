"""KernelAttention: softmax attention replaced by linear attention over feature maps, with an optional near field.

    term r   Σ_j φ_r(q_i)·ψ_r(k_j) v_j / Σ_j φ_r(q_i)·ψ_r(k_j)      (functional/linear_attention.py)
    out      term 1, or Σ_r w_r · term r                            (the lecture's rank-r attention)
    out      w₀ · softmax over the band + Σ_r w_r · term r          (FMMformer)
    out      near field and terms under one normalisation           (layers/joint_attention.py)

Key heads in `full_heads` keep exact softmax over all their keys; the following is about the others.

The weights w > 0 are learned per head, w = softplus(blend). The scaling is split: queries and keys are both multiplied
by √scaling, so that a softmax component estimates e^{scaling · q·k}. Shapes: q (B, H, L, d), k and v (B, G, N, d), H a
multiple of G; mask (B, N) -> (B, H, L, D). Cost: that of each term, and of the band.

Token by token (`continue_attention`), the state does not grow with the number of tokens: S_i = S_{i-1} + ψ(k_i) v_iᵀ,
z_i = z_{i-1} + ψ(k_i), out_i = φ(q_i) S_i / φ(q_i) z_i (Katharopoulos et al. 2020), and with a near field of width w
the last w − 1 keys and values as they are (with one normalisation, the last w and the sinks). Per example and key head
these are m·(D + 1) values for the sums, in at least fp32, and (w − 1)·(d + D) for the band. Full heads keep all their
keys and values.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from snnk_peft.errors import ConfigError, UnsupportedError
from snnk_peft.feature_map import FeatureMap
from snnk_peft.functional.at_hand import tensors_at_hand
from snnk_peft.functional.near_field import banded_softmax_attention
from snnk_peft.functional.pairwise import causal_softmax_attention
from snnk_peft.functional.precision import wide
from snnk_peft.functional.rotary import Rotary
from snnk_peft.functional.rounded import as_rounded
from snnk_peft.layers.attention_term import AttentionTerm, KeptMaps, State
from snnk_peft.layers.full_heads import Heads, Stored, joined_heads, split_heads
from snnk_peft.layers.joint_attention import JointAttention, JointState

EXPLICIT = 2048  # keys up to which attention weights are formed on request


class KernelAttention(nn.Module):
    """Linear attention of one layer.

    Args:
        terms: the terms of the sum, at least one. A list of feature maps, one or one per key head, is one term.
        num_heads: H, number of query heads with linear attention.
        near_field: width of the exact band (1 is the diagonal alone), or None for no band.
        joint: band and terms under one normalisation, instead of a blend of their results.
        sinks: number of first keys that are exact as well; requires `joint`.
        fitted_length: number of tokens of the longest text that the feature maps were fitted to, or None: beyond it,
            causal attention covers only near keys and sinks, or is an error without these. With `rotary`, far keys get
            less weight.
        rotary: removes the positions from queries and keys of the far field, or None; joint and causal only.
        full_heads: indices of key heads that keep softmax, with the query heads that share them; causal only.
        cache_bits: 8 or 4 to round their keys and values, with or without a cache; None for no rounding.

    Attributes:
        joint: the joint normalisation of band and terms, or None for a blend.
        blend: softplus⁻¹ of the weights, (fields, H), the near field first; None if there is only one field. Initially
            near and far field have equal weight, and so do all terms.

    Raises:
        ConfigError: terms mixed with feature maps, or anything else; a joint near field without a width, or over
            features that are not on the scale of softmax.
    """

    def __init__(
        self,
        terms: Sequence[AttentionTerm] | Sequence[FeatureMap],
        num_heads: int,
        *,
        near_field: int | None = None,
        joint: bool = False,
        sinks: int = 0,
        fitted_length: int | None = None,
        rotary: Rotary | None = None,
        full_heads: Sequence[int] = (),
        cache_bits: int | None = None,
    ):
        super().__init__()
        self.cache_bits = cache_bits
        self.fitted_length, self.full_heads = fitted_length, tuple(sorted(full_heads))
        given = [term for term in terms if isinstance(term, AttentionTerm)]
        maps = [feature_map for feature_map in terms if isinstance(feature_map, FeatureMap)]
        if len(terms) not in (len(given), len(maps)):
            raise ConfigError(
                f"KernelAttention was given {', '.join(type(term).__name__ for term in terms)}; expected terms alone, "
                "or feature maps alone, which are one term. Make a term of each map: AttentionTerm([feature_map])"
            )
        self.terms = nn.ModuleList(given or [AttentionTerm(maps)])
        self.near_field, self.num_heads = near_field, num_heads
        self.joint: JointAttention | None = None
        self.blend: nn.Parameter | None = None
        if joint and near_field is not None:
            self.joint = JointAttention(near_field, sinks, self._terms(), num_heads, rotary)
            return
        if joint or sinks:
            raise ConfigError(
                f"near_field is {near_field}, joint is {joint} and sinks is {sinks}; expected a width with joint=True, "
                "and sinks only there"
            )
        far = [1 / len(self.terms)] * len(self.terms)
        weights = torch.tensor(far if near_field is None else [0.5, *(weight / 2 for weight in far)])
        blend = weights.expm1().log()[:, None].repeat(1, num_heads)
        if len(weights) > 1:
            self.blend = nn.Parameter(blend)

    def _terms(self) -> list[AttentionTerm]:
        return [cast(AttentionTerm, term) for term in self.terms]

    def maps(self) -> list[FeatureMap]:
        """Return every feature map: of all terms and heads, of queries and keys."""
        return [module for module in self.modules() if isinstance(module, FeatureMap)]

    @tensors_at_hand
    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: torch.Tensor | None = None,
        *,
        causal: bool = False,
        scaling: float | None = None,
        positions: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Compute attention (B, H, L, D). With more keys than queries, causal queries are the last positions (a cache).

        `scaling` is the factor on q·k; None for d^-½. `positions` (B or 1, L) are those of the queries' tokens, None
        for the last of 0, 1, ...; they are used to remove rotary positions.

        Raises:
            ConfigError: a scaling that is not positive.
            UnsupportedError: without a near field, a text longer than those that the maps were fitted to; full heads in
                attention that is not causal.
        """
        scaling = q.shape[-1] ** -0.5 if scaling is None else scaling
        if scaling <= 0:
            raise ConfigError(f"attention scaling is {scaling}; expected a number above 0")
        return self._of_all(q, k, v, mask, self.cache_bits, causal=causal, scaling=scaling, positions=positions)

    def _of_all(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, value_bits: int | None, **options: Any
    ) -> Tensor:
        """Compute `forward`, with values of full heads in `value_bits` bits."""
        if not self.full_heads:
            return self._linear(q, k, v, mask, **options)
        if not options["causal"]:
            raise UnsupportedError("full_heads are for causal attention; leave them out for an encoder")
        (whole_q, whole_k, whole_v), (q, k, v) = self.split(q, k, v)
        whole_k, whole_v = as_rounded(whole_k, self.cache_bits), as_rounded(whole_v, value_bits)
        whole = causal_softmax_attention(whole_q, whole_k, whole_v, mask, options["scaling"])
        return joined_heads(whole, self._linear(q, k, v, mask, **options), self.full_heads)

    def split(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Heads, Heads]:
        """Split queries, keys and values into those of the full heads and those of the others."""
        return split_heads(q, k, v, self.full_heads)

    def _linear(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        *,
        causal: bool,
        scaling: float,
        positions: Tensor | None,
    ) -> Tensor:
        """Compute `forward` for the heads that are not full."""
        if self.joint is not None:
            if positions is not None and k.shape[-2] != q.shape[-2]:
                before = k.shape[-2] - q.shape[-2]
                earlier = positions[:, :1] + torch.arange(-before, 0, device=q.device)
                positions = torch.cat((earlier, positions), -1)
            return self.joint(
                self._terms(),
                q,
                k,
                v,
                mask,
                causal=causal,
                scaling=scaling,
                reach=self.fitted_length,
                positions=positions,
            )
        if causal:
            self.check_length(k.shape[-2], mask)
        root = scaling**0.5
        fields = []
        if self.near_field is not None:
            # The queries are the last positions: prepend zeros, which only see earlier keys.
            last = nn.functional.pad(q, (0, 0, k.shape[-2] - q.shape[-2], 0)) if q.shape[-2] != k.shape[-2] else q
            near = banded_softmax_attention(last, k, v, self.near_field, mask, causal=causal, scaling=scaling)
            fields.append(near[:, :, -q.shape[-2] :])
        for term in self.terms:
            fields.append(term(q, k, v, mask, causal=causal, root=root)[0])
        return self.blended(fields)

    def check_length(self, length: int, mask: torch.Tensor | None) -> None:
        """Check that the length of texts in causal attention, padding included, is within the fitted length.

        Warns:
            UserWarning: far keys are ignored beyond the fitted length.

        Raises:
            UnsupportedError: there is no joint near field.
        """
        reach, endless = self.fitted_length, self.joint is not None and self.joint.rotary is not None
        if endless or reach is None or torch.compiler.is_compiling() or length <= reach:
            return
        longest = length if mask is None else int(mask.sum(-1).max())  # padding does not count
        if longest <= reach:
            return
        told = (
            f"linear attention was fitted (calibrate) to texts of at most {reach} tokens, and what it "
            "gives beyond them is wrong by orders of magnitude: positions there are unlike all that was seen"
        )
        remedy = "Calibrate on texts as long as those that the model will read"
        if self.joint is None:
            raise UnsupportedError(f"{told}. This text has {longest} tokens. {remedy}, or give shorter ones")
        warnings.warn(
            f"{told}. Later tokens see their {self.near_field} neighbours and {self.joint.sinks} sinks alone. {remedy}",
            UserWarning,
            stacklevel=2,
        )

    def blended(self, fields: Sequence[torch.Tensor]) -> torch.Tensor:
        """Compute Σ_f w_f · field f, each field (B, H, L, D): the near field first, if there is one, then the terms."""
        if self.blend is None:
            return fields[0]
        weights = nn.functional.softplus(wide(self.blend))[:, None, :, None, None].to(fields[0].dtype)
        return sum(
            (weight * field for weight, field in zip(weights[1:], fields[1:], strict=True)), weights[0] * fields[0]
        )

    def weights(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        mask: torch.Tensor | None = None,
        *,
        causal: bool = False,
        scaling: float | None = None,
        positions: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the weights (B, H, L, N) that `forward` multiplies the values by.

        Rows sum to one, or with several fields to the sum of a head's blending weights (initially one); rows without a
        key are 0. Weights of features that are not positive can be negative.

        Raises:
            UnsupportedError: more than 2048 keys; the weights grow with their square.
        """
        count = k.shape[-2]
        if count > EXPLICIT:
            raise UnsupportedError(
                f"attention weights were asked for (output_attentions=True) with {count} keys; linear attention never "
                f"forms them, and they are formed on request for at most {EXPLICIT}. Give shorter inputs, or leave "
                "output_attentions out"
            )
        units = torch.eye(count, dtype=wide(q).dtype, device=q.device).expand(*k.shape[:2], -1, -1)
        scaling = q.shape[-1] ** -0.5 if scaling is None else scaling
        return self._of_all(q, k, units, mask, None, causal=causal, scaling=scaling, positions=positions).to(q.dtype)


class Band(NamedTuple):
    """The tokens in the next query's near field: keys (B, G, t, d), t < width, values, and their mask (B, t)."""

    keys: Tensor
    values: Tensor
    counts: Tensor


class KernelState(NamedTuple):
    """State of a KernelAttention after all earlier tokens: the sums of every feature map, and the band, if there is
    one."""

    sums: tuple[State, ...]
    band: Band | None


LinearState = KernelState | JointState


class FullState(NamedTuple):
    """All keys and values of full heads, their mask (B, t), and the state of the other heads.

    Attributes:
        every: True if no token has been masked so far.
    """

    keys: Stored
    values: Stored
    counts: Tensor
    rest: LinearState
    every: bool


AttentionMemory = LinearState | FullState


@tensors_at_hand
def continue_attention(
    kernel: KernelAttention,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    state: AttentionMemory | None = None,
    *,
    scaling: float | None = None,
    kept: KeptMaps | None = None,
    positions: Tensor | None = None,
) -> tuple[Tensor, AttentionMemory]:
    """Compute causal attention of new tokens to each other and to all earlier ones.

    Args:
        kernel: the layer's attention.
        q: (B, H, L, d), queries of the new tokens, with k (B, G, L, d) and v (B, G, L, D).
        mask: (B, L) bool, True at new keys to attend to.
        state: the state returned by the previous call; None at the start.
        scaling: factor on q·k; None for d^-½.
        kept: the caller's cache of the feature maps' logarithms, while no weight changes; or None.
        positions: (B or 1, L), positions of the new tokens; None to count unmasked tokens.

    Returns:
        (B, H, L, D), equal to the last L rows of the kernel's causal attention over all tokens, and the new state. Its
        tensors own their memory and keep nothing else alive.

    Raises:
        ConfigError: a scaling that is not positive.
        UnsupportedError: a component that adapts to all tokens of an example.
    """
    scaling = q.shape[-1] ** -0.5 if scaling is None else scaling
    if scaling <= 0:
        raise ConfigError(f"attention scaling is {scaling}; expected a number above 0")
    if kernel.full_heads:
        return _continue_with_full_heads(
            kernel, q, k, v, mask, cast("FullState | None", state), scaling, kept, positions
        )
    return _continue_linear(kernel, q, k, v, mask, cast("LinearState | None", state), scaling, kept, positions)


def _continue_with_full_heads(
    kernel: KernelAttention,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    state: FullState | None,
    scaling: float,
    kept: KeptMaps | None,
    positions: Tensor | None,
) -> tuple[Tensor, FullState]:
    (whole_q, whole_k, whole_v), (q, k, v) = kernel.split(q, k, v)
    counts = torch.ones(k.shape[0], k.shape[-2], dtype=torch.bool, device=k.device) if mask is None else mask
    bits = kernel.cache_bits
    keys, values = (Stored.of(each, bits) for each in (whole_k, whole_v))
    if state is not None:
        keys, values = state.keys.and_then(keys), state.values.and_then(values)
        counts = torch.cat((state.counts, counts), -1)
    # A mask that hides nothing costs time, but checking it costs more on an accelerator.
    hides = mask is not None or (state is not None and not state.every)
    whole_k, whole_v = (each.read(bits, whole_q.dtype) for each in (keys, values))
    out = causal_softmax_attention(whole_q, whole_k, whole_v, counts if hides else None, scaling)
    before = None if state is None else state.rest
    rest, behind = _continue_linear(kernel, q, k, v, mask, before, scaling, kept, positions)
    return joined_heads(out, rest, kernel.full_heads), FullState(keys, values, counts, behind, not hides)


def _continue_linear(
    kernel: KernelAttention,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    state: LinearState | None,
    scaling: float,
    kept: KeptMaps | None,
    positions: Tensor | None,
) -> tuple[Tensor, LinearState]:
    if kernel.joint is not None:
        terms = [cast(AttentionTerm, term) for term in kernel.terms]
        earlier = cast("JointState | None", state)
        return kernel.joint.continued(terms, q, k, v, mask, earlier, scaling, kept, kernel.fitted_length, positions)
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
    """Return the tensor in memory of its own, copied if necessary."""
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
        # A band needs as many queries as keys: prepend zeros, whose results are discarded.
        q = torch.nn.functional.pad(q, (0, 0, k.shape[-2] - length, 0))
    near = banded_softmax_attention(q, k, v, width, counts, causal=True, scaling=scaling)
    first = max(0, k.shape[-2] - (width - 1))
    band = Band(k[:, :, first:].clone(), v[:, :, first:].clone(), counts[:, first:].clone())
    return near[:, :, -length:], band
