"""The adapter's step as one operation: values, gradients, transforms and models; as the modules compute them."""

from __future__ import annotations

import copy
import gc
import itertools
import pickle
import weakref
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.utils.checkpoint import checkpoint

from snnk_cli.timing import operations
from snnk_peft import AdapterPart, SNNKConfig, build_feature_map, get_snnk_model
from snnk_peft.components.relu import Relu
from snnk_peft.feature_map import FeatureMap
from snnk_peft.functional.adapter_sum import AdapterForm, adapter_sum
from snnk_peft.layers.adapter import _NARROW, GatedReadout, SNNKAdapter, in_dtype
from snnk_peft.layers.feature_stage import FeatureStage
from snnk_peft.projections import PROJECTIONS
from tests.tiny_models import inputs_for, tiny, trained

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


def counted(run: Callable[[], Any]) -> Counter[str]:
    """Operations by name, without their library and their form."""
    return Counter(name.split("::")[1].split(".")[0] for name in operations(run).elements())


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


# === with what PyTorch does to modules ================================================================================


def functional(adapter: SNNKAdapter) -> tuple[Callable[..., torch.Tensor], dict[str, torch.Tensor]]:
    parameters = {name: p.detach() for name, p in adapter.named_parameters()}
    return lambda given, x: torch.func.functional_call(adapter, given, (x,)), parameters


@pytest.mark.parametrize("rows", ["drawn", "learned"])
def test_transforms_of_functions(rows):
    adapter, x = adapter_of(rows=rows), torch.randn(4, DIM)
    run, parameters = functional(adapter)
    each = torch.func.vmap(torch.func.grad(lambda p, one: run(p, one).square().sum()), (None, 0))(parameters, x)
    whole = torch.func.grad(lambda p: run(p, x).square().sum())(parameters)
    by_hand = gradients(adapter, lambda: adapter(x))[1:]
    for (name, gradient), found in zip(whole.items(), by_hand, strict=True):
        torch.testing.assert_close(gradient, found)
        torch.testing.assert_close(each[name].sum(0), found)


def test_forward_mode():
    adapter, x, tangent = adapter_of(rows="learned"), torch.randn(4, DIM), torch.randn(4, DIM)
    with torch.autograd.forward_ad.dual_level():
        out = adapter(torch.autograd.forward_ad.make_dual(x, tangent))
        found = torch.autograd.forward_ad.unpack_dual(out).tangent
    jacobian = torch.autograd.functional.jacobian(lambda one: adapter(one), x)
    torch.testing.assert_close(found, torch.einsum("tirj,rj->ti", jacobian, tangent))


