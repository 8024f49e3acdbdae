"""The step of an adapter as one operation: against plain formulas in fp64, and where the modules have to serve."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from snnk_peft import build_feature_map
from snnk_peft.functional.adapter_sum import AdapterForm, adapter_sum
from snnk_peft.layers.adapter import GatedReadout, SNNKAdapter
from snnk_peft.layers.feature_stage import FeatureStage

DIM, OUT, M = 12, 10, 6
ELEMENTWISE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "relu": lambda z: z.clamp_min(0),
    "gelu": lambda z: z * torch.special.ndtr(z),
    "elu": lambda z: torch.where(z > 0, z + 1, z.clamp_max(0).exp()),
    "sin": torch.sin,
    "cos": lambda z: torch.cos(z + torch.pi * (torch.arange(M) + 0.5) / M),
    "arccos": lambda z: torch.where(z > 0, z, 0) ** 2,
}
ROWS: dict[str, tuple[str, dict[str, Any]]] = {
    "drawn": ("gaussian", {}),
    "learned": ("free", {}),
    "learned, with a bias": ("free", {"bias": True}),
}


def adapter_of(
    component: str = "gelu", rows: str = "drawn", *, normalize: bool = True, out: int = DIM, gate: bool = False
) -> SNNKAdapter:
    """One with numbers other than those of the start."""
    torch.manual_seed(1)
    projection, params = ROWS[rows]
    order = {"order": 2} if component == "arccos" else {}
    made = build_feature_map(component, projection, DIM, M, component_params=order, projection_params=params)
    stage = FeatureStage(made, normalize=normalize, center=normalize, scale=0.4)
    readout = GatedReadout(stage, init="random" if gate else "default", gate=gate, scaling=3.0, out_dim=out)
    with torch.no_grad():
        for parameter in (*readout.parameters(), *([made.projection.bias] if params else [])):
            parameter.normal_()
    return SNNKAdapter(stage, readout)


def formula(adapter: SNNKAdapter, component: str, x: Any, residual: Any, weight: Any, bias: Any, A: Any, v: Any) -> Any:
    """r + s v ⊙ (A (f(α LN(x) Wᵀ + b)/√m − c)), all in fp64."""
    stage = adapter.stage
    seen = x
    if stage.normalize:
        seen = (x - x.mean(-1, keepdim=True)) / (x.var(-1, correction=0, keepdim=True) + 1e-5).sqrt()
    z = stage.scale * seen @ weight.T + (0 if bias is None else bias)
    features = ELEMENTWISE[component](z) / weight.shape[0] ** 0.5 - (0 if stage.means is None else stage.means.double())
    return residual + 3 * (features @ A.T) * (1 if v is None else v)


def error(found: torch.Tensor, true: torch.Tensor) -> float:
    return float((found.detach().double() - true.detach()).norm() / true.detach().norm())


def errors(adapter: SNNKAdapter, component: str, x: Any, residual: Any, run: Callable[..., Any]) -> list[float]:
    """Relative errors of the output and of all gradients."""
    projection, readout = adapter.stage.feature_map.projection, adapter.readout
    given = [x, residual, projection.weight, projection.bias, readout.A, readout.v]
    exact = [t if t is None else t.detach().double().requires_grad_(t.requires_grad) for t in given]
    beside = exact[0] if residual is None else exact[1]
    true = formula(adapter, component, exact[0], beside, *exact[2:])
    upstream = torch.randn(true.shape).to(true.device)
    trained = [(t, e) for t, e in zip(given, exact, strict=True) if t is not None and t.requires_grad]
    found = run()
    grads = torch.autograd.grad(found, [t for t, _ in trained], upstream.to(found.dtype))
    expected = torch.autograd.grad(true, [e for _, e in trained], upstream.to(found.dtype).double())
    assert [(g.shape, g.dtype) for g in grads] == [(t.shape, t.dtype) for t, _ in trained]
    return [error(a, b) for a, b in zip((found, *grads), (true, *expected), strict=True)]


def in_one(out: torch.Tensor) -> bool:
    """Whether the operation was what made this."""
    node: Any = out.grad_fn
    return type(node.next_functions[0][0]).__name__ == "_AdapterSumBackward"


class Operations(TorchDispatchMode):
    """Counts what is dispatched and touches numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        view = any(each.alias_info and not each.alias_info.is_write for each in function._schema.returns)
        if not view and function.name() != "aten::_unsafe_view":
            self.counts[function.name().split("::")[1].split(".")[0]] += 1
        return function(*args, **(kwargs or {}))


def counted(run: Callable[[], Any]) -> Counter[str]:
    with Operations() as seen:
        run()
    return seen.counts


def test_a_processor_takes_the_modules_for_many_tokens(monkeypatch):
    """There the operation has been slower, by up to 1.6 %; the numbers are the same."""
    adapter, x = adapter_of("relu"), torch.randn(50, DIM, requires_grad=True)
    found = adapter(x)
    assert in_one(found)
    monkeypatch.setattr("snnk_peft.layers.adapter.MANY", x.numel())
    expected = adapter(x)
    assert not in_one(expected)
    torch.testing.assert_close(found, expected)


# --- values and gradients -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("component", ELEMENTWISE)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("normalize", [True, False], ids=["normalised", "as they are"])
@pytest.mark.parametrize("beside", [False, True], ids=["behind", "beside"])
def test_values_and_all_gradients(component, rows, normalize, beside):
    for gate in (False, True):
        adapter = adapter_of(component, rows, normalize=normalize, out=OUT if beside else DIM, gate=gate)
        x = (torch.randn(2, 5, DIM) + 0.5).requires_grad_()
        residual = torch.randn(2, 5, OUT, requires_grad=True) if beside else None
        found = adapter(x, residual)
        assert in_one(found)
        assert max(errors(adapter, component, x, residual, lambda: found)) < 2e-6


