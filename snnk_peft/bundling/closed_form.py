"""Training and differentiating a bundled head without backpropagation (SNNK paper, section 3.3 and App. J.3).

A bundled head is y = W̄ φ(x) + b with a fixed φ. For the squared error the best (W̄, b) is ridge regression on φ, found
in one pass over the data with moments in fp64; classes become one-hot targets. Its Jacobian in x is explicit as well,
J = W̄ diag(s f'(G x + c)) G, without a backward pass.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from snnk_peft.bundling.classes import SavedBundle
from snnk_peft.calibration.closed_form import one_hot_targets
from snnk_peft.calibration.reduce import global_index, same_everywhere
from snnk_peft.calibration.ridge import DEFAULT_RIDGES, GramAccumulator, fit_ridge
from snnk_peft.errors import ConfigError, UnsupportedError
from snnk_peft.functional.folding import bundle_jacobian
from snnk_peft.layers.feature_stage import FeatureStage

HELD_OUT = 5  # every fifth batch chooses the ridge


@dataclass(frozen=True)
class HeadFit:
    """What `fit_closed_form` did.

    Args:
        head: path of the fitted Linear.
        examples: number of examples of all processes, those that chose the ridge included.
        ridge: the λ that was used, absolute (scikit-learn's alpha).
        relative_error: squared error on the fitted examples divided by the variance of the targets.
        seconds: wall time, forward passes included.
    """

    head: str
    examples: int
    ridge: float
    relative_error: float
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """Plain data for a metrics.json."""
        return asdict(self)


def fit_closed_form(
    model: nn.Module,
    batches: Iterable[Mapping[str, Any]],
    *,
    ridge: float | None = None,
    ridges: Sequence[float] = DEFAULT_RIDGES,
    targets: str = "labels",
) -> HeadFit:
    """Fit the head of a bundle to labels in one pass, in place.

    With several processes (torch.distributed is initialised) each gives its own share of the batches, of any size:
    `batches[rank::world_size]` in every process fits what `batches` fits in one, up to the rounding of sums, with the
    same bits in every process.

    Args:
        model: from `bundle`, of a model whose pooler was replaced and folded into the classifier (BERT, ELECTRA), or
            put before it (image classifiers).
        batches: dicts of model inputs with targets, read once. Integer targets (n,) are classes, floating ones (n,) or
            (n, k) are regressed.
        ridge: λ >= 0 of the penalty λ‖W̄‖², scikit-learn's `alpha`; the bias is not penalised. None chooses it on every
            fifth batch and then fits to all of them, still in one pass.
        ridges: the candidates for that, as fractions of the mean squared feature deviation.
        targets: key of the targets in a batch.

    Returns:
        A HeadFit. The model's head now holds the solution, rounded to its dtype.

    Raises:
        UnsupportedError: the model has no Linear that reads pooler features.
        ConfigError: no batches, no targets in a batch, labels that do not fit the head.
        ValueError: features or targets hold NaN or infinity.

    Example:
        >>> import torch
        >>> from transformers import BertConfig, BertForSequenceClassification
        >>> from snnk_peft import PoolerPart, SNNKConfig, bundle, fit_closed_form, get_snnk_model
        >>> tiny = BertConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64)
        >>> patched = get_snnk_model(BertForSequenceClassification(tiny), SNNKConfig(pooler=PoolerPart()))
        >>> model = bundle(patched)
        >>> ids = torch.randint(0, 1000, (64, 8))
        >>> fit = fit_closed_form(model, [{"input_ids": ids, "labels": ids[:, 1] % 2}], ridge=0.1)
        >>> fit.relative_error < 1
        True
    """
    path, head, _ = bundled_head(model)
    start = time.perf_counter()
    train, held_out = (GramAccumulator(head.in_features, head.out_features) for _ in range(2))
    for index, batch in enumerate(batches):
        if targets not in batch:
            raise ConfigError(f"batch {index} has no {targets!r}; found {', '.join(sorted(batch))}")
        features = head_features(model, head, {key: value for key, value in batch.items() if key != targets})
        wanted = _as_targets(batch[targets], head.out_features).to(features.device)
        choosing = ridge is None and global_index(index) % HELD_OUT == HELD_OUT - 1
        (held_out if choosing else train).update(features, wanted)
    train.reduce()
    held_out.reduce()
    if train.count == 0 or (ridge is None and held_out.count == 0):
        need = "at least one batch" if ridge is not None else f"at least {HELD_OUT} batches, or a given ridge"
        raise ConfigError(f"batches held {train.count} examples; expected {need}")
    if ridge is None:
        chosen = fit_ridge(train, held_out, ridges).ridge
        train.merge(held_out)
        ridge = chosen * train.ridge_scale
    fit = train.solve(ridge)
    with torch.no_grad():
        head.weight.copy_(fit.weight)
        head.bias.copy_(fit.bias)  # type: ignore[arg-type]
    same_everywhere(head)
    return HeadFit(path, train.count, ridge, fit.relative_error, time.perf_counter() - start)


def bundled_head(model: nn.Module) -> tuple[str, nn.Linear, FeatureStage]:
    """Path and module of the Linear that reads pooler features, and the stage that makes them.

    Raises:
        UnsupportedError: not a bundle, or its pooler was not folded into the classifier.
    """
    if not isinstance(model, SavedBundle):
        raise UnsupportedError(f"{type(model).__name__} is not a bundle; make one with snnk_peft.bundle(model)")
    plan = model.config.snnk_plan
    if plan.get("head") is None:
        raise UnsupportedError(
            "this bundle has no Linear that reads pooler features: either its config had no pooler part, or the model "
            "calls a function between pooler and classifier (RoBERTa, DistilBERT), or it has several heads (DeiT)"
        )
    assert isinstance(model, nn.Module)
    head = model.get_submodule(plan["head"])
    stage = model.get_submodule(plan["pooler"])
    assert isinstance(head, nn.Linear)
    assert isinstance(stage, FeatureStage)
    return plan["head"], head, stage


@torch.no_grad()
def head_features(model: nn.Module, head: nn.Linear, inputs: Mapping[str, Any]) -> torch.Tensor:
    """What the head reads for these inputs, (n, features), in eval mode."""
    caught: list[torch.Tensor] = []
    hook = head.register_forward_pre_hook(lambda module, args: caught.append(args[0]))
    training = {module: module.training for module in model.modules()}
    model.eval()
    try:
        device = head.weight.device
        model(**{key: value.to(device) if isinstance(value, torch.Tensor) else value for key, value in inputs.items()})
    finally:
        hook.remove()
        for module, flag in training.items():
            module.training = flag
    return caught[0]


def _as_targets(labels: Any, width: int) -> torch.Tensor:
    labels = torch.as_tensor(labels)
    if labels.is_floating_point():
        labels = labels.reshape(len(labels), -1)
        if labels.shape[1] != width:
            raise ConfigError(f"targets have {labels.shape[1]} columns; the head has {width} outputs")
        return labels
    if width < 2 or labels.ndim != 1:
        raise ConfigError(
            f"targets are {tuple(labels.shape)} {labels.dtype} and the head has {width} outputs; expected floating "
            "targets for regression, or class indices (n,) and a head with one output per class"
        )
    return one_hot_targets(labels, width)


def head_jacobian(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """The Jacobian of a bundle's outputs in the pooler's input, W̄ diag(s f'(Gx + c)) G for features s f(Gx + c).

    Args:
        model: as for `fit_closed_form`.
        x: (..., dim) inputs of the pooler: the last hidden state of the first token.

    Returns:
        (..., outputs, dim).
    """
    _, head, stage = bundled_head(model)
    feature_map = stage.feature_map
    if not feature_map.component.elementwise():
        raise UnsupportedError(
            f"the head's features are {type(feature_map.component).__name__}, no function of each projection; the "
            "explicit Jacobian needs an elementwise component such as 'cos'. Use torch.func.jacrev instead"
        )
    if stage.normalize:
        raise UnsupportedError(
            "the head's features are those of normalised vectors, which no matrix gives; the explicit Jacobian needs "
            "inputs taken as they are. Use torch.func.jacrev instead"
        )
    width = feature_map.feature_dim
    rows, offset = stage.preactivation()
    weight = head.weight.detach()
    jacobian = bundle_jacobian(
        weight[:, :width],
        rows,
        offset,
        feature_map.component.function,
        x,
        scale=feature_map.projection.amplitudes(),
    )
    return jacobian + weight[:, width:] if stage.append_input else jacobian
