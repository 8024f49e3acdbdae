"""Tables of the reference: parts, components, projections and families, from their registries."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from snnk_peft import COMPONENTS, FAMILIES, LOW_RANK_INITS, PARTS, PROJECTIONS
from snnk_peft.feature_map.describe import component_table, projection_table
from snnk_peft.options import Option, options_of
from snnk_peft.projections.base import Projection

SECTION = re.compile(r"^(?:Args|Attributes|Raises|Example):$", re.MULTILINE)
BAR = re.compile(r"(?<!\\)\|")


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table; bars and line breaks inside cells are escaped."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(
        "| " + " | ".join(BAR.sub(r"\|", " ".join(text.split())) for text in line) + " |" for line in lines
    )


def said_by(member: Any) -> str:
    """The docstring of a member down to its first section."""
    return SECTION.split(inspect.cleandoc(member.__doc__ or ""))[0].strip()


def defaults_of(cls: Any) -> dict[str, Any]:
    """Defaults of a dataclass's fields, or of the arguments of all constructors; MISSING where there is none."""
    if dataclasses.is_dataclass(cls):
        return {
            each.name: each.default if each.default_factory is dataclasses.MISSING else each.default_factory()
            for each in dataclasses.fields(cls)
        }
    found = {}
    for base in reversed(cls.__mro__):
        if "__init__" in vars(base):
            for each in inspect.signature(vars(base)["__init__"]).parameters.values():
                found[each.name] = dataclasses.MISSING if each.default is each.empty else each.default
    return found


def options_table(cls: Any, without: Collection[str] = ()) -> str:
    """Name and default, help and the values that fit of every option; empty if there is none."""
    options: Mapping[str, Option] = options_of(cls)
    rows, defaults = [], defaults_of(cls)
    for name, known in options.items():
        if known.help and name not in without:
            default = "required" if defaults[name] is dataclasses.MISSING else f"`{defaults[name]!r}`"
            values = f"<br>*{known.expected()}*" if known.checked else ""
            rows.append([f"`{name}`<br>{default}", f"{known.help}{values}"])
    return table(["option, default", "what it does, values"], rows) if rows else ""


def parts() -> str:
    """A section for every part."""
    lines = []
    for name in PARTS:
        lines += [
            f"## {PARTS[name].__name__}",
            f"In configs `{name}`. {said_by(PARTS[name])}",
            options_table(PARTS[name]),
        ]
    return "\n\n".join(lines)


def low_rank_inits() -> str:
    """How U and V may start."""
    rows = ([f"`{name}`", said_by(LOW_RANK_INITS[name])] for name in LOW_RANK_INITS)
    return table(["init", "U and V"], rows)


def members(registry: Any, without: Collection[str] = ()) -> str:
    """A section for every member: what its file says, and its arguments."""
    lines = []
    for name in registry:
        file = inspect.getdoc(inspect.getmodule(registry[name])) or said_by(registry[name])
        lines += [f"### {name}", file, options_table(registry[name], without)]
    return "\n\n".join(line for line in lines if line)


def families() -> str:
    """Every known architecture, and where it keeps its modules."""
    rows = []
    for name in FAMILIES:
        family = FAMILIES[name]
        words = [word for word, holds in (("causal", family.causal), ("gated FFN", family.gated)) if holds]
        paths = (family.layers, family.attention, family.ffn_in, family.ffn_out)
        rows.append([f"`{name}`", ", ".join(words), *(f"`{path}`" for path in paths)])
    return table(["model_type", "", "layers", "attention, in a layer", "expansion", "contraction"], rows)


TABLES: dict[str, Callable[[], str]] = {
    "parts": parts,
    "low_rank_inits": low_rank_inits,
    "components": component_table,
    "component_members": lambda: members(COMPONENTS),
    "projections": projection_table,
    "all_projections_arguments": lambda: options_table(Projection, {"dim", "num_features"}),
    "projection_members": lambda: members(PROJECTIONS, options_of(Projection)),
    "families": families,
}