NARROW = {  # dtypes of x and of the adapter, autocast
    "autocast": (torch.float32, torch.float32, True),
    "autocast, bf16 inputs": (torch.bfloat16, torch.float32, True),
    "bf16 model": (torch.bfloat16, torch.float32, False),
    "all bf16": (torch.bfloat16, torch.bfloat16, False),
}


@pytest.mark.parametrize("component", ["relu", "gelu", "elu", "arccos"])
@pytest.mark.parametrize("rows", ["drawn", "learned, with a bias"])
@pytest.mark.parametrize("normalize", [True, False], ids=["normalised", "as they are"])
@pytest.mark.parametrize("case", NARROW)
def test_half_precision_errs_by_its_rounding(component, rows, normalize, case):
    """Four roundings one after the other, as with the modules: the same error, but for chance."""
    dtype, own, autocast = NARROW[case]
    adapter = adapter_of(component, rows, normalize=normalize).to(own)
    x = (torch.randn(40, 5, DIM) + 0.5).to(dtype).requires_grad_()

    def run() -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return adapter(x)

    found = run()
    assert in_one(found)
    assert found.dtype == dtype
    ours = errors(adapter, component, x, None, lambda: found)
    with watched(adapter):
        theirs = errors(adapter, component, x, None, run)
    if component == "relu":  # what rounding turns over at a kink counts whole, in a gradient
        ours, theirs = ours[:1], theirs[:1]
    assert max(ours) < 4 * 2**-8
    assert all(a < 2.5 * b + 2**-9 for a, b in zip(ours, theirs, strict=True))


class watched:
    """Within it, the modules are called one by one: a hook looks at the stage."""

    def __init__(self, *adapters: Any):
        self.stages = [m for a in adapters for m in a.modules() if isinstance(m, FeatureStage)]
        self.calls = 0

    def __enter__(self) -> watched:
        self.hooks = [stage.register_forward_hook(self.note) for stage in self.stages]
        return self

    def note(self, *unused: Any) -> None:
        self.calls += 1

    def __exit__(self, *unused: Any) -> None:
        for hook in self.hooks:
            hook.remove()


@pytest.mark.parametrize("trained", list(itertools.product([False, True], repeat=4)))
def test_nothing_is_computed_for_what_is_frozen(trained):
    adapter = adapter_of(rows="learned, with a bias")
    projection = adapter.stage.feature_map.projection
    x = torch.randn(7, DIM)
    for tensor, needed in zip((x, projection.weight, projection.bias, adapter.readout.A), trained, strict=True):
        tensor.requires_grad_(needed)
    if not any(trained):
        assert not adapter(x).requires_grad
        return
    of_x, of_weight, of_bias, of_A = trained
    found = adapter(x)
    counts = counted(lambda: found.backward(torch.ones(7, DIM), retain_graph=True))
    inward = of_x or of_weight or of_bias
    assert counts["mm"] + counts["addmm"] == of_A + inward + of_weight + of_x
    assert counts["native_layer_norm_backward"] == of_x
    assert counts["gelu_backward"] == inward
    assert counts["sum"] == of_bias
    assert counts["native_layer_norm"] == of_weight
    adapter.zero_grad()
    x.grad = None
    assert max(errors(adapter, "gelu", x, None, lambda: found)) < 2e-6


@pytest.mark.parametrize("rows", ROWS)
def test_any_shape_and_stride(rows):
    adapter = adapter_of(rows=rows)
    for x in (
        torch.randn(DIM),
        torch.randn(0, 4, DIM),
        torch.randn(DIM, 3, 2).permute(2, 1, 0),
        torch.randn(2, 1, DIM).expand(2, 3, DIM),
        torch.randn(2, 3, 2 * DIM)[..., ::2],
    ):
        x.requires_grad_()
        found = adapter(x)
        assert in_one(found)
        assert found.shape == x.shape
        if x.numel():
            assert max(errors(adapter, "gelu", x, None, lambda found=found: found)) < 2e-6
        adapter(x).sum().backward()  # a gradient without strides
        assert adapter.readout.A.grad.isfinite().all()


@pytest.mark.parametrize("component", ELEMENTWISE)
@pytest.mark.parametrize("normalize", [True, False], ids=["normalised", "as they are"])
def test_first_and_second_derivatives_are_those_of_finite_differences(component, normalize):
    adapter = adapter_of(component, "learned, with a bias", normalize=normalize, out=3).double()
    projection = adapter.stage.feature_map.projection
    form = AdapterForm(adapter.stage.feature_map.component, normalize, 0.4, 1.7, 3.0, torch.float64)

    def run(x: Any, residual: Any, weight: Any, bias: Any, matrix: Any) -> torch.Tensor:
        return adapter_sum(x, residual, weight, weight.detach(), bias, adapter.stage.means, matrix, form)

    torch.manual_seed(3)
    given = [torch.randn(2, DIM, dtype=torch.float64), torch.randn(2, 3, dtype=torch.float64)]
    given += [projection.weight.detach().clone(), projection.bias.detach().clone(), adapter.readout.A.detach().clone()]
    for tensor in given:
        tensor.requires_grad_()
    assert torch.autograd.gradcheck(run, given)
    assert torch.autograd.gradgradcheck(run, given)
