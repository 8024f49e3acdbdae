"""Config and model classes of bundles: one pair per architecture and task head, known to the Auto classes.

BertForSequenceClassification becomes SnnkBertForSequenceClassification with model_type "snnk_bert", and
`AutoModelForSequenceClassification.from_pretrained(folder)` finds it. A saved bundle also carries the same classes as
a self-contained code file, so that it loads without this package under `trust_remote_code=True`.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Mapping
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import transformers
from huggingface_hub import HfApi
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto
from transformers.models.auto.auto_factory import _BaseAutoModelClass
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from snnk_peft.bundling.code_file import FILE_NAME, code_file
from snnk_peft.bundling.modules import CONFIG_FILE, FREE_ENTRIES, BundledConfig, BundledModel
from snnk_peft.bundling.pooled_head import PooledHeadModel, forward_like
from snnk_peft.bundling.report import BundleReport
from snnk_peft.errors import ConfigError, UnsupportedError
from snnk_peft.families import FAMILIES
from snnk_peft.families.base import BUNDLE_TYPE
from snnk_peft.model_card import mentions_import, write_model_card
from snnk_peft.saved_folder import written_whole
from snnk_peft.stamps import stamp_together
from snnk_peft.tuner.given_model import share_choices

PREFIX, POOLED_PREFIX = "Snnk", "SnnkPooled"  # of the names of bundle classes; the second have a pooled head
AUTO_CLASSES: list[type[_BaseAutoModelClass]] = [
    value
    for value in vars(modeling_auto).values()
    if isinstance(value, type) and issubclass(value, _BaseAutoModelClass) and value._model_mapping is not None
]


class SavedBundle(BundledModel):
    """Mixin of bundled models that writes all files of a folder: weights, config, code file, model card."""

    @property
    def bundle_report(self) -> BundleReport:
        """The report of `bundle`: what was folded, sizes, parity; stored in the config."""
        return BundleReport.from_dict(self.config.snnk_plan["report"])

    def save_pretrained(
        self, save_directory: str | os.PathLike[str], *args: Any, push_to_hub: bool = False, **kwargs: Any
    ) -> None:
        """Write a folder that `AutoModelFor….from_pretrained` loads; see the module's docstring.

        Args:
            save_directory: the folder; created if absent. An existing README.md is kept.
            *args: as in transformers.
            push_to_hub: also upload the folder; `repo_id`, `token`, `private` and so on are then accepted as well.
            **kwargs: as in transformers.

        Raises:
            ConfigError: the folder holds a PEFT adapter; transformers would load that on top. Or it cannot be written,
                as on a full disk: what was there before is unchanged.
        """
        folder = Path(save_directory)
        if (folder / "adapter_config.json").exists():
            raise ConfigError(
                f"{folder} holds a PEFT adapter (adapter_config.json), which transformers would load instead of the "
                "bundle; save the bundle to a folder of its own"
            )
        names = ("repo_id", "commit_message", "commit_description", "private", "token", "revision", "create_pr", "tags")
        hub = {name: kwargs.pop(name) for name in names if push_to_hub and name in kwargs}
        base = original_class(type(self))
        portable = is_portable(base)
        if portable:
            self.config.auto_map = auto_map(type(self))
        writes = args[0] if args else kwargs.get("is_main_process", True)
        # Training states of several processes, and LoRA added to a bundle by transformers, are not bundles.
        if not writes or kwargs.get("distributed_checkpoint") or getattr(self, "_hf_peft_config_loaded", False):
            super().save_pretrained(folder, *args, **kwargs)  # type: ignore[misc]
            return
        with written_whole(folder, partial(_is_outdated, kwargs.get("variant"))) as staged:
            super().save_pretrained(staged, *args, **kwargs)  # type: ignore[misc]
            stamp_together(staged / CONFIG_FILE, FREE_ENTRIES, staged.glob("model*.safetensors"), folder / CONFIG_FILE)
            if portable:
                source = code_file(base, type(self).config_class, type(self).__name__, self.config.snnk_plan["modules"])  # type: ignore[attr-defined]
                (staged / FILE_NAME).write_text(source, encoding="utf-8")
            if not (folder / "README.md").exists():
                write_model_card(staged, report=self.bundle_report)
        if push_to_hub:
            self._upload(folder, hub.pop("repo_id", folder.name), **hub)

    def push_to_hub(
        self, repo_id: str, *, max_shard_size: int | str = "50GB", token: str | bool | None = None, **options: Any
    ) -> str:
        """Upload the bundle with its code file and model card.

        A model card that the repository already has is kept if it tells readers to `import snnk_peft`.

        Args:
            repo_id: "user/name".
            max_shard_size: size of the largest weights file.
            token: access token; the stored one if None.
            **options: `commit_message`, `commit_description`, `private`, `revision`, `create_pr`, `tags`.

        Returns:
            The address of the commit.
        """
        with tempfile.TemporaryDirectory() as folder:
            self.save_pretrained(folder, max_shard_size=max_shard_size)
            return self._upload(Path(folder), repo_id, token=token, **options)

    def _upload(
        self,
        folder: Path,
        repo_id: str,
        *,
        token: str | bool | None = None,
        private: bool | None = None,
        tags: list[str] | None = None,
        commit_message: str | None = None,
        **options: Any,
    ) -> str:
        api = HfApi(token=token)
        repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
        keep_card = False
        if api.file_exists(repo_id, "README.md", revision=options.get("revision")):
            card = api.hf_hub_download(repo_id, "README.md", revision=options.get("revision"))
            keep_card = mentions_import(Path(card).read_text(encoding="utf-8"))
        if tags and not keep_card:
            write_model_card(folder, report=self.bundle_report, tags=tags)
        commit = api.upload_folder(
            repo_id=repo_id,
            folder_path=folder,
            commit_message=commit_message or f"Upload {type(self).__name__}",
            ignore_patterns=["README.md"] if keep_card else None,
            **options,
        )
        return str(commit)


def _is_outdated(variant: str | None, old: Path) -> bool:
    """Return True for a weights file that is being replaced: transformers prefers a single file over an index."""
    name = f"\\.{re.escape(variant)}" if variant else ""
    pattern = rf"model{name}(-\d+-of-\d+)?\.safetensors|model\.safetensors\.index{name}\.json"
    return re.fullmatch(pattern, old.name) is not None


def is_portable(base: type[PreTrainedModel]) -> bool:
    """Return whether the class can be imported from transformers alone, as the code file does."""
    return (
        base.__module__.startswith("transformers.") and getattr(import_module(base.__module__), base.__name__) is base
    )


def original_class(cls: type) -> type[PreTrainedModel]:
    """Return the class that a bundle class was made from."""
    return next(
        base for base in cls.__mro__ if issubclass(base, PreTrainedModel) and not issubclass(base, BundledModel)
    )


class LazyConfig(BundledConfig):
    """Mixin of the config classes: registers the architecture's model classes when the first config is made.

    Model classes are slow to import, and are never looked up without a config.
    """

    def __post_init__(self, **kwargs: Any) -> None:
        plan = kwargs.get("snnk_plan")
        register_models(type(self), plan.get("model_class") if isinstance(plan, Mapping) else None)
        super().__post_init__(**kwargs)  # type: ignore[misc]

    def __setstate__(self, state: dict[str, Any]) -> None:
        register_models(type(self))
        self.__dict__.update(state)


def bundle_config_class(base: type[PretrainedConfig]) -> type[Any]:
    """Return the bundle config class for the config class `base`; created and registered on first use."""
    name = f"{PREFIX}{base.__name__}"
    if name not in globals():
        made = type(name, (LazyConfig, base), {"model_type": BUNDLE_TYPE + base.model_type, "__module__": __name__})
        made.__doc__ = f"{base.__name__} of a bundled model; `snnk_plan` says what was exchanged."
        globals()[name] = made
        AutoConfig.register(made.model_type, made)  # type: ignore[attr-defined]
        share_choices(base.model_type, made.model_type)  # type: ignore[attr-defined]
    return globals()[name]


def bundle_model_class(base: type[PreTrainedModel], pooled: bool = False) -> type[Any]:
    """Return the bundle class of a model class; created and registered with its Auto classes on first use.

    Args:
        base: the class of transformers, or of a user.
        pooled: whether the head reads pooled hidden states (`bundling/pooled_head.py`).

    Raises:
        UnsupportedError: `base` has no config class, or another class of this name was bundled before.
    """
    name = f"{POOLED_PREFIX if pooled else PREFIX}{base.__name__}"
    if name not in globals():
        if base.config_class is None:
            raise UnsupportedError(f"{base.__name__} has no config_class, which a loadable bundle needs")
        config = bundle_config_class(base.config_class)
        body: dict[str, Any] = {"config_class": config, "__module__": __name__}
        if pooled:
            made = type(name, (PooledHeadModel, SavedBundle, base), body | {"forward": forward_like(base)})
            made.__doc__ = f"{base.__name__} with a head that reads pooled hidden states."
        else:
            made = type(name, (SavedBundle, base), body)
            made.__doc__ = f"{base.__name__} with folded SNNK parts."
        globals()[name] = made
        for auto in auto_classes(base):
            # Several classes under one Auto class are told apart by config.architectures.
            auto.register(config, (*_members(auto, config), made))
    if original_class(globals()[name]) is not base:
        raise UnsupportedError(
            f"a bundle class {name} was already made from {original_class(globals()[name])}, another class of the same "
            f"name as {base}; rename one of them"
        )
    return globals()[name]


def auto_classes(base: type[PreTrainedModel]) -> list[type[_BaseAutoModelClass]]:
    """Return the Auto classes that load `base` from its config; AutoModel for a class that none of them loads."""
    return [auto for auto in AUTO_CLASSES if base in _members(auto, base.config_class)] or [transformers.AutoModel]


def _members(auto: type[_BaseAutoModelClass], config: Any) -> tuple[Any, ...]:
    mapping: Any = auto._model_mapping
    if config not in mapping:
        return ()
    members = mapping[config]
    return tuple(members) if isinstance(members, (tuple, list)) else (members,)


def register_models(config: type[Any], wanted: str | None = None) -> None:
    """Make all model classes of a bundle's config class known to the Auto classes.

    Args:
        config: the class.
        wanted: name of a further bundle class to create, whose original no Auto class of transformers loads (an encoder
            that is part of another model, a model with a projection).
    """
    base = next(cls for cls in config.__mro__ if not issubclass(cls, BundledConfig))
    for auto in AUTO_CLASSES:
        for member in _members(auto, base):
            bundle_model_class(member)
    if wanted is not None and wanted not in globals() and base.__module__.startswith("transformers."):
        home = import_module(base.__module__.replace(".configuration_", ".modeling_"))
        original, pooled = _named(wanted)
        named = getattr(home, original, None)
        if isinstance(named, type) and issubclass(named, PreTrainedModel) and named.config_class is base:
            bundle_model_class(named, pooled)


def _named(bundle: str) -> tuple[str, bool]:
    """Return the name of a bundle class's original, and whether the bundle has a pooled head."""
    pooled = bundle.startswith(POOLED_PREFIX)
    return bundle.removeprefix(POOLED_PREFIX if pooled else PREFIX), pooled


def register_bundles(model_type: str) -> None:
    """Make bundles of one architecture loadable through the Auto classes.

    Called for every family of this package on import. Call it yourself before loading a bundle of an architecture that
    you described with `register_family`.

    Args:
        model_type: `model_type` of the architecture's config, as known to `AutoConfig`.
    """
    bundle_config_class(CONFIG_MAPPING[model_type])


def __getattr__(name: str) -> Any:
    """Return a model class by name, as unpickling needs before any config has been created."""
    original, pooled = _named(name)
    base = getattr(transformers, original, None) if name.startswith(PREFIX) else None
    if isinstance(base, type) and issubclass(base, PreTrainedModel):
        return bundle_model_class(base, pooled)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def auto_map(cls: type[Any]) -> dict[str, str]:
    """Return the config entry that points the Auto classes to the code file."""
    module = FILE_NAME.removesuffix(".py")
    names = {"AutoConfig": f"{module}.{cls.config_class.__name__}"}
    return names | {auto.__name__: f"{module}.{cls.__name__}" for auto in auto_classes(original_class(cls))}


for _name in FAMILIES.names():
    register_bundles(_name)
