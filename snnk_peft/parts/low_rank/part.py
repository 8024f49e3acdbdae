"""Low rank: Linears and convolutions become products of two thin ones, W x + b -> U (Vᵀ x) + b.

Targets are roles ("ffn", "attention", "pooler") in model families, or module paths in any nn.Module. Factors are
initialised from the dense weights ("Efficiently learning low-rank networks"); `calibrate` replaces them by the best
ones for real inputs. Folds to two plain modules if that takes fewer MACs, else to one.
"""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, cast

import torch
from torch import nn

from snnk_peft.errors import ConfigError, UnsupportedError
from snnk_peft.families import family_of
from snnk_peft.families.base import as_linear, plain_modules
from snnk_peft.functional.at_hand import at_hand
from snnk_peft.functional.nonlinearity import NONLINEARITIES
from snnk_peft.layers.low_rank_conv import SPLITS, low_rank_class
from snnk_peft.layers.slots import Slot
from snnk_peft.low_rank import LOW_RANK_INITS
from snnk_peft.options import MOST, closest, documented, option
from snnk_peft.parts import PARTS
from snnk_peft.parts.base import Part, Patch, PatchContext, layers_faults, matches, resolve_layers
from snnk_peft.parts.low_rank.slot import LowRankSlot

ROLES = ("ffn", "attention", "pooler")
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d)
KINDS: dict[str, tuple[type[nn.Module], ...]] = {
    "linear": (nn.Linear,),
    "conv": CONVOLUTIONS,
    "all": (nn.Linear, *CONVOLUTIONS),
}
DEFAULT_SCALE = 0.25


