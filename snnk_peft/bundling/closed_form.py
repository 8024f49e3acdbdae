"""Training a task head without backpropagation (SNNK paper, section 3.3).

A task head is y = W̄ φ(x) + b, where φ are the pooler's features in a bundle, or the inputs of the last Linear of any
other classifier. For the squared error the best (W̄, b) is ridge regression on φ, found in one pass over the data with
moments in fp64; classes become one-hot targets.

A head that will be trained further should give logits. With p the fitted shares, π the shares of the classes and z₀ =
log π, to first order around z₀ the softmax has the shares p where

    z = z₀ + (p − π) / π,        since  ∂ softmax / ∂z = diag(π) − ππᵀ  and  Σ (p − π) = 0,

and for labels that do not exclude each other, with z₀ = log(π / (1 − π)) each, z = z₀ + (p − π) / (π (1 − π)).
"""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from snnk_peft.arguments import in_words, number_faults, numbers_faults
from snnk_peft.bundling.classes import SavedBundle
from snnk_peft.bundling.head_bundle import PROBLEMS
from snnk_peft.bundling.pooled_head import PooledHead
from snnk_peft.calibrating.batches import LabelledRows, labelled, model_inputs, of_batch
from snnk_peft.calibrating.guards import all_or_nothing, evaluating, named_padding, refuse_not_finite, refuse_overflow
from snnk_peft.calibrating.inputs import masked_tokens
from snnk_peft.errors import ConfigError, NumericalWarning, UnsupportedError
from snnk_peft.heads.features import HEAD, HeadReader
from snnk_peft.heads.fitted import HEAD_RIDGES
from snnk_peft.heads.start import Start, starting_head
from snnk_peft.heads.targets import as_tensor, class_indices, fit_notes, is_whole, require_finite
from snnk_peft.layers.feature_stage import FeatureStage
from snnk_peft.solvers.reduce import TokenSample, same_everywhere
from snnk_peft.solvers.ridge import GramAccumulator, one_hot_targets
from snnk_peft.solvers.ridge_posterior import cross_validated
from snnk_peft.tuner.given_model import refuse_inference_tensors, takes_model
from snnk_peft.tuner.slot_layer import active_module

SAMPLE = 4000  # examples that a head from `with_head` is fitted to at most


@dataclass(frozen=True)
class HeadFit:
    """Result of `fit_closed_form`.

    Args:
        head: path of the fitted Linear.
        examples: number of fitted examples, over all processes.
        ridge: the λ used, absolute (scikit-learn's alpha).
        relative_error: squared error on the fitted examples divided by the variance of the targets.
        seconds: wall time, forward passes included.
        cross_validated: squared error by generalised cross-validation, divided by the variance of the targets; only for
            a head from `with_head`.
        taken: False if that error was no smaller than 1 or than with permuted targets: the head then starts from the
            targets' mean only.
    """

    head: str
    examples: int
    ridge: float
    relative_error: float
    seconds: float
    cross_validated: float | None = None
    taken: bool = True

    def to_dict(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if value is not None}

    def __str__(self) -> str:
        found = f"head {self.head} fitted to {self.examples:,} examples in {self.seconds:.1f} s, relative error "
        found += f"{self.relative_error:.3f}"
        if self.cross_validated is not None:
            found += f", cross-validated {self.cross_validated:.3f}"
        return found if self.taken else f"{found}: no better than chance, so that it starts from the mean target"


