"""Decoding by one launch a layer, in Triton's interpreter on the CPU, against dense formulas in fp64."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from lib.kernel_launches import watched
from torch import nn

from snnk_cli.timing import operations
from snnk_peft.feature_map import build_feature_map
from snnk_peft.functional.backend import SWITCH
from snnk_peft.functional.device_kernels import cuda_exponential
from snnk_peft.functional.device_kernels.triton_exponential import decode
from snnk_peft.functional.exponential_attention import KeyMeans
from snnk_peft.functional.exponential_causal import causal_exponential_attention
from snnk_peft.functional.log_linear import ABSENT, LogLinear
from snnk_peft.layers.kernel_attention import KernelAttention
from snnk_peft.parts.attention.cache import RecurrentLayer
from snnk_peft.parts.attention.interface import kernel_attention_forward
from tests.attention_models import causal_model, left_padded, patched
from tests.exponential_oracle import TOLERANCE, dense, error, given
from tests.interpreter import INTERPRETED, in_interpreter, kernels_on_the_cpu


@pytest.fixture(autouse=True)
def launched(monkeypatch):
    """Kernels for the CPU; the launches that were made."""
    if not INTERPRETED:
        yield []
        return
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2] / "recipes"))
    monkeypatch.setattr(cuda_exponential, "DECODES", True)
    with watched(runs=True) as found, kernels_on_the_cpu(cuda_exponential):
        yield found


EXACT = TOLERANCE[torch.float32]  # everything is computed in fp32

# log Z of the state, and what queries and keys are multiplied by.
CASES: dict[str, dict[str, Any]] = {
    "plain": {"state": True},
    "the first tokens": {},
    "masked, grouped": {"state": True, "masked": True, "B": 2, "H": 4, "rows": "text"},
    "masked first tokens": {"masked": True, "B": 2, "H": 4},
    "odd sizes": {"state": True, "d": 12, "D": 20, "m": 11},
    "keys that hide the state": {"state": True, "scale": -400.0},
    "a state that hides keys": {"state": True, "scale": 400.0},
    "a state of no key": {"state": True, "scale": ABSENT, "masked": True, "B": 2, "H": 4},
    "large": {"state": True, "size": 6.0},
}
NARROW = [(dtype, case) for dtype in (torch.bfloat16, torch.float16) for case in ("masked, grouped", "large")]


def some(dtype: torch.dtype, L: int, scale: float = 0.0, **more: Any) -> tuple[list[torch.Tensor], float, Any]:
    """As `given`, with both offsets."""
    tensors, square, mask = given(dtype, L=L, **{"H": 2, "G": 2, **more})
    if mask is not None:
        mask = torch.rand(mask.shape) > 0.5
        mask[0, :2], mask[0, 2:], mask[1:, 0] = False, True, L == 1
    if len(tensors) > 6:
        tensors[7] = tensors[7] + scale
    return tensors, square, mask


@in_interpreter
@pytest.mark.parametrize(("dtype", "case"), [*((torch.float32, case) for case in CASES), *NARROW], ids=str)
def test_tokens_behind_a_state(dtype, case, launched):
    """Outputs, logarithms of denominators, and the new state, of one token and of some."""
    for L in (1, 3):
        tensors, square, mask = some(dtype, L, **CASES[case])
        wide = [x.double() for x in tensors]
        both = torch.randn_like(tensors[4]) * 0.2
        maps = LogLinear(tensors[3], tensors[4] - both, 0.0), LogLinear(tensors[5], both, square)
        state = KeyMeans(*tensors[6:]) if len(tensors) > 6 else None
        kept = [x.clone() for x in state or ()]
        out, behind = causal_exponential_attention(*tensors[:3], *maps, mask, state)
        weighed, _ = causal_exponential_attention(*tensors[:3], *maps, mask, state, weighed=True)
        assert [launch.name for launch in launched] == ["token_pass"] * 2
        launched.clear()
        before = tuple(wide[6:]) if CASES[case].get("scale") != ABSENT else None
        expected, lse, means, log_z = dense(*wide[:3], wide[3:6], square, mask, before or None, True)
        assert (out.dtype, weighed.dtype) == (dtype, torch.float32)
        seen, there = lse > -1e5, log_z > -1e5
        assert seen.all() or CASES[case].get("masked")
        assert not out[~seen].any()
        assert (weighed[..., -1][~seen] < -1e8).all()
        assert (behind.log_weight[~there] < -1e8).all()
        assert error(out, expected) < TOLERANCE[dtype]
        assert error(out, weighed[..., :-1].double()) < TOLERANCE[dtype]
        assert error(weighed[seen], torch.cat((expected, lse.unsqueeze(-1)), -1)[seen]) < EXACT
        assert error(behind.values[there], means[there]) < EXACT
        assert error(behind.log_weight[there], log_z[there]) < EXACT
        assert all(torch.equal(x, y) for x, y in zip(kept, state or (), strict=True))


@in_interpreter
def test_token_by_token_is_the_whole():
    """From views of longer tensors, as a model hands them; padding in front and in between."""
    tensors, square, mask = some(torch.float32, 20, B=2, H=4, G=2, masked=True, rows="head")
    expected = dense(*[x.double() for x in tensors[:3]], [x.double() for x in tensors[3:6]], square, mask, None, True)
    q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in tensors[:3])
    maps = LogLinear(tensors[3], tensors[4], 0.0), LogLinear(tensors[5], torch.zeros(16), square)
    state, outs = None, []
    for first, last in [(0, 1), (1, 4), *((t, t + 1) for t in range(4, 20))]:
        part = (x[:, :, first:last] for x in (q, k, v))
        out, state = causal_exponential_attention(*part, *maps, mask[:, first:last], state)
        outs.append(out)
    for found, true in zip((torch.cat(outs, -2), *state), (expected[0], *expected[2:]), strict=True):
        assert error(found, true) < EXACT


@in_interpreter
def test_where_gradients_are_wanted_they_are_there(launched):
    tensors, square, _ = some(torch.float32, 1, state=True)
    own = [x.requires_grad_() for x in tensors]
    maps = LogLinear(own[3], own[4], 0.0), LogLinear(own[5], torch.zeros(16), square)
    out, _ = causal_exponential_attention(*own[:3], *maps, None, KeyMeans(*own[6:]))
    assert all(g.abs().sum() > 0 for g in torch.autograd.grad(out.square().sum(), own))
    assert "token_pass" not in [launch.name for launch in launched]


@in_interpreter
def test_operator_keeps_its_promises():
    """Its schema and its shapes without data."""
    for weighed, masked, state in ((True, True, True), (False, False, False)):
        tensors, square, mask = some(torch.bfloat16, 2, masked=masked, state=state)
        kept = tensors[6:] or (None, None)
        args = (*tensors[:6], torch.zeros(16), square, mask, *kept, weighed)
        torch.library.opcheck(decode.step, args)


@in_interpreter
def test_compiled_in_one_graph(launched):
    tensors, square, _ = some(torch.float32, 1, state=True)
    maps = LogLinear(tensors[3], tensors[4], 0.0), LogLinear(tensors[5], torch.zeros(16), square)

    def call(q: torch.Tensor) -> tuple[torch.Tensor, ...]:
        out, behind = causal_exponential_attention(q, *tensors[1:3], *maps, None, KeyMeans(*tensors[6:]))
        return out.cos(), *behind

    torch.testing.assert_close(torch.compile(call, fullgraph=True, backend="aot_eager")(tensors[0]), call(tensors[0]))
    assert [launch.name for launch in launched] == ["token_pass"] * 2


@in_interpreter
@pytest.mark.parametrize("masked", [False, True])
def test_a_step_of_a_layer_is_one_operation(masked, launched):
    """Between what a model calls and what it gets: no clones, sums or zeros beside it."""
    module = nn.Module()
    module.is_causal, module.snnk_kernel = True, KernelAttention([build_feature_map("posrf", "orf", 8, 16)], 4)
    layer, mask = RecurrentLayer(), torch.ones(2, 9, dtype=torch.bool)

    def step(tokens: int) -> Counter[str]:
        q, k, v = (torch.randn(2, tokens, heads, 8).transpose(1, 2) for heads in (4, 2, 2))
        counts = mask[:, : layer.get_seq_length() + tokens] if masked else None
        return operations(lambda: kernel_attention_forward(module, q, *layer.update(k, v), counts))

    with torch.no_grad():
        for tokens in (3, 1, 1):
            launched.clear()
            found = step(tokens)
    assert found == {"snnk_peft::exponential_few_tokens": 1}
    assert [launch.name for launch in launched] == ["token_pass"]


@in_interpreter
@pytest.mark.parametrize("fields", [{}, {"per_head": True, "near_field": 3}], ids=str)
def test_generated_tokens_are_those_of_the_torch_form(fields, launched, monkeypatch):
    """A batch padded on the left; one launch a layer and new token."""
    model, inputs = patched(causal_model("llama"), num_features=16, **fields), left_padded()
    made = {"max_new_tokens": 6, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    found = model.generate(**inputs, **made)
    names = Counter(launch.name for launch in launched)
    layers, steps = model.config.num_hidden_layers, len(found.logits) - 1
    assert names == {"token_pass": layers * steps, "key_pass": layers, "combine": layers, "causal_forward": layers}
    monkeypatch.setenv(SWITCH, "off")
    expected = model.generate(**inputs, **made)
    assert torch.equal(found.sequences, expected.sequences)
    torch.testing.assert_close(found.logits, expected.logits, rtol=1e-4, atol=1e-4)
    assert len(launched) == sum(names.values())
