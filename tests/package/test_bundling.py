"""bundle: parity for every family, part and placement; nothing of PEFT left; the original untouched; closed form."""

from __future__ import annotations

import copy
import dataclasses
import importlib.util
import json
import pickle
import sys

import peft
import pytest
import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForImageClassification,
    AutoModelForSequenceClassification,
    BertConfig,
    BertForSequenceClassification,
)

from snnk_peft import (
    FAMILIES,
    AdapterPart,
    FFNPart,
    LowRankPart,
    PoolerPart,
    SNNKConfig,
    bundle,
    get_snnk_model,
    register_family,
)
from snnk_peft.bundling import classes
from snnk_peft.bundling.bundle import folded_model
from snnk_peft.bundling.classes import bundle_model_class, register_bundles
from snnk_peft.bundling.code_file import assemble, code_file
from snnk_peft.bundling.modules import build_module
from snnk_peft.bundling.report import BundleReport
from snnk_peft.components import COMPONENTS
from snnk_peft.errors import ConfigError, UnsupportedError
from snnk_peft.layers.feature_stage import FeatureStage
from snnk_peft.layers.folded import FoldedAdapter
from snnk_peft.projections import PROJECTIONS
from tests.every_part import PARTS as EVERY_PART
from tests.every_part import takes
from tests.tiny_models import CLASSIFIERS, TEXT, inputs_for, same, tiny, trained

PARTS = {
    **EVERY_PART,
    **{
        f"{place}, random": {"adapter": AdapterPart(num_features=8, placement=place, init="random", scaling=2.0)}
        for place in ("parallel", "query_value")
    },
    "ffn beside adapter": {
        "ffn": FFNPart(num_features=8),
        "adapter": AdapterPart(num_features=8, placement="parallel"),
    },
    "everything": {
        "adapter": AdapterPart(num_features=8),
        "ffn": FFNPart(num_features=8, layers="top-1"),
        "pooler": PoolerPart(num_features=8),
    },
}


def patched(family: str, parts: dict, *, model_class: str | None = None, **options):
    return trained(get_snnk_model(tiny(family, model_class), SNNKConfig(**copy.deepcopy(parts), **options)))


def relative_error(given: torch.Tensor, expected: torch.Tensor) -> float:
    return float(((given - expected).abs().max() / expected.abs().max()).detach())


@pytest.mark.parametrize(
    ("family", "name"), [(f, name) for f in sorted(CLASSIFIERS) for name, parts in PARTS.items() if takes(f, parts)]
)
def test_outputs_agree_and_nothing_of_peft_is_left(family, name):
    model = patched(family, PARTS[name])
    inputs = inputs_for(model.get_base_model())
    before = {key: value.clone() for key, value in model.state_dict().items()}
    expected = model.eval()(**inputs).logits
    plain = model.get_base_model()
    small = bundle(model)
    assert relative_error(small(**inputs).logits, expected) < 1e-5
    assert small.bundle_report.parity_error < 1e-5
    keys = [key.replace("snnk_kernel", "") for key in small.state_dict()]  # where linear attention keeps its maps
    assert not [key for key in keys if "base_layer" in key or "snnk" in key or "modules_to_save" in key]
    assert not [m for m in small.modules() if type(m).__module__.split(".")[0] == "peft"]
    assert not hasattr(small, "peft_config")
    assert not getattr(small, "_hf_peft_config_loaded", False)
    # The patched model is as before, bit for bit, and shares no memory with the bundle.
    after = model.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[key], before[key]) for key in before)
    assert type(plain).__name__ == CLASSIFIERS[family][2]
    theirs = {tensor.data_ptr() for tensor in [*model.parameters(), *model.buffers()] if tensor.numel()}
    assert not theirs & {tensor.data_ptr() for tensor in [*small.parameters(), *small.buffers()] if tensor.numel()}


@pytest.mark.parametrize(
    ("family", "model_class", "parts"),
    [
        ("bert", "BertModel", PARTS["everything"]),
        ("bert", "BertForMaskedLM", PARTS["ffn beside adapter"]),
        ("bert", "BertForTokenClassification", PARTS["houlsby"]),
        ("bert", "BertForQuestionAnswering", PARTS["ffn"]),
        ("bert", "BertForMultipleChoice", PARTS["everything"]),
        ("bert", "BertForNextSentencePrediction", PARTS["pooler"]),
        ("distilbert", "DistilBertModel", PARTS["parallel"]),
        ("roberta", "RobertaForMaskedLM", PARTS["ffn"]),
        ("vit", "ViTModel", PARTS["houlsby"]),
    ],
)
def test_other_heads(family, model_class, parts):
    small = bundle(patched(family, parts, model_class=model_class))
    assert type(small).__name__ == f"Snnk{model_class}"
    assert small.bundle_report.parity_error < 1e-5