@takes_model
def fit_closed_form(
    model: nn.Module,
    batches: Iterable[Mapping[str, Any]],
    *,
    ridge: float | None = None,
    ridges: Sequence[float] = HEAD_RIDGES,
    targets: str = "labels",
    as_logits: bool = False,
) -> HeadFit:
    """Fit the task head of a classifier to labels in one pass, in place; all or nothing, like `calibrate`.

    A head from `with_head` is fitted to a sample of at most 4,000 examples as a starting point for training: with
    enough examples per parameter, and only if it beats chance (`heads/start.py`).

    With several processes (torch.distributed initialised), each passes its own share of the batches, of any size:
    `batches[rank::world_size]` in every process fits what `batches` fits in one, up to the rounding of sums, with the
    same bits in every process.

    Args:
        model: a model whose last Linear gives the logits: from `bundle`, if the pooler was replaced and folded into the
            classifier (BERT, ELECTRA) or put before it (image classifiers); or any other classifier, patched or plain,
            which keeps its pooler as it is.
        batches: dicts of model inputs with targets, read once. Integer targets (n,) are classes, as are names in
            `config.id2label` and, for several outputs, booleans and integral floats; (n, tokens) are token classes,
            where negative ones are ignored. Other floats (n,) and all of shape (n, k) are regression targets; if
            `config.problem_type` is "multi_label_classification", ½ is then subtracted from the outputs, so that they
            are above 0 for predicted labels. Targets may be a tensor, an array, a list or columns of a table.
        ridge: λ >= 0 of the penalty λ‖W̄‖², scikit-learn's `alpha`; the bias is not penalised. None chooses it by
            generalised cross-validation, in the same pass.
        ridges: the candidates for λ, as fractions of the mean squared feature deviation.
        targets: key of the targets in a batch.
        as_logits: make the outputs for classes logits instead of the targets 0 and 1, as a start for further training.
            Predictions are the same, except that logits reflect unequal class frequencies.

    Returns:
        A HeadFit. The model's head now holds the solution, rounded to its dtype.

    Raises:
        UnsupportedError: no Linear gives the model's logits, or it has no bias.
        ConfigError: fewer than two examples, no targets in a batch, labels that do not match the head or earlier
            batches, NaN or infinity among features or targets.
        ValueError: a weight of the model is NaN or infinite.

    Warns:
        NumericalWarning: rows with two labels, features that are all the same, or classes without examples.

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
    start = time.perf_counter()
    faults = [] if ridge is None else number_faults("ridge", ridge, low=0)
    faults += numbers_faults("ridges", ridges, above=0)
    if not isinstance(targets, str):
        faults.append(f"targets is {in_words(targets)}; expected the key of the targets in a batch, such as 'labels'")
    if faults:
        raise ConfigError(faults)
    refuse_inference_tensors(model)
    refuse_not_finite(model)
    with all_or_nothing(model, ()):  # nothing is written to, but modules are switched to eval mode and get hooks
        path, head, moments, sample, of_classes = _pass(model, batches, targets)
    whole: nn.Module = head
    began: Start | None = None
    if sample is None:
        if ridge is None:
            ridge = cross_validated(moments, ridges).ridge * moments.ridge_scale
        fit = moments.solve(ridge)
        weight, bias, error = fit.weight, fit.bias, fit.relative_error
        assert bias is not None
    else:
        whole, pairs = active_module(getattr(model, HEAD)), sample.reduced()
        vectors, wanted = pairs.split([head.in_features, head.out_features], 1)
        began = starting_head(vectors, wanted, ridges=ridges if ridge is None else [ridge / len(vectors)])
        weight, bias, ridge, error = began.weight, began.bias, began.ridge * len(vectors), began.relative_error
    if as_logits and of_classes:
        counted = moments.target_mean
        shares = (counted * moments.count + 1) / (moments.count + head.out_features)  # none is 0
        weight, prior = weight / shares[:, None], shares.log()
        bias = prior - prior.mean() + (bias - counted) / shares
    elif getattr(getattr(model, "config", None), "problem_type", None) == PROBLEMS["labels"]:
        if as_logits:
            counted = moments.target_mean
            shares = (counted * moments.count + 1) / (moments.count + 2)
            slope = shares * (1 - shares)
            weight, bias = weight / slope[:, None], shares.logit() + (bias - counted) / slope
        else:
            bias = bias - 0.5
    with all_or_nothing(whole, [*whole.parameters(), *whole.buffers()]), torch.no_grad():
        head.weight.copy_(weight)
        head.bias.copy_(bias)
        if began is not None:
            whole.mean.copy_(began.mean)  # type: ignore[operator]
            whole.scale.copy_(began.scale)  # type: ignore[operator]
        same_everywhere(whole)
    seconds = time.perf_counter() - start
    if began is None:
        return HeadFit(path, moments.count, ridge, error, seconds)
    return HeadFit(path, len(pairs), ridge, error, seconds, 1 - began.explained, began.taken)


def _pass(
    model: nn.Module, batches: Iterable[Mapping[str, Any]], targets: str
) -> tuple[str, nn.Linear, GramAccumulator, TokenSample | None, bool]:
    """Run the pass.

    Returns:
        Path and module of the head; the moments; for a head from `with_head`, a sample of [vectors, targets] and the
        moments of the targets alone instead; whether targets are classes.
    """
    bundled = isinstance(model, SavedBundle) and model.config.snnk_plan.get("head") is not None
    path_and_head = bundled_head(model)[:2] if bundled else None
    sample: TokenSample | None = None
    reader: HeadReader | None = None
    pooled = active_module(getattr(model, HEAD)) if hasattr(model, HEAD) else None
    if isinstance(pooled, PooledHead) and pooled.standardized:
        sample, path_and_head = TokenSample(SAMPLE, torch.Generator().manual_seed(0)), (f"{HEAD}.linear", pooled.linear)
        reader = pooled.reader
    names = list((getattr(getattr(model, "config", None), "id2label", None) or {}).values())
    of_classes, known = False, LabelledRows()
    moments = _moments_of(path_and_head, 1 if reader else None)
    for index, inputs, given in labelled(model, batches, targets):
        path_and_head = logits_head(model, inputs) if path_and_head is None else path_and_head
        head = path_and_head[1]
        if index == 0:
            moments = _moments_of(path_and_head, 1 if reader else None)
        features = head_features(model, reader or head, inputs)
        if not bool(features.isfinite().all()):
            refuse_overflow(model, model_inputs(model, inputs), f"batch {index}")
        with of_batch(index):
            labels = as_tensor("targets", given, names)
            features, wanted, classes = _pairs(features, labels, head.out_features)
            require_finite("features", features)
        if index and classes != of_classes:
            told = ["numbers", "class indices"]
            raise ConfigError(
                f"batch {index} has targets that are {told[classes]}, those before it {told[of_classes]}; expected "
                "one kind of targets in all batches"
            )
        of_classes = classes
        if of_classes:
            known.add(inputs, labels)
        wanted = wanted.to(features.device)
        if sample is not None:
            sample.update(torch.cat([features.double(), wanted], 1))
            features = features.mean(1, keepdim=True)  # all that matters is whether it varies
        moments.update(features, wanted)
    moments.reduce()
    known.reduce()
    known.warn_if_contradicting(stacklevel=5)
    if moments.count == 0:
        raise ConfigError("batches held no examples; expected at least one batch")
    if moments.count == 1:
        raise ConfigError("batches held 1 example; expected two at least, and some dozen of every class")
    varies = bool((moments.normal_equations()[0].diagonal() > 0).any())
    for note in fit_notes(moments.count, moments.target_mean if of_classes else None, names, varies):
        warnings.warn(note, NumericalWarning, stacklevel=4)
    assert path_and_head is not None
    return *path_and_head, moments, sample, of_classes


def _moments_of(path_and_head: tuple[str, nn.Linear] | None, width: int | None) -> GramAccumulator:
    """Create empty moments for the head's inputs or `width` of them; of any size if no batch has shown the head."""
    if path_and_head is None:
        return GramAccumulator(1, 1)
    return GramAccumulator(width or path_and_head[1].in_features, path_and_head[1].out_features)


