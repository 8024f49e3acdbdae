"""A feature map that is not built yet: what is wrong with it, its form in files, and what becomes of it."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch

from snnk_peft import AdapterPart, build_feature_map
from snnk_peft.errors import ConfigError
from snnk_peft.feature_map import FeatureMapSpec
from snnk_peft.layers.feature_stage import FeatureStage

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
        "site is None; expected the name of a place",
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
