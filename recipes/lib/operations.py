"""How many operations of torch something takes: what bounds a step on a small batch, and on a fast device any step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class _Counting(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        view = any(out.alias_info and not out.alias_info.is_write for out in function._schema.returns)
        if not view and function.name() != "aten::_unsafe_view":
            self.found[function.name()] += 1
        return function(*args, **(kwargs or {}))


def operations(run: Callable[[], Any]) -> Counter[str]:
    """What is dispatched in one call, by name; views, which touch no numbers, do not count."""
    with _Counting() as counting:
        run()
    return counting.found