@PARTS.register("low_rank")
@documented
@dataclass
class LowRankPart(Part):
    """Linears and convolutions become products of two thin ones, W x + b -> U (Vᵀ x) + b."""

    targets: str | list[str] = option(
        "ffn",
        'which modules: a role in the layers of a known family ("ffn", "attention", "pooler"), or patterns of module '
        'paths ("*" for anything, a leading "*." for the start of the path too, a leading "!" to exclude), which need '
        "no family.",
    )
    kind: str = option("all", 'which of these: "linear", "conv" or "all".', choices=tuple(KINDS))
    rank_scale: float | None = option(
        None,
        "rank as a fraction of full rank, min(rows, columns) of the matrix; at least rank 1. 0.25 if neither this nor "
        "rank nor energy is given.",
        above=0,
        high=1,
    )
    rank: int | None = option(None, "the same rank everywhere, >= 1.", low=1, high=MOST)
    energy: float | None = option(
        None, "the smallest rank that keeps this fraction of the squared singular values.", above=0, high=1
    )
    init: str = option(
        "spectral", "how U and V start from the dense weights, a name in `LOW_RANK_INITS`.", checked=False
    )
    split: str = option(
        "spatial",
        'how kernels become matrices: "spatial" (k × 1, then 1 × k) or "channel" (k × k to rank channels, then 1 × 1).',
        choices=SPLITS,
    )
    layers: str | list[int] = option(
        "all",
        'which layers, for a role: "all", "top-K", "bottom-K", or a list of indices from 0.',
        checked=False,
    )
    activation: str | None = option(
        None,
        "the activation after the modules, for inits that need it and for `calibrate`; None: the family's, or else "
        "none (identity).",
        checked=False,
    )
    frobenius_decay: float = option(
        0.0, "strength that `FrobeniusDecay(model)` reads from the layers; the part itself adds no decay.", low=0
    )
    ranks: dict[str, int] | None = option(None, "the ranks, filled in when a model is patched by energy.")

    size_fields: ClassVar[tuple[str, ...]] = ("rank", "rank_scale")

    @classmethod
    def candidates(cls, model: nn.Module, length: int) -> list[Part]:
        """Propose ranks for attention whose heads cannot be narrowed, which `NarrowHeadsPart` does at a lower cost."""
        family = family_of(model)
        if family.key is not None and family.attention_out is not None:
            return []
        return [cls(targets="attention", kind="linear", rank_scale=scale) for scale in (1 / 8, 1 / 3)]

    def faults(self, part: str) -> list[str]:
        faults = super().faults(part) + layers_faults(f"{part}.layers", self.layers)
        given = {name: getattr(self, name) for name in ("rank_scale", "rank", "energy")}
        given = {name: value for name, value in given.items() if value is not None}
        if len(given) > 1:
            both = " and ".join(f"{name}={value}" for name, value in given.items())
            faults.append(f"{part} has {both}; expected one of them")
        if self.targets in ([], ()):
            faults.append(f"{part}.targets is empty; expected a role ({', '.join(ROLES)}) or patterns of paths")
        if self.init == "data":
            faults.append(
                f"{part}.init is 'data', and a part starts before it has seen any; choose another start "
                "('spectral') and call calibrate(model, batches), which fits the factors to real inputs"
            )
        elif self.init not in LOW_RANK_INITS:
            starts = [name for name in LOW_RANK_INITS if name != "data"]
            close = closest(self.init, starts)
            hint = f". Did you mean {close!r}?" if close else ""
            faults.append(f"{part}.init is {self.init!r}; expected {', '.join(map(repr, starts))}{hint}")
        if self.activation is not None and self.activation not in list(NONLINEARITIES):
            known = ", ".join(map(repr, NONLINEARITIES))
            faults.append(f"{part}.activation is {self.activation!r}; expected {known}, or None")
        role = isinstance(self.targets, str) and self.targets in ROLES
        if self.layers != "all" and (not role or self.targets == "pooler"):
            faults.append(
                f"{part}.layers is {self.layers!r} with targets={self.targets!r}; expected 'all', because only the "
                "roles 'ffn' and 'attention' have layers. Name the layers in the pattern"
            )
        return faults

    def plan(self, context: PatchContext) -> list[Patch]:
        """Plan the layers; every matching module that cannot be factorised is a fault."""
        targets = self._targets(context)
        uses = Counter(id(p) for _, p in context.model.named_parameters(remove_duplicate=False))
        owners = dict(plain_modules(context.model))
        patches, faults, ranks = [], [], {}
        for path, (module, activation) in targets.items():
            dense = as_linear(module)
            fault = _unfit(module, owners.get(path.rpartition(".")[0]), uses)
            if fault is None:
                ranks[path], fault = self._rank(path, dense)
            if fault is not None:
                faults.append(f"{context.where}: {path!r}, which targets={self.targets!r} matches, {fault}")
                continue
            build = partial(_build, self, dense, ranks[path], activation, context)
            patches.append(Patch(path, build, replaces=True))
        if faults:
            raise ConfigError(faults)
        if self.energy is not None:
            self.ranks = ranks
        return patches

    def _targets(self, context: PatchContext) -> dict[str, tuple[nn.Module, Any]]:
        present = dict(plain_modules(context.model))
        if isinstance(self.targets, str) and self.targets in ROLES:
            targets = dict(self._by_role(context, present))
            if not targets:
                raise UnsupportedError(
                    f"{context.where}: the layers of {type(context.model).__name__} (family {context.family.name!r}) "
                    f"have no Linear in what the family describes as {self.targets!r}; name modules by a pattern"
                )
        else:
            patterns = [self.targets] if isinstance(self.targets, str) else list(self.targets)
            wanted = [pattern for pattern in patterns if not pattern.startswith("!")] or ["*"]
            unwanted = [pattern[1:] for pattern in patterns if pattern.startswith("!")]
            targets = {
                path: None
                for path in present
                if any(matches(path, pattern) for pattern in wanted)
                and not any(matches(path, pattern) for pattern in unwanted)
            }
            idle = [fault for p in (*wanted, *unwanted) if (fault := self._idle(context, p, present))]
            if targets and idle:
                raise ConfigError(idle)
        of_kind = {path for path, m in present.items() if isinstance(as_linear(m), KINDS[self.kind])}
        chosen = {path: (present[path], behind) for path, behind in targets.items() if path in of_kind}
        if not chosen:
            other = ", ".join(f"{path!r} ({type(present[path]).__name__})" for path in list(targets)[:5]) or "nothing"
            some = ", ".join(map(repr, sorted(of_kind)[:20])) or "none"
            raise ConfigError(
                f"{context.where}.targets is {self.targets!r}, which matches {other} in {type(context.model).__name__} "
                f"and no module of kind {self.kind!r}; expected a role ({', '.join(ROLES)}) of a known family or the "
                f"path of one of these: {some}"
            )
        activation = self.activation
        return {path: (m, activation or behind or "identity") for path, (m, behind) in chosen.items()}

    def _idle(self, context: PatchContext, pattern: str, present: dict[str, nn.Module]) -> str | None:
        """Return a message if no path matches a pattern, which may include or exclude modules."""
        if any(matches(path, pattern) for path in present):
            return None
        near = difflib.get_close_matches(pattern, present, n=3, cutoff=0.3) or list(present)[1:4]
        return (
            f"{context.where}.targets has the pattern {pattern!r}, which no path of {type(context.model).__name__} "
            f"matches; its paths are like {', '.join(map(repr, near))}. A pattern is for the whole path"
        )

    def _by_role(self, context: PatchContext, present: dict[str, nn.Module]) -> Iterator[tuple[str, Any]]:
        family, model = context.family, context.model
        if self.targets == "pooler":
            path = None if family.pooler is None else family.path(model, family.pooler)
            if path is None or path not in present:
                raise UnsupportedError(
                    f"{context.where}: {type(model).__name__} (family {family.name!r}) has no pooler; leave this part "
                    "out, or name modules by a pattern"
                )
            pooled = family.pooler_activation
            yield path, None if pooled is None else present[family.path(model, pooled)].forward
            return
        layers = family.layer_paths(model)
        chosen, faults = resolve_layers(f"{context.where}.layers", self.layers, len(layers))
        if faults:
            raise ConfigError(faults)
        for layer in (layers[index] for index in chosen):
            ffn = {f"{layer}.{family.ffn_in}", f"{layer}.{family.ffn_out}"}
            if self.targets == "ffn":
                if family.gated:  # the multiplied expansion is next to the named one
                    within = f"{layer}.{family.ffn_in.rpartition('.')[0]}."
                    ffn |= {path for path, m in present.items() if path.startswith(within) and _is_linear(m)}
                plain = family.activation is not None and not family.gated
                behind = present[f"{layer}.{family.activation}"].forward if plain else None
                yield from ((p, behind if p == f"{layer}.{family.ffn_in}" else None) for p in present if p in ffn)
                continue
            within = f"{layer}.{family.attention.partition('.')[0]}."
            yield from (
                (p, None) for p, m in present.items() if p.startswith(within) and p not in ffn and _is_linear(m)
            )

    def _rank(self, path: str, dense: nn.Module) -> tuple[int, str | None]:
        with torch.device("meta"):
            thin = _like(dense, 1, self.split)
        rows, columns = len(thin.U), len(thin.V)
        full = min(rows, columns)
        if self.rank is not None:
            fault = f"is a {rows} × {columns} matrix of full rank {full}; expected rank <= {full}, given {self.rank}"
            return self.rank, fault if self.rank > full else None
        if self.energy is None:
            return max(1, round((self.rank_scale or DEFAULT_SCALE) * full)), None
        if self.ranks is not None and path in self.ranks:
            return self.ranks[path], None
        with at_hand(dense), torch.no_grad():
            if cast(torch.Tensor, dense.weight).is_meta:
                return 1, "has no weights yet (meta device), of which energy takes a fraction; use rank or rank_scale"
            values = torch.linalg.svdvals(thin.matrix_of(cast(torch.Tensor, dense.weight).detach().float())).double()
        share = values.square().cumsum(0) / values.square().sum().clamp_min(1e-300)
        return min(full, int((share < self.energy * (1 - 1e-9)).sum()) + 1), None