def test_pooler_and_classifier_become_one_small_matrix():
    small = bundle(patched("bert", {"pooler": PoolerPart(num_features=8)}))
    assert isinstance(small.bert.pooler.dense, FeatureStage)
    assert isinstance(small.bert.pooler.activation, nn.Identity)
    assert small.classifier.weight.shape == (2, 8)
    folded = small.bundle_report.folded[0]
    assert folded.paths == ["bert.pooler.dense", "bert.pooler.activation", "classifier"]


def test_seed_only_projection_gives_the_papers_tiny_head():
    model = tiny("bert", hidden_size=768, num_attention_heads=12, num_hidden_layers=1)
    model = get_snnk_model(model, SNNKConfig(pooler=PoolerPart(num_features=32), save_projection=False))
    small = bundle(model)
    head = small.bundle_report.folded[0]
    assert head.bytes_before == 4 * (768 * 768 + 768 + 768 * 2 + 2)
    assert head.bytes_after == 4 * (32 * 2 + 2) + 32  # W̄, its bias, a checksum
    assert head.bytes_after * 1000 < head.bytes_before
    state = {key for key in small.state_dict() if "pooler" in key}
    assert state == {"bert.pooler.dense.feature_map.projection.checksum"}


def test_seed_only_ffn_keeps_its_whitening_outside_the_matrix():
    part = FFNPart(num_features=8, projection="orf", component="relu")
    small = bundle(patched("bert", {"ffn": part}, save_projection=False))
    assert small.bundle_report.parity_error < 1e-5
    stage = small.bert.encoder.layer[0].intermediate.dense
    assert stage.shift is not None
    assert not any(key.endswith("projection.weight") for key in small.state_dict())


def test_several_adapters_the_active_one_is_folded():
    model = patched("bert", PARTS["houlsby"])
    model.add_adapter("other", SNNKConfig(**PARTS["pooler"]))
    inputs = inputs_for(model.get_base_model())
    for name, features in (("default", 4), ("other", 0)):
        model.set_adapter(name)
        small = bundle(trained(model, std=0.2 if name == "default" else 0.4))
        assert relative_error(small(**inputs).logits, model.eval()(**inputs).logits) < 1e-5
        assert sum(isinstance(module, FoldedAdapter) for module in small.modules()) == features
        assert list(small.bundle_report.parts) == [name]


def test_a_transformers_model_with_a_loaded_adapter(tmp_path):
    source = patched("bert", PARTS["houlsby"])
    source.save_pretrained(tmp_path)
    model = tiny("bert")
    model.load_adapter(str(tmp_path))
    small = bundle(model)
    inputs = inputs_for(model)
    assert relative_error(small(**inputs).logits, source.eval()(**inputs).logits) < 1e-5


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_dtypes(dtype):
    model = tiny("bert").to(dtype)
    small = bundle(trained(get_snnk_model(model, SNNKConfig(**PARTS["everything"])), std=0.1))
    assert {tensor.dtype for tensor in small.state_dict().values()} == {dtype}
    report = small.bundle_report
    assert report.parity_error <= report.parity_tolerance
    assert report.dtype == str(dtype).removeprefix("torch.")


def test_training_flags_are_restored_and_the_bundle_is_trainable():
    model = patched("bert", PARTS["everything"]).train()
    flags = [module.training for module in model.modules()]
    small = bundle(model)
    assert [module.training for module in model.modules()] == flags
    assert not small.training
    assert all(parameter.requires_grad for parameter in small.parameters())
    small.train()(**inputs_for(small), labels=torch.tensor([0, 1, 0])).loss.backward()
    assert small.classifier.weight.grad is not None


def test_copies_state_dicts_and_pickles():
    small = bundle(patched("bert", PARTS["everything"]))
    inputs = inputs_for(small)
    expected = small(**inputs).logits
    assert same(copy.deepcopy(small)(**inputs).logits, expected)
    assert same(pickle.loads(pickle.dumps(small))(**inputs).logits, expected)
    twin = type(small)(small.config).eval()
    assert not torch.equal(twin(**inputs).logits, expected)
    twin.load_state_dict(small.state_dict())
    assert same(twin(**inputs).logits, expected)


def test_compiles_in_one_graph():
    small = bundle(patched("bert", PARTS["ffn beside adapter"]))
    inputs = inputs_for(small)
    compiled = torch.compile(small, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(**inputs).logits, small(**inputs).logits)


