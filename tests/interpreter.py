"""What tests of Triton kernels in Triton's interpreter share; it must be chosen before Triton is imported."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from triton.runtime.interpreter import InterpretedFunction

from snnk_peft import AttentionPart
from snnk_peft.functional.backend import DEVICE_KERNELS, SWITCH, form_that_ran
from tests.attention_models import built

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
in_interpreter = pytest.mark.skipif(not INTERPRETED, reason="in a process of its own, which test_triton.py starts")


@contextmanager
def kernels_on_the_cpu(*modules: Any, launches: Iterable[Any] = ()) -> Iterator[None]:
    """Kernels of these modules take tensors of the CPU, and memory that nobody has written to is NaN.

    Nothing happens in a process that does not interpret kernels.

    Args:
        modules: with `register`.
        launches: modules with `part_tokens` and `launch`, which then give several blocks and parts of few tokens.
    """
    if not INTERPRETED:
        yield
        return
    original, known = InterpretedFunction.__call__, set()

    def inner(self: Any, *args: Any, **kwargs: Any) -> Any:
        """The original prepares the language anew at each call of a function in a kernel: half of the time."""
        if self.fn in known:
            return self.rewrite()(*args, **kwargs)
        known.add(self.fn)
        return original(self, *args, **kwargs)

    before = dict(DEVICE_KERNELS)
    for module in modules:
        module.register("cpu")
    torch.use_deterministic_algorithms(True)  # fills new memory
    try:
        with mock.patch.object(InterpretedFunction, "__call__", inner), pytest.MonkeyPatch.context() as patch:
            for module in launches:
                patch.setattr(module, "part_tokens", lambda *_: 32)
                patch.setattr(module, "launch", lambda *_: (16, {"num_warps": 4, "num_stages": 1}))
            yield
    finally:
        torch.use_deterministic_algorithms(False)
        DEVICE_KERNELS.clear()
        DEVICE_KERNELS.update(before)


def check_gradients_of_gradients(
    run: Callable[[], tuple[torch.Tensor, list[torch.Tensor]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those by the kernels are those of the torch form; `run` gives a number and what it is a function of."""

    def second() -> tuple[torch.Tensor, ...]:
        torch.manual_seed(0)
        number, own = run()
        first = torch.autograd.grad(number, own, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in first), own)

    found = second()
    monkeypatch.setenv(SWITCH, "off")
    for mine, theirs in zip(found, second(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-3 * float(theirs.abs().max()))


def check_compiled_and_exported(
    module: torch.nn.Module, given: dict[str, Any], learned: list[torch.Tensor], operation: str
) -> None:
    """Compiled, it is one graph with the kernels, forward and backward; exported, it needs nothing but torch.

    Args:
        module: a model with logits, or a layer.
        given: its arguments.
        learned: whose gradients are compared.
        operation: what it takes kernels for.
    """

    def results(form: Any) -> list[torch.Tensor]:
        out = form(**given)
        out = getattr(out, "logits", out)
        return [out, *torch.autograd.grad(out.square().mean(), learned)]

    expected = results(module)
    assert form_that_ran(operation) != "torch"
    torch._dynamo.reset()
    found = results(torch.compile(module, fullgraph=True, backend="aot_eager"))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert form_that_ran(operation) != "torch"
    program = torch.export.export(module, (), given, strict=False)
    assert form_that_ran(operation) == "torch"
    assert not [node for node in program.graph.nodes if "snnk_peft" in str(node.target)]
    out = program.module()(**given)
    torch.testing.assert_close(getattr(out, "logits", out), expected[0], rtol=1e-4, atol=1e-5)


def check_model_compiled_and_exported(family: str, part: AttentionPart, operation: str) -> None:
    """The same of a model, "bert" or "llama", and a text that is padded on the left, with this part."""
    model, inputs = built(family, {"attention": part})
    model.config.use_cache = False
    tensors = {name: value[1:2] for name, value in inputs.items() if isinstance(value, torch.Tensor)}
    check_compiled_and_exported(model, tensors, [next(model.parameters()).requires_grad_()], operation)
