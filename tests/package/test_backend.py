"""Device kernels: throw-away ones for the CPU, of dense formulas, through every door, against the torch form."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from snnk_peft import AdapterPart, AttentionPart, build_feature_map, bundle
from snnk_peft.components import COMPONENTS
from snnk_peft.errors import ConfigError
from snnk_peft.functional.adapter_sum import AdapterForm, adapter_sum
from snnk_peft.functional.backend import DEVICE_KERNELS, OPERATIONS, SWITCH, form_that_ran, register_kernel
from snnk_peft.functional.exponential_attention import KeyMeans, exponential_attention, key_means
from snnk_peft.functional.exponential_causal import causal_exponential_attention
from snnk_peft.functional.hadamard import hadamard_matrix, hadamard_transform, walsh_hadamard
from snnk_peft.functional.linear_attention import AttentionState, causal_linear_attention, key_sums
from snnk_peft.functional.log_linear import LogLinear
from snnk_peft.functional.near_field import Sinks, near_attention
from snnk_peft.functional.normalized_projection import EPSILON, normalized_linear
from snnk_peft.functional.precision import wide
from snnk_peft.layers.kernel_attention import KernelAttention, continue_attention
from tests import exponential_oracle, linear_oracle, near_oracle
from tests.attention_models import built
from tests.fresh_process import run_python

CLOSE = {"rtol": 1e-4, "atol": 1e-5}


# --- dense forms ----------------------------------------------------------------------------------------------------


def dense_hadamard(x):
    return x @ hadamard_matrix(x.shape[-1], x.dtype)


def dense_normalized(x, weight, eps=EPSILON):
    return torch.nn.functional.layer_norm(x, x.shape[-1:], eps=eps) @ weight.to(x.dtype).T


def dense_adapter(x, residual, weight, low, bias, centres, matrix, form):
    seen = torch.nn.functional.layer_norm(x, x.shape[-1:], eps=EPSILON) if form.normalize else x
    z = form.scale * seen @ weight.T + (0 if bias is None else bias)
    features = form.component.function(z) - (0 if centres is None else form.centring * centres)
    return (x if residual is None else residual) + form.factor * features @ matrix.T


def dense_causal(q, k, v, mask=None, *, chunk=None, state=None, log_scale=None):
    given = {"q": wide(q), "k": wide(k), "v": wide(v)}
    if log_scale is not None:
        given["scales"] = log_scale.squeeze(-1)
    if state is not None:
        given |= {"S": state.values, "z": state.normaliser}
    out, *sums = linear_oracle.dense(given, None if state is None else state.log_scale, mask)
    return out.to(v.dtype), AttentionState(*sums)


def dense_sums(k, v, mask=None, *, log_scale=None, state=None, overwrite=False):
    return dense_causal(k, k, v, mask, state=state, log_scale=log_scale)[1]


def dense_exponential(q, k, v, queries, keys, mask=None, state=None, causal=False):
    maps = [queries.rows, queries.offset + keys.offset, keys.rows]
    out, _, *means = exponential_oracle.dense(wide(q), wide(k), wide(v), maps, keys.square, mask, state, causal)
    return out.to(v.dtype), KeyMeans(*means)


def dense_means(k, v, features, mask=None, state=None, memory=None):
    return dense_exponential(k, k, v, features, features, mask, state)[1]


def dense_near(q, k, v, width, mask=None, *, causal=False, scaling=1.0, sinks=None, far=()):
    kept, known = ([], None) if sinks is None else ([sinks.keys, sinks.values], sinks.known)
    far = [each for pair in far for each in pair]
    return near_oracle.dense(q, k, v, kept, far, known, mask, width, causal, scaling).to(v.dtype)


def without_signs(q, k, v, queries, keys, mask=None, state=None) -> bool:
    return keys.signs is None and keys.offset.dim() == 1


DENSE: dict[Any, tuple[Callable[..., Any], Callable[..., bool] | None]] = {
    adapter_sum: (dense_adapter, None),
    causal_exponential_attention: (partial(dense_exponential, causal=True), without_signs),
    causal_linear_attention: (dense_causal, None),
    exponential_attention: (dense_exponential, without_signs),
    hadamard_transform: (dense_hadamard, None),
    key_means: (dense_means, None),
    key_sums: (dense_sums, None),
    near_attention: (dense_near, None),
    normalized_linear: (dense_normalized, None),
}


@pytest.fixture(autouse=True)
def _undone() -> Iterator[None]:
    before = dict(DEVICE_KERNELS)
    yield
    DEVICE_KERNELS.clear()
    DEVICE_KERNELS.update(before)


def register_dense(device: str = "cpu", only: Any = None, **options: Any) -> Counter[str]:
    """All dense forms, or that of one operation; what is returned counts their calls."""
    calls: Counter[str] = Counter()

    def counted(operation: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def kernel(*args, **kwargs):
            calls[operation] += 1
            return function(*args, **kwargs)

        return kernel

    for operation, (function, serves) in DENSE.items():
        if only not in (None, operation):
            continue
        name = operation.__name__
        register_kernel(name, device=device, **{"serves": serves, **options})(counted(name, function))
    return calls


# --- one operation --------------------------------------------------------------------------------------------------


def log_linear(m: int = 5, d: int = 4) -> LogLinear:
    return LogLinear(torch.randn(m, d), torch.randn(m), 0.5)


def arguments(operation: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Two query heads per key head, a mask with a row that sees no key, scales, and the state of three keys before."""
    q, k, v = torch.randn(2, 4, 7, 4), torch.randn(2, 2, 7, 4), torch.randn(2, 2, 7, 3)
    phi, psi, scale = torch.rand(2, 4, 7, 5), torch.rand(2, 2, 7, 5), torch.randn(2, 2, 7, 1)
    mask = torch.tensor([[True] * 7, [False] * 2 + [True] * 5])
    features = log_linear()
    means = key_means(k[:, :, :3], v[:, :, :3], features)
    sums = key_sums(psi[:, :, :3], v[:, :, :3], log_scale=scale[:, :, :3])
    sinks = Sinks(torch.randn(2, 2, 2, 4), torch.randn(2, 2, 2, 3), torch.randint(3, (2, 7)))
    far = ((torch.randn(2, 4, 7, 3), torch.randn(2, 4, 7)),)
    form = AdapterForm(COMPONENTS["gelu"](), True, 0.7, 1.5, 2.0, torch.float32)
    weight, bias, centres, matrix = torch.randn(5, 6), torch.randn(5), torch.randn(5), torch.randn(4, 5)
    return {
        adapter_sum: ((torch.randn(3, 6), torch.randn(3, 4), weight, weight, bias, centres, matrix, form), {}),
        causal_exponential_attention: ((q, k, v, log_linear(), features, mask, means), {}),
        causal_linear_attention: ((phi, psi, v, mask), {"log_scale": scale, "state": sums}),
        exponential_attention: ((q, k, v, log_linear(), features, mask, means), {}),
        hadamard_transform: ((torch.randn(3, 64),), {}),
        key_means: ((k, v, features, mask, means), {}),
        key_sums: ((psi, v, mask), {"log_scale": scale, "state": sums}),
        near_attention: ((q, k, v, 3, mask), {"causal": True, "scaling": 0.6, "sinks": sinks, "far": far}),
        normalized_linear: ((torch.randn(3, 6), torch.randn(5, 6)), {}),
    }[operation]


