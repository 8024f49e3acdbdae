"""Linear attention in place of softmax, in all or some layers.

Layers that attend to a band only (ModernBERT's local layers, sliding windows) are already linear in length. "all",
"top-K" and "bottom-K" therefore refer to the layers with full attention, and local ones stay as they are. A list of
ints may name a local layer, with `near_field`: an exact band and, beyond it, linear attention.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from torch import nn

from snnk_peft.errors import ConfigError, UnsupportedError
from snnk_peft.families import family_of
from snnk_peft.families.base import head_sizes, module_at
from snnk_peft.functional.rotary import Rotary
from snnk_peft.layers.attention_term import AttentionTerm
from snnk_peft.layers.kernel_attention import KernelAttention
from snnk_peft.layers.slots import Slot
from snnk_peft.options import documented, option
from snnk_peft.parts import PARTS
from snnk_peft.parts.attention.cache import release_recurrent_cache
from snnk_peft.parts.attention.fit import HeadsReader
from snnk_peft.parts.attention.slots import Attend, FittedAttend
from snnk_peft.parts.attention.supported import check_attention, near_field_faults, rotary_of
from snnk_peft.parts.base import FeaturePart, Part, Patch, PatchContext, resolve_layers
from snnk_peft.projections import PROJECTIONS
from snnk_peft.registry import did_you_mean

DEFAULT_ROWS = 64  # of linear attention, unless specified

# Options allowed in the entries of `AttentionPart.sum_of`.
TERM_FIELDS = ["component", "projection", "num_features", "component_params", "projection_params"]
TERM_FIELDS += ["per_head", "separate_maps"]


@PARTS.register("attention")
@documented
@dataclass
class AttentionPart(FeaturePart):
    """Softmax attention becomes linear attention over feature maps: Φ(q)·Φ(k) instead of e^{q·k} (Spectraformer).

    Cost and memory grow linearly with the length of the input. `disable_adapter` gives softmax back.

    Example:
        >>> part = AttentionPart(projection="gmm", sum_of=[{"component": "elu", "num_features": 16}])
        >>> [(term.component, term.projection, term.num_features) for term in part.terms()]
        [('posrf', 'gmm', None), ('elu', 'gmm', 16)]
    """

    attends: ClassVar[bool] = True
    disables_exactly: ClassVar[bool] = False  # softmax is then computed by another function

    component: str = option("posrf", "the function f in the features f(Wx), a name in `COMPONENTS`.", checked=False)
    num_features: int | None = option(  # type: ignore[assignment]
        None,
        'rows of W. None: 64, or the nearest number that the projection allows (for "identity", the classical linear '
        'attention with component "elu", the head dimension).',
        checked=False,
    )
    per_head: bool = option(
        False, 'use a matrix W per key head instead of one per layer; projection "centroids" always does.'
    )
    separate_maps: bool = option(
        False,
        "give queries and keys a matrix each. Both start as the same draw, hence at the kernel of a shared one, and "
        'are then learned separately: for learned projections only. "centroids" always has them.',
    )
    refit_output: bool = option(
        True,
        'let `calibrate` fit the output projection as well, for projection "centroids"; others leave it as '
        "it is. It is then part of the adapter.",
    )
    near_field: int | None = option(
        None,
        "width of an exact softmax band around the diagonal, or None. Costs near_field dot products per token.",
        low=1,
        high=1 << 20,
    )
    near_field_normalisation: str = option(
        "blend",
        '"blend": the outputs of the band and of the feature maps are added with learned weights (FMMformer). "joint": '
        "the exponentials of near keys and the feature products of far ones, each key once, are divided by the sum of "
        "both: softmax itself, for a band as wide as the input is long. For positive features that estimate softmax, "
        'and for what `calibrate` fits ("mixture" over "centroids", then with maps and a factor per query head).',
        choices=("blend", "joint"),
    )
    sinks: int = option(
        0,
        'how many of the first tokens are exact too, for models that rely on them; with "joint".',
        low=0,
        high=1 << 20,
    )
    full_heads: list[list[int]] = option(
        list,
        "key heads that keep softmax over all their keys, as pairs [layer, key head]: those by which a decoder recalls "
        'from far back. Their keys stay in the cache; a layer whose heads are all named stays as it was. With "joint".',
        checked=False,
    )
    cache_bits: int | None = option(
        None,
        "bits per number of the keys and values that full heads keep: 8 or 4, rounded per key, with or without a "
        "cache. None keeps them as they are.",
        choices=(8, 4),
    )
    position_free: bool = option(
        False,
        "remove rotary positions from the far field's queries and keys, as if each query saw all far keys from one "
        "distance, near_field: centroids of rotated queries contain absolute positions, and are wrong beyond those "
        'that were fitted. With "joint", in decoders; no effect without rotary positions.',
    )
    fitted_length: int | None = option(
        None,
        "tokens of the longest text that `calibrate` fitted the far field to; set by `calibrate`. Beyond it, a decoder "
        "ignores far keys, since the fit is wrong there. None: not fitted, or unknown.",
        low=1,
        high=1 << 30,
    )
    sum_of: list[dict[str, Any]] = option(
        list,
        "further feature maps (the lecture's rank-r attention): attention is Σ_r w_r · att_r over this part's own map "
        "and one for each entry, w_r > 0 learned per head, equal at the start. An entry is a dict of any of component, "
        "projection, num_features, component_params, projection_params, per_head and separate_maps; what it leaves out "
        "is as in this part; naming a component resets its params to the defaults, naming a projection its params "
        "and num_features. Each entry costs as much as a separate attention, and has its own draw.",
        checked=False,
    )

    def faults(self, part: str) -> list[str]:
        given = self if self.num_features is not None else dataclasses.replace(self, num_features=DEFAULT_ROWS)
        faults = super(AttentionPart, given).faults(part)
        if self.needs_layer:
            faults.append(
                f"{part}.projection is {self.projection!r}; attention replaces no pretrained weight to take rows from"
            )
        faults += self._separation_faults(part) + self._fit_faults(part) + near_field_faults(self, part)
        faults += self._head_faults(part)
        if not isinstance(self.sum_of, (list, tuple)):
            return [*faults, f"{part}.sum_of is {self.sum_of!r}; expected a list of dicts, one for each further map"]
        wrong = self._sum_faults(part)
        if not wrong:
            wrong = [f for i, term in enumerate(self.terms()[1:]) for f in term.faults(f"{part}.sum_of[{i}]")]
        return faults + wrong

    def _separation_faults(self, part: str) -> list[str]:
        if not self.separate_maps or self.projection not in PROJECTIONS or PROJECTIONS[self.projection].trainable:
            return []
        learned = ", ".join(name for name in PROJECTIONS if PROJECTIONS[name].trainable)
        return [
            f"{part}.separate_maps is True with projection {self.projection!r}, which is not learned: two copies of a "
            "draw would stay equal, and two independent draws estimate no kernel; use separate_maps=False or one of "
            f"the learned projections, {learned}"
        ]

    def _head_faults(self, part: str) -> list[str]:
        faults = []
        given = [name for name in ("full_heads", "cache_bits", "position_free") if getattr(self, name)]
        if given and not (self.joint and self.near_field is not None):
            faults.append(
                f"{part}.{given[0]} is given without a near field under one normalisation; expected beside it "
                "near_field=64, say, and near_field_normalisation='joint'"
            )
        pairs = self.full_heads if isinstance(self.full_heads, (list, tuple)) else [self.full_heads]
        wrong = [pair for pair in pairs if not _is_pair(pair)]
        if wrong:
            faults.append(f"{part}.full_heads holds {wrong[0]!r}; expected pairs of integers >= 0, [layer, key head]")
        elif len({tuple(pair) for pair in pairs}) < len(pairs):
            faults.append(f"{part}.full_heads names a head twice; expected each pair [layer, key head] once")
        return faults

    @property
    def fitted(self) -> bool:
        """Whether `calibrate` computes the rows from the layer's queries and keys."""
        return self.component == "mixture" and self.of_attention

    def _fit_faults(self, part: str) -> list[str]:
        """List the faults of a fitted part: `calibrate` fits a single map to softmax."""
        entries = [entry for entry in self.further if isinstance(entry, Mapping)]
        named = [entry for entry in entries if entry.get("projection") == self.projection or "projection" not in entry]
        blended = self.near_field is not None and not self.joint
        if not self.of_attention or not (blended or named):
            return []
        beside = "near_field" if blended else "sum_of"
        joint = ", join them (near_field_normalisation='joint')" if blended else ""
        return [
            f"{part}.{beside} is given with projection {self.projection!r}, which `calibrate` fits to all of softmax, "
            f"as if nothing stood beside it; expected that map alone. Leave it out{joint}, or learn the rows: "
            "projection='free'"
        ]

    @property
    def further(self) -> Sequence[Any]:
        """The entries of `sum_of`; none if it is not a list, which is reported separately."""
        return self.sum_of if isinstance(self.sum_of, (list, tuple)) else ()

    @property
    def joint(self) -> bool:
        """Whether near and far keys share one normalisation."""
        return self.near_field_normalisation == "joint"

    def _sum_faults(self, part: str) -> list[str]:
        faults = []
        for i, entry in enumerate(self.sum_of):
            if not isinstance(entry, Mapping):
                faults.append(f"{part}.sum_of[{i}] is {entry!r}; expected a dict such as {{'component': 'elu'}}")
                continue
            faults += [
                f"{part}.sum_of[{i}].{did_you_mean('field', k, TERM_FIELDS)}" for k in entry if k not in TERM_FIELDS
            ]
        return faults

    @classmethod
    def candidates(cls, model: nn.Module, length: int) -> list[Part]:
        """Propose sizes that can be cheaper than softmax: in encoders, with few rows per token."""
        rows = [] if family_of(model).causal else [rows for rows in (32, 64, 128) if 4 * rows <= length]
        return [cls(component="mixture", projection="centroids", num_features=number) for number in rows]

    @classmethod
    def probes(cls) -> dict[str, Part]:
        return {"attention": cls(projection="free", num_features=16)}

    def terms(self) -> list[AttentionPart]:
        """Return one part per feature map of the sum: this one, then those of `sum_of`, with missing options filled
        in."""
        alone: dict[str, Any] = {"near_field": None, "near_field_normalisation": "blend", "sinks": 0}
        alone |= {"full_heads": [], "cache_bits": None, "position_free": False}
        own = dataclasses.replace(self, sum_of=[], layers="all", **alone)
        result = [own]
        for entry in self.sum_of:
            other: dict[str, Any] = {"component_params": {}} if "component" in entry else {}
            if "projection" in entry:
                other |= {"projection_params": {}, "num_features": None}
            result.append(dataclasses.replace(own, **{**other, **entry}))
        return result

    def check_model(self, model: nn.Module) -> None:
        check_attention(model)

    def plan(self, context: PatchContext) -> list[Patch]:
        """Plan the layers; UnsupportedError for a model whose attention cannot be replaced."""
        model, family = context.model, context.family
        paths = [f"{layer}.{family.attention}" for layer in family.layer_paths(model)]
        chosen = choose_layers(
            self, [_window(module_at(model, path, "the attention")) for path in paths], context.where
        )
        heads, key_heads, dim = head_sizes(family.config_of(model))
        patches = []
        full = self._full_heads(chosen, key_heads, context)
        rotary = self._rotary(context) if self.position_free else None
        for index in chosen:
            if len(full[index]) == key_heads:
                continue
            readout = self._readout(context, index) if self.fitted and self.refit_output else None
            build = partial(_attend, context, self, index, (dim, heads, key_heads), readout, full[index], rotary)
            patches.append(Patch(paths[index], build))
            if readout is not None:
                patches.append(Patch(readout.path, readout.slot, replaces=True))
        return patches

    def _full_heads(self, chosen: list[int], key_heads: int, context: PatchContext) -> dict[int, list[int]]:
        """Return the key heads that keep softmax, by layer."""
        if self.full_heads and not context.family.causal:
            raise UnsupportedError(
                f"{context.where}.full_heads is given, and family {context.family.name!r} is no decoder: its attention "
                "is not causal. Leave it out"
            )
        missing = [pair for pair in self.full_heads if pair[0] not in chosen or pair[1] >= key_heads]
        if missing:
            raise ConfigError(
                f"{context.where}.full_heads names {missing[0]}; expected key heads 0 to {key_heads - 1} of layers "
                f"that become linear: {', '.join(map(str, chosen))}"
            )
        if len(self.full_heads) == len(chosen) * key_heads:
            raise ConfigError(
                f"{context.where}.full_heads names every key head of every layer, and nothing would become linear; "
                "expected fewer"
            )
        return {index: sorted(head for layer, head in self.full_heads if layer == index) for index in chosen}

    def _rotary(self, context: PatchContext) -> Rotary | None:
        assert self.near_field is not None
        return rotary_of(context.model, context.family, self.near_field, f"{context.where}.position_free")

    def _readout(self, context: PatchContext, index: int) -> HeadsReader:
        family = context.family
        if family.attention_out is None:
            raise UnsupportedError(
                f"{context.where}.refit_output is True; family {family.name!r} does not say which Linear reads the "
                "heads (attention_out). Use refit_output=False"
            )
        path = f"{family.layer_paths(context.model)[index]}.{family.attention_out}"
        return HeadsReader(path, context.linear(path, "the output projection"))

    @classmethod
    def taken_out(cls, model: Any) -> None:
        """Restore the model's own attention."""
        before = getattr(model, "snnk_attention_before", None)
        if before is None:
            return
        model.set_attn_implementation(before)
        del model.snnk_attention_before
        release_recurrent_cache(model)
        for module in model.modules():
            vars(module).pop("snnk_owner", None)


