"""Feature maps in attention: every pair, maps of their own for keys, sums of maps, learned and data-dependent maps."""

from __future__ import annotations

import copy
import itertools
import json
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from peft import PeftModel

from snnk_peft import (
    COMPONENTS,
    PROJECTIONS,
    AttentionPart,
    FFNPart,
    SNNKConfig,
    build_feature_map,
    bundle,
    calibrate,
    get_snnk_model,
)
from snnk_peft.errors import ConfigError
from snnk_peft.feature_map import FeatureMap, advance
from snnk_peft.feature_map.describe import main, measured_error
from snnk_peft.layers.attention_term import AttentionTerm
from snnk_peft.layers.kernel_attention import KernelAttention
from snnk_peft.parts.attention.interface import NAME
from tests.attention_models import causal_model, left_padded, patched, sharpened, widened
from tests.fresh_process import run_python
from tests.tiny_models import inputs_for, same, tiny, trained

F64 = torch.float64
HEADS, GROUPS, LENGTH, DIM = 4, 2, 7, 4
SCALING = 0.6
PAIRS = [
    (component, projection)
    for component, projection in itertools.product(COMPONENTS.names(), PROJECTIONS.names())
    if COMPONENTS[component].fits(PROJECTIONS[projection])
    and not PROJECTIONS[projection].needs_layer
    and (component not in ("urf", "cos") or PROJECTIONS[projection].uniform)
]
quiet = pytest.mark.filterwarnings("ignore::snnk_peft.errors.NumericalWarning")


def made(component: str, projection: str, site: str = "", m: int = 12, **params: object) -> FeatureMap:
    size = PROJECTIONS[projection].nearest_size(DIM, m)
    return build_feature_map(component, projection, DIM, size, site=site, projection_params=params).double()


def vivid():
    return widened(tiny("bert"))


