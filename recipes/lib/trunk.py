"""A frozen trunk that runs once: training starts from its stored outputs, so a step costs only the layers after it.

    h_k = layer_k(... layer_1(embeddings(x)))       once for every training example, stored in bf16
    loss(layer_L(... layer_{k+1}(h_k)), y)          in every step

A head over all layers (`method.head=wide`) also reads the layers below: their pooled vectors are stored in fp32.
Nothing below may be trained or random (dropout, augmentation). Evaluations run the whole model.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from snnk_cli.data import AroundExamples, ExampleSet
from snnk_cli.files import writing
from snnk_cli.models import below_cut, encoder_layers
from snnk_cli.terminal import bar
from snnk_peft.bundling.pooled_head import second_text
from snnk_peft.errors import ConfigError, UnsupportedError
from snnk_peft.heads.features import HeadReader, pooled
from snnk_peft.tuner.slot_layer import root_of

STATES, VIEWS = "trunk_states", "trunk_views"  # keys in a batch
DTYPE = torch.bfloat16  # dtype of the stored states
KEPT = "method.cut is {cut}, so the layers before it run only once"


class _Reached(Exception):  # noqa: N818 - control flow, not an error
    """Signal that ends a forward pass after the last layer of the trunk."""


class Trunk:
    """The first layers of a model, whose outputs a batch may bring along.

    Args:
        model: a transformers model or a PeftModel of one; nothing below the cut is trained.
        cut: number of layers.

    Raises:
        UnsupportedError: layers pass on more than hidden states, or run several times.
        ConfigError: the model has fewer layers, trains something below the cut, or has dropout there.
    """

    def __init__(self, model: nn.Module, cut: int):
        self.model, self.cut = model, cut
        self._bare: Any = root_of(model)
        layers = encoder_layers(self._bare, cut)
        self._check(layers)
        self._given: Tensor | None = None
        self._vectors: Tensor | None = None
        self._seen: list[Tensor] | None = None
        self._rest: tuple[None, ...] | None = None  # the rest of a layer's output after the states, if it is a tuple
        readers = [module for module in model.modules() if isinstance(module, HeadReader)]
        self.reader = readers[0] if readers else None
        # Patch the instances: modules keep their names, which checkpoints and adapters rely on.
        self._changed: list[nn.Module] = [*layers[:cut], *readers]
        for index, layer in enumerate(layers[:cut]):
            layer.forward = partial(self._run_layer, index, layer.forward)
        for reader in readers:
            reader.forward = partial(self._read, reader, reader.forward)  # type: ignore[method-assign]
        self._hooks = [
            model.register_forward_pre_hook(self._take, with_kwargs=True),
            model.register_forward_hook(self._let_go, always_call=True),
        ]

    def _check(self, layers: Sequence[nn.Module]) -> None:
        """Check that nothing below the cut is trained or random."""
        kept = KEPT.format(cut=self.cut)
        trained = [name for name, value in below_cut(self._bare, self.cut).items() if value.requires_grad]
        if trained:
            shown = ", ".join(trained[:3]) + (f" and {len(trained) - 3} more" if len(trained) > 3 else "")
            raise ConfigError(f"{kept}, but {shown} would be trained; choose only layers after the cut")
        above = {module for layer in layers[self.cut :] for module in layer.modules()}
        below = [module for module in self._bare.base_model.modules() if module not in above]
        chances = [module.p for module in below if isinstance(module, nn.modules.dropout._DropoutNd)]
        for module in below:  # attention and some families call the function instead
            chances += [value for name, value in vars(module).items() if "drop" in name and isinstance(value, float)]
        if max(chances, default=0.0) > 0:
            raise ConfigError(f"{kept}, but they have dropout of {max(chances)}; set train.dropout=0")

    def remove(self) -> None:
        """Restore the model as it was."""
        for module in self._changed:
            del module.forward
        for hook in self._hooks:
            hook.remove()
        self._changed, self._hooks = [], []

    def _take(self, model: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        kwargs = dict(kwargs)
        self._given, self._vectors = kwargs.pop(STATES, None), kwargs.pop(VIEWS, None)
        return args, kwargs

    def _let_go(self, model: nn.Module, args: Any, output: Any) -> None:
        self._given = self._vectors = None

    def _run_layer(self, index: int, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        entered: Tensor = args[0] if args else kwargs["hidden_states"]
        last = index == self.cut - 1
        if self._given is not None:
            left = self._given.to(entered.dtype) if last else entered
            return left if self._rest is None else (left, *self._rest)
        output = original(*args, **kwargs)
        if self._seen is not None:
            self._rest = output[1:] if isinstance(output, tuple) else None
            if any(value is not None for value in self._rest or ()):
                raise UnsupportedError(
                    f"{KEPT.format(cut=self.cut)}, but layer {index} returns {len(output)} values; expected only "
                    "hidden states. Leave method.cut out"
                )
            self._seen += [*([] if self._seen else [entered]), output if self._rest is None else output[0]]
            if last:
                raise _Reached
        return output

    def _below(self, reader: HeadReader) -> list[tuple[int, tuple[int, str]]]:
        """Return number, layer and pool of the reader's views whose layers are not run again."""
        views = enumerate((layer % reader.layers, pool) for layer, pool in reader.features.views)
        return [(number, view) for number, view in views if view[0] < self.cut]

    def _read(
        self,
        reader: HeadReader,
        original: Callable[..., Tensor],
        hidden_states: Sequence[Tensor],
        mask: Tensor | None = None,
        second: Tensor | None = None,
    ) -> Tensor:
        """Run `HeadReader.forward` with the vectors in the batch."""
        if self._given is None:
            return original(hidden_states, mask, second)
        below = [number for number, _ in self._below(reader)]
        known: dict[int, Tensor] = {}
        if below and self._vectors is not None:
            known = dict(zip(below, self._vectors.chunk(len(below), -1), strict=True))
        found = [
            known[number] if number in known else pooled(hidden_states[layer], mask, pool, second)
            for number, (layer, pool) in enumerate(reader.features.views)
        ]
        vectors = torch.cat(found, -1)
        return vectors if reader.stage is None else reader.stage(vectors)

    @torch.no_grad()
    def outputs(self, inputs: Mapping[str, Tensor]) -> tuple[Tensor, Tensor | None]:
        """Return h_k (B, T, width), and the head's vectors of the layers below, concatenated, (B, views · width)."""
        self._seen = []
        try:
            self._bare.base_model(**inputs)
        except _Reached:
            states = self._seen
        finally:
            self._seen = None
        below = [] if self.reader is None else self._below(self.reader)
        if self.reader is None or not below:
            return states[-1], None
        mask, second = inputs.get("attention_mask"), second_text(self.reader, self._bare.config, inputs)
        return states[-1], torch.cat([pooled(states[layer], mask, pool, second) for _, (layer, pool) in below], -1)


