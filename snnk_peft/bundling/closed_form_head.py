"""Task heads for pretrained Transformers without backpropagation: one forward pass, additive statistics, a plain model.

    head = ClosedFormHead(model, HeadFeatures([(2, "mean"), (4, "mean"), (-1, "mean"), (-1, "max")]))
    head.add(batches)                # one pass; more may come later, and head.merge(other) takes those of a shard
    head.remove(their_batches)       # as if they had never been counted
    fitted = head.fit()              # scores, probabilities, variances, leave-one-out errors
    model = head.bundle()            # a transformers model with this head, for pipelines and the Hub

The head is ridge regression on features of the hidden states (`HeadFeatures`, heads/), so only moments of the examples
are kept: width² values for any number of examples.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from snnk_peft.arguments import in_words
from snnk_peft.bundling.bundle import TOLERANCES
from snnk_peft.bundling.head_bundle import PROBLEMS, classifier_with, encoder_and_reader, head_report
from snnk_peft.bundling.pooled_head import PooledHead, as_pairs, hidden_states_of, second_text
from snnk_peft.bundling.report import probe_inputs
from snnk_peft.calibrating.batches import LabelledRows, checked_one, labelled, model_inputs, of_batch
from snnk_peft.calibrating.guards import evaluating, refuse_not_finite
from snnk_peft.digests import tensor_digest, value_digest
from snnk_peft.errors import ConfigError, UnsupportedError
from snnk_peft.heads.features import HeadFeatures
from snnk_peft.heads.fitted import HEAD_RIDGES, FittedHead
from snnk_peft.heads.statistics import HeadStatistics
from snnk_peft.solvers.reduce import TokenSample, gathered
from snnk_peft.tuner.given_model import outside_inference_mode

SAMPLE = 512  # examples whose vectors are kept for the temperature
ROUNDINGS = 64  # roundings by which a variance of computed features may change with the other examples in a batch


class ClosedFormHead:
    """A task head fitted in closed form: accumulates examples, solves for the head, and puts it on the model.

    Args:
        model: a transformers model: an encoder, or one with any head, which is not used. Not changed.
        features: what the head reads; the mean over the tokens of the last layer if None.
        kind: "classes", "labels" (any number of them per example) or "numbers" (regression).
        names: names of the classes, labels or outputs; those in `model.config.id2label` if None.
        remember: keep a digest of every example, so that `remove` rejects one that was not counted; see
            `HeadStatistics`.

    Attributes:
        statistics: statistics of the examples counted so far. They can be saved, loaded, merged and subtracted.
        fitted: the result of `fit`, or None; examples counted or removed later are not part of it.

    Raises:
        ConfigError: a layer that the model does not have; an unknown kind; fewer than two classes; repeated names.
        UnsupportedError: not a transformers model, a patched one, or one without one vector per token.

    Example:
        >>> import torch
        >>> from transformers import BertConfig, BertModel
        >>> from snnk_peft import ClosedFormHead, HeadFeatures
        >>> tiny = BertConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64)
        >>> head = ClosedFormHead(BertModel(tiny), HeadFeatures([(1, "mean"), (-1, "max")]), names=["even", "odd"])
        >>> ids = torch.randint(0, 1000, (64, 8))
        >>> head.add([{"input_ids": ids, "labels": ids[:, 1] % 2}])
        64
        >>> head.fit().report.examples
        64
        >>> head.bundle().config.id2label
        {0: 'even', 1: 'odd'}
    """

    @outside_inference_mode
    def __init__(
        self,
        model: nn.Module,
        features: HeadFeatures | None = None,
        *,
        kind: str = "classes",
        names: Sequence[str] | None = None,
        remember: bool = False,
    ):
        faults: list[str] = []
        if not isinstance(features, (HeadFeatures, type(None))):
            instead = "names=[...]" if _are_texts(features) else "HeadFeatures([(-1, 'mean')])"
            faults.append(f"features is {in_words(features)}; expected HeadFeatures or None. Give {instead}")
        if names is not None and not isinstance(names, Iterable):
            faults.append(f"names is {in_words(names)}; expected a list of texts, one per class, label or number")
        if faults:
            raise ConfigError(faults)
        self.model, self.reader = encoder_and_reader(model, features)
        self.features: HeadFeatures = self.reader.features
        self.encoder: nn.Module = self.model.base_model
        self.names = _checked(names if names is not None else (self.model.config.id2label or {}).values())
        origin = {"weights": _digest(self.encoder), "features": self.features.to_dict(), "names": self.names}
        self.statistics = HeadStatistics(self.reader.out_dim, len(self.names), kind, origin, remember)
        self.fitted: FittedHead | None = None
        self._sample: TokenSample | None = None

    @torch.no_grad()
    def vectors(self, inputs: Mapping[str, Any]) -> Tensor:
        """Compute the inputs of the head for a batch, (examples, width), in eval mode.

        Raises:
            UnsupportedError: the model returns no hidden states with one vector per token.
        """
        given = model_inputs(self.model, checked_one(self.model, inputs, "inputs"))
        with evaluating(self.encoder):
            _, states, mask = hidden_states_of(self.encoder, given)
        if len(states) != self.reader.layers or states[-1].shape[-1] != self.reader.hidden:
            raise UnsupportedError(
                f"{type(self.encoder).__name__} gives {len(states)} hidden states of width {states[-1].shape[-1]}; its "
                f"config promises {self.reader.layers} of width {self.reader.hidden}"
            )
        return self.reader(states, mask, second_text(self.reader, self.model.config, given))

    def _counted(
        self, batches: Iterable[Mapping[str, Any]], targets: str
    ) -> tuple[HeadStatistics, TokenSample, LabelledRows]:
        """Accumulate separate statistics of the batches, so that a fault in a late batch discards all of them."""
        refuse_not_finite(self.encoder)
        counted, known = self.statistics.empty(), LabelledRows()
        sample = TokenSample(SAMPLE, torch.Generator().manual_seed(0))
        for index, inputs, given in labelled(self.model, batches, targets):
            vectors = self.vectors(inputs)
            with of_batch(index):
                wanted = counted.targets(given)
                counted.add(vectors, given)
            sample.update(torch.cat([vectors.double().cpu(), wanted.cpu()], 1))
            if counted.kind != "numbers":
                known.add(inputs, wanted)
        return counted, sample, known

    @outside_inference_mode
    def add(self, batches: Iterable[Mapping[str, Any]], targets: str = "labels") -> int:
        """Count examples, in one forward pass.

        Args:
            batches: dicts of model inputs with targets: class indices or `names` (n,), labels (n, outputs) of zeros and
                ones, or numbers (n,) or (n, outputs), in a tensor, an array, a list or columns of a table. Read once.
            targets: key of the targets.

        Returns:
            The number of examples counted.

        Raises:
            ConfigError: missing or unsuitable targets in a batch, NaN or infinity; nothing is counted then.

        Warns:
            NumericalWarning: rows among these batches with two labels.
        """
        counted, sample, known = self._counted(batches, targets)
        known.warn_if_contradicting(stacklevel=4)
        self.statistics.merge(counted)
        self._keep(sample)
        return counted.count

    def _keep(self, sample: TokenSample | None) -> None:
        """Keep the larger of two samples; an empty one too, so that every process of a group has one."""
        if self._sample is None or (sample is not None and sample.count > self._sample.count):
            self._sample = sample

    @outside_inference_mode
    def remove(self, batches: Iterable[Mapping[str, Any]], targets: str = "labels") -> int:
        """Remove examples that were counted here or in merged statistics; arguments as in `add`.

        The head is then that of the other examples, up to rounding: pass the rows in the batches in which they were
        counted, because a model's last bits depend on the batch. Columns in which the others differ by no more than
        such bits are then ignored. All vectors kept for the temperature are dropped as well.

        Only `remember` verifies that the rows were counted. Without it, foreign rows are detected if they leave a class
        with a negative count or a column with a negative variance; otherwise the result is the head of no set of
        examples.

        Returns:
            The number of examples removed.

        Raises:
            ConfigError: as in `add`, or examples that cannot have been counted; nothing is removed then.
        """
        counted = self._counted(batches, targets)[0]
        same_bits = counted.digests is not None
        eps = torch.finfo(torch.promote_types(self.model.dtype, torch.float32)).eps
        self.statistics.take_away(counted, 0.0 if same_bits else ROUNDINGS * eps)
        self._sample = None
        return counted.count

    @outside_inference_mode
    def merge(self, other: ClosedFormHead | HeadStatistics | str | os.PathLike[str]) -> None:
        """Add the examples counted by another head; also accepts statistics, or their file.

        Raises:
            ConfigError: the statistics are of another model or other features, or damaged.
        """
        if isinstance(other, (str, os.PathLike)):
            other = HeadStatistics.load(other)
        if not isinstance(other, ClosedFormHead):
            self.statistics.merge(other)
        else:
            self.statistics.merge(other.statistics)
            self._keep(other._sample)

    @outside_inference_mode
    def reduce(self) -> None:
        """Count the examples of all other processes as well; every process must call this, once, after its `add`."""
        self.statistics.reduce()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the statistics to a safetensors file, for `merge` here or on another machine."""
        self.statistics.save(path)

    @outside_inference_mode
    def fit(
        self,
        examples: Iterable[Mapping[str, Any]] | None = None,
        *,
        ridges: Sequence[float] = HEAD_RIDGES,
        targets: str = "labels",
    ) -> FittedHead:
        """Solve for the head that best fits all counted examples.

        Args:
            examples: batches of a few hundred counted examples, for the temperature of probabilities; those that `add`
                kept if None.
            ridges: candidates among which generalised cross-validation chooses; see `FittedHead`.
            targets: key of the targets.

        Raises:
            ConfigError: no examples were counted; ridges that are not positive numbers.
        """
        fitted = FittedHead(self.statistics, ridges)
        if fitted.kind != "numbers":
            pairs = (
                self._kept()
                if examples is None
                else [(self.vectors(inputs), given) for _, inputs, given in labelled(self.model, examples, targets)]
            )
            if pairs:
                fitted.temper(pairs)
            fitted.temperature = gathered(fitted.temperature)[0]
        self.fitted = fitted
        return fitted

    def _kept(self) -> list[tuple[Tensor, Tensor]]:
        """Return vectors and targets of the sample that `add` kept."""
        if self._sample is None:
            return []
        vectors, wanted = self._sample.reduced().split([self.reader.out_dim, len(self.names)], 1)
        return [(vectors, wanted.argmax(1) if self.statistics.kind == "classes" else wanted)]

    @outside_inference_mode
    def bundle(self) -> Any:
        """Return the model with this head, in eval mode, sharing no memory with `model`.

        Returns:
            A `PreTrainedModel` for sequence or image classification; `save_pretrained` writes a folder that loads with
            the Auto classes and pipelines after `import snnk_peft`, or without it under `trust_remote_code=True`.

        Raises:
            ConfigError: nothing was fitted, or the temperature of the probabilities is unknown.
            UnsupportedError: transformers has no classifier of this architecture.
            ValueError: its logits are not those of the fitted head, to the precision of its dtype.
        """
        fitted = self.fitted
        if fitted is None:
            raise ConfigError("nothing was fitted; call fit() first")
        temperature, shift = 1.0, 0.0
        if fitted.kind != "numbers":
            if fitted.temperature is None:
                raise ConfigError(
                    "the temperature of the probabilities is not known, because no vectors are kept of what was merged "
                    "or after something was forgotten; call fit(examples=batches) with some hundred counted examples"
                )
            temperature, shift = fitted.temperature, 0.5 if fitted.kind == "labels" else 0.0
        head = PooledHead(copy.deepcopy(self.reader), len(self.names))
        with torch.no_grad():
            head.linear.weight.copy_(temperature * fitted.weight)
            head.linear.bias.copy_(temperature * (fitted.bias - shift))
        made = classifier_with(self.model, head, self.names, PROBLEMS[fitted.kind])
        error = self._difference(made, temperature, shift)
        tolerance = TOLERANCES.get(self.model.dtype, 1e-5)
        if not error <= tolerance:
            raise ValueError(
                f"the bundle's logits differ from the fitted head's by {error:.1e} of the largest; expected at most "
                f"{tolerance:.0e}. Load the model in float32"
            )
        report = head_report(self.model, made, error, tolerance)
        report.remarks.append("the head was fitted in closed form (ridge regression)")
        made.config.snnk_plan["report"] = report.to_dict()
        return made

    @torch.no_grad()
    def _difference(self, made: nn.Module, temperature: float, shift: float) -> float:
        """Compare the logits of bundle and fitted head on random inputs; return the relative error."""
        assert self.fitted is not None
        inputs = probe_inputs(self.model)
        if self.reader.features.of_pairs:
            inputs = as_pairs(inputs, self.model.config)
        wanted = temperature * (self.fitted.scores(self.vectors(inputs)) - shift)
        return float((made(**inputs).logits - wanted).abs().max() / wanted.abs().max().clamp_min(1e-12))


def _are_texts(given: object) -> bool:
    return isinstance(given, (list, tuple)) and all(isinstance(each, str) for each in given)


def _checked(names: Any) -> list[str]:
    """Return the names; raise ConfigError unless they are distinct strings."""
    texts = [] if isinstance(names, str) else [str(name) for name in names]
    if len(set(texts)) < max(1, len(texts)):
        raise ConfigError(f"names is {names!r}; expected different texts, one per class, label or number")
    return texts


def _digest(encoder: nn.Module) -> str:
    """Compute a digest of all tensors but the pooler's, which are unused and often random."""
    tensors = {name: tensor for name, tensor in encoder.state_dict().items() if not name.startswith("pooler.")}
    return value_digest({name: tensor_digest(tensor) for name, tensor in tensors.items()})
