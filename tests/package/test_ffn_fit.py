"""How `calibrate` fits FFN blocks: one pass, memory independent of the tokens, and steps that move the rows."""

from __future__ import annotations

import copy
import json

import pytest
import torch

from snnk_peft import FFNPart, PoolerPart, SNNKConfig, bundle, calibrate, get_snnk_model
from snnk_peft.calibrating.batches import is_held_out
from snnk_peft.parts.replaced import fit
from snnk_peft.solvers.error_meter import ErrorMeter
from snnk_peft.solvers.landmarks import SecondMoments, choose_landmarks, fit_landmarks
from snnk_peft.solvers.ridge import GramAccumulator, fit_ridge
from snnk_peft.solvers.token_sample import TokenSample
from tests.fresh_process import ROOT, run_python
from tests.tiny_models import tiny


def bert(**changes: object) -> torch.nn.Module:
    """With weights large enough that its FFN blocks are far from linear."""
    return tiny("bert", initializer_range=0.2, **changes)


def batches(count: int = 30, size: int = 8, length: int = 12) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    made = []
    for _ in range(count):
        mask = torch.ones(size, length, dtype=torch.long)
        mask[::2, length // 2 :] = 0
        ids = torch.randint(3, 100, (size, length), generator=generator)
        made.append({"input_ids": ids, "attention_mask": mask})
    return made


def converted(part: FFNPart | PoolerPart, steps: int = 0, seed: int = 0, data: list | None = None, **changes: object):
    model = get_snnk_model(bert(**changes), SNNKConfig(parts=[part], seed=seed))
    return model, calibrate(model, batches() if data is None else data, steps=steps, progress=False)


# ---------------------------------------------------------------- one pass, however the tokens come


@pytest.mark.parametrize("sizes", [(1,), (37,), (1500,), (64, 1, 900)])
def test_streaming_is_one_shot(sizes):
    """Choice, readout and error from tokens in parts are those from all at once, which numpy's formulas give."""
    generator = torch.Generator().manual_seed(0)
    mixing = torch.randn(6, 23, generator=generator, dtype=torch.float64)
    hidden = torch.relu(torch.randn(1500, 6, generator=generator, dtype=torch.float64) @ mixing + 1) + 3
    output = torch.randn(4, 23, generator=generator, dtype=torch.float64)
    streamed, start = SecondMoments(23), 0
    gram = GramAccumulator(5, 23, output_weight=output)
    features = torch.tanh(hidden[:, :5])
    while start < len(hidden):
        for size in sizes:
            streamed.update(hidden[start : start + size])
            gram.update(features[start : start + size], hidden[start : start + size])
            start += size
    torch.testing.assert_close(streamed.covariance(), torch.cov(hidden.T, correction=0), rtol=1e-10, atol=1e-10)
    at_once = SecondMoments(23)
    at_once.update(hidden)
    chosen = choose_landmarks(streamed, output, 7)
    assert torch.equal(chosen, choose_landmarks(at_once, output, 7))
    for each, other in zip(
        fit_landmarks(streamed, streamed, chosen, output), fit_landmarks(at_once, at_once, chosen, output), strict=True
    ):
        torch.testing.assert_close(each, other, rtol=1e-10, atol=1e-10)
    whole = GramAccumulator(5, 23, output_weight=output)
    whole.update(features, hidden)
    for each, other in zip(fit_ridge(gram, gram), fit_ridge(whole, whole), strict=True):
        torch.testing.assert_close(each, other, rtol=1e-10, atol=1e-10)


PARTS = {
    "hidden units": FFNPart(num_features=12),
    "hidden units and the input": FFNPart(num_features=6, linear_path=True),
    "another function": FFNPart(num_features=12, component="relu"),
    "not elementwise": FFNPart(num_features=12, component="trigrf", init="random"),
    "drawn": FFNPart(num_features=12, component="relu", projection="orf"),
    "learned": FFNPart(num_features=12, component="relu", projection="free"),
}


@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize("name", PARTS)
def test_one_pass_per_slot(name, steps):
    """A layer more is a pass more."""
    reads = []

    def passes(layers: list[int]) -> int:
        model = get_snnk_model(bert(), SNNKConfig(ffn=FFNPart(**{**vars(PARTS[name]), "layers": layers})))
        reads.clear()
        calibrate(model, lambda: reads.append(1) or iter(batches(6)), steps=steps, progress=False)
        return len(reads)

    assert passes([0, 1]) == passes([0]) + 1


def test_a_sample_is_uniform_and_does_not_depend_on_the_batches():
    """Each of 60 tokens is among 20 with chance 1/3: over 1,000 draws all lie within five standard deviations."""
    tokens = torch.arange(60.0).unsqueeze(1)
    generator = torch.Generator().manual_seed(0)
    hits = torch.zeros(60)
    for _ in range(1000):
        sample = TokenSample(20, generator)
        for part in tokens.split(7):
            sample.update(part)
        kept = sample.reduced().squeeze(1).long()
        assert len(kept) == len(kept.unique()) == 20
        hits[kept] += 1
    assert (hits - 1000 / 3).abs().max() < 5 * (1000 * (1 / 3) * (2 / 3)) ** 0.5

    def kept_of(size: int) -> torch.Tensor:
        sample = TokenSample(20, torch.Generator().manual_seed(4))
        for part in tokens.split(size):
            sample.update(part)
        return sample.reduced()

    assert torch.equal(kept_of(1), kept_of(60))
    assert torch.equal(kept_of(13), kept_of(60))
    assert not torch.equal(kept_of(60), tokens[:20])
    with pytest.raises(ValueError, match="no vectors were given"):
        TokenSample(20, generator).reduced()


def test_more_tokens_than_a_sample_holds(monkeypatch):
    """Rows of another function are fitted to a sample: nearly as good as to all tokens."""
    part = FFNPart(num_features=12, component="relu", layers=[0])
    everything = converted(part)[1].slots[0].error_after
    monkeypatch.setattr(fit, "TOKENS", 600)
    report = converted(part)[1]
    assert report.slots[0].tokens > 1500
    assert report.slots[0].held_out_tokens == 150
    assert report.slots[0].error_after < 1.3 * everything


MEMORY = """
import sys, json, torch
sys.path.insert(0, "recipes/benchmarks")
from transformers import BertConfig, BertForSequenceClassification
from _bench import peak_bytes
from snnk_peft import FFNPart, SNNKConfig, calibrate, get_snnk_model
config = BertConfig(hidden_size=64, num_hidden_layers=1, num_attention_heads=2, intermediate_size=512, vocab_size=500)
model = BertForSequenceClassification(config).eval()
generator = torch.Generator().manual_seed(0)
data = [{"input_ids": torch.randint(3, 500, (256, 64), generator=generator)} for _ in range(7)]
def forward():
    with torch.no_grad():
        for batch in data:
            model(**batch)
forward()
forward = peak_bytes(forward)
patched = get_snnk_model(model, SNNKConfig(ffn=FFNPart(num_features=32)))
calibrating = peak_bytes(lambda: calibrate(patched, data, steps=5, progress=False))
print(json.dumps([forward, calibrating]))
"""


def test_memory_of_many_tokens():
    """114,688 tokens: at most half as much again as a forward pass, where their hidden units alone are 235 MB."""
    run = run_python(["-c", MEMORY], cwd=ROOT)
    assert run.returncode == 0, run.stderr
    forward, calibrating = json.loads(run.stdout.splitlines()[-1])
    if forward is None:
        pytest.skip("this system does not tell how much memory a call takes")
    assert calibrating < 1.5 * forward


# ---------------------------------------------------------------- steps


def slot_layer(model: torch.nn.Module, index: int) -> torch.nn.Module:
    return model.get_base_model().bert.encoder.layer[index].intermediate.dense


@pytest.mark.parametrize("name", ["hidden units", "hidden units and the input", "another function", "learned"])
def test_steps_move_the_rows_and_lower_the_error(name):
    """The error that is reported is that of the model, recomputed from its modules on the held-out batches."""
    part = FFNPart(**{**vars(PARTS[name]), "layers": [1]})
    data = batches()
    model = get_snnk_model(bert(), SNNKConfig(ffn=part))
    plain = calibrate(model, data, refit=False, progress=False).slots[0]
    again = get_snnk_model(bert(), SNNKConfig(ffn=part))
    moved = calibrate(again, data, refit=False, steps=200, progress=False).slots[0]
    assert moved.error_before == pytest.approx(plain.error_before, rel=1e-5)
    assert moved.tokens == plain.tokens
    most = 0.98 if part.linear_path else 0.9  # the linear path leaves little to gain here
    assert moved.error_after < most * plain.error_after
    layer, block = slot_layer(again, 1), again.get_base_model().bert.encoder.layer[1]
    meter = ErrorMeter(block.output.dense.weight.detach())
    stand_in = layer.snnk_slots["default"][0].layer
    for index, batch in enumerate(data):
        if is_held_out(index, 0.2):
            seen = []
            hook = layer.register_forward_pre_hook(lambda module, args, seen=seen: seen.append(args[0]))
            with torch.no_grad():
                again(**batch)
                x = seen[0][batch["attention_mask"].bool()]
                meter.update(torch.nn.functional.gelu(layer.base_layer(x)), stand_in(x))
            hook.remove()
    assert moved.held_out_tokens == meter.count
    assert moved.error_after == pytest.approx(meter.value(), rel=1e-3)


def test_drawn_rows_stay_as_drawn():
    """They are the draw of a seed, which a reader of the file expects; steps then change nothing at all."""
    models = [converted(PARTS["drawn"], steps=steps)[0] for steps in (0, 20)]
    for name, value in models[0].state_dict().items():
        assert torch.equal(value, models[1].state_dict()[name]), name


def test_what_steps_spoil_is_not_taken(monkeypatch):
    """A step that is far too long raises the error on held-out tokens: the closed form stays, bit for bit."""
    part = FFNPart(num_features=12, layers=[0])
    plain, report = converted(part)
    monkeypatch.setattr("snnk_peft.solvers.descent.LEARNING_RATE", 30.0)
    spoiled, other = converted(part, steps=5)
    assert other.slots[0].error_after == report.slots[0].error_after
    for name, value in plain.state_dict().items():
        assert torch.equal(value, spoiled.state_dict()[name]), name


def test_the_same_every_time():
    def weights(seed: int) -> torch.Tensor:
        model = get_snnk_model(bert(), SNNKConfig(ffn=FFNPart(num_features=12, layers=[0]), seed=seed))
        state = torch.get_rng_state()
        calibrate(model, batches(), steps=20, progress=False)
        assert torch.equal(state, torch.get_rng_state())
        stage = slot_layer(model, 0).snnk_slots["default"][0].layer.stage
        return stage.feature_map.projection.weight.clone()

    first, again, other = weights(0), weights(0), weights(1)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


RELOAD = """
import sys, torch
from peft import PeftModel
from transformers import AutoModelForSequenceClassification
import snnk_peft
base, adapter, bundled, found = sys.argv[1:]
batch = torch.load(found, weights_only=True)
inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
model = PeftModel.from_pretrained(AutoModelForSequenceClassification.from_pretrained(base), adapter).eval()
plain = AutoModelForSequenceClassification.from_pretrained(bundled, trust_remote_code=True).eval()
with torch.no_grad():
    print(float((model(**inputs).logits - batch["logits"]).abs().max()))
    print(float((plain(**inputs).logits - batch["logits"]).abs().max()))
"""


@pytest.mark.parametrize("padding", ["right", "left"])
def test_moved_rows_are_saved_bundled_and_loaded_in_a_fresh_process(tmp_path, padding):
    data = batches(12)
    if padding == "left":
        data = [{name: value.flip(1) for name, value in batch.items()} for batch in data]
    original = bert()
    original.save_pretrained(tmp_path / "base")
    model = get_snnk_model(copy.deepcopy(original), SNNKConfig(ffn=FFNPart(num_features=12)))
    calibrate(model, data, steps=30, progress=False)
    with torch.no_grad():
        logits = model.eval()(**data[0]).logits
        with model.disable_adapter():
            torch.testing.assert_close(model(**data[0]).logits, original(**data[0]).logits)
    model.save_pretrained(tmp_path / "adapter")
    bundle(model).save_pretrained(tmp_path / "bundle")
    torch.save({**data[0], "logits": logits}, tmp_path / "found.pt")
    folders = [str(tmp_path / name) for name in ("base", "adapter", "bundle", "found.pt")]
    run = run_python(["-c", RELOAD, *folders])
    assert run.returncode == 0, run.stderr
    assert all(float(line) < 1e-5 for line in run.stdout.splitlines()[-2:]), run.stdout


def test_half_precision_and_the_pooler():
    model = get_snnk_model(bert().to(torch.bfloat16), SNNKConfig(ffn=FFNPart(num_features=12, layers=[1])))
    plain = calibrate(model, batches(), progress=False).slots[0]
    moved = calibrate(model, batches(), steps=100, progress=False).slots[0]
    assert moved.error_after < 0.9 * plain.error_after
    with torch.no_grad():
        assert model(**batches(1)[0]).logits.dtype == torch.bfloat16
    pooler = PoolerPart(num_features=12, component="relu", projection="free")
    errors = [converted(pooler, steps=steps)[1].slots[0].error_after for steps in (0, 60)]
    assert errors[1] < errors[0]
