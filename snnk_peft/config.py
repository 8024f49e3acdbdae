"""The configuration: which parts of a model become SNNK layers.

`SNNKConfig` is a `peft.PeftConfig`; it is saved as adapter_config.json next to the weights. It is plain data: sizes and
names are checked against the registries (`parts.py`), the model is checked when it is patched.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peft import PeftConfig, TaskType

from snnk_peft.digests import DIGESTS, entry_faults, open_tensors, stamp_entries, stamp_tensors
from snnk_peft.errors import ConfigError
from snnk_peft.model_card import write_adapter_card
from snnk_peft.parts import PARTS, AdapterPart, AttentionPart, FFNPart, Part, PoolerPart, layers_faults
from snnk_peft.registry import did_you_mean

__all__ = [
    "PARTS",
    "AdapterPart",
    "AttentionPart",
    "FFNPart",
    "Part",
    "PoolerPart",
    "SNNKConfig",
    "SNNKType",
    "layers_faults",
    "resolve_layers",
]


WEIGHTS = "adapter_model.safetensors"
# Entries of adapter_config.json that do not decide what the adapter computes.
FREE = ("auto_mapping", "base_model_name_or_path", "inference_mode", "peft_version", "revision", "task_type")


class SNNKType(str, enum.Enum):
    """The PEFT method name; equal to the plain string "SNNK" and hashes like it, as PEFT's own members do."""

    SNNK = "SNNK"


