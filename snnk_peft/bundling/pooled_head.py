"""Bundles whose task head reads pooled hidden states of any layers; the original reads one vector of the last layer.

    pooled_head     logits = A φ + a,  φ of heads/features.py      spec: views, stage, width, layers, outputs,
                    or A (φ − mean) · scale + a                     standardized

Modules of transformers pass on one tensor, and this head reads several, so the model has a `forward` of its own, with
the arguments of the original's. Part of the code file of bundles that have such a head.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers.loss.loss_utils import ForSequenceClassificationLoss
from transformers.modeling_outputs import SequenceClassifierOutput

from snnk_peft.bundling.modules import ADDITIONS, BUILDERS, BundledModel, Spec
from snnk_peft.bundling.plan import FIELDS, SIZE, YES_OR_NO, or_none, stage_faults
from snnk_peft.errors import ConfigError, UnsupportedError
from snnk_peft.functional.precision import full_precision
from snnk_peft.heads.features import HeadFeatures, HeadReader
from snnk_peft.layers.feature_stage import FeatureStage


class PooledHead(nn.Module):
    """A linear head over the output of a `HeadReader`, standardised first if it will be trained.

    One learning rate then suits all columns, whose standard deviations differ by orders of magnitude.
    """

    mean: Tensor
    scale: Tensor

    def __init__(self, reader: HeadReader, outputs: int, standardized: bool = False):
        super().__init__()
        self.reader, self.linear, self.standardized = reader, nn.Linear(reader.out_dim, outputs), standardized
        if standardized:
            self.register_buffer("mean", torch.zeros(reader.out_dim))
            self.register_buffer("scale", torch.ones(reader.out_dim))

    def forward(
        self, hidden_states: tuple[Tensor, ...], mask: Tensor | None = None, second: Tensor | None = None
    ) -> Tensor:
        """Return (B, outputs), arguments as for `HeadReader`; without autocast, which loses precision in sums."""
        with full_precision(hidden_states[0]):
            vectors = self.reader(hidden_states, mask, second)
            if self.standardized:
                vectors = (vectors - self.mean) * self.scale
            return self.linear(vectors.to(self.linear.weight.dtype))

    def spec(self) -> Spec:
        """Return plain data from which the module can be rebuilt."""
        features, stage = self.reader.features, self.reader.stage
        return {
            "kind": "pooled_head",
            "views": [list(view) for view in features.views],
            "stage": None if stage is None else stage.spec(),
            "width": self.reader.hidden,
            "layers": self.reader.layers,
            "outputs": self.linear.out_features,
            **({"standardized": True} if self.standardized else {}),
        }


def hidden_states_of(encoder: nn.Module, inputs: Mapping[str, Any]) -> tuple[Any, tuple[Tensor, ...], Tensor | None]:
    """Return the outputs of an encoder, its hidden states and the matching mask.

    Raises:
        UnsupportedError: it returns no hidden states with one vector per token, or fewer of them than the mask has
            tokens.
    """
    outputs = encoder(**{**inputs, "output_hidden_states": True, "return_dict": True})
    states, mask = outputs.get("hidden_states"), inputs.get("attention_mask")
    name = type(encoder).__name__
    if not states or any(state.ndim != 3 or state.shape != states[-1].shape for state in states):
        shapes = [tuple(state.shape) for state in states or ()]
        raise UnsupportedError(
            f"the hidden states of {name} are {shapes or 'missing'}; expected (examples, tokens, width) of every layer"
        )
    if mask is not None and mask.shape != states[-1].shape[:2]:
        raise UnsupportedError(
            f"attention_mask is {tuple(mask.shape)} and the hidden states of {name} are {tuple(states[-1].shape)}; "
            "expected (examples, tokens) and (examples, tokens, width)"
        )
    return outputs, states, mask


def separator_of(config: Any) -> int | None:
    """Return the token that separates two texts, if the model's config defines one."""
    tokens = [getattr(config, name, None) for name in ("sep_token_id", "eos_token_id")]
    return next((value for value in tokens if isinstance(value, int)), None)


