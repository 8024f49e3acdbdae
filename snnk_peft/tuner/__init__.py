"""The PEFT side: importing this module makes "SNNK" a PEFT method.

`peft.register_peft_method` only accepts names of PEFT's own enum, so its tables are filled here.
"""

from peft import mapping

from snnk_peft.config import SNNKConfig, SNNKType
from snnk_peft.tuner.doors import watch_doors
from snnk_peft.tuner.model import SNNKModel
from snnk_peft.tuner.saving import watch_saving

watch_doors()
watch_saving()
mapping.PEFT_TYPE_TO_CONFIG_MAPPING[SNNKType.SNNK] = SNNKConfig  # type: ignore[index]
mapping.PEFT_TYPE_TO_TUNER_MAPPING[SNNKType.SNNK] = SNNKModel  # type: ignore[index]
mapping.PEFT_TYPE_TO_PREFIX_MAPPING[SNNKType.SNNK] = SNNKModel.prefix  # type: ignore[index]

__all__ = ["SNNKModel"]
