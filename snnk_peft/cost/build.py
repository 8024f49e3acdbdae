"""Build models from configs, on the meta device: the pretrained one and its SNNK, bundled and LoRA forms."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import peft
import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel

from snnk_peft.bundling.bundle import folded_model
from snnk_peft.config import SNNKConfig
from snnk_peft.config_parts import SHORTCUTS
from snnk_peft.errors import ConfigError, UnsupportedError
from snnk_peft.families import family_of
from snnk_peft.registry import did_you_mean
from snnk_peft.tuner.get_model import get_snnk_model
from snnk_peft.tuner.model import modules_to_save
from snnk_peft.yaml_files import parse_yaml

TASKS = {
    "features": "AutoModel",
    "causal-lm": "AutoModelForCausalLM",
    "masked-lm": "AutoModelForMaskedLM",
    "sequence-classification": "AutoModelForSequenceClassification",
    "token-classification": "AutoModelForTokenClassification",
    "question-answering": "AutoModelForQuestionAnswering",
    "image-classification": "AutoModelForImageClassification",
    "audio-classification": "AutoModelForAudioClassification",
}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# Raised by transformers, or torch, for a config that describes no valid model.
FAULTS = (OSError, ValueError, TypeError, KeyError, AttributeError, RuntimeError, ImportError, StrictDataclassError)


def read_snnk_config(path: str | Path) -> SNNKConfig:
    """Read an SNNKConfig from the fields in a YAML or JSON file.

    Raises:
        ConfigError: no such file, invalid YAML, or wrong fields; lists all faults.
    """
    try:
        given = parse_yaml(Path(path).read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read as YAML: {error}") from error
    if not isinstance(given, Mapping):
        raise ConfigError(f"{path} holds {type(given).__name__}; expected fields of SNNKConfig, such as 'adapter:'")
    if isinstance(given.get("method"), Mapping):
        raise ConfigError(f"{path} holds the settings of a recipe; expected the parts alone, what is below 'method:'")
    valid = [*SHORTCUTS, "parts", "seed", "save_projection", "modules_to_save", "task_type"]
    if faults := [f"{path}: {did_you_mean('field', str(key), valid)}" for key in given if key not in valid]:
        raise ConfigError(faults)
    return SNNKConfig(**given)


def read_model_config(model: str | Path | PretrainedConfig) -> PretrainedConfig:
    """Read the config of a model.

    Raises:
        ConfigError: it is missing or damaged.
        UnsupportedError: the config is that of an adapter, a bundle, or a quantized model.
    """
    if isinstance(model, PretrainedConfig):
        config = copy.deepcopy(model)
    else:
        place = Path(model).expanduser()
        if (place / "adapter_config.json").is_file() and not (place / "config.json").is_file():
            raise UnsupportedError(f"{model} holds an adapter; expected a model: give the one that it belongs to")
        try:
            config = AutoConfig.from_pretrained(str(place if place.exists() else model))
        except FAULTS as error:
            raise ConfigError(
                f"no config could be read from {str(model)!r}; expected a config.json, a folder with one, or the name "
                f"of a model on the Hub: {error}"
            ) from error
    if getattr(config, "quantization_config", None) is not None:
        raise UnsupportedError(
            "the config describes a quantized model, whose weights SNNK parts cannot read; expected one in floating "
            "point. Remove quantization_config to see the cost of the model as it was before"
        )
    if getattr(config, "snnk_plan", None) is not None:
        raise UnsupportedError("the config is that of a bundle; expected that of the model that was patched")
    return config


def prepare(config: Any, num_labels: int | None = None, image_size: int | None = None) -> None:
    """Set the fields of a config that determine shapes, and disable the cache.

    Raises:
        ConfigError: the model does not accept images.
    """
    if num_labels is not None:
        config.num_labels = num_labels
    if image_size is not None:
        vision = getattr(config, "vision_config", config)
        if not hasattr(vision, "image_size"):
            raise ConfigError(f"image_size is {image_size}, and {type(config).__name__} has no images; leave it out")
        vision.image_size = image_size
    for part in (config, getattr(config, "text_config", config)):
        if getattr(part, "use_cache", False):
            part.use_cache = False
    if getattr(config, "pad_token_id", None) is None:  # text classifiers reject batches without one
        config.pad_token_id = 0


def model_class(config: PretrainedConfig, task: str | None) -> Any:
    """Return the class to build, or an Auto class."""
    if task is not None:
        if task not in TASKS:
            raise ConfigError(did_you_mean("task", task, list(TASKS)))
        return getattr(transformers, TASKS[task])
    named = (getattr(config, "architectures", None) or [None])[0]
    cls = transformers.AutoModel if named is None else getattr(transformers, named, None)
    if cls is None:
        raise UnsupportedError(
            f"config.architectures names {named!r}, which transformers {transformers.__version__} does not have; give "
            f"a task instead, one of {', '.join(TASKS)}"
        )
    return cls


@contextmanager
def _on_meta() -> Iterator[None]:
    """Create tensors on the meta device, and silence library warnings about unusual configs."""
    level = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    try:
        with torch.device("meta"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        transformers.logging.set_verbosity(level)


@contextmanager
def without_numbers(what: str) -> Iterator[None]:
    """Raise UnsupportedError if the code for `what` reads values, which the meta device does not have."""
    try:
        yield
    except RuntimeError as error:
        raise UnsupportedError(
            f"{what} is not possible on the meta device, where tensors have shapes but no values; expected code whose "
            f"shapes do not depend on values (a part of your own may ask `tensor.is_meta`): {error}"
        ) from error


class Builder:
    """Builder of models from one config; each call builds a new one.

    Raises:
        ConfigError: no model can be built from the config.
    """

    def __init__(self, config: PretrainedConfig, task: str | None, dtype: torch.dtype):
        self.config, self.dtype, self.cls = config, dtype, model_class(config, task)

    def pretrained(self) -> PreTrainedModel:
        make = getattr(self.cls, "from_config", None) or self.cls._from_config
        try:
            with _on_meta():
                return make(copy.deepcopy(self.config), dtype=self.dtype)
        except FAULTS as error:
            raise ConfigError(
                f"{self.cls.__name__} cannot be built from this config ({type(self.config).__name__}): {error}"
            ) from error

    def patched(self, config: SNNKConfig) -> Any:
        config = copy.deepcopy(config)
        config.save_projection = True  # or every matrix would be drawn for its checksum
        base = self.pretrained()
        with without_numbers("patching the model"), _on_meta():
            return get_snnk_model(base, config).to("meta")  # some components draw small tensors on the CPU

    def bundled(self, patched: Any) -> Any:
        """Bundle a patched model without comparing outputs."""
        with without_numbers("bundling"), _on_meta():
            return folded_model(patched.get_base_model())[0]

    def full(self) -> PreTrainedModel:
        return self.pretrained().requires_grad_(True)

    def lora(self, config: SNNKConfig, size: int) -> tuple[Any, int]:
        """Return LoRA on queries and values with about `size` parameters and the same task head trained, and its rank.

        If the family has no separate projections for them, PEFT's default for the architecture is used.

        Raises:
            ConfigError: PEFT has no default for the architecture.
        """
        per_rank = slot_parameters(self._lora(config, 1))
        rank = max(1, round(size / per_rank))
        return self._lora(config, rank), rank

    def _lora(self, config: SNNKConfig, rank: int) -> Any:
        base = self.pretrained()
        family = family_of(base)
        names = [name for name in (family.query, family.value) if name is not None]
        paths = [f"{layer}.{name}" for layer in family.layer_paths(base) for name in names]
        try:
            with _on_meta():
                return peft.get_peft_model(
                    base,
                    peft.LoraConfig(
                        r=rank,
                        target_modules=paths or None,
                        modules_to_save=modules_to_save(config, base, family, []),
                    ),
                )
        except ValueError as error:
            raise ConfigError(f"PEFT has no LoRA for {type(base).__name__}: {error}") from error


def slot_parameters(model: Any) -> int:
    """Count the trained parameters of a patched model outside the modules trained in full."""
    return sum(
        parameter.numel()
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and ".modules_to_save." not in name
    )


def inputs_for(
    model: PreTrainedModel, batch_size: int, length: int | None, dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """Create a batch of inputs of these shapes, without padding, on the meta device.

    Args:
        model: model of texts, images or mel spectrograms.
        batch_size: number of examples.
        length: tokens per text; None for the model's number of positions, at most 512.
        dtype: dtype of images and spectrograms.

    Raises:
        ConfigError: more tokens than positions.
        UnsupportedError: the model has other inputs.
    """
    config: Any = model.config
    if model.main_input_name == "pixel_values":
        vision = getattr(config, "vision_config", config)
        size = vision.image_size
        sides = (size, size) if isinstance(size, int) else tuple(size)
        return {"pixel_values": torch.empty(batch_size, vision.num_channels, *sides, dtype=dtype, device="meta")}
    if model.main_input_name == "input_features" and hasattr(config, "num_mel_bins"):
        frames = 2 * config.max_source_positions
        return {"input_features": torch.empty(batch_size, config.num_mel_bins, frames, dtype=dtype, device="meta")}
    if model.main_input_name != "input_ids":
        raise UnsupportedError(
            f"{type(model).__name__} reads {model.main_input_name!r}; expected a model of texts, images or mel "
            "spectrograms"
        )
    text = getattr(config, "text_config", config)
    room = getattr(text, "max_position_embeddings", None)
    length = min(512, room or 512) if length is None else length
    if room is not None and length > room:
        raise ConfigError(f"length is {length}; {type(model).__name__} has positions for {room} tokens")
    return {"input_ids": torch.zeros(batch_size, length, dtype=torch.long, device="meta")}


def labels_for(model: PreTrainedModel, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Create labels for the model's task.

    There are none if its loss needs labels other than classes; outputs are then summed.
    """
    first = next(iter(inputs.values()))
    name = type(model).__name__
    if name.endswith(("ForCausalLM", "LMHeadModel", "ForMaskedLM", "ForTokenClassification")):
        return {"labels": torch.zeros(first.shape[:2], dtype=torch.long, device="meta")}
    if name.endswith(("ForSequenceClassification", "ForImageClassification", "ForAudioClassification")):
        kind = torch.float32 if model.config.num_labels == 1 else torch.long
        return {"labels": torch.zeros(first.shape[:1], dtype=kind, device="meta")}
    return {}
