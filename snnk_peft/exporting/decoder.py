"""A converted decoder as a program for one token, whose state is passed in and out.

    logits (B, 1, V), present.* = program(input_ids (B, 1), attention_mask (B, 1), past.*)

`past.*` is what a RecurrentCache holds of each layer: means and weights of far keys, the window, the sinks, the number
of tokens so far, and all keys and values of heads that keep softmax, whose token axis starts at length 0. Zeros are the
state before the first token. Every row has a text of its own: where `attention_mask` is 0, a row's token does not
count. The logits are for the token after the one that was read. Tested against passes over whole texts in
tests/package/test_export_decoder.py.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from snnk_peft.errors import UnsupportedError
from snnk_peft.exporting.program import Inputs, onnx_options, quiet
from snnk_peft.functional.log_linear import ABSENT
from snnk_peft.parts.attention.cache import RecurrentCache

PAST, PRESENT = "past.", "present."
TOKENS = 4  # of the traced sample
GROWING = ("keys", "values", "counts")  # fields of a FullState whose token axis grows


class Entry(NamedTuple):
    """One tensor of the state.

    Attributes:
        name: its path, such as "0.band.keys".
        axis: the axis that grows with the tokens, or None.
    """

    name: str
    axis: int | None


class Step(nn.Module):
    """`forward(input_ids, attention_mask, *past)` of a model in eval mode; see the module's docstring.

    Args:
        model: a bundle with linear attention in all layers.

    Attributes:
        entries: entries of the state, in the order of `past`.

    Raises:
        UnsupportedError: a model that does not generate; a layer whose state grows, or is not constant otherwise.
    """

    def __init__(self, model: Any):
        super().__init__()
        if not model.can_generate():
            raise UnsupportedError(
                f"cache=True writes a language model that generates, and {type(model).__name__} answers once per text: "
                "leave cache out"
            )
        self.model = model
        cache = self._cache()
        ids = torch.ones(2, TOKENS, dtype=torch.long, device=model.device)
        with torch.no_grad():
            model(input_ids=ids, attention_mask=torch.ones_like(ids), past_key_values=cache)
        self.states = [getattr(layer, "state", None) for layer in cache.layers]
        if wrong := [number for number, state in enumerate(self.states) if not hasattr(_joint(state), "place")]:
            raise UnsupportedError(
                f"cache=True needs a state of constant size in every layer, and that of layers {wrong} of "
                f"{type(model).__name__} is not: expected what convert(model, texts, cache=...) makes, or an "
                'AttentionPart with near_field and near_field_normalisation="joint" in all layers'
            )
        self.entries = [entry for number, state in enumerate(self.states) for entry in _entries(state, f"{number}")]

    def _cache(self) -> Any:
        # A bundle's own code file has a class of the same name.
        kernels = [getattr(module, "snnk_kernel", None) for module in self.model.modules()]
        code = sys.modules[type(next((kernel for kernel in kernels if kernel is not None), self)).__module__]
        return getattr(code, RecurrentCache.__name__, RecurrentCache)(self.model)

    def first(self) -> Inputs:
        """Return a token for each of two rows."""
        ids = torch.ones(2, 1, dtype=torch.long, device=self.model.device)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

    def sample(self) -> tuple[Tensor, ...]:
        """Return arguments of `forward` after some tokens."""
        return *self.first().values(), *(tensor for state in self.states for tensor in _tensors(state))

    def again(self, **first: Tensor) -> None:
        """Repeat the same step, for timing."""
        self(*first.values(), *self.sample()[2:])

    def free(self) -> dict[str, list[int]]:
        """Return the axes of the program's inputs that may have any size."""
        found = {PAST + entry.name: [0] if entry.axis is None else [0, entry.axis] for entry in self.entries}
        return {"input_ids": [0], "attention_mask": [0], **found}

    def maps(self) -> set[tuple[int, ...]]:
        """Return the shapes of the matrices of feature maps."""
        joints = [_joint(state) for state in self.states]
        return {(joint.band.keys.shape[-1], each.values.shape[-2]) for joint in joints for each in joint.sums}

    def start(self, batch: int) -> list[Tensor]:
        """Return the state before the first token."""
        found = []
        for entry, tensor in zip(self.entries, self.sample()[2:], strict=True):
            shape = [batch, *tensor.shape[1:]]
            if entry.axis is not None:
                shape[entry.axis] = 0
            found.append(tensor.new_zeros(shape))
        return found

    def forward(self, input_ids: Tensor, attention_mask: Tensor, *past: Tensor) -> tuple[Tensor, ...]:
        """Return the logits, and the state after the token."""
        cache, given = self._cache(), iter(past)
        states = [_rebuilt(template, given) for template in self.states]
        for layer, state in zip(cache.layers, states, strict=True):
            layer.state = _begun(state)
        place = _joint(states[0]).place
        out = self.model(
            input_ids=input_ids, attention_mask=attention_mask, position_ids=place[:, None], past_key_values=cache
        )
        return out.logits, *(tensor for layer in cache.layers for tensor in _tensors(layer.state))

    def traced(self, opset: int | None) -> Any:
        """Return the graph, for any number of rows and of earlier tokens."""
        auto = torch.export.Dim.AUTO
        axes: list[dict[int, Any]] = [{0: auto} | ({} if e.axis is None else {e.axis: auto}) for e in self.entries]
        names = [entry.name for entry in self.entries]
        with quiet():
            made = torch.onnx.export(
                self,
                self.sample(),
                dynamo=True,
                opset_version=opset,
                input_names=["input_ids", "attention_mask", *(PAST + name for name in names)],
                output_names=["logits", *(PRESENT + name for name in names)],
                dynamic_shapes=({0: auto}, {0: auto}, tuple(axes)),
            )
        assert made is not None
        return made.model


