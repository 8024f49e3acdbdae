"""The logarithms of attention's feature maps as tensors of the model while it is traced.

They depend on weights alone. A graph that computes them, head by head, has hundreds of nodes per layer, which tracing,
decomposition and ONNX's optimizer process one by one, before the optimizer folds them to the same constants.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from snnk_peft.exporting.program import Inputs
from snnk_peft.layers.attention_term import AttentionTerm


@contextlib.contextmanager
def formed_maps(model: nn.Module, sample: Inputs) -> Iterator[None]:
    """Precompute, in a context, the feature maps of attention terms that do not adapt to the tokens, as buffers."""
    # By name: a bundle's own code file has a class of the same name.
    terms = [module for module in model.modules() if type(module).__name__ == AttentionTerm.__name__]
    found: dict[nn.Module, list[Any]] = {term: [] for term in terms}
    try:
        for term in terms:
            vars(term)["prepared"] = partial(_recorded, found[term], term.prepared)
        if terms:
            with torch.no_grad():
                model(**sample)
        for term in terms:
            del vars(term)["prepared"]
            if len(found[term]) == 1 and found[term][0] is not None:
                vars(term)["prepared"] = _Formed(term, found[term][0])
        yield
    finally:
        for term in terms:
            formed = vars(term).pop("prepared", None)
            for name in formed.names if isinstance(formed, _Formed) else ():
                delattr(term, name)


def _recorded(into: list[Any], prepared: Any, statistics: Any, root: float, like: torch.Tensor) -> Any:
    pair = prepared(statistics, root, like)
    into.append(None if statistics else pair)
    return pair


class _Formed:
    """Replacement for `AttentionTerm.prepared` of one term."""

    def __init__(self, term: nn.Module, pair: Any):
        self.term, self.pair = term, pair
        self.names: list[str] = []
        for side, logarithms in enumerate(pair):
            for field, value in logarithms._asdict().items():
                if isinstance(value, torch.Tensor):
                    term.register_buffer(name := f"formed_{field}_{side}", value.detach(), persistent=False)
                    self.names.append(name)

    def __call__(self, statistics: Any, root: float, like: torch.Tensor) -> Any:
        return tuple(
            logarithms._replace(
                **{
                    field: getattr(self.term, f"formed_{field}_{side}")
                    for field, value in logarithms._asdict().items()
                    if isinstance(value, torch.Tensor)
                }
            )
            for side, logarithms in enumerate(self.pair)
        )
