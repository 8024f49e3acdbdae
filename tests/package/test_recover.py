"""Steps towards the original's answers: never worse than before, the same every time, and judged on other batches."""

from __future__ import annotations

import copy
import time
from typing import Any

import pytest
import torch

from snnk_peft import FFNPart, SNNKConfig, bundle, calibrate, convert, get_snnk_model
from snnk_peft.calibrating.answers import Answers
from snnk_peft.converting import pipeline
from snnk_peft.converting import recover as recovering
from snnk_peft.converting.pipeline import Result
from snnk_peft.converting.quality import smallest
from snnk_peft.converting.recover import cut, judging, loss_of, recover, state_error, trained_weights
from snnk_peft.errors import ConfigError
from snnk_peft.planning.result import Plan
from tests.package.test_convert import batches
from tests.tiny_families import build
from tests.tiny_models import tiny, trained


def pair(original: Any) -> tuple[Any, list[dict[str, torch.Tensor]]]:
    """A poor conversion of a model, and batches."""
    data = batches(original, 16)
    patched = get_snnk_model(
        copy.deepcopy(original), SNNKConfig(parts=[FFNPart(num_features=2)], seed=0, modules_to_save=[])
    )
    calibrate(patched, data, progress=False)
    return bundle(patched), data


def states(model: Any) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def equal(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(value, second[name]) for name, value in first.items())


@torch.no_grad()
def divergence(model: Any, original: Any, data: list[dict[str, torch.Tensor]]) -> float:
    logs = [torch.cat([each(**batch).logits.double().log_softmax(-1) for batch in data]) for each in (original, model)]
    return float((logs[0].exp() * (logs[0] - logs[1])).sum(-1).mean())


def test_nearer_on_batches_that_were_not_trained_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovering, "RATE", 5e-3)
    original = trained(tiny("bert"))
    model, data = pair(original)
    with torch.no_grad():
        model.classifier.weight.mul_(0.5)
    held = [data[number] for number in (3, 11)]
    before = divergence(model, original, held)
    found = recover(model, original, data, Answers(original), steps=40, progress=False)
    assert found.before == pytest.approx(before)
    assert found.after == pytest.approx(divergence(model, original, held))
    assert found.after < 0.8 * found.before
    assert not model.training
    assert all(each.grad is None for each in model.parameters())
    assert model.bert.embeddings.word_embeddings.weight.requires_grad  # as it was


@pytest.mark.parametrize(
    ("shape", "count", "judges"), [((8, 16), 16, [3, 11]), ((8, 16), 1000, 40), ((4, 500), 400, 20), ((2, 500), 1, [0])]
)
def test_of_many_texts_some_judge(shape: tuple[int, int], count: int, judges: Any) -> None:
    """An eighth of the batches; of more, 320 texts or 40,000 tokens, wherever they stand."""
    found = judging([{"input_ids": torch.zeros(shape, dtype=torch.long)}] * count)
    assert found == judges or len(found) == judges
    assert all(abs(each - (place + 0.5) * count / len(found)) <= 1 for place, each in enumerate(found))