def test_every_operation_has_a_dense_form():
    assert tuple(sorted(operation.__name__ for operation in DENSE)) == OPERATIONS


@pytest.mark.parametrize("operation", DENSE, ids=lambda operation: operation.__name__)
def test_the_kernel_runs_in_place_of_the_torch_form(operation):
    args, kwargs = arguments(operation)
    expected = operation(*args, **kwargs)
    calls = register_dense(only=operation)
    torch.testing.assert_close(operation(*args, **kwargs), expected, **CLOSE)
    assert calls == {operation.__name__: 1}
    assert form_that_ran(operation.__name__) == f"{__name__}.register_dense.<locals>.counted.<locals>.kernel"
    torch.testing.assert_close(operation.__wrapped__(*args, **kwargs), expected, rtol=0, atol=0)
    assert calls == {operation.__name__: 1}


@pytest.mark.parametrize("operation", DENSE, ids=lambda operation: operation.__name__)
def test_the_environment_turns_kernels_off(operation, monkeypatch):
    args, kwargs = arguments(operation)
    expected = operation(*args, **kwargs)
    calls = register_dense()
    monkeypatch.setenv(SWITCH, "off")
    torch.testing.assert_close(operation(*args, **kwargs), expected, rtol=0, atol=0)
    assert not calls
    assert form_that_ran(operation.__name__) == "torch"