def _attend(
    context: PatchContext,
    part: AttentionPart,
    index: int,
    sizes: tuple[int, int, int],
    readout: HeadsReader | None,
    full: list[int],
    rotary: Rotary | None,
) -> Slot:
    dim, heads, key_heads = sizes
    repeats = heads // key_heads
    linear = [head for head in range(key_heads) if head not in full]
    terms = []
    for number, own in enumerate(part.terms()):
        site = f"layer.{index}.attention" + (f".term.{number}" if number else "")
        apart: Sequence[int] = linear
        if own.of_attention and part.joint:  # a map of each query head
            apart = [repeats * head + query for head in linear for query in range(repeats)]
        names = [f"{site}.{head}" for head in apart] if own.per_head or own.of_attention else [site]
        sized = dataclasses.replace(own, num_features=_rows(own, dim))
        # Separate key maps start from the same draw and share all redraws, since their site names are the same.
        queries, keys = (context.feature_maps(sized, dim, names) for _ in range(2))
        terms.append(AttentionTerm(queries, keys if own.separate_maps or own.of_attention else None))
    near = {"near_field": part.near_field, "joint": part.joint, "sinks": part.sinks}
    kernel = KernelAttention(
        terms,
        repeats * len(linear),
        fitted_length=part.fitted_length,
        rotary=rotary,
        full_heads=full,
        cache_bits=part.cache_bits if full else None,
        **near,  # type: ignore[arg-type]
    )
    return FittedAttend(kernel, readout, part) if part.fitted else Attend(kernel)