def _is_linear(module: nn.Module) -> bool:
    return isinstance(as_linear(module), nn.Linear)


def _unfit(module: nn.Module, parent: nn.Module | None, uses: Counter[int]) -> str | None:
    name, weight = type(module).__name__, cast(torch.Tensor, module.weight)
    if not weight.is_floating_point():
        return f"holds {weight.dtype} numbers, so the model is quantized; expected floating point. Load it plain"
    known = {nn.Linear.forward, nn.Conv1d.forward, nn.Conv2d.forward}
    if isinstance(module, (nn.Linear, *CONVOLUTIONS)) and type(module).forward not in known:
        return f"is a {name} with a forward() of its own; expected what torch's layer computes. Leave it out"
    if isinstance(module, CONVOLUTIONS) and module.groups != 1:
        kind = "depthwise" if module.groups == module.in_channels else "grouped"
        return (
            f"is a {kind} convolution, {module.groups} groups of {module.in_channels // module.groups} channels, and "
            "not one matrix; expected groups=1. Take it out by a pattern that starts with '!'"
        )
    if uses[id(weight)] > 1:
        return "shares its weight with another module (tied weights), which would keep the dense one; leave it out"
    if isinstance(parent, nn.MultiheadAttention):
        return "is read by nn.MultiheadAttention and never called; leave it out"
    if isinstance(parent, nn.TransformerEncoderLayer) and torch.backends.mha.get_fastpath_enabled():
        return (
            "is read past its forward() by torch's fast path for nn.TransformerEncoderLayer; call "
            "torch.backends.mha.set_fastpath_enabled(False) first, or leave it out"
        )
    return None


def _like(dense: nn.Module, rank: int, split: str) -> Any:
    """Create an empty layer with the sizes of `dense`."""
    cls: Any = low_rank_class(dense)
    return cls.like(dense, rank) if isinstance(dense, nn.Linear) else cls.like(dense, rank, split=split)


def _build(part: LowRankPart, dense: nn.Module, rank: int, activation: Any, context: PatchContext) -> Slot:
    layer = _like(dense, rank, part.split)
    if not context.filled:
        layer.fill(dense, part.init, activation, None, context.seed)
    layer.frobenius_decay = part.frobenius_decay or None
    return LowRankSlot(layer, activation)
