"""Hidden states on disk, from which a pass over the batches starts at the layer of its slot.

Slots are fitted front to back: the inputs of a layer no longer change once everything before it is fitted. Without
stored inputs the passes for a model of L layers run L² / 2 layers, with them L. Only the hidden state of each batch is
stored; the model computes everything else itself (masks, positions), while its earlier layers pass their inputs
through. The first batch of every pass runs both ways, and if the inputs of the slot differ, all batches run in full
from then on; so does a batch that is not the one that was stored.
"""

from __future__ import annotations

import contextlib
import hashlib
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from snnk_peft.errors import UnsupportedError
from snnk_peft.families import family_of
from snnk_peft.tuner.slot_layer import original_path

Run = Callable[[int, Mapping[str, Any]], object]


class _Seen(Exception):  # noqa: N818 - control flow, not an error
    """Exception that ends a run which only records a slot's input."""


class StoredInputs:
    """Store of the hidden states that enter layers, batch by batch; a context manager that deletes them on exit.

    The converted model and the original each have a stream of their own.

    Args:
        root: the transformers model inside PEFT's wrapper; a model of an unknown family always runs in full.

    Attributes:
        usable: whether passes may be shortened.
    """

    def __init__(self, root: nn.Module):
        self.paths: list[str] = []
        with contextlib.suppress(UnsupportedError):
            self.paths = family_of(root).layer_paths(root)
        self.layers = [root.get_submodule(path) for path in self.paths]
        self.usable = True
        # (stream, batch) -> the layer whose input is stored, digest of the batch
        self._kept: dict[tuple[str, int], tuple[int, bytes]] = {}

    def __enter__(self) -> StoredInputs:
        self._folder = tempfile.TemporaryDirectory(prefix="snnk-calibrate-")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._folder.cleanup()

    @contextlib.contextmanager
    def one_pass(
        self, model: Callable[..., Any], name: str, slot: nn.Module, runs: int, stream: str = "converted"
    ) -> Iterator[Run]:
        """Provide a function (batch index, inputs) that runs the model up to a slot, for one pass over the batches.

        Everything before the slot must already be in its final state.
        """
        path = original_path(name)
        inside = [index for index, layer in enumerate(self.paths) if f"{path}.".startswith(f"{layer}.")]
        known = [layer for (of, _), (layer, _) in self._kept.items() if of == stream]
        if runs > 1 or not self.usable or not (inside or known):
            yield lambda index, inputs: model(**inputs)
            return
        # After the last layer (a pooler) nothing further is stored.
        one = _Pass(self, model, slot, inside[0] if inside else max(known), stream)
        with self.layers[one.layer].register_forward_pre_hook(one.keep, with_kwargs=True):
            yield one.run

    def load(self, batch: tuple[str, int], digest: bytes, layer: int) -> tuple[int, torch.Tensor] | None:
        """Return the last layer up to `layer` with a stored input for this batch, and this input, or None."""
        kept = self._kept.get(batch)
        if kept is None or kept[1] != digest or kept[0] > layer:
            return None
        return kept[0], load_file(self._file(batch))["hidden"]

    def save(self, batch: tuple[str, int], digest: bytes, layer: int, hidden: torch.Tensor) -> None:
        """Store the input of a layer, replacing the earlier one of this batch."""
        if self._kept.get(batch) == (layer, digest):
            return
        try:
            save_file({"hidden": hidden.detach().contiguous().cpu()}, self._file(batch))
        except (OSError, SafetensorError) as error:
            self.usable = False
            warnings.warn(
                f"what layers are given cannot be stored in {self._folder.name} ({error}), so every pass of calibrate "
                f"runs the model from its start, which takes longer; {hidden.nbytes:,} bytes per batch are needed. Set "
                "TMPDIR to a folder with more room",
                RuntimeWarning,
                stacklevel=2,
            )
            return
        self._kept[batch] = layer, digest

    def _file(self, batch: tuple[str, int]) -> Path:
        return Path(self._folder.name) / f"{batch[0]}-{batch[1]}.safetensors"


