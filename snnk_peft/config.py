"""The configuration of an SNNK adapter.

`SNNKConfig` is a `peft.PeftConfig`, saved as adapter_config.json next to the weights. It is plain data: the parts
check their own sizes and names against the registries, and the model is checked when it is patched.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from peft import PeftConfig, TaskType

from snnk_peft.arguments import in_words
from snnk_peft.config_parts import SHORTCUTS, config_with, listed_part, part_from, part_name
from snnk_peft.digests import DIGESTS, entry_faults, open_tensors
from snnk_peft.errors import ConfigError
from snnk_peft.model_card import write_adapter_card
from snnk_peft.options import MOST_SEED
from snnk_peft.parts import PARTS, Part
from snnk_peft.registry import NamedOptions
from snnk_peft.stamps import stamp_entries, stamp_tensors
from snnk_peft.version import __version__

if TYPE_CHECKING:
    from snnk_peft.parts.adapter import AdapterPart
    from snnk_peft.parts.attention.part import AttentionPart
    from snnk_peft.parts.low_rank.part import LowRankPart
    from snnk_peft.parts.replaced.ffn import FFNPart
    from snnk_peft.parts.replaced.pooler import PoolerPart

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
# Entries of adapter_config.json that do not affect the computation of the adapter.
FREE = (
    "auto_mapping",
    "base_model_name_or_path",
    "id2label",
    "inference_mode",
    "peft_version",
    "problem_type",
    "revision",
    "task_type",
)


class SNNKType(str, enum.Enum):
    """The PEFT method name; equals the plain string "SNNK" and hashes like it, as PEFT's own members do."""

    SNNK = "SNNK"


