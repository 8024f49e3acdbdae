"""The methods that load adapter weights, wrapped to know which file will be read.

PEFT and transformers put an adapter's modules into the model first and read its file afterwards, and neither tells the
tuner which file. So the three methods that load adapters record their arguments while they run, and the tuner looks
them up before it changes anything (see checkpoint.py). The Auto classes, which read adapter_config.json themselves, are
wrapped only to name that file if it is damaged. Other PEFT methods load as usual.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import EntryNotFoundError
from peft import PeftConfig, PeftModel, PeftType, mapping
from peft.auto import _BaseAutoPeftModel
from transformers import PretrainedConfig
from transformers.integrations.peft import PeftAdapterMixin
from transformers.models.auto import auto_factory

from snnk_peft.config import CONFIG, WEIGHTS, SNNKConfig
from snnk_peft.config_size import weights_of
from snnk_peft.digests import DIGESTS, content_faults, entry_faults, layout_of, open_tensors, refuse
from snnk_peft.errors import ConfigError
from snnk_peft.json_files import read_json
from snnk_peft.tuner.base_model import label_options
from snnk_peft.tuner.checkpoint import Incoming, check_loaded

MODEL_CONFIG = "config.json"
LAYERS = {"num_hidden_layers", "num_layers", "n_layer", "n_layers", "encoder_layers", "decoder_layers", "depth"}


@dataclass
class Door:
    """Arguments of a loading method.

    Args:
        source: folder or Hub repository, or None for tensors in memory.
        options: options of the download: subfolder, revision, token and so on.
        tensors: the tensors in memory.
        pickled: whether a pickled file was requested.
        seen: set once the tuner has compared the tensors with its modules.
    """

    source: str | None
    options: dict[str, Any] = field(default_factory=dict)
    tensors: Mapping[str, torch.Tensor] | None = None
    pickled: bool = False
    seen: bool = False

    def incoming(self) -> Incoming | None:
        """The tensors that will be loaded.

        Raises:
            ConfigError: the tensors are not in a safetensors file.
        """
        self.seen = True
        if self.tensors is not None:
            checksums = {key: value for key, value in self.tensors.items() if key.endswith("checksum")}
            layout = {key: (tuple(value.shape), value.dtype) for key, value in self.tensors.items()}
            return Incoming("adapter_state_dict", layout, checksums)
        if self.source is None:
            return None
        path = self._file()
        with open_tensors(path) as file:
            checksums = {key: file.get_tensor(key) for key in file.keys() if key.endswith("checksum")}  # noqa: SIM118
            return Incoming(str(path), layout_of(file), checksums, partial(_content_faults, path))

    def _file(self) -> Path:
        if self.pickled:
            raise ConfigError(f"use_safetensors is False for {self.source}; adapters are read from {WEIGHTS} only")
        folder = self._folder()
        if folder is None:
            try:
                return Path(hf_hub_download(str(self.source), WEIGHTS, **self.options))
            except EntryNotFoundError as error:
                raise ConfigError(f"{self.source} has no {WEIGHTS}, the only file that is read: {error}") from error
        if not (folder / WEIGHTS).is_file():
            other = f"; {folder / 'adapter_model.bin'} is not read, because unpickling can run code"
            raise ConfigError(
                f"{folder} has no {WEIGHTS}{other if (folder / 'adapter_model.bin').is_file() else ''}. Save the "
                "adapter with model.save_pretrained(folder), or copy the whole folder again"
            )
        return folder / WEIGHTS

    def _folder(self) -> Path | None:
        folder = None if self.source is None else Path(self.source) / (self.options.get("subfolder") or "")
        return folder if folder is not None and folder.is_dir() else None

    def check_config(self, needs_base: bool = False) -> None:
        """Raise ConfigError if a local adapter_config.json cannot be read, or is not that of its original method."""
        folder = self._folder()
        if folder is None or not os.path.lexists(path := folder / CONFIG):
            return
        content = read_json(path)
        if not isinstance(content, dict) or "peft_type" not in content:
            raise ConfigError(f"{path} is no adapter config: expected an object with a 'peft_type'")
        kind = content["peft_type"]
        if not isinstance(kind, str) or kind not in mapping.PEFT_TYPE_TO_CONFIG_MAPPING:
            raise ConfigError(f"{path}: peft_type is {str(kind)[:100]!r}; expected a method of PEFT, such as 'SNNK'")
        base = content.get("base_model_name_or_path")
        alone = not (folder / MODEL_CONFIG).is_file()  # transformers prefers a model next to an adapter
        if needs_base and alone and not (isinstance(base, str) and base):
            raise ConfigError(f"{path}: base_model_name_or_path is {base!r}; expected a folder or a repository")
        if needs_base and alone and os.path.isabs(str(base)) and not os.path.exists(str(base)):
            raise ConfigError(
                f"{path}: base_model_name_or_path is {base!r}, which is not there; expected a folder or a repository "
                "on the Hub. Load the base model from where it is and give it to PeftModel.from_pretrained"
            )
        if needs_base:
            _check_base(Path(str(base)) if alone else folder)
        if DIGESTS in content and content["peft_type"] != "SNNK":
            faults = entry_faults(content, content[DIGESTS])
            refuse(
                path, f"was changed: it was saved by snnk_peft, and its peft_type is {content['peft_type']!r}", faults
            )


def _check_base(folder: Path) -> None:
    """Raise ConfigError if the config of a local model asks for far more layers than its weights have tensors."""
    path = folder / MODEL_CONFIG
    if not os.path.lexists(path):
        return
    content, (most, why) = read_json(path), weights_of(folder, None)
    inner = [each for each in content.values() if isinstance(each, dict)] if isinstance(content, dict) else []
    for entries in [content, *inner]:
        for name in LAYERS & set(entries):
            if isinstance(entries[name], int) and entries[name] > most:
                raise ConfigError(f"{path}: {name} is {entries[name]}; {why}. Copy the base model again")


def _watch_json(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def _dict_from_json_file(cls: type, json_file: Any) -> Any:
        try:
            content = original(cls, json_file)
        except (json.JSONDecodeError, UnicodeDecodeError):
            raise  # transformers reports it
        except (ValueError, RecursionError) as error:  # numbers of thousands of digits, thousands of brackets
            read_json(json_file)
            raise ConfigError(f"{json_file} cannot be read ({error}); copy or download it again") from error
        if not isinstance(content, dict):
            raise ConfigError(f"{json_file} is {str(content)[:100]!r}; expected an object. Copy or download it again")
        code = content.get("auto_map") or {}
        if not isinstance(code, dict) or not all(isinstance(name, (str, list, type(None))) for name in code.values()):
            raise ConfigError(
                f"{json_file}: auto_map is {str(code)[:100]!r}; expected names of classes in files of code"
            )
        return content

    return _dict_from_json_file


def _content_faults(path: Path) -> list[str]:
    with open_tensors(path) as file:
        return content_faults(path, file, config=path.with_name(CONFIG))


_open: ContextVar[Door | None] = ContextVar("snnk_peft_door", default=None)


def open_door() -> Door | None:
    """Return what is currently being loaded; None for a new adapter."""
    return _open.get()


@contextlib.contextmanager
def _through(source: object, options: Mapping[str, Any], tensors: Mapping[str, torch.Tensor] | None) -> Iterator[Door]:
    """Record what is loaded in a context; of nested loading methods, the outermost one is used."""
    outer = _open.get()
    if outer is not None:
        yield outer
        return
    accepted = inspect.signature(hf_hub_download).parameters.keys() - {"repo_id", "filename"}
    given = {key: value for key, value in options.items() if key in accepted and value is not None}
    door = Door(None if source is None else os.fspath(source), given, tensors)  # type: ignore[call-overload]
    door.check_config()
    token = _open.set(door)
    try:
        yield door
    finally:
        _open.reset(token)


def _watch_from_pretrained(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def from_pretrained(cls: type[PeftModel], model: Any, model_id: Any, *args: Any, **kwargs: Any) -> Any:
        with _through(model_id, kwargs, None):
            return original(cls, model, model_id, *args, **kwargs)

    return from_pretrained


def _watch_search(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def find_adapter_config_file(*args: Any, **kwargs: Any) -> Any:
        file = original(*args, **kwargs)
        if file is not None:
            Door(str(Path(file).parent)).check_config(needs_base=True)
        return file

    return find_adapter_config_file


def _watch_auto(original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def from_pretrained(cls: type, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        config: Any = None
        if isinstance(pretrained_model_name_or_path, (str, os.PathLike)):
            Door(os.fspath(pretrained_model_name_or_path)).check_config(needs_base=True)
            revision = signature.bind(cls, pretrained_model_name_or_path, *args, **kwargs).arguments.get("revision")
            hub = {key: value for key, value in kwargs.items() if key != "revision"}
            config = PeftConfig.from_pretrained(os.fspath(pretrained_model_name_or_path), revision=revision, **hub)
            if isinstance(config, SNNKConfig):
                kwargs |= label_options(config, kwargs)
                if config.modules_to_save or config.trained_within:  # replaced by the adapter's classifier
                    kwargs.setdefault("ignore_mismatched_sizes", True)
        try:
            return original(cls, pretrained_model_name_or_path, *args, **kwargs)
        except OSError as error:
            if not isinstance(config, SNNKConfig):
                raise
            raise ConfigError(
                f"the base model of {pretrained_model_name_or_path}, base_model_name_or_path "
                f"{config.base_model_name_or_path!r}, cannot be loaded: {error}"
            ) from error

    return from_pretrained


def _check_parts(door: Door, adapter_name: str, config: SNNKConfig) -> None:
    """Raise ConfigError if new weights of an adapter were saved with other options, which tensors do not reveal."""
    if door.source is None:
        return
    new = PeftConfig.from_pretrained(door.source, **door.options)
    if not isinstance(new, SNNKConfig):
        raise ConfigError(
            f"{door.source} is an adapter of {PeftType(new.peft_type).value}; adapter {adapter_name!r} is one of SNNK"
        )
    # As plain data, with lists where a config in memory may have tuples.
    here, there = (
        {name: json.loads(json.dumps(asdict(part))) for name, part in each.named_parts().items()}
        for each in (config, new)
    )
    faults = [
        f"{name}.{key} is {there.get(name, {}).get(key)!r} there and {here.get(name, {}).get(key)!r} here"
        for name in sorted({*here, *there})
        for key in sorted({*here.get(name, {}), *there.get(name, {})})
        if here.get(name, {}).get(key) != there.get(name, {}).get(key)
    ]
    if faults:
        raise ConfigError(
            [
                f"{door.source} has other parts than adapter {adapter_name!r} of this model; give it a name of its "
                "own: model.load_adapter(folder, 'other'), and model.set_adapter('other')",
                *faults,
            ]
        )


def _watch_peft(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def load_adapter(self: PeftModel, model_id: Any, adapter_name: str, *args: Any, **kwargs: Any) -> Any:
        with _through(model_id, kwargs, None) as door:
            config = self.peft_config.get(adapter_name)
            if isinstance(config, SNNKConfig) and not door.seen:  # new weights for existing modules
                _check_parts(door, adapter_name, config)
                check_loaded(config, self.get_base_model(), adapter_name, door.incoming())
            return original(self, model_id, adapter_name, *args, **kwargs)

    return load_adapter


def _watch_transformers(original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def load_adapter(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = signature.bind(self, *args, **kwargs).arguments
        load_config = given.get("load_config")
        source = given.get("peft_model_id") or getattr(load_config, "pretrained_model_name_or_path", None)
        options = {**(getattr(load_config, "download_kwargs", None) or {}), **given.get("kwargs", {})}
        options |= {"local_files_only": given.get("local_files_only"), **(given.get("adapter_kwargs") or {})}
        with _through(source, options, given.get("adapter_state_dict")) as door:
            asked = given.get("kwargs", {}).get("use_safetensors", getattr(load_config, "use_safetensors", None))
            door.pickled = asked is False
            return original(self, *args, **kwargs)

    return load_adapter


def watch_doors() -> None:
    """Wrap the loading methods of PEFT and transformers, once, to record their arguments."""
    PretrainedConfig._dict_from_json_file = classmethod(_watch_json(PretrainedConfig._dict_from_json_file.__func__))  # type: ignore
    # Every Auto class has its own copy of `from_pretrained`; all of them call this one function.
    auto_factory.find_adapter_config_file = _watch_search(auto_factory.find_adapter_config_file)
    _BaseAutoPeftModel.from_pretrained = classmethod(_watch_auto(_BaseAutoPeftModel.from_pretrained.__func__))  # type: ignore
    PeftModel.from_pretrained = classmethod(_watch_from_pretrained(PeftModel.from_pretrained.__func__))  # type: ignore
    PeftModel.load_adapter = _watch_peft(PeftModel.load_adapter)  # type: ignore[method-assign]
    PeftAdapterMixin.load_adapter = _watch_transformers(PeftAdapterMixin.load_adapter)  # type: ignore[method-assign]
