"""A feature map that is not built yet: what is wrong with it, its form in files, and what becomes of it."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch

from snnk_peft import PROJECTIONS, AdapterPart, FFNPart, SNNKConfig, build_feature_map, calibrate, get_snnk_model
from snnk_peft.errors import ConfigError
from snnk_peft.feature_map import FeatureMapSpec
from snnk_peft.layers.feature_stage import FeatureStage
from snnk_peft.projections import Projection
from tests.tiny_models import tiny

GOOD = FeatureMapSpec("cos", "orf", 12, {"phases": False}, {"norms": "sqrt_dim"}, dim=6, seed=3, site="layer.0")
# A stage as bundles of version 0.1.0 hold it; never to be changed.
STORED = {
    "component": "cos",
    "component_params": {"phases": False},
    "projection": "orf",
    "projection_params": {"norms": "sqrt_dim"},
    "dim": 6,
    "num_features": 12,
    "seed": 3,
    "slot": "layer.0",
    "save": True,
    "normalize": True,
    "whitened": False,
    "center": True,
    "scale": 0.5,
    "append_input": False,
}


def test_every_fault_is_found_at_once():
    spec = FeatureMapSpec("rleu", "ofr", 0, 3, ["x"], dim=True, seed=-1, site=None, save="yes")
    found = spec.faults()
    assert len(found) == 9
    for text in (
        "unknown component 'rleu'; did you mean 'relu'?",
        "unknown projection 'ofr'; did you mean 'orf'?",
        "component_params is 3; expected a dict of arguments",
        "projection_params is ['x']; expected a dict of arguments",
        "num_features is 0; expected an integer >= 1",
        "dim is True; expected an integer >= 1",
        "seed is -1; expected an integer >= 0",
        "site is None; expected a string",
        "save is 'yes'; expected True or False",
    ):
        assert sum(fault.startswith(text) for fault in found) == 1
    assert all(fault.startswith("part.") for fault in spec.faults("part"))
    assert any(fault.startswith("part.slot is None") for fault in spec.faults("part"))  # its name in files


def test_parameters_are_suggested_and_reserved_ones_refused():
    given = {"norm": "chi", "seed": 1, "site": "x", "save": False, "dim": 4, "num_features": 3}
    found = FeatureMapSpec("relu", "orf", 4, {"order": 1}, given).faults("adapter")
    assert len(found) == 7
    assert found[0] == "adapter: component 'relu' parameter 'order' is unknown; valid: none"
    assert found[1].endswith("parameter 'norm' is unknown; valid: norms, redraw_every. Did you mean 'norms'?")
    tensors = FeatureMapSpec("relu", "landmark", 4, {}, {"source_weight": torch.ones(4, 4)}).faults()
    assert len(tensors) == 1
    assert "'source_weight' is unknown" in tensors[0]
    assert FeatureMapSpec("posrf", "poisson", 4).faults("x")[0].startswith("x: component Posrf needs rows drawn from")


def test_building_finds_what_component_and_projection_find():
    with pytest.raises(ConfigError) as caught:
        FeatureMapSpec("gerf", "orf", 0, {"A": 1}, {"norms": "x"}, seed=-1).build()
    found = caught.value.faults
    assert len(found) == len(set(found)) == 5
    for text in ("gerf A is 1", "orf norms is 'x'", "num_features is 0", "dim is None", "seed is -1"):
        assert any(fault.startswith(text) for fault in found)


def test_a_part_says_the_same():
    spec = FeatureMapSpec("rleu", "orf", 0, {}, {"norm": "chi"})
    part = AdapterPart("rleu", "orf", 0, projection_params={"norm": "chi"})
    assert part.feature_map_spec() == spec
    assert len(spec.faults("adapter")) == 3
    assert set(spec.faults("adapter")) <= set(part.faults("adapter"))


def test_built_map_and_spec_are_each_others():
    built = GOOD.build()
    assert FeatureMapSpec.of(built) == GOOD
    called = build_feature_map(
        "cos",
        "orf",
        6,
        12,
        seed=3,
        site="layer.0",
        component_params={"phases": False},
        projection_params={"norms": "sqrt_dim"},
    )
    assert torch.equal(built.projection.weight, called.projection.weight)
    elsewhere = dataclasses.replace(GOOD, site="layer.1").build()
    assert not torch.equal(built.projection.weight, elsewhere.projection.weight)
    seed_only = dataclasses.replace(GOOD, save=False)
    assert FeatureMapSpec.of(seed_only.build()) == seed_only
    assert torch.equal(seed_only.build().projection.weight, built.projection.weight)
    assert "weight" not in seed_only.build().projection.state_dict()


def test_stored_form():
    names = FeatureMapSpec.stored_names()
    stored = {name: STORED[name] for name in names}
    assert GOOD.as_dict() == stored
    assert FeatureMapSpec.from_dict(json.loads(json.dumps(stored))) == GOOD
    assert FeatureMapSpec.from_dict({"component": "cos", "projection": "orf", "num_features": 2}).seed == 0
    with pytest.raises(ConfigError) as caught:
        FeatureMapSpec.from_dict({"component": "cos", "projektion": "orf", "num_features": 2})
    assert "lacks 'projection'" in caught.value.faults[0]
    assert "'projektion'; did you mean 'projection'?" in caught.value.faults[1]
    stage = FeatureStage.from_spec(STORED)
    assert stage.spec() == STORED
    assert torch.equal(stage.feature_map.projection.weight, GOOD.build().projection.weight)


def test_a_function_of_ones_own_is_no_plain_data():
    params = {"activation": torch.tanh, "x_norm": 0.3, "w_norm": 0.3}
    with pytest.raises(ConfigError, match="Urf was given a function of your own as activation"):
        FeatureMapSpec.of(FeatureMapSpec("urf", "gaussian", 64, params, dim=4).build())


# --- rows of a pretrained layer -------------------------------------------------------------------------------------


class Tail(Projection):
    """The last rows of a layer: a projection that nothing outside this file has heard of."""

    redrawable = resamplable = False
    needs_layer = True
    layer_arguments = ("rows",)

    def __init__(self, dim: int, num_features: int, *, rows: torch.Tensor | None = None, **kwargs: object):
        self.given = rows
        super().__init__(dim, num_features, **kwargs)

    @classmethod
    def from_layer(cls, layer, num_features, *, importance=None, **kwargs):
        return cls(layer.in_features, num_features, rows=layer.weight.detach()[-num_features:], **kwargs)

    def draw(self, generator: torch.Generator) -> torch.Tensor:
        return torch.zeros(self.num_features, self.dim) if self.given is None else self.given


@pytest.fixture
def tail(monkeypatch):
    PROJECTIONS.names()
    monkeypatch.setitem(PROJECTIONS._members, "tail", Tail)
    return "tail"


def test_any_projection_may_take_rows_from_a_layer(tail):
    model = tiny("bert")
    layer = model.get_submodule("bert.encoder.layer.0.intermediate.dense")
    rows = layer.weight.detach().clone()
    part = FFNPart("relu", tail, num_features=5, layers=[0])
    patched = get_snnk_model(model, SNNKConfig(ffn=part))
    (slot,) = patched.get_submodule("base_model.model.bert.encoder.layer.0.intermediate.dense").slots_of("default")
    stage = slot.layer.stage
    assert torch.equal(stage.feature_map.projection.weight, rows[-5:])
    assert stage.shift is None  # such rows are made for the inputs as they are
    again = FeatureStage.from_spec(stage.spec())
    assert not again.feature_map.projection.weight.any()
    again.load_state_dict(stage.state_dict())
    assert torch.equal(again.feature_map.projection.weight, rows[-5:])


class Chosen(Tail):
    """A projection that lets its rows be chosen."""

    selects_rows = True

    def select(self, weight, bias, importance):
        chosen = importance.topk(self.num_features).indices.sort().values
        self.weight = weight.detach()[chosen].clone()
        return chosen


def test_calibrate_chooses_the_rows_of_any_projection_that_lets_it(tail, monkeypatch):
    for member, chosen in ((Tail, False), (Chosen, True)):
        monkeypatch.setitem(PROJECTIONS._members, "tail", member)
        model = tiny("bert")
        rows = model.get_submodule("bert.encoder.layer.0.intermediate.dense").weight.detach().clone()
        patched = get_snnk_model(model, SNNKConfig(ffn=FFNPart("gelu", tail, num_features=5, layers=[0])))
        batches = [{"input_ids": ids} for ids in torch.randint(5, 60, (16, 4, 7))]
        calibrate(patched, batches, progress=False)
        layer = patched.get_submodule("base_model.model.bert.encoder.layer.0.intermediate.dense")
        weight = layer.slots_of("default")[0].layer.stage.feature_map.projection.weight
        assert torch.equal(weight, rows[-5:]) != chosen
        assert all((rows == row).all(1).any() for row in weight)


@pytest.mark.parametrize("name", ["landmark", "tail"])
def test_rows_of_a_layer_are_refused_where_there_are_none(tail, name):
    for part in ("adapter", "attention"):
        with pytest.raises(ConfigError, match=f"{part}.projection is '{name}'; .* no pretrained weight"):
            SNNKConfig(**{part: {"projection": name}})
    with pytest.raises(ConfigError, match=f"ffn.*'{name}'.* cannot be drawn again from a seed"):
        SNNKConfig(ffn={"projection": name}, save_projection=False)
    for tensor in PROJECTIONS[name].layer_arguments:
        with pytest.raises(ConfigError, match=f"ffn: projection '{name}' parameter '{tensor}' is unknown"):
            SNNKConfig(ffn={"projection": name, "projection_params": {tensor: 1}})
    config = SNNKConfig(ffn={"projection": name, "num_features": 10**4})
    with pytest.raises(ConfigError, match=f"ffn.num_features is 10000 with projection '{name}'; layer 0 has only"):
        get_snnk_model(tiny("bert"), config)


def test_a_drawn_matrix_takes_nothing_but_the_size_from_a_layer():
    layer = torch.nn.Linear(6, 20)
    assert torch.equal(GOOD.build(layer).projection.weight, GOOD.build().projection.weight)
    assert dataclasses.replace(GOOD, dim=None).build(layer).dim == 6
    with pytest.raises(ConfigError, match="dim is 6; expected 7, the inputs of the layer"):
        GOOD.build(torch.nn.Linear(7, 20))
    landmarks = FeatureMapSpec("relu", "landmark", 12)
    built = landmarks.build(layer, importance=torch.arange(20.0)).projection
    assert torch.equal(built.weight, layer.weight[8:])
    assert torch.equal(built.bias, layer.bias[8:])


@pytest.mark.parametrize("dim", [5, 7])
def test_the_size_is_that_of_the_layer(tail, dim):
    spec = FeatureMapSpec("relu", tail, 4, dim=dim)
    with pytest.raises(ConfigError, match=f"dim is {dim}; expected 6, the inputs of the layer"):
        spec.build(torch.nn.Linear(6, 9))
    assert spec.build(torch.nn.Linear(dim, 9)).projection.dim == dim
