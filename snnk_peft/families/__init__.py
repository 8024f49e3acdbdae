"""Model families: the paths of attention, FFN, pooler and classifier of each architecture, all in `table.py`."""

from snnk_peft.families.base import FAMILIES, ModelFamily, family_of, known_family, module_at, register_family, unwrap

__all__ = ["FAMILIES", "ModelFamily", "family_of", "known_family", "module_at", "register_family", "unwrap"]
