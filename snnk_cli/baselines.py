"""Other ways to adapt a pretrained model, for comparison: PEFT's methods, and BitFit.

lora                LoRA (Hu et al. 2021); with lora.dora DoRA (Liu et al. 2024); with lora.norms also all norms
ia3, vera           (IA)³ (Liu et al. 2022) and VeRA (Kopiczko et al. 2023)
boft                BOFT (Liu et al. 2024): diag(s) W R, R orthogonal and made of blocks; with one butterfly factor it
                    is block diagonal, which is OFT (Qiu et al. 2023) with trained lengths s
bitfit              all biases and normalisation layers (Zaken et al. 2022)
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Collection
from typing import Any

import torch
from accelerate.utils import patch_environment
from peft import BOFTConfig, IA3Config, LoraConfig, VeraConfig, get_peft_model
from peft.utils.constants import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as CHOICES
from peft.utils.error import NoMatchingPeftModuleError
from transformers import PreTrainedModel

from snnk_cli.settings import MethodSection
from snnk_peft.errors import ConfigError
from snnk_peft.families import family_of, known_family
from snnk_peft.parts.norms import is_norm

PEFT_BASELINES = ("lora", "ia3", "vera", "boft")


def with_baseline(
    base: PreTrainedModel, method: MethodSection, saved: list[str], task_type: str | None, seed: int
) -> Any:
    """Wrap `base` in the PeftModel of one of `PEFT_BASELINES`.

    Args:
        base: the pretrained model with a fresh classifier.
        method: the settings.
        saved: modules to train and save in full, besides those that PEFT saves for the task type.
        task_type: task type of PEFT, or None.
        seed: seed of VeRA's shared random matrices.

    Raises:
        ConfigError: the model lacks the target modules, PEFT has no default for its architecture, or the blocks do not
            fit.
    """
    lora = method.lora
    if lora.norms:
        saved = [*saved, *norm_names(base, lora.layers)]
    common: dict[str, Any] = {"task_type": task_type, "modules_to_save": saved or None}
    if method.name != "ia3":
        common["layers_to_transform"] = lora.layers
    if method.name == "lora":
        targets = lora.target_modules or query_value_names(base)
        scale: dict[str, Any] = {
            "r": lora.r,
            "lora_alpha": lora.alpha,
            "lora_dropout": lora.dropout,
            "use_dora": lora.dora,
        }
        config: Any = LoraConfig(**common, **scale, target_modules=targets)
    elif method.name == "vera":
        targets = lora.target_modules or query_value_names(base)
        config = VeraConfig(
            **common,
            r=lora.r,
            vera_dropout=lora.dropout,
            target_modules=targets,
            projection_prng_key=seed,
        )
    elif method.name == "boft":
        config = BOFTConfig(
            **common,
            boft_block_size=lora.block_size,
            boft_n_butterfly_factor=lora.butterfly_factors,
            boft_dropout=lora.dropout,
            target_modules=lora.target_modules or query_value_names(base),
        )
    else:
        config = IA3Config(**common, target_modules=lora.target_modules)
    try:
        if method.name == "boft":
            return _with_boft(base, config)
        return get_peft_model(base, config)
    except (NoMatchingPeftModuleError, ValueError) as error:
        found = {name.rpartition(".")[2] for name, m in base.named_modules() if isinstance(m, torch.nn.Linear)}
        asked = f"method.lora.target_modules is {lora.target_modules!r}"
        if isinstance(error, NoMatchingPeftModuleError):
            asked += f", which matches no module of {type(base).__name__}"
        elif method.name == "boft" and "in_features" in str(error):
            raise ConfigError(
                f"method.lora.block_size is {lora.block_size} and butterfly_factors {lora.butterfly_factors}; expected "
                f"blocks that fit into the inputs of every layer: {error}"
            ) from error
        elif "target_modules" in str(error) and lora.target_modules is None:
            asked += f", and PEFT has no default for {base.config.model_type}"
        else:
            raise
        raise ConfigError(f"{asked}; expected names among {', '.join(sorted(found))}") from error


def _with_boft(base: PreTrainedModel, config: Any) -> Any:
    """Return the BOFT PeftModel; raise a ConfigError if PEFT would use fewer butterfly factors than requested.

    Even without a GPU, PEFT tries to compile a CUDA extension, warns that it failed, and falls back to one factor.
    """
    _load_compiler()
    asked = config.boft_n_butterfly_factor
    with warnings.catch_warnings():
        if asked == 1:  # the fallback that it warns about
            warnings.filterwarnings("ignore", message="Failed to load the CUDA extension")
            warnings.filterwarnings("ignore", message="Setting boft_n_butterfly_factor to 1")
        model = get_peft_model(base, config)
    found = {len(value) for name, value in model.named_parameters() if ".boft_R." in name}
    if found != {asked}:
        raise ConfigError(
            f"method.lora.butterfly_factors is {asked}, for which PEFT needs its CUDA extension, and that could not be "
            "compiled here (see its warning): set it to 1, or use a machine with a GPU, ninja and a compiler"
        )
    return model


def _load_compiler() -> None:
    """Import torch's extension builder, as PEFT will, even if setuptools refuses to be imported.

    Before Python 3.12, setuptools refuses in a process that has looked up pip, as huggingface_hub may have.
    """
    try:
        importlib.import_module("torch.utils.cpp_extension")
    except AssertionError:
        with patch_environment(SETUPTOOLS_USE_DISTUTILS="stdlib"), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # setuptools calls this deprecated
            importlib.import_module("torch.utils.cpp_extension")


def train_biases_and_norms(model: PreTrainedModel) -> None:
    """Freeze everything in the encoder but its biases and normalisation layers (BitFit)."""
    prefix = f"{model.base_model_prefix}."
    inside = {name for name, module in model.named_modules() if is_norm(module)}
    for name, parameter in model.named_parameters():
        owner, _, own = name.rpartition(".")
        parameter.requires_grad_(not name.startswith(prefix) or own == "bias" or owner in inside)


def norm_names(model: PreTrainedModel, layers: list[int] | None = None) -> list[str]:
    """Return the last path components of the normalisation layers, or the full paths of those inside `layers`."""
    paths = [name for name, module in model.named_modules() if is_norm(module)]
    if layers is None:
        return sorted({path.rpartition(".")[2] for path in paths})
    every = family_of(model).layer_paths(model)
    inside = tuple(f"{every[index]}." for index in layers)
    return [path for path in paths if path.startswith(inside)]


def query_value_names(model: PreTrainedModel) -> list[str] | None:
    """Return the names of the family's query and value modules, or None if PEFT has a default of its own."""
    family = known_family(model)
    if model.config.model_type in CHOICES:
        return None
    if family is None or family.query is None or family.value is None:
        raise ConfigError(
            f"method.lora.target_modules is null, and PEFT has no default for {model.config.model_type}; expected a "
            "list of module names"
        )
    return [name.rpartition(".")[2] for name in (family.query, family.value)]


