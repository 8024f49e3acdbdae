"""Requirements of one normalisation for near and far field: a band, and features on the scale of softmax."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from snnk_peft.components import COMPONENTS
from snnk_peft.errors import ConfigError
from snnk_peft.layers.joint_attention import may_be_joint
from snnk_peft.projections import PROJECTIONS


def near_field_faults(part: Any, where: str) -> list[str]:
    """Messages about `near_field_normalisation` and `sinks`.

    Args:
        part: an AttentionPart.
        where: what it is called in messages.
    """
    if not part.joint:
        if type(part.sinks) is not int or part.sinks <= 0:
            return []
        return [
            f"{where}.sinks is {part.sinks} with near_field_normalisation {part.near_field_normalisation!r}; exact "
            "tokens beside the band need one normalisation with it: near_field_normalisation='joint'"
        ]
    found = []
    if part.near_field is None:
        found.append(
            f"{where}.near_field_normalisation is 'joint' without near_field; expected the width of the exact band as "
            "well, such as near_field=64"
        )
    others = [entry if isinstance(entry, Mapping) else {} for entry in part.further]
    for place, entry in [(where, {}), *((f"{where}.sum_of[{i}]", entry) for i, entry in enumerate(others))]:
        params = {} if "component" in entry else part.component_params
        component = entry.get("component", part.component)
        projection = entry.get("projection", part.projection)
        if not _known(component, projection) or _fit(component, projection, entry.get("component_params", params)):
            continue
        fitting = [name for name in COMPONENTS if _fit(name, "orf", {})]
        found.append(
            f"{place} has component {component!r} over {projection!r}, whose features are not known as positive "
            "numbers on the scale of e^(q·k), as near_field_normalisation='joint' needs them; expected one of "
            f"{', '.join(fitting)}, over rows of equal weights such as 'orf', or use 'blend'"
        )
    return found


def _known(component: Any, projection: Any) -> bool:
    """Return False for unknown names, which the part reports itself."""
    return component in COMPONENTS and projection in PROJECTIONS


def _fit(component: str, projection: str, params: Mapping[str, Any]) -> bool:
    try:
        made = COMPONENTS[component](**params)
    except (ConfigError, TypeError):  # wrong arguments are a fault of their own
        return True
    return may_be_joint(made, PROJECTIONS[projection])