def second_text(reader: HeadReader, config: Any, inputs: Mapping[str, Any]) -> Tensor | None:
    """Return the mask of the second text's tokens, (B, L) bool; None for a reader that does not need it.

    These are the tokens with token type 1; in a model without token types, those after the first separator.

    Raises:
        UnsupportedError: the second text cannot be identified.
    """
    if not reader.features.of_pairs:
        return None
    types: Tensor | None = inputs.get("token_type_ids")
    if types is not None:
        return types == 1
    ids: Tensor | None = inputs.get("input_ids")
    separator = separator_of(config)
    if ids is None or separator is None:
        raise UnsupportedError(
            "the head reads pairs of texts, and nothing marks the tokens of the second one; expected "
            "token_type_ids, or input_ids and the separator in config.sep_token_id or config.eos_token_id"
        )
    separates = (ids == separator).int()
    return separates.cumsum(1) - separates > 0


def as_pairs(inputs: dict[str, Tensor], config: Any) -> dict[str, Tensor]:
    """Mark the second half of the inputs as the second text, in the form that `second_text` reads."""
    ids, separator = inputs["input_ids"], separator_of(config)
    half = ids.shape[1] // 2
    if separator is None:
        types = (torch.arange(ids.shape[1], device=ids.device) >= half).long().expand_as(ids)
        return inputs | {"token_type_ids": types}
    ids = ids.clone()
    ids[:, half] = separator
    return inputs | {"input_ids": ids}


class PooledHeadModel(BundledModel):
    """Mixin of bundle classes with a PooledHead at `snnk_head` instead of the original pooler and head."""

    snnk_head: PooledHead

    def predict(self, inputs: dict[str, Any]) -> SequenceClassifierOutput | tuple[Any, ...]:
        labels, plain = inputs.pop("labels", None), inputs.pop("return_dict", None) is False
        shown = inputs.pop("output_hidden_states", None)
        shown = self.config.output_hidden_states if shown is None else shown
        encoder: nn.Module = self.base_model  # type: ignore[attr-defined]
        outputs, states, mask = hidden_states_of(encoder, inputs)
        logits = self.snnk_head(states, mask, second_text(self.snnk_head.reader, self.config, inputs))
        loss = None
        if labels is not None:
            # transformers' loss reads the kind from the config, as in every classifier of its own
            loss = ForSequenceClassificationLoss(labels, logits, self.config)
        made = SequenceClassifierOutput(
            loss=loss,
            logits=logits,
            hidden_states=states if shown else None,
            attentions=outputs.get("attentions"),
        )
        return made.to_tuple() if plain else made


def forward_like(original: type[Any]) -> Callable[..., Any]:
    """Return the `forward` of a PooledHeadModel with the original's signature, which Trainer and pipelines inspect."""
    signature = inspect.signature(original.forward)
    names = list(signature.parameters)[1:]

    def forward(self: PooledHeadModel, *args: Any, **kwargs: Any) -> Any:
        return self.predict({**dict(zip(names, args, strict=False)), **kwargs})

    # No functools.wraps: accelerate removes its wrappers by following __wrapped__, and would follow this one too.
    forward.__signature__ = signature  # type: ignore[attr-defined]
    forward.__doc__ = original.forward.__doc__
    return forward


def _pooled_head(spec: Spec, present: nn.Module) -> nn.Module:
    reader = HeadReader(HeadFeatures([tuple(view) for view in spec["views"]]), spec["width"], spec["layers"])
    if spec["stage"] is not None:
        reader.stage = FeatureStage.from_spec(spec["stage"])
    return PooledHead(reader, spec["outputs"], spec.get("standardized", False))


def _view_faults(where: str, views: Any) -> list[str]:
    try:
        HeadFeatures(views)
    except ConfigError as error:
        return [f"{where}: {error}"]
    return []


FIELDS["pooled_head"] = {
    "views": _view_faults,
    "stage": or_none(stage_faults),
    "width": SIZE,
    "layers": SIZE,
    "outputs": SIZE,
    "standardized": YES_OR_NO,
}
BUILDERS["pooled_head"] = _pooled_head
ADDITIONS.add("pooled_head")
