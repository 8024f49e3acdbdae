"""Which module becomes what: one file per part, (family, part configuration) -> a list of patches.

A patcher only plans. Every fault of every part is collected before the first module is touched, so a model is patched
whole or not at all.
"""

from snnk_peft.patchers.base import Patch, PatchContext, Patcher
from snnk_peft.registry import Registry

PATCHERS: Registry[Patcher] = Registry("part", __name__)

__all__ = ["PATCHERS", "Patch", "PatchContext", "Patcher"]