def test_the_device_is_that_of_the_first_argument():
    calls = register_dense("meta")
    x, weight = torch.randn(3, 6), torch.randn(5, 6)
    normalized_linear(x, weight)
    assert not calls
    assert normalized_linear(x.to("meta"), weight.to("meta")).shape == (3, 5)
    normalized_linear(weight=weight.to("meta"), x=x.to("meta"))
    assert calls == {"normalized_linear": 2}


def test_what_a_kernel_does_not_serve_the_torch_form_does():
    asked = []

    def serves(x):
        asked.append(x.shape)
        return x.shape[-1] > 8

    register_kernel("hadamard_transform", device="cpu", serves=serves)(torch.zeros_like)
    x = torch.randn(2, 8)
    torch.testing.assert_close(walsh_hadamard(x), dense_hadamard(x))
    assert not walsh_hadamard(torch.randn(2, 16)).any()
    assert asked == [(2, 8), (2, 16)]


def test_what_a_kernel_raises_is_seen():
    @register_kernel("hadamard_transform", device="cpu")
    def fails(x):
        raise NotImplementedError("no such size")

    with pytest.raises(NotImplementedError, match="no such size"):
        walsh_hadamard(torch.randn(2, 8))


def test_arguments_are_checked_before_a_kernel_sees_them():
    calls = register_dense()
    with pytest.raises(ValueError, match="pad to 8"):
        walsh_hadamard(torch.randn(2, 6))
    assert not calls


@pytest.mark.parametrize("operation", DENSE, ids=lambda operation: operation.__name__)
@pytest.mark.parametrize("differentiable", [False, True])
def test_gradients_come_from_what_can_give_them(operation, differentiable):
    args, kwargs = arguments(operation)
    given = args[0].requires_grad_()

    def gradient() -> torch.Tensor:
        out = operation(*args, **kwargs)
        out = out if isinstance(out, torch.Tensor) else out[0]
        return torch.autograd.grad(out.square().sum(), given)[0]

    expected = gradient()
    calls = register_dense(only=operation, differentiable=differentiable)
    torch.testing.assert_close(gradient(), expected, rtol=1e-3, atol=1e-4)
    assert bool(calls) == differentiable
    with torch.no_grad():
        operation(*args, **kwargs)
    assert calls[operation.__name__] == 1 + differentiable


def test_a_gradient_of_rows_inside_a_tuple_counts():
    (k, v, features, *rest), _ = arguments(key_means)
    calls = register_dense()
    means = key_means(k, v, features._replace(rows=features.rows.requires_grad_()), *rest)
    assert not calls
    assert means.values.requires_grad


# --- registration ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("operation", "device", "message"),
    [
        ("key_sum", "cpu", "no operation 'key_sum'.*'key_sums'"),
        ("key_sums", "cuda:0", "expected a type without an index, such as 'cuda'"),
        ("key_sums", "gpu", "'gpu' is given as the device type of a kernel; Expected one of cpu, cuda"),
    ],
)
def test_registration_names_what_is_wrong(operation, device, message):
    with pytest.raises(ConfigError, match=message):
        register_kernel(operation, device=device)


def test_one_kernel_per_operation_and_device():
    register_kernel("key_sums", device="cpu")(dense_sums)
    register_kernel("key_sums", device="meta")(dense_sums)
    with pytest.raises(ConfigError, match=r"key_sums on 'cpu' has a kernel, \S*test_backend\.dense_sums"):
        register_kernel("key_sums", device="cpu")


KERNEL_FILE = """
import torch
from snnk_peft.functional.backend import register_kernel

@register_kernel("hadamard_transform", device="{device}")
def sevens(x):
    return torch.full_like(x, 7.0)
"""
PROGRAM = """
import sys, torch
from snnk_peft.functional.hadamard import walsh_hadamard
x = torch.ones(1, 2)
assert not [name for name in sys.modules if "device_kernels." in name]
print(torch.compile(walsh_hadamard, fullgraph=True, backend="eager")(x).tolist())
print(walsh_hadamard(x).tolist())
print(sorted(name for name in sys.modules if "device_kernels." in name))
"""