@torch.no_grad()
def logits_head(model: nn.Module, inputs: Mapping[str, Any]) -> tuple[str, nn.Linear]:
    """Find the Linear whose output is the model's logits, (n, outputs) or (n, tokens, outputs); return path and module.

    Raises:
        UnsupportedError: there is none, or it has no bias.
    """
    given: list[tuple[str, nn.Linear, torch.Tensor]] = []

    def note(path: str, linear: nn.Linear, args: object, out: torch.Tensor) -> None:
        given.append((path, linear, out))

    given_inputs = model_inputs(model, inputs)
    with contextlib.ExitStack() as hooks, evaluating(model), named_padding(model, masked_tokens(given_inputs)):
        for path, module in model.named_modules():
            if isinstance(module, nn.Linear):
                hooks.enter_context(module.register_forward_hook(partial(note, path)))
        try:
            logits = getattr(model(**given_inputs), "logits", None)
        except (AttributeError, TypeError, ValueError) as error:  # the model's code needs other inputs
            raise UnsupportedError(
                f"{type(model).__name__} does not run on {', '.join(given_inputs)} alone ({type(error).__name__}: "
                f"{error}); expected a classifier that does"
            ) from error
    for path, linear, out in reversed(given):
        if isinstance(logits, torch.Tensor) and out.shape == logits.shape and torch.equal(out, logits):
            if linear.bias is None:
                raise UnsupportedError(f"{path}, which gives the logits, has no bias to fit; expected one that has")
            return path, linear
    refuse_overflow(model, given_inputs, "the first batch")  # NaN is equal to nothing
    raise UnsupportedError(
        f"no Linear of {type(model).__name__} gives its logits; expected a classifier whose last step is one Linear, "
        "such as BERT's, or a bundle of a pooler part"
    )


