"""SNNKLinear, SNNKAdapter and the slots: plain modules, compared with the formulas they stand for."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from torch import nn

from snnk_peft import COMPONENTS, PROJECTIONS, build_feature_map
from snnk_peft.errors import ConfigError
from snnk_peft.feature_map import FeatureMap
from snnk_peft.layers.adapter import GatedReadout, SNNKAdapter
from snnk_peft.layers.feature_stage import FeatureStage
from snnk_peft.layers.slots import Retrained
from snnk_peft.layers.snnk_linear import SNNKLinear
from snnk_peft.parts.adapter import Behind, BesideContraction, BesideExpansion, OnHiddenUnits
from snnk_peft.parts.replaced.slots import Bypass, Replace

DIM, HIDDEN = 6, 10


def stage_of(component: str = "relu", projection: str = "orf", m: int = 8, dim: int = DIM, **options) -> FeatureStage:
    return FeatureStage(build_feature_map(component, projection, dim, m), **options)


def landmark_stage(linear: nn.Linear, m: int, component: str, **options) -> FeatureStage:
    projection = PROJECTIONS["landmark"](
        linear.in_features, m, source_weight=linear.weight.detach(), source_bias=linear.bias.detach()
    )
    return FeatureStage(FeatureMap(COMPONENTS[component](), projection), **options)


def whitening(dim: int = DIM) -> dict[str, torch.Tensor]:
    return {"shift": torch.randn(dim), "inverse_std": torch.rand(dim) + 0.5}


# --- the stage ------------------------------------------------------------------------------------------------------


class TestFeatureStage:
    def test_is_its_formula(self):
        x = torch.randn(2, 3, DIM)
        phi = build_feature_map("cos", "orf", DIM, 8)
        mean, std = x.mean(-1, keepdim=True), x.var(-1, unbiased=False, keepdim=True).add(1e-5).sqrt()
        torch.testing.assert_close(FeatureStage(phi)(x), phi(x))
        torch.testing.assert_close(FeatureStage(phi, scale=0.3)(x), phi(0.3 * x))
        torch.testing.assert_close(FeatureStage(phi, normalize=True, scale=0.3)(x), phi(0.3 * (x - mean) / std))
        white = whitening()
        expected = phi(0.3 * (x - white["shift"]) * white["inverse_std"])
        torch.testing.assert_close(FeatureStage(phi, scale=0.3, **white)(x), expected)
        appended = FeatureStage(phi, scale=0.3, append_input=True)
        assert (appended.dim, appended.out_dim) == (DIM, 8 + DIM)
        torch.testing.assert_close(appended(x), torch.cat((phi(0.3 * x), x), -1))

    @pytest.mark.parametrize("append_input", [False, True])
    @pytest.mark.parametrize("projection", ["orf", "landmark"])
    def test_simplified_is_the_same_function(self, append_input, projection):
        linear = nn.Linear(DIM, HIDDEN)
        options = {"scale": 0.4, "append_input": append_input, **whitening()}
        stage = (
            landmark_stage(linear, 7, "gelu", **options)
            if projection == "landmark"
            else stage_of("gelu", projection, 7, **options)
        ).double()
        plain = stage.simplified()
        assert plain.shift is None
        assert plain.scale == 1.0
        x = torch.randn(5, DIM, dtype=torch.float64)
        torch.testing.assert_close(plain(x), stage(x), rtol=1e-12, atol=1e-12)

    def test_simplified_keeps_what_is_plain_already(self):
        stage = stage_of(scale=0.5)
        assert stage.simplified() is stage

    def test_a_normalised_input_has_no_effective_rows(self):
        with pytest.raises(ValueError, match="no effective rows"):
            stage_of(normalize=True).effective_rows(torch.ones(1, DIM), None)

    @pytest.mark.parametrize(
        ("component", "projection"),
        [
            (component, projection)
            for component, projection in itertools.product(COMPONENTS.names(), PROJECTIONS.names())
            if COMPONENTS[component].fits(PROJECTIONS[projection])
            and (component not in ("urf", "cos") or PROJECTIONS[projection].uniform)
        ],
    )
    @pytest.mark.filterwarnings("ignore::snnk_peft.errors.NumericalWarning")
    def test_spec_round_trip(self, component, projection):
        options = {"normalize": projection == "orf", "scale": 0.5, "append_input": component == "cos"}
        params = {"order": 2} if component == "arccos" else {}
        if projection == "landmark":
            stage = landmark_stage(nn.Linear(DIM, HIDDEN), 8, component, **options)
        else:
            # A multiple of four suits the halves of a Gaussian mixture.
            size = PROJECTIONS[projection].nearest_size(DIM, 12)
            stage = FeatureStage(
                build_feature_map(component, projection, DIM, size, seed=4, component_params=params), **options
            )
        spec = stage.spec()
        rebuilt = FeatureStage.from_spec(spec)
        assert rebuilt.spec() == spec
        rebuilt.load_state_dict(stage.state_dict())
        x = torch.randn(3, DIM)
        assert torch.equal(rebuilt(x), stage(x))


# --- SNNKLinear -----------------------------------------------------------------------------------------------------


class TestSNNKLinear:
    @pytest.mark.parametrize(("component", "activation"), [("relu", torch.relu), ("gelu", nn.GELU())])
    def test_all_rows_as_landmarks_give_the_layer(self, component, activation):
        """G = W and m = l: the layer itself."""
        linear = nn.Linear(DIM, HIDDEN)
        layer = SNNKLinear.from_linear(linear, activation, landmark_stage(linear, HIDDEN, component))
        x = torch.randn(20, DIM)
        torch.testing.assert_close(layer(x), activation(linear(x)), rtol=1e-4, atol=1e-5)

    @pytest.mark.parametrize("white", [False, True])
    def test_nystrom_is_the_best_readout_for_gaussian_inputs(self, white):
        """Against the least-squares fit to 40000 samples."""
        linear, mean, std = nn.Linear(DIM, HIDDEN), torch.randn(DIM), torch.rand(DIM) + 0.5
        options = {"shift": mean, "inverse_std": 1 / std, "scale": DIM**-0.5} if white else {}
        layers = {
            init: SNNKLinear.from_linear(
                linear,
                torch.relu,
                stage_of("relu", "orf", 12, **options),
                init=init,
                generator=torch.Generator().manual_seed(0),
                input_mean=mean,
                input_std=std,
            )
            for init in ("nystrom", "paper", "random")
        }
        x = mean + std * torch.randn(40000, DIM)
        with torch.no_grad():
            target = torch.relu(linear(x))
            risk = {init: (layer(x) - target).square().mean().item() for init, layer in layers.items()}
            features = torch.cat((layers["nystrom"].stage(x), torch.ones(len(x), 1)), 1)
            best = torch.linalg.lstsq(features.double(), target.double()).solution
            least = (features.double() @ best - target).square().mean().item()
        assert least <= risk["nystrom"] < 1.02 * least
        assert risk["nystrom"] < 0.5 * min(risk["paper"], risk["random"])

    def test_paper_and_random_readouts(self):
        linear, stage = nn.Linear(DIM, HIDDEN), stage_of("relu", "orf", 8, scale=DIM**-0.25)
        paper = SNNKLinear.from_linear(linear, torch.relu, stage, init="paper")
        expected = stage.feature_map.psi(linear.weight.detach() * DIM**-0.25).dense()
        torch.testing.assert_close(paper.A.detach(), expected)
        assert not paper.bias.any()

        def draw(seed):
            return SNNKLinear.from_linear(
                linear, torch.relu, stage, init="random", generator=torch.Generator().manual_seed(seed)
            ).A

        assert torch.equal(draw(1), draw(1))
        assert not torch.equal(draw(1), draw(2))
        with pytest.raises(ConfigError, match="init is 'best'"):
            SNNKLinear.from_linear(linear, torch.relu, stage, init="best")

    @pytest.mark.parametrize("init", ["nystrom", "paper", "random"])
    def test_the_linear_path_starts_without_effect_and_is_trainable(self, init):
        linear = nn.Linear(DIM, HIDDEN, bias=False)
        generator = torch.Generator().manual_seed(0)
        layer = SNNKLinear.from_linear(
            linear, nn.GELU(), stage_of("gelu", m=8, append_input=True), init=init, generator=generator
        )
        assert layer.A.shape == (HIDDEN, 8 + DIM)
        if init != "random":
            assert not layer.A[:, 8:].any()
        x = torch.randn(4, DIM)
        expected = layer.stage.feature_map(x) @ layer.A[:, :8].T + x @ layer.A[:, 8:].T + layer.bias
        torch.testing.assert_close(layer(x), expected)
        layer(x).sum().backward()
        assert layer.A.grad[:, 8:].any()

    @pytest.mark.parametrize("following", [False, True])
    @pytest.mark.parametrize("bias", [False, True])
    @pytest.mark.parametrize("append_input", [False, True])
    def test_fold_is_the_same_function(self, following, bias, append_input):
        """(Φ Aᵀ) W₂ᵀ + b₂ = Φ (W₂ A)ᵀ + b₂ (SNNK paper, Eq. 13)."""
        options = {"append_input": append_input, "scale": 0.3, **whitening()}
        layer = SNNKLinear(stage_of("gelu", m=8, **options), HIDDEN, bias=bias).double()
        nn.init.normal_(layer.A)
        if bias:
            nn.init.normal_(layer.bias)
        after = nn.Linear(HIDDEN, 3, bias=bias).double() if following else None
        stage, linear = layer.fold(after)
        x = torch.randn(2, 5, DIM, dtype=torch.float64)
        expected = layer(x) if after is None else after(layer(x))
        torch.testing.assert_close(linear(stage(x)), expected, rtol=1e-12, atol=1e-12)
        assert (linear.bias is not None) == bias
        single = [m.to(torch.float32) for m in (copy.deepcopy(stage), linear)]
        torch.testing.assert_close(single[1](single[0](x.float())), expected.float(), rtol=1e-5, atol=1e-5)


# --- SNNKAdapter ----------------------------------------------------------------------------------------------------

FORMS = [
    pytest.param({"init": "default", "gate": False}, {"normalize": True, "scale": DIM**-0.5}, id="default"),
    pytest.param({"init": "paper", "gate": True}, {}, id="paper"),
    pytest.param({"init": "random", "gate": True}, {"normalize": True}, id="random"),
]


@pytest.mark.parametrize(("options", "input_options"), FORMS)
class TestSNNKAdapter:
    def build(self, options, input_options, component="relu", **more) -> SNNKAdapter:
        generator = torch.Generator().manual_seed(0)
        stage = stage_of(component, **input_options)
        return SNNKAdapter(stage, GatedReadout(stage, generator=generator, **{**options, **more}))

    def test_starts_as_the_identity_and_learns(self, options, input_options):
        """Bitwise identity; the first step reaches what is zero and nothing else."""
        adapter = self.build(options, input_options)
        x = torch.randn(4, 3, DIM)
        out = adapter(x)
        assert torch.equal(out, x)
        (out.square().sum()).backward()
        readout = adapter.readout
        if options["gate"]:
            assert readout.v.grad.abs().min() > 0
            assert not readout.A.grad.any()
        else:
            assert readout.v is None
            assert readout.A.grad.any()
        torch.optim.SGD(adapter.parameters(), lr=0.1).step()
        assert not torch.equal(adapter(x), x)
        adapter.zero_grad()
        adapter(x).square().sum().backward()
        assert readout.A.grad.any()

    @pytest.mark.parametrize("scaling", [1.0, 4.0])
    def test_is_its_formula(self, options, input_options, scaling):
        adapter = self.build(options, input_options, scaling=scaling).double()
        readout = adapter.readout
        nn.init.normal_(readout.A)
        v = torch.ones(DIM, dtype=torch.float64)
        if readout.v is not None:
            nn.init.normal_(readout.v)
            v = readout.v
        x = torch.randn(4, DIM, dtype=torch.float64)
        branch = scaling * v * (adapter.stage(x) @ readout.A.T)
        torch.testing.assert_close(adapter(x), x + branch, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(adapter.stage(x) @ readout.matrix().T, branch, rtol=1e-12, atol=1e-12)

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
    @pytest.mark.parametrize("component", ["relu", "cos"])
    def test_output_has_the_dtype_of_the_input(self, options, input_options, dtype, component):
        x = torch.randn(4, DIM, dtype=dtype)
        for adapter in (self.build(options, input_options, component), self.build(options, input_options).to(dtype)):
            nn.init.normal_(adapter.readout.A)
            out = adapter(x)
            assert out.dtype == dtype
            assert out.isfinite().all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"init": "default", "gate": True}, "must start as the identity"),
        ({"init": "paper", "gate": False}, "must start as the identity"),
        ({"init": "zero"}, "init is 'zero'"),
    ],
)
def test_forms_that_cannot_learn_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        GatedReadout(stage_of(), **options)


# --- slots ----------------------------------------------------------------------------------------------------------


class TestSlots:
    def test_replace_bypass_after_retrained(self):
        x = torch.randn(3, DIM)
        layer = SNNKLinear(stage_of(), HIDDEN)

        def never(*args):
            raise AssertionError("a replacing slot called what it replaces")

        assert torch.equal(Replace(layer)(never, x), layer(x))
        assert Bypass()(never, x) is x
        stage = stage_of()
        adapter = SNNKAdapter(stage, GatedReadout(stage))
        nn.init.normal_(adapter.readout.A)
        assert torch.equal(Behind(adapter)(torch.tanh, x), adapter(torch.tanh(x)))
        linear = nn.Linear(DIM, 2)
        copied = Retrained(linear)
        assert torch.equal(copied(never, x), linear(x))
        nn.init.zeros_(copied.module.weight)
        assert linear.weight.any()
        assert [s.replaces for s in (Replace(layer), Bypass(), Behind(adapter), copied)] == [True, True, False, True]

    @pytest.mark.parametrize("count", [1, 2])
    def test_parallel_slots_are_an_adapter_beside_the_ffn(self, count):
        """contraction(act(expansion(x))) + Σ v ⊙ (Φ(x) Aᵀ), for one adapter and for two of different size."""
        expansion, activation, contraction = nn.Linear(DIM, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, DIM)
        x = torch.randn(2, 3, DIM)
        expected = contraction(activation(expansion(x)))
        wide, act, narrow = expansion, activation, contraction
        for i in range(count):
            stage = FeatureStage(build_feature_map("cos", "orf", DIM, 5 + i, seed=i), normalize=True)
            readout = GatedReadout(stage, init="random", gate=True, scaling=2.0)
            nn.init.normal_(readout.v)
            expected = expected + readout.scaling * readout.v * (stage(x) @ readout.A.T)
            wide = wrap(BesideExpansion(stage), wide)
            act = wrap(OnHiddenUnits(stage.out_dim, "expansion"), act)
            narrow = wrap(BesideContraction(readout), narrow)
        torch.testing.assert_close(narrow(act(wide(x))), expected)


def wrap(slot, base):
    return lambda x: slot(base, x)


def test_under_autocast_a_replaced_layer_gives_what_the_linear_gave():
    """In bf16: a wide fp32 output would be written, and rounded again by the Linear that reads it."""
    linear, x = torch.nn.Linear(8, 32), torch.randn(4, 8)
    stage = FeatureStage(build_feature_map("gelu", "gaussian", dim=8, num_features=4))
    layer = SNNKLinear.from_linear(linear, torch.nn.GELU(), stage)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(x).dtype == linear(x).dtype == torch.bfloat16
    assert layer(x).dtype == torch.float32
    assert layer(x.bfloat16()).dtype == torch.bfloat16
