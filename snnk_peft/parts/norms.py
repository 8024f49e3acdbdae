"""Training of normalisation layers: gains and biases of every LayerNorm or RMSNorm, a few thousand parameters.

    y = g ⊙ (x − mean) / std + b        g and b are trained; nothing is added

On their own (Zhao et al. 2023, "Tuning LayerNorm in Attention") or together with an adapter. The backward pass goes
down to the lowest of them: for those of the embeddings it includes the queries, keys and values of the first layer;
`targets` or `layers` can exclude them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from torch import nn

from snnk_peft.errors import ConfigError, UnsupportedError
from snnk_peft.families.base import plain_modules
from snnk_peft.layers.slots import Retrained
from snnk_peft.options import documented, option
from snnk_peft.parts import PARTS
from snnk_peft.parts.base import Part, Patch, PatchContext, layers_faults, matches, resolve_layers


def is_norm(module: nn.Module) -> bool:
    """Return whether a module is a LayerNorm or RMSNorm with a gain, from torch or transformers."""
    weight = getattr(module, "weight", None)
    named = type(module).__name__.lower().endswith(("layernorm", "rmsnorm", "layernorm2d"))
    return (named or isinstance(module, (nn.LayerNorm, nn.RMSNorm))) and isinstance(weight, nn.Parameter)


@PARTS.register("norms")
@documented
@dataclass
class NormsPart(Part):
    """Gains and biases of normalisation layers are trained, as part of the adapter: saved, switched, disabled with it.

    A bundle has the trained values in the model's existing layers.
    """

    calls_only: ClassVar[bool] = True

    targets: str = option("*", 'which norms, as a path pattern, "*" for anything: "*.layer.*" omits embeddings.')
    layers: str | list[int] = option(
        "all",
        'norms of which Transformer layers: "top-K" (the last K), "bottom-K", or a list of indices from 0; "all" also '
        "includes those outside the layers.",
        checked=False,
    )

    def faults(self, part: str) -> list[str]:
        return super().faults(part) + layers_faults(f"{part}.layers", self.layers)

    def plan(self, context: PatchContext) -> list[Patch]:
        whole = {path: module for path, module in plain_modules(context.model) if is_norm(module)}
        if self.layers != "all":
            paths = context.family.layer_paths(context.model)
            chosen, faults = resolve_layers(f"{context.where}.layers", self.layers, len(paths))
            if faults:
                raise ConfigError(faults)
            inside = tuple(f"{paths[index]}." for index in chosen)
            whole = {path: norm for path, norm in whole.items() if path.startswith(inside)}
        norms = {path: norm for path, norm in whole.items() if matches(path, self.targets)}
        if not norms:
            raise UnsupportedError(
                f"{context.where}: no LayerNorm or RMSNorm of {type(context.model).__name__} has a path that matches "
                f"{self.targets!r}; expected a pattern for some of {', '.join(map(repr, whole)) or 'none at all'}"
            )
        return [Patch(path, partial(Retrained, norm), replaces=True) for path, norm in norms.items()]
