"""A part in one file of its own (two_linears_part.py): planned, trained, fitted, folded, saved, loaded elsewhere."""

from __future__ import annotations

import json

import peft
import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from transformers import FNetConfig, FNetForSequenceClassification

from snnk_peft import FAMILIES, AdapterPart, FFNPart, SNNKConfig, bundle, calibrate, check_family, get_snnk_model, plan
from snnk_peft.errors import ConfigError, UnsupportedError
from tests.fresh_process import run_python
from tests.tiny_families import build
from tests.tiny_models import tiny
from tests.two_linears_part import TwoLinears, TwoLinearsPart

SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "intermediate_size": 24, "vocab_size": 30}
BATCHES = [{"input_ids": torch.randint(3, 30, (8, 12), generator=torch.Generator().manual_seed(i))} for i in range(4)]
PART = TwoLinearsPart(targets="*.intermediate.dense", rank=6)


def fnet() -> FNetForSequenceClassification:
    torch.manual_seed(0)
    return FNetForSequenceClassification(FNetConfig(**SIZES, max_position_embeddings=20)).eval()


def logits(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(**BATCHES[0]).logits


def patched() -> peft.PeftModel:
    assert "fnet" not in FAMILIES
    return get_snnk_model(fnet(), SNNKConfig(parts=[PART], task_type="SEQ_CLS"))


def test_it_is_trained_fitted_folded_and_loaded_by_a_fresh_process(root, tmp_path):
    model = patched()
    places = [name for name, module in model.named_modules() if isinstance(module, TwoLinears)]
    assert len(places) == 2
    report = calibrate(model, BATCHES, progress=False)
    assert [slot.num_features for slot in report.slots] == [6, 6]
    assert all(slot.error_after < 0.9 * slot.error_before for slot in report.slots)
    before = logits(model)
    model.train()(**BATCHES[0], labels=torch.zeros(8, dtype=torch.long)).loss.backward()
    assert all(p.grad is not None and p.grad.any() for name, p in model.named_parameters() if "snnk_slots" in name)
    with model.disable_adapter():
        assert torch.equal(logits(model), logits(fnet()))

    model.save_pretrained(tmp_path / "adapter")
    fnet().save_pretrained(tmp_path / "base")
    bundled = bundle(model.eval())
    assert type(bundled.fnet.encoder.layer[0].intermediate.dense) is nn.Linear
    assert bundled.num_parameters() == fnet().num_parameters()
    torch.testing.assert_close(logits(bundled), before, rtol=1e-5, atol=1e-6)
    bundled.save_pretrained(tmp_path / "bundled")
    save_file({**BATCHES[0], "logits": before}, tmp_path / "expected.safetensors")

    program = """
import sys, torch
from pathlib import Path
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification
top = Path(sys.argv[1])
given = load_file(top / "expected.safetensors")
ids, expected = given["input_ids"], given["logits"]
bundled = AutoModelForSequenceClassification.from_pretrained(top / "bundled", trust_remote_code=True).eval()
import peft, tests.two_linears_part
base = AutoModelForSequenceClassification.from_pretrained(top / "base").eval()
adapted = peft.PeftModel.from_pretrained(base, top / "adapter").eval()
with torch.no_grad():
    for model in (bundled, adapted):
        torch.testing.assert_close(model(input_ids=ids).logits, expected, rtol=1e-5, atol=1e-6)
print("equal")
"""
    done = run_python(["-c", program, str(tmp_path)], cwd=root)
    assert done.stdout.split() == ["equal"], done.stderr


def test_any_module_will_do(tmp_path):
    torch.manual_seed(0)
    make = lambda: nn.Sequential(nn.Linear(12, 20), nn.Tanh(), nn.Linear(20, 3))  # noqa: E731
    plain = make()
    state, x = plain.state_dict(), torch.randn(64, 12)
    expected = plain(x)
    model = get_snnk_model(plain, SNNKConfig(parts=[TwoLinearsPart(targets="0", rank=10)]))
    report = calibrate(model, [{"input": x[i : i + 16]} for i in range(0, 64, 16)], progress=False)
    assert [slot.path for slot in report.slots] == ["0"]
    with torch.no_grad():
        found = model(x)
    assert 0 < float((found - expected).square().sum() / expected.square().sum()) < 0.2
    with pytest.raises(UnsupportedError, match="is not a transformers PreTrainedModel"):
        bundle(model)
    model.save_pretrained(tmp_path)
    again = make()
    again.load_state_dict(state)
    again = peft.PeftModel.from_pretrained(again, tmp_path)
    with torch.no_grad():
        assert torch.equal(again(x), found)
    other = nn.Sequential(nn.Linear(12, 21), nn.Tanh(), nn.Linear(21, 3))
    with pytest.raises(ConfigError, match="belongs to another base model"):
        peft.PeftModel.from_pretrained(other, tmp_path)


def test_what_transformers_writes_as_conv1d_is_a_linear():
    ids = {"input_ids": BATCHES[0]["input_ids"], "attention_mask": torch.ones_like(BATCHES[0]["input_ids"])}
    model = build("gpt2", "GPT2ForSequenceClassification")
    with torch.no_grad():
        expected = model(**ids).logits
    model = get_snnk_model(model, SNNKConfig(parts=[TwoLinearsPart("*.mlp.c_fc", rank=16)])).eval()
    with torch.no_grad():  # of full rank: nothing but rounding
        torch.testing.assert_close(model(**ids).logits, expected, rtol=1e-4, atol=1e-5)
    bundled = bundle(model)
    with torch.no_grad():
        torch.testing.assert_close(bundled(**ids).logits, expected, rtol=1e-4, atol=1e-5)


def test_a_pattern_that_matches_nothing_names_what_there_is():
    with pytest.raises(
        UnsupportedError, match=r"matches 'decoder\.\*'; it has .*'fnet.encoder.layer.0.intermediate.dense'"
    ):
        get_snnk_model(fnet(), SNNKConfig(parts=[TwoLinearsPart(targets="decoder.*")]))


def test_faults_of_all_parts_at_once():
    with pytest.raises(ConfigError) as caught:
        SNNKConfig(
            ffn=FFNPart(init="x"), parts=[TwoLinearsPart(rank=0), {"part": "two_liners"}, {"part": "ffn", "x": 1}, 3]
        )
    found = caught.value.faults
    assert len(found) == 5
    for start in ("ffn.init is 'x'; expected 'nystrom', ", "parts[0].rank is 0; expected an integer >= 1",
                  "parts[1].part: unknown part 'two_liners'; did you mean 'two_linears'", "parts[2].unknown field 'x'",
                  "parts[3] is an int; expected one of"):  # fmt: skip
        assert any(fault.startswith(start) for fault in found), (start, found)


def test_several_parts_of_one_kind(tmp_path):
    """What a planner returns: other sizes in other layers, beside parts of other kinds, through file and bundle."""
    parts = [
        FFNPart(num_features=8, layers=[0]),
        FFNPart("relu", "orf", 12, layers=[1]),
        AdapterPart(num_features=4, layers=[1], placement="pfeiffer"),
        AdapterPart(num_features=6, layers=[0], placement="parallel"),
    ]
    torch.manual_seed(0)
    base = tiny("bert", "BertForSequenceClassification")
    state = {key: value.clone() for key, value in base.state_dict().items()}
    model = get_snnk_model(base, SNNKConfig(parts=parts, task_type="SEQ_CLS"))
    sizes = [m.num_features for m in model.modules() if hasattr(m, "num_features") and hasattr(m, "materialize")]
    assert sorted(sizes) == [4, 6, 8, 12]
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter), alpha=0.02)
    before = logits(model)
    torch.testing.assert_close(logits(bundle(model)), before, rtol=1e-4, atol=1e-5)
    model.save_pretrained(tmp_path)
    content = json.loads((tmp_path / "adapter_config.json").read_text())
    assert [entry["part"] for entry in content["parts"]] == ["ffn", "ffn", "adapter", "adapter"]
    base = tiny("bert", "BertForSequenceClassification")
    base.load_state_dict(state)
    assert torch.equal(logits(peft.PeftModel.from_pretrained(base, tmp_path)), before)
    assert SNNKConfig.from_pretrained(tmp_path).parts == parts


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([FFNPart(num_features=4), FFNPart(num_features=8, layers=[1])], "both replace 'bert.encoder.layer.1.interm"),
        (
            [TwoLinearsPart("*.query"), TwoLinearsPart("*layer.0*")],
            "both replace 'bert.encoder.layer.0.attention.self.query'",
        ),
        (
            [AdapterPart(num_features=4), AdapterPart(num_features=8, placement="pfeiffer")],
            "both change in the same way",
        ),
    ],
)
def test_two_parts_that_want_the_same_are_refused(parts, message):
    with pytest.raises(ConfigError, match=rf"parts\[0\] and parts\[1\] {message}"):
        get_snnk_model(tiny("bert", "BertForSequenceClassification"), SNNKConfig(parts=parts))


