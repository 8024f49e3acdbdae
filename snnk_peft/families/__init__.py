"""Model families: where attention, FFN, pooler and classifier of an architecture live; `table.py` has all of them."""

from snnk_peft.families.base import FAMILIES, ModelFamily, family_of, known_family, module_at, register_family, unwrap

__all__ = ["FAMILIES", "ModelFamily", "family_of", "known_family", "module_at", "register_family", "unwrap"]