class _Pass:
    """One pass; see `StoredInputs.one_pass`."""

    def __init__(self, store: StoredInputs, model: Callable[..., Any], slot: nn.Module, layer: int, stream: str):
        self.store, self.model, self.slot, self.layer, self.stream = store, model, slot, layer, stream
        self.checked = False
        self.now: tuple[tuple[str, int], bytes] = (stream, 0), b""

    def run(self, index: int, inputs: Mapping[str, Any]) -> None:
        """Run the model for one batch; an exception that ends it at the slot passes through."""
        self.now = (self.stream, index), _digest(inputs)
        stored = self.store.load(*self.now, self.layer) if self.store.usable else None
        if stored is None:
            self.model(**inputs)
        elif self.checked:
            self._short(inputs, *stored)
        else:
            self._both_ways(inputs, *stored)

    def keep(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Store the layer's input; a hook at the layer that holds the slot."""
        hidden = _hand_on(*args, **kwargs)
        if self.store.usable and isinstance(hidden, torch.Tensor):
            self.store.save(*self.now, self.layer, hidden)

    def _short(self, inputs: Mapping[str, Any], begin: int, hidden: torch.Tensor) -> None:
        def put(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            given = _hand_on(*args, **kwargs)
            stored = hidden.to(given.device)
            return ((stored, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": stored})

        stored_first = self.store.layers[begin].register_forward_pre_hook(put, with_kwargs=True, prepend=True)
        with stored_first, _handing_on(self.store.layers[:begin]):
            self.model(**inputs)

    def _both_ways(self, inputs: Mapping[str, Any], begin: int, hidden: torch.Tensor) -> None:
        short = self._seen(lambda: self._short(inputs, begin, hidden))
        full = self._seen(lambda: self.model(**inputs))
        self.checked = True
        self.store.usable = short is not None and full is not None and _same(short, full)
        if self.store.usable:
            self._short(inputs, begin, hidden)
        else:
            self.model(**inputs)

    def _seen(self, run: Callable[[], object]) -> Any:
        """Run the model up to the slot and return its inputs; None on failure, which the full run will report."""
        seen: list[Any] = []

        def see(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            seen.append((args, kwargs))
            raise _Seen

        # Any exception: an architecture whose layers do not simply pass their inputs through.
        with contextlib.suppress(Exception), self.slot.register_forward_pre_hook(see, with_kwargs=True, prepend=True):
            run()
        return seen[0] if seen else None


@contextlib.contextmanager
def _handing_on(layers: list[nn.Module]) -> Iterator[None]:
    before = [vars(layer).get("forward") for layer in layers]
    for layer in layers:
        layer.forward = _hand_on
    try:
        yield
    finally:
        for layer, own in zip(layers, before, strict=True):
            del layer.forward
            if own is not None:  # accelerate's
                layer.forward = own


def _hand_on(*args: Any, **kwargs: Any) -> Any:
    """Return the hidden state among the arguments of a layer."""
    return args[0] if args else kwargs.get("hidden_states")


def _same(one: Any, other: Any) -> bool:
    """Return whether the tensors in two nested structures are equal up to rounding."""
    if isinstance(one, torch.Tensor):
        if not isinstance(other, torch.Tensor) or one.shape != other.shape or one.dtype != other.dtype:
            return False
        return torch.allclose(one, other, 1e-4, 1e-5) if one.is_floating_point() else torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(value, other[key]) for key, value in one.items())
    if isinstance(one, (tuple, list)):
        return len(one) == len(other) and all(map(_same, one, other))
    return True


def _digest(inputs: Mapping[str, Any]) -> bytes:
    digest = hashlib.sha256()
    for name, value in sorted(inputs.items()):
        if isinstance(value, torch.Tensor):
            digest.update(f"{name}{tuple(value.shape)}{value.dtype}".encode())
            digest.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.digest()