def test_the_file_names_the_part(tmp_path):
    patched().save_pretrained(tmp_path)
    content = json.loads((tmp_path / "adapter_config.json").read_text())
    assert content["parts"] == [{"part": "two_linears", "targets": "*.intermediate.dense", "rank": 6}]


def test_it_is_offered_to_the_planner_and_checked_by_its_own_file_alone(monkeypatch):
    pooler = "bert.pooler.dense"  # a place outside of the layers: the part has no `layers` to choose among
    monkeypatch.setattr(TwoLinearsPart, "tried", {pooler: [2, 4]})
    monkeypatch.setattr(TwoLinears, "fold", lambda self, place: place.put(nn.Sequential(self.U, self.V)))  # saves work
    model = tiny("bert", "BertForSequenceClassification")
    found = plan(model, BATCHES, 0.95, of="macs", progress=False)
    offered = {candidate.size for candidate in found.candidates if candidate.part == "two_linears"}
    assert offered == {"2", "4"}
    assert "two_linears" in check_family(model).checked
    monkeypatch.setattr(TwoLinears, "forward", lambda self, base, x: base(x))  # nothing reads U and V
    with pytest.raises(UnsupportedError, match=r"two_linears: no gradient reaches 'bert\.pooler\.dense'"):
        check_family(model)
