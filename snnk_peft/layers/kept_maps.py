"""Caches of the logarithms of feature maps: computing them takes longer than using them.

    KeptMaps        for a caller that guarantees that no weight changes, as in token-by-token decoding
    KeptByVersion   for one attention term, valid while nothing that they are computed from has changed

Logarithms are not cached for components that adapt to tokens or inside a graph, nor by version for parameters:
fused optimizers, sharded training and weight averaging (`.data`) write to these without incrementing a version.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import nn

from snnk_peft.functional.backend import exporting, plain_call
from snnk_peft.functional.log_linear import LogLinear, with_one_offset

Pair = tuple[LogLinear, LogLinear]  # queries and keys
SETTINGS = (bool, float, int, str)


class Term(Protocol):
    """The part of `AttentionTerm` that computes logarithms."""

    def logarithms(self, statistics: Mapping[str, torch.Tensor], root: float, like: torch.Tensor) -> Pair | None: ...

    def prepared(self, statistics: Mapping[str, torch.Tensor], root: float, like: torch.Tensor) -> Pair | None: ...


class _Empty:
    """Base of caches, whose copies and pickles are empty."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return type(self)()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), ()


class KeptMaps(_Empty):
    """A cache for any number of terms; the caller guarantees that the weights do not change."""

    def __init__(self) -> None:
        self._found: WeakKeyDictionary[Term, tuple[Any, Pair]] = WeakKeyDictionary()

    def of(self, term: Term, statistics: Mapping[str, torch.Tensor], root: float, like: torch.Tensor) -> Pair | None:
        """Return `AttentionTerm.logarithms`, cached unless the component adapts to the tokens."""
        if exporting():
            return term.prepared(statistics, root, like)  # formed beforehand (exporting/formed_maps.py)
        if statistics or torch.is_grad_enabled():
            return term.logarithms(statistics, root, like)
        kind, kept = (root, like.dtype, like.device), self._found.get(term)
        if kept is None or kept[0] != kind:
            if (found := term.logarithms(statistics, root, like)) is None:
                return None
            self._found[term] = kept = (kind, with_one_offset(*found))
        return kept[1]


class KeptByVersion(_Empty):
    """A cache for one term, valid as long as its buffers and settings are unchanged."""

    def __init__(self) -> None:
        self._kept: tuple[Any, _Seen, Pair] | None = None

    def of(self, term: Term, made_from: Iterable[nn.Module], root: float, like: torch.Tensor) -> Pair | None:
        """Return `AttentionTerm.logarithms` of a term that is always the same, without statistics, cached.

        `made_from` are the modules whose tensors and settings determine the logarithms.
        """
        # A CUDA graph keeps reading the memory that it captured.
        if not plain_call() or (like.is_cuda and torch.cuda.is_current_stream_capturing()):
            return term.logarithms({}, root, like)
        if (seen := _Seen.of(made_from)) is None:
            return term.logarithms({}, root, like)
        kind, kept = (root, like.dtype, like.device), self._kept
        if kept is None or kept[0] != kind or not kept[1].is_still(seen):
            with torch.inference_mode(False), torch.no_grad():  # a later call may want gradients of queries
                if (found := term.logarithms({}, root, like)) is None:
                    return None
                self._kept = kept = (kind, seen.held(), with_one_offset(*found))
        return kept[2]


class _Seen:
    def __init__(self, buffers: list[torch.Tensor], settings: list[Any]):
        self.buffers, self.settings = buffers, settings
        self.state = [(buffer._version, buffer.data_ptr()) for buffer in buffers]  # `.data = ` keeps the version
        self.memory: list[torch.Tensor] = []

    @classmethod
    def of(cls, modules: Iterable[nn.Module]) -> _Seen | None:
        """Record the current state; return None if changes could go unnoticed."""
        buffers: list[torch.Tensor] = []
        settings: list[Any] = []
        waiting = list(modules)
        while waiting:
            own = waiting.pop().__dict__
            if (
                any(p is not None for p in own["_parameters"].values())
                or own["_forward_hooks"]
                or own["_forward_pre_hooks"]
            ):
                return None
            for buffer in own["_buffers"].values():
                if type(buffer) is torch.Tensor and not buffer.is_inference() and not buffer.requires_grad:
                    buffers.append(buffer)
                elif buffer is not None:
                    return None
            for value in own.values():
                if type(value) in SETTINGS:
                    settings.append(value)
                elif isinstance(value, torch.Tensor):
                    return None
            waiting.extend(own["_modules"].values())
        return cls(buffers, settings)

    def is_still(self, other: _Seen) -> bool:
        same = self.state == other.state and self.settings == other.settings
        return same and all(a is b for a, b in zip(self.buffers, other.buffers, strict=True))

    def held(self) -> _Seen:
        """Keep the recorded memory alive, so that no other tensor gets its addresses."""
        self.memory = [buffer.detach() for buffer in self.buffers]
        return self