@pytest.mark.parametrize("rows", ["drawn", "learned"])
def test_compiled_in_one_graph_and_exported(rows):
    adapter, x = adapter_of(rows=rows), torch.randn(4, DIM, requires_grad=True)
    torch._dynamo.reset()
    compiled = torch.compile(adapter, fullgraph=True, backend="aot_eager")
    for a, b in zip(gradients(adapter, lambda: compiled(x)), gradients(adapter, lambda: adapter(x)), strict=True):
        torch.testing.assert_close(a, b)
    exported = torch.export.export(adapter, (x.detach(),)).module()
    torch.testing.assert_close(exported(x), adapter(x))


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("autocast", [False, True])
def test_checkpointed(reentrant, autocast):
    adapter, x = adapter_of("relu").train(), torch.randn(4, DIM, requires_grad=True)

    def run(way: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return way(x)

    expected = gradients(adapter, lambda: run(adapter))
    found = gradients(adapter, lambda: run(partial(checkpoint, adapter, use_reentrant=reentrant)))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("which", ["stage", "readout", "stage.feature_map", "stage.feature_map.projection"])
@pytest.mark.parametrize("hook", ["register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook"])
def test_hooks_of_the_modules_are_called(which, hook):
    adapter, seen = adapter_of(normalize=False), []
    getattr(adapter.get_submodule(which), hook)(lambda *unused: seen.append(which))
    adapter(torch.randn(4, DIM, requires_grad=True)).sum().backward()
    assert seen == [which]


def test_a_component_of_ones_own():
    """One that inherits a derivative but has another function, and one that learns."""

    class Cubed(Relu):
        def function(self, z: torch.Tensor) -> torch.Tensor:
            return z**3

    class Steep(Relu):
        def __init__(self) -> None:
            super().__init__()
            self.slope = torch.nn.Parameter(torch.ones(()))

        def function(self, z: torch.Tensor) -> torch.Tensor:
            return torch.relu(z) * self.slope

        def gradient(self, z: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
            return grad * (z > 0) * self.slope

    x = torch.randn(4, DIM, requires_grad=True)
    for component in (Cubed(), Steep()):
        stage = FeatureStage(FeatureMap(component, PROJECTIONS["gaussian"](DIM, M)))
        adapter = SNNKAdapter(stage, GatedReadout(stage))
        torch.nn.init.normal_(adapter.readout.A)
        z = x.detach().double() @ stage.feature_map.projection.weight.double().T
        slope = 3 * z**2 if isinstance(component, Cubed) else (z > 0).double()
        expected = 1 + (slope * adapter.readout.A.detach().double().sum(0) / M**0.5) @ (
            stage.feature_map.projection.weight.double()
        )
        (found,) = torch.autograd.grad(adapter(x).sum(), x)
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
        adapter(x).sum().backward()
        assert all(p.grad is not None for p in adapter.parameters())


def test_what_follows_may_change_the_output_in_place():
    adapter, x = adapter_of(), torch.randn(4, DIM)
    found = gradients(adapter, lambda: torch.relu_(adapter(x)))
    expected = gradients(adapter, lambda: torch.relu(adapter(x)))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_without_gradients_the_modules_are_called():
    adapter = adapter_of()
    with watched(adapter) as watch, torch.no_grad():
        adapter(torch.randn(4, DIM))
    assert watch.calls == 1


# === in models ========================================================================================================


def bf16() -> torch.autocast:
    return torch.autocast("cpu", torch.bfloat16)


def gradients(module: Any, run: Callable[[], torch.Tensor]) -> list[torch.Tensor]:
    """Of an output, the output first."""
    module.zero_grad()
    out = run()
    out.square().sum().backward()
    return [out.detach(), *(p.grad.clone() for p in module.parameters() if p.grad is not None)]


# --- models ---------------------------------------------------------------------------------------------------------

LEARNED = {"component": "gelu", "projection": "free", "normalize": False}
PLACES = {
    "houlsby": {},
    "pfeiffer": {"placement": "pfeiffer"},
    "query_value": {"placement": "query_value"},
    "parallel": {"placement": "parallel"},
    "learned rows": {"placement": "query_value", **LEARNED},
    "gated": {"init": "paper"},
    "a fast matrix": {"projection": "sorf", "projection_params": {"fast": True}},
    "a quadrature": {"projection": "sgq", "num_features": 65, "component": "relu"},
    "features by a tower": {"component": "trigrf"},
}


@pytest.mark.parametrize("place", PLACES)
def test_a_model_is_trained_as_by_the_modules(place):
    """With dropout, whose draws are the same; a second adapter is in use as well."""
    options = {"num_features": 4, **PLACES[place]}
    model = get_snnk_model(tiny("bert"), SNNKConfig(adapter=AdapterPart(**options), modules_to_save=[]))
    if place != "parallel":  # which lets nothing pass
        model.add_adapter("second", SNNKConfig(adapter=AdapterPart(num_features=3), modules_to_save=[]))
        model.base_model.set_adapter(["default", "second"])
    trained(model).double().train()
    inputs = inputs_for(model)

    def run() -> torch.Tensor:
        torch.manual_seed(5)
        return model(**inputs).logits

    found = gradients(model, run)
    with watched(model) as watch:
        expected = gradients(model, run)
    assert watch.calls
    assert len(found) == len(expected) == 1 + sum(p.requires_grad for p in model.parameters())
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("autocast", [False, True])
def test_a_step_has_no_more_operations_than_loras(autocast):
    layers, inputs = 3, inputs_for(tiny("bert"))
    plain = tiny("bert", num_hidden_layers=layers)

    def needed(model: Any) -> int:
        def run() -> None:
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = model(**inputs).logits.float().square().sum()
            loss.backward()

        run()
        return sum(counted(run).values())

    lora = get_peft_model(copy.deepcopy(plain), LoraConfig(r=4, target_modules=["query", "value"])).train()
    ours = get_snnk_model(plain, SNNKConfig(adapter=AdapterPart(num_features=4), modules_to_save=[])).train()
    assert needed(ours) <= needed(lora)


@pytest.mark.parametrize(("autocast", "forward", "backward"), [(False, 5, 7), (True, 7, 7)])
def test_few_operations_for_each_adapter(autocast, forward, backward):
    adapter, x = adapter_of("relu"), torch.randn(5, DIM)
    x = (x.bfloat16() if autocast else x).requires_grad_()

    def run() -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return adapter(x)

    found = [run()]  # the cast of W is kept
    assert sum(counted(lambda: found.append(run())).values()) <= forward
    upstream = torch.ones_like(x)
    assert sum(counted(lambda: torch.autograd.grad(found[-1], [x, adapter.readout.A], upstream)).values()) <= backward


# --- the cast of W --------------------------------------------------------------------------------------------------

CHANGES: dict[str, Callable[[Any], Any]] = {
    "in place": lambda p: p.weight.mul_(2),
    "a row": lambda p: p.weight[0].zero_(),
    "loaded": lambda p: p.load_state_dict({name: value * 3 for name, value in p.state_dict().items()}),
    "another tensor": lambda p: setattr(p, "weight", p.weight * 2),
    "other memory": lambda p: setattr(p.weight, "data", p.weight.data * 2),
    "other strides": lambda p: setattr(p.weight, "data", p.weight.flip(0).T.contiguous().T),
    "another dtype": lambda p: p.double(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_matrix_is_cast_again(change):
    adapter, x = adapter_of("relu", normalize=False), torch.randn(5, DIM)
    with bf16():
        before = adapter(x)
        with torch.no_grad():
            CHANGES[change](adapter.stage.feature_map.projection)
        found = adapter(x)
        with watched(adapter):
            expected = adapter(x)
    assert in_one(found)
    assert error(found, expected) < 2**-7
    assert change == "another dtype" or error(found, before) > 2**-4


def test_the_matrix_is_cast_once_for_as_long_as_it_lives():
    adapter = adapter_of()
    projection = adapter.stage.feature_map.projection
    first = in_dtype(projection, projection.weight, torch.bfloat16)
    assert in_dtype(projection, projection.weight, torch.bfloat16) is first
    other = in_dtype(projection, projection.weight, torch.float16)
    assert other.dtype == torch.float16
    copied = copy.deepcopy(adapter).stage.feature_map.projection
    assert copied not in _NARROW
    assert pickle.loads(pickle.dumps(projection)) not in _NARROW
    assert len(pickle.dumps(projection)) == len(pickle.dumps(copied))
    alive = weakref.ref(projection)
    del adapter, projection
    gc.collect()
    assert alive() is None


def test_training_after_inference_mode():
    adapter, x = adapter_of(), torch.randn(5, DIM)
    with torch.inference_mode(), bf16():
        adapter(x)
        with torch.enable_grad():
            adapter(x)
    with bf16():
        gradients(adapter, lambda: adapter(x))
    with torch.inference_mode():
        made = copy.deepcopy(adapter.stage.feature_map.projection.weight)
    adapter.stage.feature_map.projection.weight = made
    with bf16():
        gradients(adapter, lambda: adapter(x))


@pytest.mark.parametrize("rows", ["drawn", "learned"])
def test_what_changes_before_the_backward_pass_is_told(rows):
    """The kept cast of a frozen matrix is what the forward pass saw."""
    adapter, x = adapter_of(rows=rows), torch.randn(5, DIM, requires_grad=True)
    found = adapter(x)
    with torch.no_grad():
        (adapter.readout.A if rows == "drawn" else adapter.stage.feature_map.projection.weight).mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        found.sum().backward()