class Session:
    """The program in a file, run from the first token on.

    Args:
        file: the file that `traced` was written to.
        steps: the traced module.
    """

    def __init__(self, file: Path, steps: Step):
        import onnxruntime

        self.session, self.steps = onnxruntime.InferenceSession(str(file), onnx_options()), steps
        self.names = [entry.name for entry in steps.entries]
        self.asked = {entry.name for entry in self.session.get_inputs()}
        self.last: dict[str, Any] = {}

    def __call__(self, input_ids: Tensor, attention_mask: Tensor, **others: Any) -> dict[str, Tensor]:
        """Return the logits (B, L, V) of L tokens, one after the other."""
        past, found = [tensor.numpy() for tensor in self.steps.start(len(input_ids))], []
        for place in range(input_ids.shape[1]):
            now = slice(place, place + 1)
            feeds = dict(zip((PAST + name for name in self.names), past, strict=True))
            feeds |= {"input_ids": input_ids[:, now].numpy(), "attention_mask": attention_mask[:, now].numpy()}
            self.last = {name: value for name, value in feeds.items() if name in self.asked}
            logits, *past = self.session.run(None, self.last)
            found.append(torch.from_numpy(logits))
        return {"logits": torch.cat(found, 1)}

    def again(self, **first: Tensor) -> None:
        """Repeat the last step, for timing."""
        self.session.run(None, self.last)


def texts(model: Any, steps: Step) -> list[Inputs]:
    """Return random texts that are longer than every window, of one row and of three."""
    generator, vocabulary = torch.Generator().manual_seed(0), model.config.get_text_config().vocab_size
    reach = max(_joint(state).band.keys.shape[2] + _joint(state).sinks.keys.shape[2] for state in steps.states)
    shapes = [(rows, 2 * reach + 8) for rows in (1, 3)]
    drawn = [torch.randint(vocabulary, shape, generator=generator) for shape in shapes]
    return [{"input_ids": ids, "attention_mask": torch.ones_like(ids)} for ids in drawn]


def _joint(state: Any) -> Any:
    """Return the state of the heads that are not full."""
    return getattr(state, "rest", state)


def _begun(state: Any) -> Any:
    """Return the state with zero weight for far keys before the first token, whatever the zeros mean."""
    joint = _joint(state)
    none = (joint.place == 0)[:, None, None]
    sums = tuple(each._replace(log_weight=each.log_weight.masked_fill(none, ABSENT)) for each in joint.sums)
    joint = joint._replace(sums=sums)
    return state._replace(rest=joint) if hasattr(state, "rest") else joint


def _entries(state: Any, path: str, growing: bool = False) -> Iterator[Entry]:
    if isinstance(state, Tensor):
        # (B, heads, tokens, d), or counts (B, tokens)
        yield Entry(path, None if not growing else 1 if state.dim() == 2 else 2)
    elif isinstance(state, tuple):
        names: Sequence[str] = getattr(state, "_fields", [str(number) for number in range(len(state))])
        full = hasattr(state, "rest")
        for name, part in zip(names, state, strict=True):
            yield from _entries(part, f"{path}.{name}", growing or (full and name in GROWING))


def _tensors(state: Any) -> Iterator[Tensor]:
    if isinstance(state, Tensor):
        yield state
    elif isinstance(state, tuple):
        for part in state:
            yield from _tensors(part)


def _rebuilt(template: Any, given: Iterator[Tensor]) -> Any:
    """Rebuild a state of the template's form from its tensors, in order."""
    if isinstance(template, Tensor):
        return next(given)
    if isinstance(template, tuple):
        parts = [_rebuilt(part, given) for part in template]
        return type(template)(*parts) if hasattr(template, "_fields") else tuple(parts)
    return template
