"""Networks for pictures, dense or low-rank, all of whose parameters in use are trained."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import nn
from transformers import ViTImageProcessorPil
from transformers.image_utils import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD

from _lib.cifar_resnet import SIDE, CifarResNet, load_cifar_resnet
from _lib.lowrank_settings import CIFAR_RESNETS, LowRankMethod, LowRankModel
from _lib.models import load_pretrained, resolve_model, train_in_use
from snnk_peft import get_snnk_model
from snnk_peft.errors import ConfigError


def image_processor(model: LowRankModel, task: Any) -> Any:
    """What makes inputs of pictures: for the ResNets of 32 x 32 pixels, ImageNet's mean and deviation."""
    if model.name_or_path in CIFAR_RESNETS:
        return ViTImageProcessorPil(
            size={"height": SIDE, "width": SIDE},
            image_mean=list(IMAGENET_DEFAULT_MEAN),
            image_std=list(IMAGENET_DEFAULT_STD),
        )
    from _lib.modality import modality_of

    return modality_of(task).reader(resolve_model(model.name_or_path), task)


def dense_model(model: LowRankModel, task: Any) -> nn.Module:
    """A classifier for `task`, of random weights (from torch's global generator) or pretrained ones.

    Raises:
        ConfigError: no such model, or weights of another one.
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
            f"{task.num_labels}: expected weights for as many, or null"
        )
    return found


def low_rank_model(base: nn.Module, method: LowRankMethod, seed: int, resumed: bool = False) -> tuple[Any, float]:
    """The network as the method wants it, and the seconds that its factors took.

    Args:
        base: the dense network; patched in place.
        method: the layers and their initialisation.
        seed: of what an initialisation draws.
        resumed: the factors will be read from a checkpoint, so that the quickest start will do.
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


def make_optimizer(model: nn.Module, train: Any, frobenius_decay: float) -> torch.optim.Optimizer:
    """SGD with momentum or AdamW; Frobenius decay takes the place of weight decay on the factors.

    Args:
        model: with requires_grad where it is trained.
        train: the settings (`LowRankTrain`).
        frobenius_decay: its strength; 0 for none.
    """
    from snnk_peft.low_rank.frobenius_decay import FrobeniusDecay, decay_groups

    groups = decay_groups(model, train.weight_decay, factor_decay=0.0 if frobenius_decay else None)
    optimizer: torch.optim.Optimizer
    if train.optimizer == "sgd":
        optimizer = torch.optim.SGD(groups, lr=train.learning_rate, momentum=train.momentum)
    else:
        optimizer = torch.optim.AdamW(groups, lr=train.learning_rate)
    if frobenius_decay:
        FrobeniusDecay(model, strength=frobenius_decay).attach(optimizer)
    return optimizer
