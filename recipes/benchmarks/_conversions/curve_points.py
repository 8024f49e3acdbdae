"""The points of `curve.py`: each method of making a BERT smaller, at each size."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from _bench import alternate, ratio
from _peers import distilling, fisher_pruning, modegpt
from _peers.blocks import Batch, Cost, model_inputs
from torch import nn

from _conversions.finetuned import timed
from snnk_peft import AttentionPart, FFNPart, LowRankPart, SNNKConfig, bundle, calibrate, convert, get_snnk_model

Make = Callable[[nn.Module, Sequence[Batch], int], nn.Module]
FEATURES = (256, 128)
LONG = 600  # steps of a long recovery
CENTROIDS, BESIDE = 64, 192  # centroids per head, and FFN features if attention is linear
BUDGETS = ("1.5x", "2x", "2.5x", "3x")
SHARES = (0.8, 0.55, 0.42)  # heads alone cost .351
LAYERS = (4, 3, 2)
REFERENCE = "plan 2x"  # its seconds are the time limit of distillation


ORIGINAL, ROUNDED = "original", "original int8"


class Speeds:
    """Seconds of forward passes, in as many rounds as requested.

    Args:
        models: functions of model inputs by name, including ORIGINAL and ROUNDED, in eval mode.
        inputs: the inputs to time them on.
        repetitions: passes per round.
    """

    def __init__(self, models: Mapping[str, Callable[..., Any]], inputs: Batch, repetitions: int):
        self.runs = {name: partial(model, **inputs) for name, model in models.items()}
        self.repetitions = repetitions
        self.seconds: dict[str, list[float]] = {name: [] for name in models}

    @torch.inference_mode()
    def add_round(self) -> None:
        """Time each model for one more round."""
        for name, more in alternate(self.runs, self.repetitions).items():
            self.seconds[name] += more

    def original(self) -> float:
        """Return the seconds of the original's fastest pass."""
        return min(self.seconds[ORIGINAL])

    def speed_up(self, name: str, of_rounded: float | None = None) -> float:
        """Return the speed-up of a model over the original; for one in int8, pass that of ROUNDED."""
        if of_rounded is None:
            return self.original() / min(self.seconds[name])
        return of_rounded * ratio(self.seconds[ROUNDED], self.seconds[name])


def converted(teacher: nn.Module, batches: Sequence[Batch], seed: int, **how: Any) -> nn.Module:
    """Convert with `convert`, without labels."""
    model: nn.Module = convert(
        teacher, [model_inputs(batch) for batch in batches], seed=seed, progress=False, **how
    ).model
    return model.eval()


def ffn(teacher: nn.Module, batches: Sequence[Batch], seed: int, count: int, **how: Any) -> nn.Module:
    """Convert all FFNs, with `count` features."""
    return converted(teacher, batches, seed, budget=None, parts=[FFNPart(num_features=count)], **how)


def planned(teacher: nn.Module, batches: Sequence[Batch], seed: int, budget: str, shape: str) -> nn.Module:
    """Convert for a budget of the timed latency."""
    return converted(teacher, batches, seed, budget=budget, inputs=timed(teacher, shape))


def linear(teacher: nn.Module, batches: Sequence[Batch], seed: int, count: int) -> nn.Module:
    """Convert attention in all layers, with `count` centroids, and all FFNs, with fewer features."""
    parts = [AttentionPart("mixture", "centroids", num_features=count), FFNPart(num_features=BESIDE)]
    return converted(teacher, batches, seed, budget=None, parts=parts)


def svd(teacher: nn.Module, batches: Sequence[Batch], share: float) -> nn.Module:
    """Factorise FFN matrices, optimally for their real inputs, at the rank whose two factors cost `share`."""
    config: Any = teacher.config
    dim, units = config.hidden_size, config.intermediate_size
    rank = max(1, round(Cost.of(config).unit_share(share) * dim * units / (dim + units)))
    part = LowRankPart("ffn", rank=rank, activation="identity")
    patched = get_snnk_model(copy.deepcopy(teacher), SNNKConfig(parts=[part], modules_to_save=[]))
    calibrate(patched, batches, progress=False)
    return bundle(patched).eval()


def points(shape: str, seconds: Callable[[int], float]) -> dict[str, Make]:
    """Return all methods and sizes by name, for a timed shape and the `seconds` that the reference took for a seed."""

    def shared(teacher: nn.Module, batches: Sequence[Batch], seed: int, how: Any, share: float) -> nn.Module:
        made: nn.Module = how(teacher, batches, share)
        return made

    def distilled(teacher: nn.Module, batches: Sequence[Batch], seed: int, layers: int) -> nn.Module:
        return distilling.distil(teacher, batches, layers, seconds(seed), seed=seed)

    peers = {"svd": svd, "fisher": fisher_pruning.prune, "modegpt": modegpt.decompose}
    return {
        "original": lambda teacher, batches, seed: teacher,
        **{f"ffn {count}": partial(ffn, count=count) for count in FEATURES},
        f"ffn+ {FEATURES[1]}": partial(ffn, count=FEATURES[1], steps=LONG),
        **{f"plan {budget}": partial(planned, budget=budget, shape=shape) for budget in BUDGETS},
        f"attention {CENTROIDS}": partial(linear, count=CENTROIDS),
        **{f"{name} {share}": partial(shared, how=how, share=share) for name, how in peers.items() for share in SHARES},
        **{f"distilled {count}": partial(distilled, layers=count) for count in LAYERS},
    }