def _is_pair(pair: object) -> bool:
    return (
        isinstance(pair, (list, tuple))
        and len(pair) == 2
        and all(type(number) is int and number >= 0 for number in pair)
    )


def _rows(part: AttentionPart, dim: int) -> int:
    """Return num_features; if it is None, the number closest to the default that the projection supports."""
    if part.num_features is not None:
        return part.num_features
    return PROJECTIONS[part.projection].nearest_size(dim, DEFAULT_ROWS, **part.projection_params)


def _window(attention: nn.Module) -> int | None:
    """Return the width of an attention module's band, diagonal included; None for all tokens."""
    return getattr(attention, "sliding_window", None)


def choose_layers(part: AttentionPart, windows: list[int | None], where: str = "attention") -> list[int]:
    """Return the indices of the layers that `part` changes.

    Raises:
        ConfigError: layers that do not exist, or a local layer named without `near_field`.
        UnsupportedError: every layer is local.
    """
    everywhere = [index for index, window in enumerate(windows) if window is None]
    if isinstance(part.layers, str):
        if not everywhere:
            raise UnsupportedError(
                f"all {len(windows)} layers attend to a band of {windows[0]} tokens only, which is linear in length "
                "already; name layers as a list of ints, with near_field, to let them see beyond their band"
            )
        chosen, faults = resolve_layers(f"{where}.layers", part.layers, len(everywhere))
        if faults and len(everywhere) < len(windows):
            faults = [f"{faults[0]} that attend to all tokens (the others, local ones, are not counted)"]
        chosen = [everywhere[index] for index in chosen]
    else:
        chosen, faults = resolve_layers(f"{where}.layers", part.layers, len(windows))
        faults += [
            f"{where}.layers names layer {index}, which attends to a band of {windows[index]} tokens on each side "
            f"only, itself included: that is linear in length already. Leave it out, or set near_field="
            f"{windows[index]} to keep the band and add linear attention beyond it"
            for index in chosen
            if windows[index] is not None and part.near_field is None
        ]
    if faults:
        raise ConfigError(faults)
    return chosen
