"""`method.cut`: layers that run once over the training examples, against training without it."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import finetune
import pytest
import torch
import transformers
from lib import trunk as trunks
from lib.trunk import STATES, VIEWS, Trunk
from recipe_world import last_weights, scored, write_settings, write_world
from tiny_families import CONFIGS, build, main_head
from tiny_models import CLASSIFIERS, inputs_for, tiny

from snnk_peft import HeadFeatures, with_head
from snnk_peft.bundling.report import probe_inputs
from snnk_peft.errors import ConfigError, UnsupportedError
from snnk_peft.families import family_of

ROWS = "method.adapter={component: gelu, projection: free, num_features: 4, normalize: false, placement: query_value}"


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_world(tmp_path_factory.mktemp("world"))


def train(world: Path, out: Path, method: str, *changes: str) -> int:
    file = out.with_name(f"{out.name}.yaml")
    write_settings(file, str(world / "bert"), str(world / "glue"), str(out), method)
    return finetune.main([str(file), "train.dropout=0", "train.learning_rate=5e-3", *changes])


def quiet(family: str, **changes: Any) -> Any:
    """A tiny model of the family, frozen and without dropout."""
    known = getattr(transformers, CLASSIFIERS[family][0])().to_dict()
    none = {key: 0.0 for key, value in known.items() if "drop" in key and isinstance(value, float)}
    return tiny(family, **none, **changes).requires_grad_(False)


def layers_of(model: Any) -> list[Any]:
    return [model.get_submodule(path) for path in family_of(model).layer_paths(model)]


@torch.no_grad()
@pytest.mark.parametrize("family", sorted(CONFIGS.keys() - {"albert"}))
def test_every_family_goes_on_from_stored_states(family: str) -> None:
    model = build(family, main_head(family)).eval().requires_grad_(False)
    for module in model.modules():
        for name, value in vars(module).items():
            if isinstance(value, float) and (name == "p" or "drop" in name):
                setattr(module, name, 0.0)
    inputs = probe_inputs(model)
    expected = model(**inputs)[0]
    trunk = Trunk(model, 1)
    states, _ = trunk.outputs(inputs)
    for value in layers_of(model)[0].parameters():
        value.fill_(torch.nan)
    torch.testing.assert_close(model(**inputs, **{STATES: states})[0], expected)


@pytest.mark.parametrize("head", ["own", "wide"])
@pytest.mark.parametrize("family", sorted(CLASSIFIERS))
def test_layers_before_the_cut_are_not_run_again(family: str, head: str) -> None:
    model = quiet(family)
    count = len(layers_of(model))
    if head == "wide":
        model = with_head(model, HeadFeatures.means(count)).requires_grad_(False).eval()
        torch.nn.init.normal_(model.snnk_head.linear.weight)
    inputs = inputs_for(model)
    with torch.no_grad():
        expected = model(**inputs).logits
        for cut in range(1, count + 1):
            trunk = Trunk(model, cut)
            states, views = trunk.outputs(inputs)
            assert (views is None) == (head == "own" or cut == 1)
            values = [value for layer in layers_of(model)[:cut] for value in layer.parameters()]
            before = [value.clone() for value in values]
            for value in values:
                value.fill_(torch.nan)
            given = {STATES: states} | ({} if views is None else {VIEWS: views})
            torch.testing.assert_close(model(**inputs, **given).logits, expected)
            assert model(**inputs).logits.isnan().any()  # without states everything runs
            trunk.remove()
            assert model(**inputs, **given).logits.isnan().any()  # transformers passes over what it does not know
            for value, kept in zip(values, before, strict=True):
                value.copy_(kept)
            torch.testing.assert_close(model(**inputs).logits, expected, rtol=0, atol=0)


LAYERS = "method.lora.layers=[1]"
OF_ROWS = (
    ROWS.replace("{", "{layers: [1], "),
    "method.parts=[{part: norms, layers: [1]}]",
)
METHODS = {
    "snnk": ((ROWS, "method.parts=[{part: norms}]"), OF_ROWS),
    "lora": (("method.lora.norms=true",), ("method.lora.norms=true", LAYERS)),
    "vera": ((), (LAYERS,)),
    "boft": ((), (LAYERS,)),
}
WIDE = ("method.head=wide", "method.fit_head=true", "train.head_learning_rate=1e-3")


@pytest.mark.parametrize("head", [(), WIDE], ids=["own", "wide"])
@pytest.mark.parametrize("method", sorted(METHODS))
def test_a_run_with_a_cut_is_one_of_the_layers_behind(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, head: tuple[str, ...]
) -> None:
    """To rounding, where the states are not rounded; with bf16, nearly."""
    own, explicit = METHODS[method]
    assert train(world, tmp_path / "plain", method, *explicit, *head) == 0
    wanted, start = last_weights(tmp_path / "plain"), "output.save_model=true"
    assert train(world, tmp_path / "rounded", method, "method.cut=1", start, *own, *head) == 0
    monkeypatch.setattr(trunks, "DTYPE", torch.float32)
    assert train(world, tmp_path / "cut", method, "method.cut=1", *own, *head) == 0
    for name, found in last_weights(tmp_path / "cut").items():
        torch.testing.assert_close(found, wanted[name], rtol=1e-3, atol=2e-5, msg=name)
    exact, rounded = (json.loads((tmp_path / run / "metrics.json").read_text()) for run in ("plain", "rounded"))
    assert rounded["trainable_parameters"] == exact["trainable_parameters"]
    assert rounded["cut"]["stored_bytes"] > 0
    assert "cut" not in exact
    assert scored(tmp_path / "rounded")["metrics"] == rounded["metrics"]
    for folder in ("adapter", "bundle") if method == "snnk" else ("adapter",):
        told = scored(tmp_path / "rounded" / folder, "--task", "rte", f"data.dir={world / 'glue'}")
        assert told["metrics"] == rounded["metrics"], folder


@pytest.mark.parametrize("method", ["full", "bitfit", "linear_probe"])
def test_what_is_before_the_cut_stays_as_it_was(world: Path, tmp_path: Path, method: str) -> None:
    assert train(world, tmp_path / "run", method, "method.cut=1") == 0
    found = last_weights(tmp_path / "run")
    start = transformers.AutoModel.from_pretrained(world / "bert").state_dict()
    changed = {
        name.removeprefix("bert.")
        for name, value in found.items()
        if name.startswith("bert.") and not torch.equal(value, start[name.removeprefix("bert.")])
    }
    assert not [name for name in changed if name.startswith(("embeddings.", "encoder.layer.0."))]
    assert bool([name for name in changed if name.startswith("encoder.layer.1.")]) == (method != "linear_probe")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (("method.cut=3",), "method.cut is 3; BertForSequenceClassification has 2 layers"),
        (("method.cut=2",), "no layer is left for snnk"),
        (("method.cut=1", "train.dropout=0.2"), "dropout of 0.2; set train.dropout=0"),
        (
            ("method.cut=1", "method.adapter={num_features: 4, layers: [0, 1]}"),
            "would be trained; choose only layers after",
        ),
        (("method.cut=1", "method.name=ia3"), "IA3Config takes no layers"),
        (("method.cut=0",), "method.cut"),
    ],
)
def test_refused(
    world: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: tuple[str, ...], message: str
) -> None:
    assert train(world, tmp_path / "run", "snnk", *changes) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run").exists() or not list((tmp_path / "run").iterdir())


def test_layers_that_share_weights_have_no_cut() -> None:
    with pytest.raises(UnsupportedError, match="2 layers of AlbertForSequenceClassification share 1 sets of weights"):
        Trunk(build("albert", main_head("albert")), 1)
    with pytest.raises(ConfigError, match=r"bert\.embeddings.*would be trained"):
        Trunk(tiny("bert"), 1)


def test_a_full_disk_is_told_before_the_first_step(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*args: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    assert train(world, tmp_path / "run", "lora", "method.cut=1") == 2
    assert "No space left on device; free some space" in capsys.readouterr().err