def test_never_worse_than_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps that lead away are taken back, bit for bit."""
    original = trained(tiny("bert"))
    model, data = pair(original)
    before = states(model)
    monkeypatch.setattr(recovering, "RATE", 30.0)
    found = recover(model, original, data, Answers(original), steps=5, progress=False)
    assert found.steps == 5
    assert found.after == found.before
    assert equal(states(model), before)


def test_the_same_every_time_and_with_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    original = trained(tiny("bert"))
    model, data = pair(original)
    before, state = states(model), torch.random.get_rng_state()
    results = []
    for room in (recovering.KEPT, 0):
        monkeypatch.setattr(recovering, "KEPT", room)
        model.load_state_dict(before)
        recover(model, original, data, Answers(original), steps=20, progress=False)
        results.append(states(model))
    assert equal(*results)
    assert not equal(before, results[0])
    assert torch.equal(torch.random.get_rng_state(), state)
    model.load_state_dict(before)
    recover(model, original, data, Answers(original), steps=20, seed=1, progress=False)
    assert not equal(states(model), results[0])


def test_interrupted_the_weights_are_those_of_before() -> None:
    original = trained(tiny("bert"))
    model, data = pair(original)
    before, calls = states(model), 0

    def stop(*args: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 6:  # of which two are those of the batches that are held out
            raise KeyboardInterrupt

    model.bert.pooler.register_forward_pre_hook(stop)
    with pytest.raises(KeyboardInterrupt):
        recover(model, original, data, Answers(original), steps=20, progress=False)
    assert equal(states(model), before)


def test_steps_are_judged_by_what_no_fit_has_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Judged by texts that the closed form was fitted to, steps look worse than they are."""
    fitted: list[Any] = []
    judged: list[Any] = []
    compare = recovering._distance

    def fit(model: Any, batches: Any, **how: Any) -> Any:
        fitted.extend(batches)
        return calibrate(model, batches, **how)

    def judge(model: Any, wanted: Any, batches: Any, held: Any) -> float:
        judged.extend(batches[number] for number in held)
        return compare(model, wanted, batches, held)

    monkeypatch.setattr(pipeline, "calibrate", fit)
    monkeypatch.setattr(recovering, "_distance", judge)
    model = trained(tiny("bert"))
    data = batches(model, 24)
    convert(model, data, None, parts=[FFNPart(num_features=4)], steps=2, progress=False)
    assert judged
    assert not any(torch.equal(one["input_ids"], other["input_ids"]) for one in fitted for other in judged)
    count = len(fitted)
    fitted.clear()
    convert(model, data, None, parts=[FFNPart(num_features=4)], recover=0, progress=False)
    assert len(fitted) > count  # without steps nothing is kept back


@pytest.mark.parametrize("types", [True, False])
def test_texts_are_cut(types: bool) -> None:
    """First token, a run of half of the others or more, last token; padding is masked."""
    texts = [[1, *range(10, 19), 2], [1, 30, 31, 32, 33, 2], [1, 40, 41, 2], [1, 2], [7]]
    ids = torch.tensor([each + [0] * (11 - len(each)) for each in texts])
    inputs = {"input_ids": ids, "attention_mask": (ids != 0).long()}
    if types:
        inputs["token_type_ids"] = torch.zeros_like(ids)
    generator, lengths, starts = torch.Generator().manual_seed(0), set[int](), set[int]()
    for _ in range(200):
        found = cut(inputs, generator)
        assert found is not None
        assert found.keys() == inputs.keys()
        assert {each.shape for each in found.values()} == {(5, int(found["attention_mask"].sum(1).max()))}
        rows = [row[mask.bool()].tolist() for row, mask in zip(*list(found.values())[:2], strict=True)]
        assert rows[3:] == texts[3:]
        for row, text in zip(rows[:3], texts[:3], strict=True):
            assert (row[0], row[-1]) == (1, 2)
            assert row[1:-1] == list(range(row[1], row[-2] + 1))
            assert set(row) <= set(text)
            assert 2 * len(row[1:-1]) >= len(text[1:-1])
        lengths.add(len(rows[0]))
        starts.add(rows[0][1])
    assert lengths == set(range(7, 12))
    assert starts == set(range(10, 15))


def test_what_is_not_cut() -> None:
    ids, ones = torch.full((2, 6), 3), torch.ones(2, 6, dtype=torch.long)
    left, pair = ones.clone(), ones.clone()
    left[0, 0] = 0
    pair[:, :3] = 0
    generator = torch.Generator()
    for inputs in (
        {"pixel_values": torch.zeros(2, 3, 4, 4)},
        {"input_ids": ids, "attention_mask": left},
        {"input_ids": ids, "attention_mask": ones[:, None, None, :]},
        {"input_ids": ids, "attention_mask": ones, "token_type_ids": pair},
        {"input_ids": ids, "position_ids": ones},
    ):
        assert cut(inputs, generator) is None
    assert cut({"input_ids": ids}, generator) is not None


