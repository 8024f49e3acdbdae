"""The Triton kernels in Triton's interpreter, on the CPU, against dense formulas in fp64."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from snnk_peft import AttentionPart
from snnk_peft.functional.backend import form_that_ran
from snnk_peft.functional.device_kernels import cuda_exponential
from snnk_peft.functional.device_kernels.triton_exponential import launches, operators
from snnk_peft.functional.exponential_attention import KeyMeans, exponential_attention
from snnk_peft.functional.exponential_causal import causal_exponential_attention
from snnk_peft.functional.log_linear import ABSENT, LogLinear
from tests.compile_kernels import all_usages
from tests.exponential_oracle import CASES, check, compare, given
from tests.interpreter import (
    INTERPRETED,
    check_gradients_of_gradients,
    check_model_compiled_and_exported,
    in_interpreter,
    kernels_on_the_cpu,
)

OPERATION = {False: exponential_attention, True: causal_exponential_attention}


# Bytes of registers that a thread keeps elsewhere: 256, but where no block size does (see launching.py).
SPILLS = {
    (90, torch.bfloat16): {},
    (90, torch.float16): {},
    (90, torch.float32): {"causal_key_back": 512},
    (80, torch.bfloat16): {"combine": 512, "causal_forward": 512, "causal_query_back": 512, "causal_key_back": 1024},
}


@pytest.mark.slow
@pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")
@pytest.mark.parametrize(("capability", "dtype"), SPILLS, ids=str)
def test_compiled_kernels_fit(capability, dtype):
    """Without a GPU: what a thread keeps outside of its registers, and shared memory of a program, in bytes."""
    found = list(all_usages(capability, dtype, learned=True, masked=True))
    assert len({name for name, _ in found}) == 13
    more = SPILLS[capability, dtype]
    assert [(name, use) for name, use in found if use["stack"] > more.get(name, 256)] == []
    assert max(use["shared"] for _, use in found) <= {80: 163, 90: 227}[capability] * 2**10


@pytest.fixture(autouse=True)
def _on_the_cpu():
    with kernels_on_the_cpu(cuda_exponential, launches=[launches]):
        yield


# What depends on the dtype: roundings, and whether their range is enough.
SHAPES = {**CASES, **{name: {**CASES[name], "H": 1, "G": 1} for name in ("odd sizes", "large", "shrinking", "growing")}}
CHOSEN = [
    *((torch.float32, case, False) for case in CASES),
    (torch.float32, "state", True),
    *((dtype, case, False) for dtype in (torch.bfloat16, torch.float16) for case in ("large", "shrinking")),
    *((dtype, "plain", True) for dtype in (torch.bfloat16, torch.float16)),
]


@in_interpreter
@pytest.mark.parametrize(("dtype", "case", "alone"), CHOSEN, ids=str)
@pytest.mark.parametrize("causal", [False, True], ids=["", "causal"])
def test_attention(causal, dtype, case, alone):
    tensors, square, mask = given(dtype, **SHAPES[case])
    report = compare(tensors, square, mask, causal, alone)
    assert "cuda_exponential" in form_that_ran(OPERATION[causal].__name__)
    print({name: f"{value:.1e}" for name, value in report.items()})
    check(report, dtype, case)


def small(**more: Any) -> tuple[tuple[Any, ...], list[torch.Tensor]]:
    """Arguments of either operation, and those tensors of them that have gradients."""
    tensors, square, mask = given(torch.float32, **{"L": 37, "d": 16, "D": 16, "m": 16, **more})
    own = [x.requires_grad_() for x in tensors]
    q, k, v, rows, offset, key_rows = own[:6]
    maps = LogLinear(rows, offset, 0.0), LogLinear(key_rows, torch.zeros(rows.shape[-2]), square)
    return (q, k, v, *maps, mask, KeyMeans(*own[6:]) if len(own) > 6 else None), own


@in_interpreter
@pytest.mark.parametrize("causal", [False, True], ids=["", "causal"])
@pytest.mark.parametrize("state", [False, True], ids=["", "state"])
def test_without_a_key_there_is_nothing(state, causal):
    """Of the second text no key counts, nor in its state."""
    args, own = small(B=2, state=state)
    out, means = OPERATION[causal](*args[:5], torch.tensor([[True], [False]]).expand(2, 37), args[-1])
    assert not out[1].any()
    assert (means.log_weight[1] == ABSENT).all()
    assert means.seen.tolist() == [[True, True], [False, False]]
    for gradient in torch.autograd.grad(out.square().sum(), own[:3]):
        assert gradient[0].any()
        assert not gradient[1].any()


@in_interpreter
@pytest.mark.parametrize("causal", [False, True], ids=["", "causal"])
def test_gradients_of_gradients_are_those_of_the_torch_form(causal, monkeypatch):
    def run() -> tuple[torch.Tensor, list[torch.Tensor]]:
        args, own = small(masked=True)
        return OPERATION[causal](*args)[0].square().sum(), own

    check_gradients_of_gradients(run, monkeypatch)


@in_interpreter
@pytest.mark.parametrize("causal", [False, True], ids=["", "causal"])
def test_compiled_in_one_graph(causal):
    args, own = small()

    def call(q: torch.Tensor) -> torch.Tensor:
        return OPERATION[causal](q, *args[1:])[0].cos()

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    found, expected = (torch.autograd.grad(f(own[0]).sum(), own) for f in (compiled, call))
    torch.testing.assert_close(found, expected)
    assert "cuda_exponential" in form_that_ran(OPERATION[causal].__name__)


@in_interpreter
@pytest.mark.parametrize("causal", [False, True], ids=["", "causal"])
def test_models_compile_and_export(causal):
    part = AttentionPart(num_features=8)
    check_model_compiled_and_exported("llama" if causal else "bert", part, OPERATION[causal].__name__)


@in_interpreter
def test_operators_keep_their_promises():
    """Schemas, shapes without data, and gradients that compilers can trace."""
    (q, k, v, queries, keys, mask, state), _ = small(L=5, H=2, G=1, d=4, D=6, m=3, masked=True, state=True)
    maps = (queries.rows, queries.offset, keys.rows, keys.square, mask)
    torch.library.opcheck(operators.key_means, (k, v, keys.rows, keys.square, mask))
    torch.library.opcheck(operators.attention, (q, k, v, *maps, *state))
    torch.library.opcheck(operators.causal, (q, k, v, *maps, *state, torch.float32))
    torch.library.opcheck(operators.causal, (q, k, v, *maps, None, None, torch.float32))
    with torch.no_grad():
        given = (q, k, v, *maps, *state)
        out, *means = operators.attention(*given)
        torch.library.opcheck(operators.key_means_back, (*means, k, v, keys.rows, keys.square, mask, *means, True))
        torch.library.opcheck(operators.attention_back, (out, *means, *given, *means, True, True))
        out, lse, *behind = operators.causal(*given, torch.float32)
        torch.library.opcheck(operators.causal_back, (out, lse, *behind, *given, out, lse, *behind, True, True))
        given = (*given[:-2], None, None)
        torch.library.opcheck(operators.causal_back, (out, None, None, None, *given, out, lse, *behind, False, False))


@in_interpreter
@pytest.mark.parametrize("causal", [False, True], ids=["", "causal"])
def test_what_the_kernels_do_not_take(causal):
    """Signs, a matrix in place of a number, other dtypes, more features than fit: the torch form, and no error."""
    (q, k, v, queries, keys, *_), _ = small()
    wide = LogLinear(torch.randn(600, 16), torch.zeros(600), 0.0)
    others = [
        (q.double(), k.double(), v.double(), *(x._replace(rows=x.rows.double()) for x in (queries, keys))),
        (q, k, v.half(), queries, keys),
        (q, k, v, queries, keys._replace(signs=torch.ones(16))),
        (q, k, v, queries, keys._replace(square=torch.full((1, 16), 0.1))),
        (q, k, v, wide, wide),
    ]
    for args in others:
        OPERATION[causal](*args)
        assert form_that_ran(OPERATION[causal].__name__) == "torch"
    OPERATION[causal](q, k, v, queries, keys)
    assert form_that_ran(OPERATION[causal].__name__) != "torch"