def test_a_file_is_all_it_takes(root, tmp_path):
    """Found at the first call on its device type, in a compiled function too; those of others are not imported."""
    shutil.copytree(root / "snnk_peft", tmp_path / "snnk_peft", ignore=shutil.ignore_patterns("__pycache__"))
    folder = tmp_path / "snnk_peft" / "functional" / "device_kernels"
    (folder / "cpu_throwaway.py").write_text(KERNEL_FILE.format(device="cpu"))
    (folder / "cuda_throwaway.py").write_text("import a_library_that_is_absent")
    done = run_python(["-c", PROGRAM], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    name = "snnk_peft.functional.device_kernels.cpu_throwaway"
    assert done.stdout.splitlines() == ["[[7.0, 7.0]]", "[[7.0, 7.0]]", str([name])]
    (folder / "fast_hadamard.py").write_text(KERNEL_FILE.format(device="cuda"))
    done = run_python(["-c", PROGRAM], cwd=tmp_path)
    assert "'fast' is given as the device type of a kernel" in done.stderr


# --- through every door ---------------------------------------------------------------------------------------------


ATTENTION = [
    ("posrf", False, {"exponential_attention"}),
    ("posrf", True, {"causal_exponential_attention"}),
    ("relu", False, {"key_sums"}),
    ("relu", True, {"causal_linear_attention"}),
]


def test_declined_features_with_signs():
    kernel = KernelAttention([build_feature_map("posrf", "sgq", 4, 9)], 4).eval()
    q = torch.randn(2, 4, 9, 4)
    assert kernel.maps()[0].projection.feature_weights.min() < 0
    expected = kernel(q, q, q, causal=True)
    calls = register_dense()
    torch.testing.assert_close(kernel(q, q, q, causal=True), expected, rtol=0, atol=0)
    assert not calls


@pytest.mark.parametrize("component", ["posrf", "relu"])
@pytest.mark.parametrize("first", ["torch", "dense"])
def test_each_form_continues_from_the_others_state(component, first):
    kernel = KernelAttention([build_feature_map(component, "orf", 4, 8)], 4).eval()
    q, k, v = (torch.randn(2, heads, 9, 4) for heads in (4, 2, 2))
    expected = kernel(q, k, v, causal=True)
    if first == "dense":
        calls = register_dense()
    out, state = continue_attention(kernel, q[:, :, :5], k[:, :, :5], v[:, :, :5])
    if first == "dense":
        assert calls
        DEVICE_KERNELS.clear()
    else:
        calls = register_dense()
    rest, _ = continue_attention(kernel, q[:, :, 5:], k[:, :, 5:], v[:, :, 5:], state=state)
    assert calls
    torch.testing.assert_close(torch.cat((out, rest), -2), expected, **CLOSE)


FAST = {"projection": "sorf", "projection_params": {"fast": True}}
MODELS = [
    ("bert", {"adapter": AdapterPart(num_features=4)}, {"normalized_linear"}),
    ("bert", {"adapter": AdapterPart(num_features=4, **FAST)}, {"hadamard_transform"}),
    ("bert", {"attention": AttentionPart(num_features=8)}, {"exponential_attention"}),
    ("bert", {"attention": AttentionPart("relu", num_features=8)}, {"key_sums"}),
    ("llama", {"attention": AttentionPart(num_features=8)}, {"causal_exponential_attention"}),
    ("llama", {"attention": AttentionPart("relu", num_features=8)}, {"causal_linear_attention"}),
]


@pytest.mark.parametrize(("family", "parts", "operations"), MODELS)
def test_models_and_their_bundles(family, parts, operations, tmp_path):
    model, inputs = built(family, parts)
    auto = AutoModelForSequenceClassification if family == "bert" else AutoModelForCausalLM
    small = bundle(model)
    small.save_pretrained(tmp_path)
    again = auto.from_pretrained(tmp_path).eval()
    with torch.no_grad():
        expected = model(**inputs).logits
        calls = register_dense()
        for each in (model, small, again):
            calls.clear()
            torch.testing.assert_close(each(**inputs).logits, expected, **CLOSE)
            assert set(calls) == operations


def test_generation():
    model, inputs = built("llama", {"attention": AttentionPart(num_features=8)})
    inputs = {**inputs, "use_cache": True, "max_new_tokens": 6, "do_sample": False}
    expected = model.generate(**inputs)
    calls = register_dense()
    assert torch.equal(model.generate(**inputs), expected)
    assert calls["causal_exponential_attention"] == 6 * 2  # two layers


def test_training_is_as_without_kernels():
    model, inputs = built("bert", {"adapter": AdapterPart(num_features=4), "attention": AttentionPart(num_features=8)})

    def gradients() -> list[torch.Tensor]:
        model.zero_grad()
        model(**inputs).logits.square().sum().backward()
        return [p.grad.clone() for p in model.parameters() if p.requires_grad]

    expected = gradients()
    register_dense()
    torch.testing.assert_close(gradients(), expected, **CLOSE)


# --- graphs ---------------------------------------------------------------------------------------------------------


@torch.library.custom_op("snnk_tests::hadamard", mutates_args=())
def opaque_hadamard(x: torch.Tensor) -> torch.Tensor:
    """What a compiler cannot look into, as the launch of a GPU kernel."""
    return torch.from_numpy(x.numpy() @ hadamard_matrix(x.shape[-1], x.dtype).numpy())


@opaque_hadamard.register_fake
def _(x):
    return torch.empty_like(x)


class Graphs:
    """A compiler that keeps the graphs it is given."""

    def __init__(self) -> None:
        self.found: list[torch.fx.GraphModule] = []
        torch._dynamo.reset()

    def __call__(self, graph: torch.fx.GraphModule, inputs: Any) -> Any:
        self.found.append(graph)
        return graph.forward


def is_opaque(graph: torch.fx.GraphModule) -> bool:
    return any("snnk_tests" in str(node.target) for node in graph.graph.nodes)


def test_an_opaque_kernel_is_one_node_of_one_graph():
    graphs, x = Graphs(), torch.randn(3, 64)
    compiled = torch.compile(lambda x: walsh_hadamard(x.cos()).sin(), fullgraph=True, backend=graphs)
    expected = compiled(x)
    register_kernel("hadamard_transform", device="cpu")(opaque_hadamard)
    torch.testing.assert_close(compiled(x), expected)  # what was compiled before a kernel came is compiled again
    assert [is_opaque(graph) for graph in graphs.found] == [False, True]


@pytest.mark.parametrize(("component", "causal", "operations"), ATTENTION)
def test_attention_compiles_in_one_graph(component, causal, operations):
    kernel = KernelAttention([build_feature_map(component, "orf", 4, 8)], 4).eval()
    q, k, v = (torch.randn(2, heads, 9, 4) for heads in (4, 2, 2))
    with torch.no_grad():
        expected = kernel(q, k, v, causal=causal)
        calls, graphs = register_dense(), Graphs()
        compiled = torch.compile(lambda q, k, v: kernel(q, k, v, causal=causal), fullgraph=True, backend=graphs)
        torch.testing.assert_close(compiled(q, k, v), expected, **CLOSE)
    assert len(graphs.found) == 1
    assert set(calls) == operations


@pytest.mark.parametrize("strict", [False, True])
def test_what_is_exported_needs_no_kernel(strict):
    register_kernel("hadamard_transform", device="cpu")(opaque_hadamard)

    class Transform(torch.nn.Module):
        def forward(self, x):
            return walsh_hadamard(x)

    x = torch.randn(3, 64)
    program = torch.export.export(Transform(), (x,), strict=strict).module()
    torch.testing.assert_close(program(x), dense_hadamard(x))
    assert not is_opaque(program)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_what_is_traced_by_torchscript_needs_no_kernel():
    calls, x, weight = register_dense(), torch.randn(3, 6), torch.randn(5, 6)
    program = torch.jit.trace(normalized_linear, (x, weight), check_trace=False)
    assert not calls
    torch.testing.assert_close(program(x, weight), dense_normalized(x, weight))


@pytest.mark.parametrize(("family", "parts"), [model[:2] for model in MODELS[:4:2] + MODELS[5:]])
def test_bundles_export_as_without_kernels(family, parts):
    model, inputs = built(family, parts)
    small = bundle(model)
    expected = small(**inputs).logits
    calls = register_dense()
    batch = {name: value for name, value in inputs.items() if isinstance(value, torch.Tensor)}
    small.config.use_cache = False
    program = torch.export.export(small, (), batch, strict=False).module()
    assert not calls
    torch.testing.assert_close(program(**batch).logits, expected, **CLOSE)