def test_a_batch_is_cut_from_the_second_time_on(monkeypatch: pytest.MonkeyPatch) -> None:
    original = trained(tiny("bert"))
    model, data = pair(original)
    sizes: list[int] = []
    watched = loss_of

    def watch(model: Any, inputs: Any, *given: Any) -> torch.Tensor:
        sizes.append(int(inputs["attention_mask"].sum()))
        with torch.no_grad():  # the answers belong to what is read
            torch.testing.assert_close(given[0]["logits"], original(**inputs).logits)
        return watched(model, inputs, *given)

    monkeypatch.setattr(recovering, "loss_of", watch)
    fitted = len(data) - 2
    recover(model, original, data, Answers(original), steps=3 * fitted, progress=False)
    whole = int(data[0]["attention_mask"].sum())
    assert sizes[:fitted] == [whole] * fitted
    assert all(size < whole for size in sizes[fitted:])


def test_seconds_end_it() -> None:
    original = trained(tiny("bert"))
    model, data = pair(original)
    found = recover(model, original, data, Answers(original), seconds=0.5, progress=False)
    assert found.steps > 0
    assert found.after <= found.before


def test_slow_steps_get_more_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a number, the usual seconds; if steps are slow, as many as are worth it, but not for ever."""
    original = trained(tiny("bert"))
    model, data = pair(original)

    def steps(seconds: float, wanted: int, longest: float) -> int:
        for name, value in (("SECONDS", seconds), ("STEPS", wanted), ("LONGEST", longest)):
            monkeypatch.setattr(recovering, name, value)
        return recover(model, original, data, Answers(original), progress=False).steps

    assert steps(0.01, 40, 60.0) in (40, 41)
    assert steps(0.5, 2, 60.0) > 2
    begun = time.perf_counter()
    assert steps(0.01, 10**6, 0.5) < 10**4
    assert time.perf_counter() - begun < 30


def test_what_is_trained() -> None:
    """All but the embeddings, the rows of feature maps among them; each of it has a gradient."""
    original = trained(tiny("bert"))
    model, data = pair(original)
    weights = trained_weights(model)
    tables = [part.weight for part in model.modules() if isinstance(part, torch.nn.Embedding)]
    assert not {id(each) for each in tables} & {id(each) for each in weights}
    rows = model.bert.encoder.layer[0].intermediate.dense.feature_map.projection.weight
    assert any(each is rows for each in weights)
    for each in weights:
        each.requires_grad_(True)
    with torch.no_grad():
        outputs = original(**data[0], output_hidden_states=True)
    answers = Answers(original)
    wanted = answers.read(outputs, data[0])
    loss_of(model, data[0], wanted, outputs.hidden_states[1:], answers).backward()
    assert all(each.grad is not None for each in weights)


def test_losses_by_hand() -> None:
    wanted, given = torch.tensor([[[1.0], [3.0], [99.0]]]), torch.tensor([[[2.0], [3.0], [0.0]]])
    # Σ(h - h')² = 1, Σ(h - 2)² = 2; padding does not count.
    assert state_error(wanted, given, torch.tensor([[1, 1, 0]])).item() == pytest.approx(0.5)
    encoder = build("mpnet", "MPNetModel")
    batch = batches(encoder)[0]
    answers = Answers(encoder)
    other = trained(build("mpnet", "MPNetModel"))
    with torch.no_grad():
        a, b = (answers.read(each(**batch), batch)["embedding"] for each in (encoder, other))
        loss = loss_of(other, batch, {"embedding": a}, [], answers).item()
    cosine = torch.cosine_similarity(a, b, dim=-1)
    alike = [torch.cosine_similarity(each[:, None], each[None], dim=-1) for each in (a, b)]
    expected = 1 - cosine.mean() + (alike[0] - alike[1]).square().mean()
    assert loss == pytest.approx(expected.item(), rel=1e-4)


# --- the smallest that keeps a share of the answers -------------------------------------------------------------------


def made(share: float, kept: float) -> Result:
    curve = [{"cost": cost / 100, "error": (1 - cost / 100) ** 2} for cost in range(100, 10, -1)]
    predicted = {"cost": share, "speed_up": 1 / share, "error": (1 - share) ** 2, "measured": share}
    plan = Plan(SNNKConfig(parts=[FFNPart()]), "macs", share, predicted, [], curve)
    return Result(None, plan, None, None, {"agreement": kept, "distance": 0.0}, [])  # type: ignore[arg-type]


@pytest.mark.parametrize("lost", [0.02, 0.05, 0.1, 0.2])
def test_quality_is_found_by_few_conversions(lost: float) -> None:
    """Answers are lost in proportion to what is saved, but below a third of the cost nothing can be chosen."""
    tried: list[float] = []

    def run(share: float) -> Result:
        tried.append(share)
        if share < 0.33:
            raise ConfigError("budget leaves less than the cheapest choice")
        return made(share, 1 - lost * (1 - share))

    found = smallest(0.99, run)
    assert len(tried) <= 4
    assert found.figures["agreement"] >= 0.99
    cheapest = max(0.33, 1 - 0.01 / lost)
    assert found.plan is not None
    assert found.plan.budget <= cheapest + 0.12


def test_quality_that_cannot_be_met() -> None:
    with pytest.raises(ConfigError, match=r"quality is 0.99.*0.9000 at 60% of the cost"):
        smallest(0.99, lambda share: made(share, 0.9))


def test_quality_by_the_public_door() -> None:
    model = trained(tiny("bert"))
    parts = [FFNPart(num_features=size) for size in (2, 16)]
    done = convert(model, batches(model), quality=0.5, of="macs", parts=parts, steps=1, progress=False)
    assert done.report.figures["agreement"] >= 0.5
    assert done.report.plan is not None
    assert done.report.settings["quality"] == 0.5


# --- int8 beside it ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_int8_of_both(tmp_path: Any) -> None:
    pytest.importorskip("onnxruntime")
    model = trained(tiny("bert"))
    data = batches(model)
    given = {"parts": [FFNPart(num_features=12)], "steps": 1, "progress": False}
    done = convert(model, data, None, int8=True, **given)  # type: ignore[arg-type]
    rows = done.report.models
    assert list(rows) == ["original", "converted", "original, int8", "converted, int8"]
    done.save_pretrained(tmp_path)
    file = tmp_path / "model_int8.onnx"
    assert rows["converted, int8"]["bytes"] == file.stat().st_size
    import onnxruntime

    session = onnxruntime.InferenceSession(str(file))
    held = data[4]
    reads = [each.name for each in session.get_inputs()]
    logits = torch.from_numpy(session.run(["logits"], {name: held[name].numpy() for name in reads})[0])
    with torch.no_grad():
        same = (logits.argmax(-1) == model(**held).logits.argmax(-1)).double().mean().item()
    assert rows["converted, int8"]["agreement"] == same
    assert "original, int8" in str(done.report)


def test_small_values_before_large_outputs_move_in_small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in narrower heads: the function is the same, and steps of one size for all would undo it."""
    original = tiny("bert", "BertModel", initializer_range=0.3)
    model, data = pair(original)
    with torch.no_grad():
        for layer in model.encoder.layer:
            layer.attention.self.value.weight /= 300
            layer.attention.self.value.bias /= 300
            layer.attention.output.dense.weight *= 300
    start = states(model)
    found = recover(model, original, data, Answers(original), steps=14, progress=False)
    model.load_state_dict(start)
    monkeypatch.setattr(recovering, "share_of_rate", lambda weight: 1.0)
    alike = recover(model, original, data, Answers(original), steps=14, progress=False)
    assert found.before == alike.before
    assert found.after < 0.97 * alike.after