def head_with_bias(model: PreTrainedModel, among: Collection[str] | None = None) -> torch.nn.Linear | None:
    """Return the last Linear with one output per label, or None if there is none or it has no bias.

    Args:
        model: a model with a head.
        among: tensor names (the newly initialised ones) that must include the bias, or None.
    """
    linears = {name: module for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    heads = {name: linear for name, linear in linears.items() if linear.out_features == model.config.num_labels}
    if not heads:
        return None
    name, head = list(heads.items())[-1]
    return head if head.bias is not None and (among is None or f"{name}.bias" in among) else None


def move_threshold(model: PreTrainedModel, threshold: float) -> None:
    """Shift the head's bias so that the second class is predicted where its logit exceeds the first by `threshold`.

    Args:
        model: a model whose head has a bias, see `head_with_bias`.
        threshold: threshold on the difference of the current logits.
    """
    head = head_with_bias(model)
    assert head is not None
    with torch.no_grad():
        head.bias.add_(torch.tensor([threshold / 2, -threshold / 2]).to(head.bias))


def start_at_prior(model: PreTrainedModel, labels: torch.Tensor) -> None:
    """Initialise the head's bias with the class prior: log frequencies, log odds, or the mean target of a regression.

    From zero, the first steps would be spent learning it.

    Args:
        model: a model with a fresh head.
        labels: (n,) class indices (negative ones are ignored) or regression targets of the training examples; for
            multi-label tasks (n, labels) of zeros and ones.

    Raises:
        ConfigError: the head has no bias.
    """
    head = head_with_bias(model)
    if head is None:
        raise ConfigError(
            f"method.head_bias is prior, but {type(model).__name__} has no Linear with {model.config.num_labels} "
            "outputs and a bias; set method.head_bias=auto"
        )
    with torch.no_grad():
        if labels.dim() == 2 and labels.is_floating_point():
            head.bias.copy_(((labels.sum(0) + 1) / (len(labels) + 2)).logit())
        elif labels.is_floating_point():
            head.bias.fill_(labels.mean())
        else:
            counts = torch.bincount(labels[labels >= 0].flatten(), minlength=int(model.config.num_labels or 0)) + 1
            logarithm = counts.double().log()
            head.bias.copy_(logarithm - logarithm.mean())