@dataclass
class SNNKConfig(PeftConfig):
    """Which parts of a model are adapted or replaced. At least one part is required.

    Args:
        adapter: non-linear adapters, or None.
        pooler: replacement of the pooler, or None.
        ffn: replacement of feed-forward blocks, or None.
        attention: linear attention, or None.
        seed: decides every random draw, together with the name of each place.
        save_projection: True saves the matrices W with the checkpoint. False saves 32 bytes of checksum for each and
            draws them again when loading; loading fails if the draw differs.
        modules_to_save: further modules to train and save in full. None means the model's classifier, [] nothing.
        target_modules: filled in when a model is patched: the paths of the patched modules.
        made_for: filled in when a model is patched: its architecture and sizes. Another model is then refused.
        saved_embeddings: filled in when saving: tensors of the base model's embeddings that PEFT put into the file, as
            after a change of the vocabulary. Any other tensor of the base model in an adapter file is refused.
        snnk_digests: in files only: digests of the other fields, which a changed value does not fit.

    Raises:
        ConfigError: every fault of every part at once.

    Example:
        >>> config = SNNKConfig(adapter=AdapterPart(num_features=16), task_type="SEQ_CLS")
        >>> config.adapter.placement
        'houlsby'
    """

    adapter: AdapterPart | None = None
    pooler: PoolerPart | None = None
    ffn: FFNPart | None = None
    attention: AttentionPart | None = None
    seed: int = 0
    save_projection: bool = True
    modules_to_save: list[str] | None = None
    target_modules: tuple[str, ...] | None = None
    made_for: dict[str, Any] | None = None
    saved_embeddings: list[str] | None = None
    snnk_digests: dict[str, str] | None = None

    def __post_init__(self) -> None:
        if self.task_type is not None and self.task_type not in list(TaskType):
            valid = ", ".join(TaskType)
            raise ConfigError(f"task_type is {self.task_type!r}; expected one of {valid}, or None")
        super().__post_init__()
        changed = self._take_digests()
        self.peft_type = SNNKType.SNNK
        found: list[str] = []
        for name, cls in PARTS.items():
            value = getattr(self, name)
            if isinstance(value, Mapping):
                value, wrong = part_from_mapping(name, cls, value)
                found += wrong
                setattr(self, name, value)
            if isinstance(value, cls):
                found += value.faults(name)
                if not self.save_projection and not value.feature_map_spec().redrawable:
                    found.append(
                        f"{name}.projection is {value.projection!r} with save_projection=False: such a matrix cannot "
                        "be drawn again from a seed; use save_projection=True or a drawn projection such as 'orf'"
                    )
            elif value is not None:
                found.append(
                    f"{name} is a {type(value).__name__}; expected {cls.__name__}, a dict of its fields or None"
                )
        if not found and all(getattr(self, name) is None for name in PARTS):
            found.append(f"no part given; set at least one of {', '.join(PARTS)}")
        if isinstance(self.seed, bool) or not isinstance(self.seed, int) or self.seed < 0:
            found.append(f"seed is {self.seed!r}; expected an integer >= 0")
        if not isinstance(self.save_projection, bool):
            found.append(f"save_projection is {self.save_projection!r}; expected True or False")
        if isinstance(self.modules_to_save, str):
            found.append(f"modules_to_save is {self.modules_to_save!r}; expected a list, [{self.modules_to_save!r}]")
        found += [
            f"{name} is {value!r}; expected a list of paths or None"
            for name in ("modules_to_save", "target_modules", "saved_embeddings")
            if not _is_paths(value := getattr(self, name)) and not isinstance(value, str)
        ]
        if self.made_for is not None and not isinstance(self.made_for, Mapping):
            found.append(f"made_for is {self.made_for!r}; expected a dict, which patching a model fills in, or None")
        if found := found + changed:
            raise ConfigError(found)
        # A tuple: PEFT shortens long lists and sets of targets to common endings, which would no longer be paths.
        if self.target_modules is not None:
            self.target_modules = tuple(self.target_modules)

    def _take_digests(self) -> list[str]:
        """Messages for fields of a file that are not what was saved; whoever changes the object later may do so."""
        digests, self.snnk_digests = self.snnk_digests, None
        if digests is None:
            return []
        faults = [f"adapter_config.json was changed: {fault}" for fault in entry_faults(vars(self), digests)]
        remedy = f"if the change is meant, remove {DIGESTS!r} from adapter_config.json; if not, copy the file again"
        return [*faults, remedy] if faults else []

    def save_pretrained(self, save_directory: str, **kwargs: Any) -> None:
        """Write adapter_config.json, give it and the weights beside it digests of what they hold, and write the card.

        PEFT calls this when the weights are written.

        Args:
            save_directory: the folder.
            **kwargs: options of `peft.PeftConfig.save_pretrained`.
        """
        weights = Path(save_directory) / WEIGHTS
        if weights.is_file():
            with open_tensors(weights) as file:
                self.saved_embeddings = self._base_tensors(list(file.keys())) or None
            stamp_tensors(weights)
        super().save_pretrained(save_directory, **kwargs)
        stamp_entries(Path(save_directory) / "adapter_config.json", FREE)
        if weights.is_file():
            write_adapter_card(save_directory, self, kwargs.get("auto_mapping_dict"))

    def _base_tensors(self, keys: list[str]) -> list[str]:
        """The keys that belong neither to a slot nor to a module that is saved in full."""
        own = (".snnk_slots.", *(f".{name}." for name in self.modules_to_save or ()))
        return sorted(key for key in keys if not any(mark in key for mark in own))

    def parts(self) -> dict[str, Part]:
        """The parts that are set, by name."""
        return {name: getattr(self, name) for name in PARTS if getattr(self, name) is not None}


def _is_paths(value: object) -> bool:
    return value is None or (isinstance(value, (list, tuple, set)) and all(isinstance(name, str) for name in value))


def part_from_mapping(name: str, cls: type[Part], given: Mapping[str, Any]) -> tuple[Part | None, list[str]]:
    """A part from a plain dict (JSON, YAML), and the messages for fields that it does not have."""
    valid = [f.name for f in dataclasses.fields(cls)]
    wrong = [f"{name}.{did_you_mean('field', key, valid)}" for key in given if key not in valid]
    return (None, wrong) if wrong else (cls(**given), [])


def resolve_layers(where: str, layers: str | list[int], total: int) -> tuple[list[int], list[str]]:
    """Layer indices for a model of `total` layers, and the messages for those it does not have."""
    if layers == "all":
        return list(range(total)), []
    if isinstance(layers, str):
        end, count = layers.split("-")
        if int(count) > total:
            return [], [f"{where} is {layers!r}; the model has {total} layers"]
        return list(range(total))[-int(count) :] if end == "top" else list(range(int(count))), []
    outside = [i for i in layers if i >= total]
    return sorted(set(layers) - set(outside)), (
        [f"{where} has {outside}; the model has {total} layers, indices 0 to {total - 1}"] if outside else []
    )
