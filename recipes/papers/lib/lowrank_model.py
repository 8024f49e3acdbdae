"""Image networks, dense or low-rank, with all parameters in use trained."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import nn
from transformers import ViTImageProcessorPil
from transformers.image_utils import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD

from papers.lib.cifar_resnet import SIDE, CifarResNet, load_cifar_resnet
from papers.lib.lowrank_settings import CIFAR_RESNETS, LowRankConfig, LowRankMethod, LowRankModel
from snnk_cli.modality import modality_of
from snnk_cli.models import load_pretrained, resolve_model, train_in_use
from snnk_cli.task_settings import find_task
from snnk_peft import get_snnk_model
from snnk_peft.errors import ConfigError
from snnk_peft.families.base import as_linear
from snnk_peft.functional.nonlinearity import nonlinearity
from snnk_peft.low_rank.frobenius_decay import FrobeniusDecay, decay_groups
from snnk_peft.low_rank.risk import gaussian_risk, ratio
from snnk_peft.parts.low_rank.slot import LowRankSlot
from snnk_peft.tuner.slot_layer import SlotLayer


def image_processor(model: LowRankModel, task: Any) -> Any:
    """Return the image processor: for the ResNets of 32 x 32 pixels, with ImageNet's mean and standard deviation."""
    if model.name_or_path in CIFAR_RESNETS:
        return ViTImageProcessorPil(
            size={"height": SIDE, "width": SIDE},
            image_mean=list(IMAGENET_DEFAULT_MEAN),
            image_std=list(IMAGENET_DEFAULT_STD),
        )

    return modality_of(task).reader(resolve_model(model.name_or_path), task)


def dense_model(model: LowRankModel, task: Any) -> nn.Module:
    """Return a classifier for `task` with random weights (from torch's global generator) or pretrained ones.

    Raises:
        ConfigError: there is no such model, or the weights belong to another one.
    """
    depth = CIFAR_RESNETS.get(model.name_or_path)
    if depth is None:
        folder = resolve_model(model.name_or_path)
        return load_pretrained(folder, task, model.weights == "pretrained")[0]
    if model.weights is None:
        return CifarResNet(depth, task.num_labels)
    found = load_cifar_resnet(model.weights, depth)
    if found.linear.out_features != task.num_labels:
        raise ConfigError(
            f"model.weights is {model.weights}, of {found.linear.out_features} classes; task {task.name} has "
            f"{task.num_labels}: expected weights for that many, or null"
        )
    return found


def low_rank_model(base: nn.Module, method: LowRankMethod, seed: int, resumed: bool = False) -> tuple[Any, float]:
    """Return the network prepared by the method, and the seconds spent on its factors.

    Args:
        base: the dense network; patched in place.
        method: the layers and their initialisation.
        seed: seed of random initialisations.
        resumed: the factors will be loaded from a checkpoint, so the fastest initialisation is used.
    """
    base.requires_grad_(True)
    if method.low_rank is None:
        return base, 0.0
    started = time.perf_counter()
    config = method.snnk_config(seed, **({"init": "baseline"} if resumed else {}))
    model: Any = get_snnk_model(base, config)
    seconds = time.perf_counter() - started
    train_in_use(model)
    return model, seconds


def init_errors(model: nn.Module) -> dict[str, float]:
    """Compute the error of the factors against the dense layers they replace, by path; empty for a dense network.

    That is E‖f(UVᵀx + b') − f(Wx + b)‖² / E‖f(Wx + b)‖² for x ~ N(0, I), exact, with the activation f of the settings;
    for a convolution, x is a patch.
    """
    found = {}
    for path, module in model.named_modules():
        if not isinstance(module, SlotLayer):
            continue
        for slot in module.active_slots():
            if isinstance(slot, LowRankSlot):
                dense: Any = as_linear(module.base_layer)
                layer, wide = slot.layer, torch.float64
                with torch.no_grad():
                    missed, energy = gaussian_risk(
                        nonlinearity(slot.activation),
                        dense.weight.flatten(1).to(wide),
                        layer.product(layer.U.to(wide), layer.V.to(wide)),
                        None if dense.bias is None else dense.bias.to(wide),
                        None if layer.bias is None else layer.bias.to(wide),
                    )
                found[path.removeprefix("base_model.model.")] = ratio(max(float(missed), 0.0), float(energy))
    return found


def rebuilt_errors(config: LowRankConfig) -> dict[str, float]:
    """Return `init_errors` at the start of a run, from its settings alone; leave torch's generator unchanged."""
    with torch.random.fork_rng():
        torch.manual_seed(config.train.seed)
        base = dense_model(config.model, find_task(config))  # type: ignore[arg-type]
        return init_errors(low_rank_model(base, config.method, config.train.seed)[0])


def make_optimizer(model: nn.Module, train: Any, frobenius_decay: float) -> torch.optim.Optimizer:
    """Create SGD with momentum or AdamW; Frobenius decay replaces weight decay on the factors."""
    groups = decay_groups(model, train.weight_decay, factor_decay=0.0 if frobenius_decay else None)
    optimizer: torch.optim.Optimizer
    if train.optimizer == "sgd":
        optimizer = torch.optim.SGD(groups, lr=train.learning_rate, momentum=train.momentum)
    else:
        optimizer = torch.optim.AdamW(groups, lr=train.learning_rate)
    if frobenius_decay:
        FrobeniusDecay(model, strength=frobenius_decay).attach(optimizer)
    return optimizer