@dataclass
class SNNKConfig(NamedOptions, PeftConfig):
    """Configuration of an SNNK adapter: the parts of a model to adapt or replace. At least one is required.

    Args:
        adapter: non-linear adapters, or None.
        pooler: replacement of the pooler, or None.
        ffn: replacement of feed-forward blocks, or None.
        attention: linear attention, or None.
        low_rank: low-rank Linears and convolutions, or None.
        parts: further parts, any number of each kind, such as a second FFN part on other layers with another size;
            required for parts without a field above. In files, dicts with the name of the part as "part".
        seed: seed of all random draws, combined with the site of each.
        save_projection: True saves the matrices W with the checkpoint. False saves 32 bytes of checksum for each and
            draws them again when loading; loading fails if the draw differs.
        modules_to_save: further modules to train and save in full. None means the model's classifier, [] nothing.
        target_modules: filled in when a model is patched: the paths of the patched modules.
        trained_within: filled in when a model is patched: modules of `modules_to_save` that are inside a slot.
        made_for: filled in when a model is patched: its architecture and sizes. Any other model is then rejected.
        saved_embeddings: filled in when saving: tensors of the base model's embeddings that PEFT put into the file, as
            after a change of vocabulary. Any other base-model tensor in an adapter file is rejected.
        base_digests: filled in when a model is patched: digests of a sample of its weights, by the precision they
            were rounded to. Loading the adapter into other weights gives a warning.
        id2label: filled in when saving: the names of a classifier's labels, by index. AutoPeftModel creates a
            classifier with these labels.
        problem_type: filled in when saving: the classifier's problem type, as in transformers.
        revision: revision of the base model on the Hub, as in PEFT: "v1", a branch or a commit; AutoPeftModel loads it.
        snnk_digests: in files only: digests of the other fields, which reveal changed values.

    Raises:
        ConfigError: every fault of every part at once.

    Example:
        >>> from snnk_peft import AdapterPart
        >>> config = SNNKConfig(adapter=AdapterPart(num_features=16), task_type="SEQ_CLS")
        >>> config.adapter.placement
        'houlsby'
    """

    adapter: AdapterPart | None = None
    pooler: PoolerPart | None = None
    ffn: FFNPart | None = None
    attention: AttentionPart | None = None
    low_rank: LowRankPart | None = None
    parts: list[Part] = field(default_factory=list)
    seed: int = 0
    save_projection: bool = True
    modules_to_save: list[str] | None = None
    target_modules: tuple[str, ...] | None = None
    trained_within: list[str] | None = None
    made_for: dict[str, Any] | None = None
    saved_embeddings: list[str] | None = None
    base_digests: dict[str, str] | None = None
    id2label: dict[int, str] | None = None
    problem_type: str | None = None
    snnk_digests: dict[str, str] | None = None

    @classmethod
    def unknown_option(cls, name: str, known: list[str]) -> str:
        """Return the message about an unknown option, with a hint if it is a part without its own field."""
        if name in PARTS:
            return f"{cls.__name__} has no field {name!r}; this part is given as {config_with(PARTS[name])}"
        return super().unknown_option(name, known)

    def __post_init__(self) -> None:
        if self.task_type is not None and self.task_type not in list(TaskType):
            valid, given = ", ".join(TaskType), self.task_type
            if isinstance(given, str):
                raise ConfigError(f"task_type is {given!r}; expected one of {valid}, or None")
            instead = config_with(type(given)) if isinstance(given, Part) else "SNNKConfig(ffn=FFNPart(...))"
            raise ConfigError(
                f"task_type, the first argument, is {in_words(given)}; expected one of {valid}, or None. Parts are "
                f"given by name, {instead}, and a dict of options as SNNKConfig(**options)"
            )
        super().__post_init__()
        of_a_file = self.snnk_digests is not None
        changed = self._take_digests()
        self.peft_type = SNNKType.SNNK
        faults: list[str] = []
        for name in SHORTCUTS:
            value, wrong = part_from(name, PARTS[name], getattr(self, name))
            setattr(self, name, value)
            faults += wrong
        if isinstance(self.parts, (list, tuple)):
            read = [listed_part(f"parts[{index}]", value) for index, value in enumerate(self.parts)]
            self.parts = [part for part, _ in read]
            faults += [fault for _, wrong in read for fault in wrong]
        else:
            faults.append(f"parts is {in_words(self.parts)}; expected a list of parts, [FFNPart(...)] for example")
        if faults and of_a_file and not changed:
            faults.append(
                f"adapter_config.json is as it was written, but not by snnk_peft {__version__} or an older one; update "
                "the package, or import the file of the part first"
            )
        for name, part in self.named_parts().items() if isinstance(self.parts, list) else ():
            if not isinstance(part, Part):
                continue  # already reported
            faults += part.faults(name)
            if not self.save_projection and (what := part.not_drawn()) is not None:
                faults.append(
                    f"{name}.{what} with save_projection=False: such a matrix cannot be drawn again from a seed; use "
                    "save_projection=True or a drawn projection such as 'orf'"
                )
        if not faults and not self.named_parts():
            faults.append(f"no part given; set at least one of {', '.join(SHORTCUTS)}, or parts")
        if isinstance(self.seed, bool) or not isinstance(self.seed, int) or not 0 <= self.seed <= MOST_SEED:
            faults.append(f"seed is {repr(self.seed)[:100]}; expected an integer >= 0, of 63 bits")
        if not isinstance(self.save_projection, bool):
            faults.append(f"save_projection is {self.save_projection!r}; expected True or False")
        if isinstance(self.modules_to_save, str):
            faults.append(f"modules_to_save is {self.modules_to_save!r}; expected a list, [{self.modules_to_save!r}]")
        faults += [
            f"{name} is {value!r}; expected a list of paths or None"
            for name in ("modules_to_save", "target_modules", "trained_within", "saved_embeddings")
            if not _is_paths(value := getattr(self, name)) and not isinstance(value, str)
        ]
        if self.target_modules and self.made_for is None:
            faults.append(
                f"target_modules is {self.target_modules!r}; expected None, because parts choose their modules: "
                "AdapterPart by placement= ('query_value' for queries and values), LowRankPart by targets=, most by "
                "layers="
            )
        if self.made_for is not None and not isinstance(self.made_for, Mapping):
            faults.append(f"made_for is {self.made_for!r}; expected a dict, which patching a model fills in, or None")
        if self.base_digests is not None and not isinstance(self.base_digests, Mapping):
            faults.append(f"base_digests is {self.base_digests!r}; expected a dict, which patching fills in, or None")
        try:
            if self.id2label is not None:  # JSON keys are strings
                self.id2label = dict(sorted((int(key), str(name)) for key, name in self.id2label.items()))
        except (AttributeError, TypeError, ValueError):
            faults.append(f"id2label is {repr(self.id2label)[:100]}; expected a dict of names by index, or None")
        if not isinstance(self.problem_type, (str, type(None))):
            faults.append(f"problem_type is {self.problem_type!r}; expected a name that transformers knows, or None")
        if not isinstance(self.revision, (str, type(None))):
            faults.append(f"revision is {self.revision!r}; expected a branch, tag or commit of the base model, or None")
        if faults := faults + changed:
            raise ConfigError(faults)
        # A tuple: PEFT shortens long lists and sets of targets to common endings, which are no longer paths.
        if self.target_modules is not None:
            self.target_modules = tuple(self.target_modules)

    def _take_digests(self) -> list[str]:
        """List the fields of a file that changed since saving; objects may be changed freely after loading."""
        digests, self.snnk_digests = self.snnk_digests, None
        if digests is None:
            return []
        faults = [f"adapter_config.json was changed: {fault}" for fault in entry_faults(vars(self), digests)]
        remedy = f"if the change is meant, remove {DIGESTS!r} from adapter_config.json; if not, copy the file again"
        return [*faults, remedy] if faults else []

    def save_pretrained(self, save_directory: str, **kwargs: Any) -> None:
        """Write adapter_config.json, add digests to it and to the weights next to it, and write the card.

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
        """Return the keys that belong neither to a slot nor to a module saved in full."""
        own = (".snnk_slots.", *(f".{name}." for name in self.modules_to_save or ()))
        return sorted(key for key in keys if not any(mark in key for mark in own))

    def named_parts(self) -> dict[str, Part]:
        """Return the parts that are set: those with a field by its name, then parts[0], parts[1], ..."""
        own = {name: getattr(self, name) for name in SHORTCUTS if getattr(self, name) is not None}
        return own | {f"parts[{index}]": part for index, part in enumerate(self.parts)}

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, as in PEFT; entries of `parts` name their part."""
        names = [part_name(type(part)) for part in self.parts]
        entries: dict[str, Any] = super().to_dict()
        entries["parts"] = [{"part": name, **fields} for name, fields in zip(names, entries["parts"], strict=True)]
        return entries


def _is_paths(value: object) -> bool:
    return value is None or (isinstance(value, (list, tuple, set)) and all(isinstance(name, str) for name in value))