def test_report_survives_the_config():
    small = bundle(patched("roberta", PARTS["pooler"]))
    report = small.bundle_report
    data = json.loads(json.dumps(report.to_dict()))
    assert BundleReport.from_dict(data) == report
    assert "called inside the model's forward()" in report.remarks[0]
    text = str(report)
    assert "pretrained" in text
    assert "classifier.dense" in text
    base, after = tiny("roberta"), small
    assert report.parameters_base == base.num_parameters()
    assert report.bytes_base == 4 * base.num_parameters()
    assert report.parameters_after == sum(t.numel() for t in after.state_dict().values())
    assert report.parameters_patched > report.parameters_base


# Refusals


def test_nothing_to_bundle():
    with pytest.raises(ConfigError, match="nothing to bundle"):
        bundle(tiny("bert"))
    model = patched("bert", PARTS["houlsby"])
    with model.disable_adapter(), pytest.raises(ConfigError, match="nothing to bundle"):
        bundle(model)


def test_other_peft_layers_are_refused():
    model = peft.get_peft_model(tiny("bert"), peft.LoraConfig(target_modules=["query"]))
    with pytest.raises(UnsupportedError, match="merge_and_unload"):
        bundle(model)


def test_a_model_that_its_config_does_not_build_is_refused():
    base = tiny("vit")
    base.vit.layernorm = nn.LayerNorm(32, bias=False)
    with pytest.raises(UnsupportedError, match="not what its config builds"):
        bundle(get_snnk_model(base, SNNKConfig(**PARTS["houlsby"])))


def test_a_module_that_was_left_out_stays_out(tmp_path):
    """As in a ViT without its last norm: the bundle knows, and its config loads it back."""
    base = tiny("vit")
    base.vit.layernorm = nn.Identity()
    model = trained(get_snnk_model(base, SNNKConfig(**PARTS["houlsby"]))).eval()
    expected = model(**inputs_for(base)).logits
    bundle(model).save_pretrained(tmp_path)
    loaded = AutoModelForImageClassification.from_pretrained(tmp_path)
    assert type(loaded.vit.layernorm) is nn.Identity
    torch.testing.assert_close(loaded(**inputs_for(base)).logits, expected, rtol=1e-4, atol=1e-5)


def test_a_parity_failure_names_the_error():
    model = patched("bert", PARTS["houlsby"])
    with torch.no_grad():
        model.base_model.model.bert.encoder.layer[0].output.dropout.slots_of("default")[0].adapter.readout.A.fill_(
            float("nan")
        )
    with pytest.raises(ValueError, match=r"readout.A of the adapter\) holds NaN in"):
        bundle(model)


