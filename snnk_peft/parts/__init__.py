"""The parts of a model that can be changed, each in its own file or folder.

A part is a dataclass of options. It plans which module gets which slot (`plan`); its slots define what the module
computes, how it is fitted and what it folds to. To add one, add a file with `@PARTS.register("name")`.
"""

from snnk_peft.parts.base import FeaturePart, Part, Patch, PatchContext, layers_faults, resolve_layers
from snnk_peft.registry import Registry

PARTS: Registry[type[Part]] = Registry("part", __name__)

__all__ = ["PARTS", "FeaturePart", "Part", "Patch", "PatchContext", "layers_faults", "resolve_layers"]