def bundled_head(model: nn.Module) -> tuple[str, nn.Linear, FeatureStage]:
    """Return path and module of the Linear that reads pooler features, and the stage that computes them.

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
def head_features(model: nn.Module, head: nn.Linear | HeadReader, inputs: Mapping[str, Any]) -> torch.Tensor:
    """Compute the inputs of the head, or the outputs of its reader, for a batch, (n, features), in eval mode."""
    caught: list[torch.Tensor] = []
    given = model_inputs(model, inputs)
    if isinstance(head, HeadReader):
        note = head.register_forward_hook(lambda module, args, out: caught.append(out))
    else:
        note = head.register_forward_pre_hook(lambda module, args: caught.append(args[0]))
    with note, evaluating(model), named_padding(model, masked_tokens(given)):
        model(**given)
    return caught[0]


def _pairs(features: torch.Tensor, given: torch.Tensor, outputs: int) -> tuple[torch.Tensor, torch.Tensor, bool]:
    """Return features (n, m) and targets (n, outputs) without ignored examples, and whether targets are classes."""
    floating, shape = given.is_floating_point(), tuple(given.shape)
    if not floating and features.ndim == 3 and shape == features.shape[:2]:  # token classes; ignored ones are negative
        features, given = features[given >= 0], given[given >= 0]
    if given.shape[:1] != features.shape[:1]:
        raise ConfigError(f"targets are {shape}; expected one per example, of which there are {len(features)}")
    if floating:
        require_finite("targets", given)
    indices = outputs > 1 and given.shape[1:].numel() == 1 and (not floating or is_whole(given))
    if (floating and not indices) or given.shape[1:] == (outputs,):
        wanted = given.reshape(len(given), -1).double()
        if wanted.shape[1] != outputs:
            raise ConfigError(
                f"targets have {wanted.shape[1]} columns; the head has {outputs} outputs. Expected a column for each, "
                "or integer class indices (n,)"
            )
        return features, wanted, False
    if outputs == 1:
        raise ConfigError(
            f"targets are {shape} {given.dtype} and the head has 1 output; expected floating targets for regression, "
            "or class indices (n,) and a head with one output per class"
        )
    return features, one_hot_targets(class_indices("targets", given, outputs), outputs), True