def test_a_model_that_makes_much_of_rounding():
    """Logits are differences of pairs of pooled units that are nearly the same; the fold itself is exact.

    Of many pairs, since a single one may round alike on some processors.
    """
    model = tiny("bert")
    with torch.no_grad():
        dense, head = model.bert.pooler.dense, model.classifier
        dense.weight[1::2] = dense.weight[0::2] + 1e-5 * torch.randn(dense.out_features // 2, dense.in_features)
        dense.bias[1::2] = dense.bias[0::2]
        head.weight[:, 1::2] = -head.weight[:, 0::2]
        head.bias.zero_()
    given = get_snnk_model(model, SNNKConfig(parts=[LowRankPart("ffn", rank=4, activation="identity")]))
    with pytest.warns(RuntimeWarning, match="in float64: this model makes much of rounding"):
        small = bundle(given)
    assert small.bundle_report.parity_error > 1e-5
    given.double()
    assert relative_error(small.double()(**inputs_for(model)).logits, given.eval()(**inputs_for(model)).logits) < 1e-5


def test_a_fold_that_is_wrong_is_refused(monkeypatch):
    def wrong(base):
        small, *rest = folded_model(base)
        with torch.no_grad():
            small.classifier.weight[0] *= 1.001
        return small, *rest

    monkeypatch.setattr("snnk_peft.bundling.bundle.folded_model", wrong)
    with pytest.raises(ValueError, match=r"logits differs from the model's by .* of its largest value"):
        bundle(patched("bert", PARTS["houlsby"]))


def test_the_wrong_head_or_a_changed_plan_is_refused():
    small = bundle(patched("bert", PARTS["houlsby"]))
    with pytest.raises(ConfigError, match="use the Auto class that matches"):
        classes.SnnkBertModel(small.config)
    config = copy.deepcopy(small.config)
    config.snnk_plan["modules"]["bert.nowhere"] = {"kind": "identity"}
    with pytest.raises(ConfigError, match=r"bert\.nowhere"):
        type(small)(config)
    with pytest.raises(ConfigError, match="no complete snnk_plan"):
        type(small)(type(config)())
    with pytest.raises(ConfigError, match="did you mean 'linear'"):
        build_module({"kind": "lineal"}, nn.Identity())
    with pytest.raises(ConfigError, match="lacks 'out'"):
        build_module({"kind": "linear", "in": 3}, nn.Identity())


class MineConfig(BertConfig):
    model_type = "mine"


class MineForSequenceClassification(BertForSequenceClassification):
    config_class = MineConfig


def test_a_users_own_family(tmp_path):
    AutoConfig.register("mine", MineConfig)
    AutoModelForSequenceClassification.register(MineConfig, MineForSequenceClassification)
    register_family(dataclasses.replace(FAMILIES["bert"], name="mine"))
    register_bundles("mine")
    model = MineForSequenceClassification(MineConfig(**TEXT)).eval()
    small = bundle(trained(get_snnk_model(model, SNNKConfig(**PARTS["everything"]))))
    small.save_pretrained(tmp_path)
    # transformers alone could not run a code file that needs the user's classes, so there is none.
    assert not (tmp_path / "modeling_snnk_bundle.py").exists()
    assert "the package that defines" in (tmp_path / "README.md").read_text()
    again = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    inputs = inputs_for(small)
    assert same(again(**inputs).logits, small(**inputs).logits)
    assert again.config.model_type == "snnk_mine"


def test_a_class_of_the_same_name_is_not_confused():
    bundle(patched("bert", PARTS["houlsby"]))
    namesake = type("BertForSequenceClassification", (BertForSequenceClassification,), {})
    with pytest.raises(UnsupportedError, match="of the same name"):
        bundle_model_class(namesake)


# The code file


def test_all_projections_and_components_fit_into_one_code_file():
    members = [*(COMPONENTS[name] for name in COMPONENTS), *(PROJECTIONS[name] for name in PROJECTIONS)]
    assert len(members) > 6
    imports, text = assemble(
        ["snnk_peft.bundling.modules", "snnk_peft.bundling.attention", *(member.__module__ for member in members)]
    )
    compile(text, "assembled", "exec")
    roots = {module.split(".")[0] for module, _ in imports}
    assert {"torch", "math"} <= roots
    assert not roots & {"peft", "snnk_peft"}
    assert all(member.__name__ in text for member in members)


MEMBERS = [
    *(
        (
            name,
            {"gaussian": "orf", "none": "identity"}.get(COMPONENTS[name].distribution, COMPONENTS[name].distribution),
        )
        for name in COMPONENTS
    ),
    *(
        ("relu", name)
        for name in PROJECTIONS
        if PROJECTIONS[name].distribution == "gaussian" and not PROJECTIONS[name].needs_layer
    ),
]


@pytest.mark.filterwarnings("ignore::snnk_peft.errors.NumericalWarning")
@pytest.mark.parametrize(("component", "projection"), MEMBERS, ids=lambda name: name)
def test_every_member_works_in_a_model(component, projection, tmp_path, monkeypatch):
    """As an adapter of a model: a step trains it, the bundle agrees, its own code file alone builds it again."""
    size = PROJECTIONS[projection].nearest_size(32, max(16, COMPONENTS[component]().fewest_rows()))
    part = AdapterPart(component=component, projection=projection, num_features=size, layers="top-1")
    model = patched("bert", {"adapter": part})
    inputs = inputs_for(model.get_base_model())
    model.train()(**inputs).logits.square().sum().backward()
    readouts = [p for name, p in model.named_parameters() if name.endswith(".A") and p.requires_grad]
    assert readouts
    if component != "arccos":
        assert all(p.grad is not None and p.grad.isfinite().all() and p.grad.any() for p in readouts)
    small = bundle(model.eval())
    assert relative_error(small(**inputs).logits, model(**inputs).logits) < 1e-5
    small.save_pretrained(tmp_path)
    again = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    assert same(again(**inputs).logits, small(**inputs).logits)
    file = tmp_path / "modeling_snnk_bundle.py"
    assert "from snnk_peft" not in file.read_text()
    spec = importlib.util.spec_from_file_location(f"alone_{component}_{projection}", file)
    alone = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, alone)
    spec.loader.exec_module(alone)
    config = getattr(alone, type(small.config).__name__).from_pretrained(tmp_path)
    rebuilt = getattr(alone, type(small).__name__).from_pretrained(tmp_path, config=config)
    assert same(rebuilt(**inputs).logits, small(**inputs).logits)


def test_name_collisions_are_found(tmp_path, monkeypatch):
    for name in ("collide_one", "collide_two"):
        (tmp_path / f"{name}.py").write_text("LIMIT = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match="both define 'LIMIT'"):
        assemble(["collide_one", "collide_two"])


def test_only_what_is_used_is_in_the_code_file():
    small = bundle(patched("bert", PARTS["pfeiffer-paper"]))
    base = type(tiny("bert"))
    text = code_file(base, type(small.config), type(small).__name__, small.config.snnk_plan["modules"])
    assert "class Cos(" in text
    assert "class Relu(" not in text
    assert "from snnk_peft" not in text
