"""Linear attention over features of any kind by Triton kernels, in the interpreter, against dense formulas in fp64."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch

from snnk_peft import AttentionPart
from snnk_peft.functional.backend import SWITCH, form_that_ran
from snnk_peft.functional.device_kernels import cuda_linear
from snnk_peft.functional.device_kernels.triton_linear import decode, launches, operators
from snnk_peft.functional.linear_attention import AttentionState, causal_linear_attention, key_sums
from tests.attention_models import causal_model, left_padded, patched
from tests.compile_kernels import linear_usages
from tests.exponential_oracle import TOLERANCE, error
from tests.interpreter import (
    INTERPRETED,
    check_gradients_of_gradients,
    check_model_compiled_and_exported,
    in_interpreter,
    kernels_on_the_cpu,
)
from tests.linear_oracle import CASES, check, compare, dense, given

both = pytest.mark.parametrize("causal", [False, True], ids=["sums", "causal"])


@pytest.mark.slow
@pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")
@pytest.mark.parametrize("features", [torch.bfloat16, torch.float32], ids=str)
def test_compiled_kernels_fit(features):
    """Without a GPU: bytes that a thread keeps outside of its registers, and shared memory of a program."""
    found = list(linear_usages(90, features, scaled=True, masked=True, values=torch.bfloat16))
    assert len({name for name, _ in found}) == 7
    assert [(name, use) for name, use in found if use["stack"] > 256] == []
    assert max(use["shared"] for _, use in found) <= 227 * 2**10


@pytest.fixture(autouse=True)
def _on_the_cpu():
    with kernels_on_the_cpu(cuda_linear, launches=[launches]):
        yield


def taken(causal: bool) -> str:
    return form_that_ran("causal_linear_attention" if causal else "key_sums")


# What depends on the dtype: roundings, and whether their range is enough.
NARROW = [(dtype, case) for dtype in (torch.bfloat16, torch.float16) for case in ("signed", "scales and state")]


@in_interpreter
@both
@pytest.mark.parametrize(("dtype", "case"), [*((torch.float32, case) for case in CASES), *NARROW], ids=str)
def test_attention(dtype, case, causal):
    report = compare(*given(dtype, **CASES[case]), causal)
    assert "cuda_linear" in taken(causal)
    print({name: f"{value:.1e}" for name, value in report.items()})
    check(report, dtype, CASES[case].get("values", dtype))


def small(causal: bool, dtype: torch.dtype = torch.float32, **more: Any) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
    """Arguments of either operation, and those tensors of them that have gradients."""
    tensors, scale, mask = given(dtype, **{"L": 37, "D": 16, "m": 16, **more})
    own = {name: x.requires_grad_() for name, x in tensors.items() if causal or name != "q"}
    state = None if scale is None else AttentionState(own["S"], own["z"], scale)
    scales = own["scales"].unsqueeze(-1) if "scales" in own else None
    first = (own["q"],) if causal else ()
    return (*first, own["k"], own["v"], mask), {"state": state, "log_scale": scales}, list(own.values())


def call(causal: bool, args: tuple[Any, ...], options: dict[str, Any]) -> tuple[torch.Tensor, ...]:
    """All results but the scale."""
    if not causal:
        return tuple(key_sums(*args, **options)[:2])
    out, state = causal_linear_attention(*args, **options)
    return out, *state[:2]


@in_interpreter
@both
@pytest.mark.parametrize("scales", [None, (0, 0)], ids=["", "scales"])
def test_without_a_key_there_is_nothing(scales, causal):
    """Of the second text no key counts."""
    args, options, own = small(causal, B=2, scales=scales)
    args = *args[:-1], torch.tensor([[True], [False]]).expand(2, 37)
    found = call(causal, args, options)
    assert all(x[0].any() and not x[1].any() for x in found)
    for gradient in torch.autograd.grad(sum(x.square().sum() for x in found), own):
        assert gradient[0].any()
        assert not gradient[1].any()
    state = key_sums(*args[-3:], log_scale=options["log_scale"])
    assert state.log_scale.isfinite().flatten().tolist() == [True, scales is None]


@in_interpreter
@both
def test_gradients_of_gradients_are_those_of_the_torch_form(causal, monkeypatch):
    forms = []

    def run() -> tuple[torch.Tensor, list[torch.Tensor]]:
        args, options, own = small(causal, masked=True, scales=(0, 0), state=1.0, L=60)
        number = sum(x.pow(3).sum() for x in call(causal, args, options))
        forms.append(taken(causal))
        return number, own

    check_gradients_of_gradients(run, monkeypatch)
    assert "cuda_linear" in forms[0]


@in_interpreter
@both
def test_compiled_in_one_graph(causal):
    args, options, own = small(causal, scales=(0, 0), state=1.0)

    def plain(first: torch.Tensor) -> torch.Tensor:
        return sum(x.cos().sum() for x in call(causal, (first, *args[1:]), options))

    compiled = torch.compile(plain, fullgraph=True, backend="aot_eager")
    found, expected = (torch.autograd.grad(f(args[0]), own) for f in (plain, compiled))
    torch.testing.assert_close(found, expected)


@in_interpreter
@both
def test_models_compile_and_export(causal):
    part, operation = AttentionPart("relu", num_features=8), causal_linear_attention if causal else key_sums
    check_model_compiled_and_exported("llama" if causal else "bert", part, operation.__name__)


@in_interpreter
def test_a_compiled_step_is_one_launch():
    args, options, _ = small(True, L=1, scales=(0, 0), state=1.0)

    def plain(q: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return call(True, (q, *args[1:]), options)

    with torch.no_grad(), launches_of_a_step() as launched:
        torch.testing.assert_close(torch.compile(plain, fullgraph=True, backend="aot_eager")(args[0]), plain(args[0]))
    assert len(launched) == 2


@in_interpreter
def test_operators_keep_their_promises():
    """Schemas, shapes without data, and gradients that compilers can trace."""
    for scales, state in ((None, None), ((0, 0), 1.0)):
        more = {"L": 5, "H": 2, "D": 6, "m": 3, "masked": True, "state": state, "scales": scales}
        (q, k, v, mask), options, _ = small(True, **more)
        s = None if scales is None else options["log_scale"].squeeze(-1)
        kept = k, v, mask, s, *(options["state"] or (None, None, None))
        torch.library.opcheck(operators.key_sums, kept)
        torch.library.opcheck(operators.causal, (q, *kept))
        with torch.no_grad():
            torch.library.opcheck(decode.step, (q, *kept))
            S, z, scale = operators.key_sums(*kept)
            torch.library.opcheck(operators.key_sums_back, (S, z, *kept[:4], scale, s is not None))
            out, den, rho, *_ = operators.causal(q, *kept)
            given = q, *kept, out, den, rho, scale
            torch.library.opcheck(operators.causal_back, (out, S, z, *given, s is not None, state is not None))
            torch.library.opcheck(operators.causal_back, (out, None, None, *given, False, False))


@in_interpreter
@both
def test_what_the_kernels_do_not_take(causal):
    """Other dtypes, more features than fit, a scale of the state with a gradient: the torch form, and no error."""
    (*features, v, mask), options, _ = small(causal, scales=(0, 0), state=1.0)
    state = options["state"]
    learned = state._replace(log_scale=state.log_scale.clone().requires_grad_())
    wide = *(torch.rand(1, 2, 37, 200) for _ in features), v, mask
    for args, more in (
        ((*(x.double() for x in features), v.double(), mask), {}),
        (wide, {}),
        ((*features, v, mask), {**options, "state": learned}),
    ):
        call(causal, args, more)
        assert taken(causal) == "torch"
    call(causal, (*features, v, mask), options)
    assert taken(causal) != "torch"


# --- a few tokens -----------------------------------------------------------------------------------------------------


@in_interpreter
@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize(
    ("dtype", "case"), [*((torch.float32, case) for case in CASES), (torch.bfloat16, "signed")], ids=str
)
def test_tokens_behind_a_state(dtype, case, tokens):
    """In one launch."""
    tensors, scale, mask = given(dtype, **{"G": 2, **CASES[case], "L": tokens, "H": 4})
    if mask is not None:
        mask = torch.rand(mask.shape) > 0.5
        mask[0, :2] = False
    state = None if scale is None else AttentionState(tensors["S"], tensors["z"], scale)
    scales = tensors["scales"].unsqueeze(-1) if "scales" in tensors else None
    kept = [x.clone() for x in state or ()]
    with launches_of_a_step() as launched:
        features = (tensors[name] for name in ("q", "k", "v"))
        out, behind = causal_linear_attention(*features, mask, state=state, log_scale=scales)
    assert len(launched) == 1
    assert all(torch.equal(x, y) for x, y in zip(kept, state or (), strict=True))
    expected, S, z, top = dense({name: x.double() for name, x in tensors.items()}, scale, mask)
    assert out.dtype == tensors["v"].dtype
    assert error(out, expected) < max(TOLERANCE[out.dtype], TOLERANCE[dtype])
    if scales is None:
        assert not behind.log_scale.any()
    else:
        seen = top > -1e5
        torch.testing.assert_close(behind.log_scale[seen], top[seen].float())
        assert (behind.log_scale[~seen] < -1e30).all()
    for found, true in zip(behind, (S, z), strict=False):
        assert error(found, true) < TOLERANCE[torch.float32]


def launches_of_a_step() -> Any:
    """A context that collects the launches of the kernel for few tokens."""

    class Watched(list):
        kernel = decode.token_pass

        def __getitem__(self, grid: Any) -> Any:
            self.append(grid)
            return self.kernel[grid]

    return mock.patch.object(decode, "token_pass", Watched())


@in_interpreter
def test_generated_tokens_are_those_of_the_torch_form(monkeypatch):
    """A batch padded on the left, features without scales; one launch of attention a layer and new token."""
    inputs, model = left_padded(), causal_model("llama")
    model = patched(model, component="relu", projection="gaussian", num_features=16)
    made = {"max_new_tokens": 4, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    with launches_of_a_step() as launched:
        found = model.generate(**inputs, **made)
    assert len(launched) == model.config.num_hidden_layers * (len(found.logits) - 1)
    monkeypatch.setenv(SWITCH, "off")
    expected = model.generate(**inputs, **made)
    assert torch.equal(found.sequences, expected.sequences)
    torch.testing.assert_close(found.logits, expected.logits, rtol=1e-4, atol=1e-4)