def vectors() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k, v and a mask that hides the last two tokens of the second example."""
    generator = torch.Generator().manual_seed(4)
    q = torch.randn(2, HEADS, LENGTH, DIM, dtype=F64, generator=generator) * 0.7
    k, v = torch.randn(2, 2, GROUPS, LENGTH, DIM, dtype=F64, generator=generator) * 0.7
    return q, k, v, torch.arange(LENGTH) < torch.tensor([[LENGTH], [LENGTH - 2]])


Maps = Callable[[int], tuple[FeatureMap, FeatureMap]]


def explicit(maps: Maps, causal: bool = False, masked: bool = True) -> tuple[torch.Tensor, float]:
    """The weights of one example and head at a time, hidden tokens cut off; and how much rounding errors grow."""
    q, k, v, mask = vectors()
    out, growth = torch.zeros(2, HEADS, LENGTH, DIM, dtype=F64), 1.0
    for b, group in itertools.product(range(2), range(GROUPS)):
        first, second = maps(group)
        kept = int(mask[b].sum()) if masked else LENGTH
        members = range(group * HEADS // GROUPS, (group + 1) * HEADS // GROUPS)
        x, y = q[b] * SCALING**0.5, k[b, group, :kept] * SCALING**0.5
        statistics = first.component.statistics(torch.cat([x[h, :kept] for h in members]), y)
        psi = second.psi(y, statistics).dense()
        for h in members:
            weights = first.phi(x[h], statistics).dense() @ psi.T
            if causal:
                weights = weights.tril()
            total = weights.sum(-1, keepdim=True)
            seen = total[:, 0] != 0  # to a query that no feature answers, nothing is like it
            out[b, h, seen] = (weights @ v[b, group, :kept] / total)[seen]
            # Signed features can nearly cancel in the denominator.
            growth = max(growth, (weights.abs().sum(-1, keepdim=True) / total.abs())[seen].max().item())
    return out.detach(), growth


def close(found: torch.Tensor, expected: torch.Tensor, growth: float = 1.0) -> None:
    tolerance = 1e-10 * max(1.0, expected.abs().max().item()) * growth
    torch.testing.assert_close(found.detach(), expected, rtol=0, atol=tolerance)


# --- every pair -----------------------------------------------------------------------------------------------------


def test_there_are_pairs():
    assert len(PAIRS) > 300
    assert {"softmax_pm", "elu"} <= {component for component, projection in PAIRS if projection == "identity"}


@quiet
@pytest.mark.parametrize("component", COMPONENTS.names())
def test_every_pair_is_its_quadratic_form(component):
    """Bidirectional with a mask, and causal where that is possible; grouped heads, one W for all."""
    q, k, v, mask = vectors()
    count = 0
    for name, projection in PAIRS:
        if name == component:
            fm = made(component, projection)
            kernel = KernelAttention([fm], HEADS)
            close(kernel(q, k, v, mask, scaling=SCALING), *explicit(lambda _, fm=fm: (fm, fm)))
            if not fm.component.adapts:
                expected = explicit(lambda _, fm=fm: (fm, fm), causal=True, masked=False)
                close(kernel(q, k, v, causal=True, scaling=SCALING), *expected)
            count += 1
    assert count >= 1


@pytest.mark.parametrize("component", ["posrf", "oprf", "saderf", "derf", "softmax_pm"])
@pytest.mark.parametrize("apart", [False, True])
def test_a_matrix_for_every_key_head(component, apart):
    q, k, v, mask = vectors()
    queries = [made(component, "free", f"{group}") for group in range(GROUPS)]
    keys = [made(component, "free", f"key.{group}") for group in range(GROUPS)] if apart else queries
    kernel = KernelAttention([AttentionTerm(queries, keys if apart else None)], HEADS)
    close(kernel(q, k, v, mask, scaling=SCALING), *explicit(lambda group: (queries[group], keys[group])))


def test_classical_linear_attention():
    """elu + 1 without a projection: against the formula of Katharopoulos et al., here and in a whole model's layer."""
    q, k, v, mask = vectors()

    def formula(q, k, v, mask):
        phi, psi = (torch.where(t > 0, t + 1, t.exp()) for t in (q, k.repeat_interleave(q.shape[1] // k.shape[1], 1)))
        psi = psi * mask[:, None, :, None]
        values = v.repeat_interleave(q.shape[1] // v.shape[1], 1)
        return phi @ (psi.mT @ values) / (phi @ psi.sum(-2).unsqueeze(-1))

    kernel = KernelAttention([made("elu", "identity")], HEADS)
    root = SCALING**0.5
    close(kernel(q, k, v, mask, scaling=SCALING), formula(q * root, k * root, v, mask))

    model = patched(vivid(), component="elu", projection="identity")
    layer = model.get_base_model().bert.encoder.layer[0].attention.self
    seen: dict[str, torch.Tensor] = {}
    base = layer.base_layer
    base.register_forward_hook(lambda module, args, kwargs, out: seen.update(x=args[0], out=out[0]), with_kwargs=True)
    inputs = inputs_for(model.get_base_model())
    with torch.no_grad():
        model(**inputs)
        heads = [
            linear(seen["x"]).unflatten(-1, (2, 16)).transpose(1, 2) for linear in (base.query, base.key, base.value)
        ]
    expected = formula(heads[0] / 2, heads[1] / 2, heads[2], inputs["attention_mask"])
    torch.testing.assert_close(seen["out"], expected.transpose(1, 2).flatten(2), rtol=1e-5, atol=1e-6)


def test_softmax_of_both_signs_by_brute_force():
    fm = made("softmax_pm", "free", bias=True, m=3)
    with torch.no_grad():
        fm.projection.bias.copy_(torch.tensor([0.3, -0.2, 0.1]))
    x = torch.randn(2, DIM, dtype=F64)
    w, b = fm.projection.weight.tolist(), fm.projection.bias.tolist()
    for row, found in zip(x.tolist(), fm(x).tolist(), strict=True):
        z = [sum(w[i][j] * row[j] for j in range(DIM)) + b[i] for i in range(3)]
        powers = [math.exp(value) for value in [*z, *(-value for value in z)]]
        assert found == pytest.approx([power / sum(powers) for power in powers], rel=1e-12)
    assert fm.feature_dim == 6
    large = fm(1e4 * x)
    assert large.isfinite().all()
    assert torch.equal(fm.phi(x).values, fm.psi(x).values)
    half = copy.deepcopy(fm).float()
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(half(x.float()).double(), fm(x), rtol=1e-5, atol=1e-6)


def test_a_component_without_kernel_says_so(capsys):
    assert not COMPONENTS["softmax_pm"].has_kernel()
    assert COMPONENTS["elu"].has_kernel()
    for pair in (("softmax_pm", "free"), ("elu", "identity")):
        with pytest.raises(ConfigError, match="estimates no kernel"):
            measured_error(*pair, 4, 4)
        assert main(["describe", *pair, "--dim", "4", "--num-features", "4"]) == 0
        shown = capsys.readouterr().out
        assert "there is no kernel to measure against" in shown
        assert "estimates no kernel" in shown
        assert "unbiased" not in shown


# --- separate maps --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("projection", ["free", "gmm", "fastfood_learned", "generative"])
@pytest.mark.parametrize("per_head", [False, True])
def test_separate_maps_start_as_the_shared_one_and_learn_apart(projection, per_head):
    model = vivid()
    inputs = inputs_for(model)
    fields = {"projection": projection, "num_features": 8, "per_head": per_head}
    shared = patched(copy.deepcopy(model), **fields)
    apart = patched(model, separate_maps=True, **fields)
    assert torch.equal(shared(**inputs).logits, apart(**inputs).logits)
    kernel = next(module for module in apart.modules() if isinstance(module, KernelAttention))
    assert len(kernel.maps()) == (4 if per_head else 2)
    apart(**inputs).logits.square().sum().backward()
    for first, second in kernel.terms[0].pairs():
        given = {name: p.grad for name, p in first.named_parameters()}
        other = {name: p.grad for name, p in second.named_parameters()}
        moving = [name for name in given if given[name].any()]
        assert moving
        for name in moving:  # two towers, two gradients
            assert other[name].any()
            assert not torch.allclose(given[name], other[name])
    before = apart(**inputs).logits
    with torch.no_grad():
        for p in kernel.terms[0].pairs()[0][1].parameters():
            p += 0.5
    assert not torch.allclose(apart(**inputs).logits, before, atol=1e-6)


# --- sums of maps ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("near_field", [None, 2])
def test_a_sum_of_maps_is_the_sum_of_their_quadratic_forms(causal, near_field):
    q, k, v, mask = vectors()
    first, second, third = made("posrf", "orf"), made("elu", "identity"), made("softmax_pm", "free", "x")
    keys = made("softmax_pm", "free", "y")
    terms = [AttentionTerm([first]), AttentionTerm([second]), AttentionTerm([third], [keys])]
    kernel = KernelAttention(terms, HEADS, near_field=near_field).double()
    fields = [
        explicit(lambda _, pair=pair: pair, causal=causal)[0]
        for pair in ((first, first), (second, second), (third, keys))
    ]
    options = {"causal": causal, "scaling": SCALING}
    if near_field is not None:
        scores = (SCALING * q @ k.repeat_interleave(2, 1).mT).masked_fill(~mask[:, None, None, :], -math.inf)
        i, j = torch.arange(LENGTH)[:, None], torch.arange(LENGTH)[None, :]
        hidden = (i - j).abs() >= near_field
        weights = scores.masked_fill(hidden | (j > i) if causal else hidden, -math.inf).softmax(-1)
        fields.insert(0, weights.nan_to_num(0.0) @ v.repeat_interleave(2, 1))
    shares = [1 / 3] * 3 if near_field is None else [1 / 2, *[1 / 6] * 3]
    weights = torch.nn.functional.softplus(kernel.blend)
    torch.testing.assert_close(weights, torch.tensor(shares, dtype=F64)[:, None].expand(-1, HEADS), rtol=1e-6, atol=0)
    close(kernel(q, k, v, mask, **options), blended(weights, fields))
    with torch.no_grad():
        kernel.blend.copy_(torch.randn(kernel.blend.shape, dtype=F64))
    weights = torch.nn.functional.softplus(kernel.blend)
    assert (weights > 0).all()
    close(kernel(q, k, v, mask, **options), blended(weights, fields))


def blended(weights: torch.Tensor, fields: Sequence[torch.Tensor]) -> torch.Tensor:
    return sum(weights[r].detach()[:, None, None] * field for r, field in enumerate(fields))


def test_terms_of_a_part():
    part = AttentionPart(
        component="gerf",
        component_params={"s": -1},
        projection="gmm",
        projection_params={"components": 1},
        num_features=8,
        near_field=3,
        sum_of=[{}, {"component": "elu"}, {"projection": "orf", "per_head": True}],
    )
    shown = [
        (t.component, t.component_params, t.projection, t.projection_params, t.num_features, t.per_head, t.sum_of)
        for t in part.terms()
    ]
    assert shown == [
        ("gerf", {"s": -1}, "gmm", {"components": 1}, 8, False, []),
        ("gerf", {"s": -1}, "gmm", {"components": 1}, 8, False, []),
        ("elu", {}, "gmm", {"components": 1}, 8, False, []),
        ("gerf", {"s": -1}, "orf", {}, None, True, []),
    ]
    assert SNNKConfig(attention=part).attention == part


def test_every_term_has_its_own_draw_and_trains():
    model = patched(vivid(), num_features=8, projection="free", sum_of=[{}, {"component": "softmax_pm"}])
    kernel = next(module for module in model.modules() if isinstance(module, KernelAttention))
    drawn = [feature_map.projection.materialize() for feature_map in kernel.maps()]
    assert len(drawn) == 3
    assert not any(torch.allclose(a, b) for a, b in itertools.combinations(drawn, 2))
    model(**inputs_for(model.get_base_model())).logits.square().sum().backward()
    for parameter in kernel.parameters():
        assert parameter.requires_grad
        assert parameter.grad.isfinite().all()
        assert parameter.grad.any()


# --- learned maps and redrawn ones ----------------------------------------------------------------------------------


def test_learned_fastfood_starts_near_softmax():
    model = vivid()
    inputs = inputs_for(model)
    exact = model(**inputs).logits
    errors = [
        (patched(copy.deepcopy(model), projection="fastfood_learned", num_features=m)(**inputs).logits - exact)
        .abs()
        .max()
        .item()
        for m in (4, 4096)
    ]
    assert errors[1] < errors[0] / 3


@pytest.mark.parametrize("projection", ["free", "gmm", "fastfood_learned", "generative", "inn", "bbq"])
def test_learned_maps_train(projection):
    """A few steps bring the linear model nearer to what the softmax model says."""
    model = vivid()
    inputs = inputs_for(model)
    target = model(**inputs).logits.detach()
    changed = patched(model, num_features=8, projection=projection, per_head=True)
    names = [name for name, p in changed.named_parameters() if p.requires_grad]
    assert names
    assert all(".projection." in name for name in names)
    parameters = [p for p in changed.parameters() if p.requires_grad]
    optimizer = torch.optim.Adam(parameters, lr=1e-2)
    errors = []
    for _ in range(12):
        loss = (changed(**inputs).logits - target).square().sum()
        errors.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert all(p.grad.isfinite().all() for p in parameters)
    assert errors[-1] < 0.8 * errors[0]


def test_redraws_follow_the_schedule():
    model = vivid()
    inputs = inputs_for(model)
    fields = {"num_features": 8, "projection": "gmm", "separate_maps": True, "projection_params": {"redraw_every": 2}}
    changed = patched(model, sum_of=[{"projection": "gaussian", "separate_maps": False}], **fields)
    first = changed(**inputs).logits
    advance(changed)  # eval: nothing moves
    advance(changed)
    assert torch.equal(changed(**inputs).logits, first)
    changed.train()
    advance(changed)
    assert torch.equal(changed.eval()(**inputs).logits, first)
    advance(changed.train())
    assert not torch.allclose(changed.eval()(**inputs).logits, first, atol=1e-6)
    for module in changed.modules():
        if isinstance(module, KernelAttention):
            query, key, fixed = (feature_map.projection for feature_map in module.maps())
            assert torch.equal(query.noise, key.noise)
            assert int(query.steps) == int(key.steps) == 2
            assert fixed.redraw_every is None  # params of another projection are its own


# --- data-dependent maps --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("component", ["oprf", "saderf", "derf"])
@pytest.mark.parametrize("per_head", [False, True])
def test_batch_mates_and_padding_have_no_influence(component, per_head):
    model = patched(vivid(), component=component, num_features=16, per_head=per_head)
    plain = patched(vivid(), num_features=16, per_head=per_head)
    inputs = inputs_for(model.get_base_model())
    kept = int(inputs["attention_mask"][-1].sum())
    assert kept < inputs["input_ids"].shape[1]
    strange = {name: value.clone() for name, value in inputs.items()}
    strange["input_ids"][:-1] = 5
    strange["attention_mask"][:-1] = 1
    strange["input_ids"][-1, kept:] = 7
    with torch.no_grad():
        together = model(**inputs).logits[-1]
        among_others = model(**strange).logits[-1]
        cut = model(input_ids=inputs["input_ids"][-1:, :kept]).logits[0]
        assert not torch.allclose(plain(**inputs).logits[-1], together, atol=1e-5)
    torch.testing.assert_close(together, among_others, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(together, cut, rtol=1e-5, atol=1e-6)


# --- saving, bundling, calibrating ----------------------------------------------------------------------------------

MAPS = {
    "gmm": {"projection": "gmm", "per_head": True},
    "fastfood": {"projection": "fastfood_learned"},
    "generative": {"projection": "generative", "separate_maps": True},
    "hedgehog": {
        "component": "softmax_pm",
        "projection": "free",
        "projection_params": {"bias": True},
        "per_head": True,
        "separate_maps": True,
    },
    "classical": {"component": "elu", "projection": "identity", "num_features": 16},
    "sum": {
        "near_field": 2,
        "sum_of": [
            {"component": "elu", "projection": "identity"},
            {"component": "softmax_pm", "projection": "free", "num_features": 8, "separate_maps": True},
        ],
    },
}


JOINT = {"component": "mixture", "projection": "centroids", "num_features": 8, "refit_output": False}
JOINT |= {"near_field": 3, "near_field_normalisation": "joint", "sinks": 2}


def fields_of(name: str) -> dict:
    return {"num_features": 8, **MAPS[name]}


@pytest.mark.parametrize("name", MAPS)
def test_adapter_checkpoints(name, tmp_path):
    model = trained(patched(vivid(), **fields_of(name)))
    inputs = inputs_for(model.get_base_model())
    expected = model(**inputs).logits
    model.save_pretrained(tmp_path)
    assert SNNKConfig.from_pretrained(tmp_path).attention == AttentionPart(**fields_of(name))
    again = PeftModel.from_pretrained(vivid(), tmp_path).eval()
    assert same(again(**inputs).logits, expected)
    fresh = patched(vivid(), **fields_of(name))
    if name != "classical":  # which has nothing to train
        assert not torch.allclose(fresh(**inputs).logits, expected, atol=1e-5)


def test_fixed_maps_as_checksums(tmp_path):
    config = SNNKConfig(
        attention=AttentionPart(num_features=8, sum_of=[{"component": "elu", "projection": "identity"}]),
        save_projection=False,
        modules_to_save=[],
    )
    model = trained(get_snnk_model(vivid(), config)).eval()
    inputs = inputs_for(model.get_base_model())
    model.save_pretrained(tmp_path)
    again = PeftModel.from_pretrained(vivid(), tmp_path).eval()
    assert same(again(**inputs).logits, model(**inputs).logits)
    assert same(bundle(model)(**inputs).logits, model(**inputs).logits)
    learned = SNNKConfig(attention=AttentionPart(sum_of=[{"projection": "free"}]), save_projection=False)
    with pytest.raises(ConfigError, match="cannot be drawn again from a seed"):
        get_snnk_model(vivid(), learned)


llama, gpt2 = (partial(causal_model, name) for name in ("llama", "gpt2"))
# Model and fields of the part: every map, every kind of near field, some layers, local layers.
BUNDLES: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    **{name: (llama if name in ("hedgehog", "sum") else vivid, fields_of(name)) for name in MAPS},
    "some layers": (vivid, {"num_features": 16, "layers": "top-1"}),
    "modernbert": (partial(sharpened, "modernbert"), {"num_features": 16, "near_field": 2}),
    "per head": (llama, {"near_field": 3, "per_head": True}),
    "llama, some layers": (llama, {"num_features": 16, "near_field": 3, "layers": "top-1"}),
    "gpt2, some layers": (gpt2, {"num_features": 16, "near_field": 3, "layers": "top-1"}),
    "joint": (llama, JOINT),
}
ANSWERS = """
import json, sys, torch, transformers

def answers(folder, **options):
    '''The error of a loaded bundle, its attention, and its text with a cache and without.'''
    given = torch.load(folder + ".pt")
    auto = "AutoModelForCausalLM" if given["text"] is not None else "AutoModelForSequenceClassification"
    model = getattr(transformers, auto).from_pretrained(folder, **options).eval()
    error = (model(**given["inputs"]).logits - given["logits"]).abs().max() / given["logits"].abs().max()
    found = {"error": error.item(), "attention": model.config._attn_implementation}
    for beams in (1, 2) if given["text"] is not None else ():
        settings = dict(max_new_tokens=10, do_sample=False, num_beams=beams, return_dict_in_generate=True)
        made = model.generate(**given["inputs"], **settings)
        assert torch.equal(made.sequences, model.generate(**given["inputs"], **settings, use_cache=False).sequences)
        assert beams > 1 or torch.equal(made.sequences, given["text"])
        found["cache"] = [type(layer).__name__ for layer in made.past_key_values.layers]
    half = model.to(torch.bfloat16)(**given["inputs"]).logits
    assert half.isfinite().all() and half.dtype == torch.bfloat16
    return found
"""


@pytest.fixture(scope="module")
def without_the_package(tmp_path_factory) -> tuple[str, dict[str, Any]]:
    """A folder of bundles, and what a process without the package says about each."""
    folder = tmp_path_factory.mktemp("bundles")
    for name, (make, fields) in BUNDLES.items():
        model = trained(patched(make(), **fields))
        causal = make in (llama, gpt2)
        inputs = left_padded() if causal else inputs_for(model.get_base_model(), tokens=12)
        small = bundle(model)
        assert same(small(**inputs).logits, model(**inputs).logits)
        small.save_pretrained(folder / name)
        text = model.generate(**inputs, max_new_tokens=10, do_sample=False) if causal else None
        known = {"inputs": inputs, "logits": small(**inputs).logits.detach(), "text": text}
        torch.save(known, folder / f"{name}.pt")
    program = f"""
import sys; sys.modules["snnk_peft"] = None
{ANSWERS}
for name in {list(BUNDLES)!r}:
    print(json.dumps([name, answers({str(folder)!r} + "/" + name, trust_remote_code=True)]))
"""
    done = run_python(["-c", program])
    assert done.returncode == 0, done.stderr[-2000:]
    return str(folder), dict(json.loads(line) for line in done.stdout.splitlines() if line.startswith("["))


@pytest.mark.parametrize("name", BUNDLES)
def test_bundles_reload_and_generate_with_and_without_the_package(name, without_the_package):
    folder, found = without_the_package
    scope: dict[str, Any] = {}
    exec(ANSWERS, scope)
    own = scope["answers"](f"{folder}/{name}")
    assert own.pop("attention") == NAME
    assert found[name].pop("attention").endswith(".modeling_snnk_bundle")
    assert own.pop("error") < 1e-5
    assert found[name].pop("error") < 1e-5
    assert own == found[name]
    if own:
        some = BUNDLES[name][1].get("layers") == "top-1"
        assert own["cache"] == ["DynamicLayer" if some else "RecurrentLayer", "RecurrentLayer"]


def test_the_bundle_report_tells_the_maps():
    after = bundle(patched(vivid(), **fields_of("sum"))).bundle_report.folded[0].after
    assert after == (
        "linear attention, 8 posrf features + 16 elu features + 8 softmax_pm features, queries and keys apart"
    )
    after = bundle(patched(vivid(), **fields_of("gmm"))).bundle_report.folded[0].after
    assert after == "linear attention, 8 posrf features per head"
    after = bundle(patched(vivid(), **JOINT)).bundle_report.folded[0].after
    assert "beyond 3 neighbours and 2 sinks" in after


def test_calibration_leaves_attention_alone():
    batches = [{"input_ids": torch.randint(3, 100, (4, 9))} for _ in range(4)]
    model = patched(vivid(), num_features=8, projection="free")
    with pytest.raises(ConfigError, match="learned projection with steps=200"):
        calibrate(model, batches, progress=False)
    config = SNNKConfig(
        attention=AttentionPart(num_features=8, projection="free"), ffn=FFNPart(num_features=8), modules_to_save=[]
    )
    both = get_snnk_model(vivid(), config)
    kernels = [module for module in both.modules() if isinstance(module, KernelAttention)]
    before = [{key: value.clone() for key, value in kernel.state_dict().items()} for kernel in kernels]
    report = calibrate(both, batches, progress=False)
    assert len(report.slots) == 2
    for kernel, state in zip(kernels, before, strict=True):
        assert all(torch.equal(value, state[key]) for key, value in kernel.state_dict().items())


# --- sizes and errors -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "rows"),
    [
        ({}, 64),
        ({"component": "elu", "projection": "identity"}, 16),
        ({"component": "elu", "projection": "identity", "num_features": 16}, 16),
        ({"projection": "sgq"}, 33),
        ({"num_features": 20}, 20),
    ],
)
def test_the_default_number_of_features_fits_the_projection(fields, rows):
    model = patched(vivid(), **fields)
    found = [module.num_features for module in model.modules() if isinstance(module, FeatureMap)]
    assert found == [rows] * 2


@pytest.mark.parametrize(
    ("fields", "messages"),
    [
        ({"component": "elu", "projection": "identity", "num_features": 8}, ["identity num_features is 8 with dim 16"]),
        ({"projection": "identity"}, ["attention: component Posrf needs rows drawn from 'gaussian'"]),
        ({"separate_maps": True}, ["attention.separate_maps is True with projection 'orf', which is not learned"]),
        ({"separate_maps": 1, "projection": "free"}, ["attention.separate_maps is 1"]),
        ({"sum_of": "elu"}, ["attention.sum_of is 'elu'; expected a list of dicts"]),
        (
            {"sum_of": 2.0, "projection": "landmarks", "component": "mixture"},
            ["attention.sum_of is 2.0; expected a list"],
        ),
        ({"sum_of": ["elu"]}, [r"attention.sum_of\[0\] is 'elu'; expected a dict"]),
        ({"sum_of": [{"componnet": "elu"}]}, [r"attention.sum_of\[0\]..*did you mean 'component'"]),
        ({"sum_of": [{"near_field": 3}]}, [r"attention.sum_of\[0\]..*'near_field'"]),
        (
            {"sum_of": [{"component": "rleu"}, {"num_features": 0}], "near_field": 0},
            [
                r"attention.sum_of\[0\]..*did you mean 'relu'",
                r"attention.sum_of\[1\].num_features is 0",
                "near_field is 0",
            ],
        ),
        ({"sum_of": [{"projection": "landmark"}]}, [r"attention.sum_of\[0\].projection is 'landmark'"]),
        ({"sum_of": [{"separate_maps": True}]}, [r"attention.sum_of\[0\].separate_maps is True"]),
        ({"projection_params": {"bias": 2}, "projection": "free"}, ["free bias is 2; expected True or False"]),
    ],
)
def test_errors_name_what_is_wrong(fields, messages):
    with pytest.raises(ConfigError) as caught:
        patched(vivid(), **fields)
    for message in messages:
        assert caught.match(message)


def test_as_many_maps_for_keys_as_for_queries():
    maps = [made("posrf", "orf"), made("posrf", "orf")]
    with pytest.raises(ConfigError, match="2 feature maps for queries, 1 for keys"):
        AttentionTerm(maps, maps[:1])
    with pytest.raises(ConfigError, match="0 feature maps"):
        KernelAttention([], 2)


def test_terms_and_maps_side_by_side_are_refused():
    """Neither may be dropped without a word; what the message says keeps both."""
    term, feature_map = AttentionTerm([made("posrf", "orf")]), made("elu", "identity")
    for given in ([term, feature_map], [feature_map, term], [term, None]):
        with pytest.raises(ConfigError, match=r"KernelAttention was given .*; expected terms alone, or feature maps"):
            KernelAttention(given, 2)
    assert len(KernelAttention([term, AttentionTerm([feature_map])], 2).maps()) == 2