class StoredExamples(AroundExamples):
    """Examples whose batches also bring the trunk's outputs, once `fill` has been called; the same in every epoch.

    Attributes:
        seconds: seconds that `fill` took.
        stored: bytes stored.
    """

    def __init__(self, examples: ExampleSet):
        super().__init__(examples)
        self._states: Tensor | None = None
        self._views: Tensor | None = None
        self._ends: list[int] = []
        self.seconds, self.stored = 0.0, 0

    def batches(
        self, wanted: Sequence[Sequence[int]], device: torch.device | str = "cpu", epoch: int | None = None
    ) -> Iterator[dict[str, Tensor]]:
        for indices, inputs in zip(wanted, self.inner.batches(wanted, device), strict=True):
            yield self._with_states(indices, inputs)

    def fill(self, trunk: Trunk, batch_size: int, device: torch.device, folder: Path) -> None:
        """Run the trunk over all examples.

        Args:
            trunk: trunk on `device`.
            batch_size: examples per forward pass.
            device: target device.
            folder: the outputs go into an unnamed file here, so that memory only caches them.

        Raises:
            FileError: the disk is full.
        """
        started, was_training = time.perf_counter(), trunk.model.training
        trunk.model.eval()
        plan = list(self.by_length(batch_size))
        feed = self.inner.batches(plan, device)
        for indices, inputs in zip(bar(plan, "layers before the cut"), feed, strict=True):
            inputs.pop("labels", None)
            states, views = trunk.outputs(inputs)
            mask = inputs.get("attention_mask")
            counts = [states.shape[1]] * len(indices) if mask is None else mask.sum(1).tolist()
            if self._states is None:
                tokens = len(self) * states.shape[1] if mask is None else sum(self.lengths)
                self._states = self._mapped(folder, (tokens, states.shape[-1]), DTYPE)
                lengths = [states.shape[1]] * len(self) if mask is None else self.lengths
                self._ends = torch.tensor(lengths).cumsum(0).tolist()
                if views is not None:
                    self._views = self._mapped(folder, (len(self), views.shape[1]), torch.float32)
            real = states.flatten(0, 1) if mask is None else states[mask.bool()]
            for index, rows in zip(indices, real.to("cpu", DTYPE).split(counts), strict=True):
                self._states[self._ends[index] - len(rows) : self._ends[index]] = rows
            if views is not None and self._views is not None:
                self._views[list(indices)] = views.float().cpu()
        trunk.model.train(was_training)
        self.seconds = time.perf_counter() - started

    def _mapped(self, folder: Path, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        size = shape[0] * shape[1] * dtype.itemsize
        self.stored += size
        where = next(path for path in (folder, *folder.absolute().parents) if path.is_dir())
        with writing(where), tempfile.TemporaryFile(dir=where) as file:
            if hasattr(os, "posix_fallocate"):  # a full disk is reported here, not when a page is written
                os.posix_fallocate(file.fileno(), 0, size)
            else:
                file.truncate(size)
            return torch.frombuffer(mmap.mmap(file.fileno(), size), dtype=dtype).view(shape)

    def _with_states(self, indices: Sequence[int], inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        if self._states is None:
            return inputs
        starts = [self._ends[index - 1] if index else 0 for index in indices]
        rows = torch.cat(
            [self._states[start : self._ends[index]] for start, index in zip(starts, indices, strict=True)]
        )
        device, mask = inputs["labels"].device, inputs.get("attention_mask")
        if mask is None:
            states = rows.view(len(indices), -1, rows.shape[-1])
        else:
            states = rows.new_zeros(*mask.shape, rows.shape[-1])
            states[mask.bool().cpu()] = rows
        extra = {} if self._views is None else {VIEWS: self._views[list(indices)].to(device)}
        return {**inputs, STATES: states.to(device), **extra}
