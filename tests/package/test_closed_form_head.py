"""Heads in closed form on real architectures: what they read, what is forgotten, and the models they become."""

from __future__ import annotations

import copy
import inspect
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from sklearn.linear_model import Ridge
from sklearn.preprocessing import StandardScaler
from torch import nn
from transformers import (
    AutoModelForImageClassification,
    AutoModelForSequenceClassification,
    ResNetForImageClassification,
    Trainer,
    TrainingArguments,
)

from snnk_peft import (
    AdapterPart,
    ClosedFormHead,
    FFNPart,
    HeadFeatures,
    HeadStatistics,
    PoolerPart,
    SNNKConfig,
    bundle,
    fit_closed_form,
    get_snnk_model,
)
from snnk_peft.errors import ConfigError, UnsupportedError
from tests.elsewhere import check_elsewhere, save_known
from tests.tiny_families import CONFIGS, build, main_head
from tests.tiny_models import tiny

VIEWS = HeadFeatures([(0, "mean"), (1, "max"), (-1, "mean"), (-1, "first")])
TOWERS = ["clip", "siglip"]  # their image classifiers keep the encoder elsewhere
CLASSIFIERS = [
    name
    for name in CONFIGS
    if main_head(name).endswith(("ForSequenceClassification", "ForImageClassification")) and name not in TOWERS
]


def text_batches(count: int = 12, kind: str = "classes", seed: int = 3) -> list[dict[str, torch.Tensor]]:
    """Sentences of different lengths and what is to be told of them."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for _ in range(count):
        ids = torch.randint(3, 50, (8, 9), generator=generator)
        mask = torch.ones_like(ids)
        mask[::3, 5:] = 0
        ids = torch.where(mask.bool(), ids, 0)
        several = torch.stack([ids[:, 1] % 2, ids[:, 2] % 2, ids[:, 3] % 2], 1)
        wanted = {"classes": ids[:, 1] % 3, "labels": several, "numbers": ids[:, 1:4].float() / 25}[kind]
        made.append({"input_ids": ids, "attention_mask": mask, "labels": wanted})
    return made


def image_batches(config: Any, count: int = 12) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)
    size = (8, config.num_channels, config.image_size, config.image_size)
    pictures = [torch.randn(size, generator=generator) for _ in range(count)]
    return [{"pixel_values": each, "labels": (each.mean((1, 2, 3)) > 0).long()} for each in pictures]


def read(encoder: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """What VIEWS read, example by example and without padding."""
    found = []
    for row in range(len(batch["labels"])):
        inputs = {name: value[row : row + 1] for name, value in batch.items() if name != "labels"}
        with torch.no_grad():
            states = encoder(**inputs, output_hidden_states=True).hidden_states
        seen = inputs["attention_mask"][0].bool() if "attention_mask" in inputs else slice(None)
        first, second, last = (states[index][0, seen] for index in (0, 1, -1))
        found.append(torch.cat((first.mean(0), second.amax(0), last.mean(0), last[0])))
    return torch.stack(found)


def fitted(model: Any, batches: list[dict[str, torch.Tensor]], **options: Any) -> ClosedFormHead:
    head = ClosedFormHead(model, VIEWS, **options)
    assert head.add(iter(batches)) == sum(len(batch["labels"]) for batch in batches)
    head.fit()
    return head


@pytest.mark.parametrize("family", CLASSIFIERS)
def test_every_classifier(family: str, tmp_path: Path) -> None:
    """Logits are those of scikit-learn on vectors read example by example, before and after a round trip."""
    model = build(family, main_head(family))
    images = model.main_input_name == "pixel_values"
    batches = image_batches(model.config) if images else text_batches()
    head = fitted(model, batches, names=["a", "b"] if images else ["a", "b", "c"])
    vectors = torch.cat([read(model.base_model, batch) for batch in batches]).double().numpy()
    wanted = torch.nn.functional.one_hot(torch.cat([batch["labels"] for batch in batches])).double().numpy()
    scaler = StandardScaler().fit(vectors)
    peer = Ridge(alpha=head.fitted.ridge * len(vectors)).fit(scaler.transform(vectors), wanted)
    expected = head.fitted.temperature * torch.from_numpy(peer.predict(scaler.transform(vectors[:8])))
    small = head.bundle()
    inputs = {name: value for name, value in batches[0].items() if name != "labels"}
    with torch.no_grad():
        found = small(**inputs).logits
    largest = expected.abs().max()
    assert (found - expected).abs().max() < 1e-3 * largest  # float32 vectors that hardly vary, divided by their spread
    small.save_pretrained(tmp_path)
    auto = AutoModelForImageClassification if images else AutoModelForSequenceClassification
    again = auto.from_pretrained(tmp_path)
    assert type(again).__name__ == f"SnnkPooled{main_head(family)}"
    with torch.no_grad():
        assert (again(**inputs).logits - found).abs().max() < 1e-6 * largest
    assert not any("pooler" in name for name in again.state_dict())


@pytest.mark.parametrize("family", TOWERS)
def test_encoders_elsewhere(family: str) -> None:
    model = build(family, main_head(family))
    batches = image_batches(model.config.vision_config)
    with pytest.raises(UnsupportedError, match="the name that it gives its encoder"):
        fitted(model, batches, names=["a", "b"]).bundle()


def test_an_encoder_without_head_and_a_converted_one(tmp_path: Path) -> None:
    batches = text_batches()
    plain = tiny("bert", num_labels=3)
    bare = fitted(plain.bert, batches).bundle()
    with torch.no_grad():
        expected = fitted(plain, batches).bundle()(**batches[0]).logits
        assert torch.equal(bare(**batches[0]).logits, expected)
    patched = get_snnk_model(plain, SNNKConfig(ffn=FFNPart(num_features=6, init="random")))
    with pytest.raises(UnsupportedError, match=r"snnk_peft\.bundle"):
        ClosedFormHead(patched)
    converted = bundle(patched)
    head = fitted(converted, batches)
    small = head.bundle()
    small.save_pretrained(tmp_path)
    again = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    with torch.no_grad():
        vectors = read(converted.bert, batches[0])
        wanted = head.fitted.temperature * head.fitted.scores(vectors)
        assert (again(**batches[0]).logits - wanted).abs().max() < 1e-5 * wanted.abs().max()
    assert any(spec["kind"] == "features" for spec in again.config.snnk_plan["modules"].values())


@pytest.mark.parametrize("kind", ["classes", "labels", "numbers"])
def test_forgotten_and_merged(kind: str, tmp_path: Path) -> None:
    """A forgotten batch was never seen; shards from files are one pass."""
    model, batches = tiny("bert", num_labels=3), text_batches(kind=kind)
    whole = fitted(model, batches, kind=kind)
    never = fitted(model, batches[:4] + batches[6:], kind=kind)
    assert whole.remove(batches[4:6]) == 16
    weight = whole.fit(batches[:2]).weight
    assert (weight - never.fitted.weight).abs().max() < 1e-8 * weight.abs().max()
    parts = []
    for index in range(4):
        shard = ClosedFormHead(model, VIEWS, kind=kind)
        shard.add(batches[index::4])
        parts.append(tmp_path / f"{index}.safetensors")
        shard.save(parts[-1])
    merged = ClosedFormHead(model, VIEWS, kind=kind)
    merged.merge(parts[0])
    merged.merge(HeadStatistics.load(parts[1]))
    for path in parts[2:]:
        other = ClosedFormHead(model, VIEWS, kind=kind)
        other.merge(path)
        merged.merge(other)
    one = fitted(model, batches, kind=kind).fitted.weight
    assert (merged.fit(batches).weight - one).abs().max() < 1e-8 * one.abs().max()


def test_what_was_forgotten_leaves_nothing() -> None:
    """Neither the moments nor the vectors that were kept for the temperature."""
    model, batches = tiny("bert", num_labels=3), text_batches()
    head = fitted(model, batches)
    assert head.fitted.temperature is not None
    head.remove(batches[:1])
    with pytest.raises(ConfigError, match=r"fit\(examples=batches\)"):
        head.fit() and head.bundle()
    assert head.fit(batches[1:]).temperature == pytest.approx(fitted(model, batches[1:]).fitted.temperature, rel=1e-4)


def test_statistics_of_another_model_are_refused() -> None:
    batches = text_batches(2)
    head = fitted(tiny("bert", num_labels=3), batches)
    before = head.statistics.moments.tensors()["gram"].clone() if "gram" in head.statistics.moments.tensors() else None
    other = tiny("bert", num_labels=3)
    other.bert.encoder.layer[0].output.dense.bias.data[0] += 1e-3
    with pytest.raises(ConfigError, match="origin is"):
        head.merge(fitted(other, batches))
    pooled = tiny("bert", num_labels=3)
    pooled.bert.pooler.dense.bias.data[0] += 1  # not read; of a model without one it is random
    head.merge(fitted(pooled, batches))
    head.remove(batches)
    with pytest.raises(ConfigError, match="origin is"):
        head.merge(ClosedFormHead(tiny("bert", num_labels=3), HeadFeatures([(1, "mean")] * 4)))
    with pytest.raises(ConfigError, match="24 tokens are to be removed of 16"):
        head.remove(text_batches(3))
    with pytest.raises(ConfigError, match="batch 1 has no 'labels'"):
        head.add([batches[0], {"input_ids": batches[0]["input_ids"]}])
    assert head.statistics.count == 16  # nothing of the first batch either
    if before is not None:
        assert torch.equal(head.statistics.moments.tensors()["gram"], before)


def test_refusals() -> None:
    model = tiny("bert", num_labels=3)
    with pytest.raises(ConfigError, match="hidden states 3"):
        ClosedFormHead(model, HeadFeatures([(3, "mean")]))
    head = ClosedFormHead(model)
    with pytest.raises(ConfigError, match="nothing was fitted"):
        head.bundle()
    with pytest.raises(ConfigError, match=r"no examples were counted, call add\(batches\) first"):
        head.fit()
    with pytest.raises(UnsupportedError, match="PreTrainedModel"):
        ClosedFormHead(torch.nn.Linear(3, 3))
    residual = pytest.importorskip("transformers").ResNetConfig(embedding_size=8, hidden_sizes=[8], depths=[1])
    residual.hidden_size, residual.num_hidden_layers = 8, 1
    pictures = {"pixel_values": torch.randn(2, 3, 16, 16), "labels": torch.tensor([0, 1])}
    with pytest.raises(UnsupportedError, match="examples, tokens, width"):
        ClosedFormHead(ResNetForImageClassification(residual)).add([pictures])


@pytest.mark.parametrize("component", ["relu", "cos"])
@pytest.mark.parametrize("save", [True, False])
def test_through_a_feature_map(component: str, save: bool, tmp_path: Path) -> None:
    """Features of the vectors, stored or as a seed, also in half precision."""
    model, batches = tiny("bert", num_labels=3), text_batches()
    chosen = {"component": component, "projection": "orf", "num_features": 24, "save": save}
    views = HeadFeatures([(1, "mean"), (-1, "max")], chosen)
    head = ClosedFormHead(model, views)
    head.add(batches)
    head.fit()
    head.bundle().save_pretrained(tmp_path)
    wanted = head.fitted.temperature * head.fitted.scores(head.vectors(_inputs(batches[0])))
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 0.1), (torch.float16, 0.02)):
        again = AutoModelForSequenceClassification.from_pretrained(tmp_path, dtype=dtype)
        with torch.no_grad():
            found = again(**_inputs(batches[0])).logits
        assert found.dtype == dtype
        assert (found - wanted).abs().max() < tolerance * wanted.abs().max()


@pytest.fixture
def fresh_accelerator() -> Iterator[None]:
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


def _inputs(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value for name, value in batch.items() if name != "labels"}


@pytest.mark.usefixtures("fresh_accelerator")
@pytest.mark.parametrize(
    ("kind", "loss"),
    [
        ("classes", torch.nn.functional.cross_entropy),
        ("labels", torch.nn.functional.binary_cross_entropy_with_logits),
        ("numbers", torch.nn.functional.mse_loss),
    ],
)
def test_the_model_is_one_of_transformers(kind: str, loss: Any, tmp_path: Path) -> None:
    """Loss, arguments by place, tuples, hidden states, Trainer's columns, autocast, copies, accelerate's wrappers."""
    batches = text_batches(kind=kind)
    small = fitted(tiny("bert", num_labels=3), batches, kind=kind).bundle()
    batch = batches[0]
    labels = batch["labels"].float() if kind == "labels" else batch["labels"]
    with torch.no_grad():
        out = small(**_inputs(batch), labels=labels)
        assert torch.equal(small(batch["input_ids"], batch["attention_mask"]).logits, out.logits)
        assert torch.equal(small(**_inputs(batch), return_dict=False)[0], out.logits)
        assert small(**_inputs(batch), output_hidden_states=True).hidden_states[-1].shape == (8, 9, 32)
        assert out.hidden_states is None
        assert torch.equal(copy.deepcopy(small)(**_inputs(batch)).logits, out.logits)
        with torch.autocast("cpu", torch.bfloat16):
            assert (small(**_inputs(batch)).logits - out.logits).abs().max() < 0.1 * out.logits.abs().max()
    torch.testing.assert_close(out.loss, loss(out.logits, labels))
    assert {"input_ids", "attention_mask", "labels"} <= set(inspect.signature(small.forward).parameters)

    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    unwrapped = accelerator.unwrap_model(accelerator.prepare(copy.deepcopy(small)), keep_fp32_wrapper=False)
    with torch.no_grad():
        assert torch.equal(unwrapped(**_inputs(batch)).logits, out.logits)

    rows = [{name: value[i] for name, value in batch.items()} | {"labels": labels[i], "extra": 1} for i in range(8)]
    arguments = TrainingArguments(str(tmp_path), report_to=[], use_cpu=True, max_steps=2, save_strategy="no")
    before = small.snnk_head.linear.weight.detach().clone()
    Trainer(small, arguments, train_dataset=rows).train()
    assert not torch.equal(small.snnk_head.linear.weight, before)


def test_a_loaded_model_can_be_pickled(tmp_path: Path) -> None:
    batches = text_batches()
    fitted(tiny("bert", num_labels=3), batches).bundle().save_pretrained(tmp_path)
    again = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    copied = pickle.loads(pickle.dumps(again))
    with torch.no_grad():
        assert torch.equal(copied(**_inputs(batches[0])).logits, again(**_inputs(batches[0])).logits)


@pytest.mark.parametrize("package", [True, False])
def test_in_a_fresh_process(package: bool, tmp_path: Path) -> None:
    """With the package, and without it as remote code."""
    batches = text_batches()
    chosen = {"component": "relu", "projection": "gaussian", "num_features": 8}
    views = HeadFeatures([(1, "mean"), (-1, "last")], chosen)
    head = ClosedFormHead(tiny("bert", num_labels=3), views, names=["bad", "fair", "good"])
    head.add(batches)
    head.fit()
    small = head.bundle()
    assert small.config.id2label == {0: "bad", 1: "fair", 2: "good"}
    check_elsewhere(save_known(small, _inputs(batches[0]), tmp_path), package=package)


SEPARATOR = 2


def pair_batches(types: bool, count: int = 12) -> list[dict[str, torch.Tensor]]:
    """Pairs of texts: 0 A 2 B 2, or 0 A 2 2 B 2 as RoBERTa has them; alike if they begin with words of one parity."""
    generator = torch.Generator().manual_seed(5)
    made = []
    for _ in range(count):
        rows = []
        for length in (3, 5, 4, 2) * 2:
            a, b = torch.randint(3, 50, (2, length), generator=generator)
            middle = [SEPARATOR] if types else [SEPARATOR, SEPARATOR]
            rows.append(
                ([0, *a.tolist(), *middle[:1]], [*middle[1:], *b.tolist(), SEPARATOR], int(a[0] % 2 == b[0] % 2))
            )
        longest = max(len(a) + len(b) for a, b, _ in rows)
        ids, mask, second = torch.full((8, longest), 1), torch.zeros(8, longest).long(), torch.zeros(8, longest).long()
        for row, (a, b, _) in enumerate(rows):
            ids[row, : len(a) + len(b)] = torch.tensor([*a, *b])
            mask[row, : len(a) + len(b)] = 1
            second[row, len(a) : len(a) + len(b)] = 1
        told = {"token_type_ids": second} if types else {}
        labels = torch.tensor([label for *_, label in rows])
        made.append({"input_ids": ids, "attention_mask": mask, "labels": labels, **told})
    return made


@pytest.mark.parametrize("family", ["bert", "roberta"])
def test_pairs_of_texts(family: str, tmp_path: Path) -> None:
    """Token types or separators tell the texts apart; vectors are those of a loop, loaded bundles have their logits."""
    types = family == "bert"
    model = tiny(family, num_labels=2)
    if not types:
        model.config.sep_token_id, model.config.eos_token_id = None, SEPARATOR
    head = ClosedFormHead(model, HeadFeatures([(-1, "mean"), (1, "apart"), (-1, "product")]))
    batches = pair_batches(types)
    head.add(batches)
    head.fit()
    batch, expected = batches[0], []
    for row, ids in enumerate(batch["input_ids"]):
        length = int(batch["attention_mask"][row].sum())
        alone = {name: value[row : row + 1, :length] for name, value in batch.items() if name != "labels"}
        with torch.no_grad():
            states = head.encoder(**alone, output_hidden_states=True).hidden_states
        start = ids.tolist().index(SEPARATOR) + 1
        a, b = (
            (states[1][0, part].mean(0), states[-1][0, part].mean(0)) for part in (slice(start), slice(start, None))
        )
        expected.append(torch.cat((states[-1][0].mean(0), (a[0] - b[0]).abs(), a[1] * b[1])))
    torch.testing.assert_close(head.vectors(_inputs(batch)), torch.stack(expected), rtol=1e-4, atol=1e-5)
    head.bundle().save_pretrained(tmp_path / "model")
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path / "model")
    with torch.no_grad():
        found = loaded(**_inputs(batch)).logits
    assert head.fitted is not None
    torch.testing.assert_close(
        found.softmax(-1), head.fitted.probabilities(head.vectors(_inputs(batch))).float(), rtol=1e-3, atol=1e-4
    )


def test_pairs_that_nothing_tells_apart() -> None:
    model = tiny("bert", num_labels=2)
    model.config.sep_token_id = model.config.eos_token_id = None
    head = ClosedFormHead(model, HeadFeatures([(-1, "apart")]))
    with pytest.raises(
        UnsupportedError, match=r"token_type_ids, or input_ids and the separator in config\.sep_token_id"
    ):
        head.add(pair_batches(types=False))


def test_a_changed_plan_is_refused(tmp_path: Path) -> None:
    fitted(tiny("bert", num_labels=3), text_batches()).bundle().save_pretrained(tmp_path)
    text = (tmp_path / "config.json").read_text()
    (tmp_path / "config.json").write_text(text.replace('"max"', '"min"').replace('"snnk_digests"', '"old_digests"'))
    with pytest.raises(ConfigError, match="views"):
        AutoModelForSequenceClassification.from_pretrained(tmp_path)
    assert sys.modules["snnk_peft"]


def test_forgetting_what_other_batches_computed_and_what_was_never_counted() -> None:
    """In other batches a model's last bits are others: a column that is constant in what stays must not become one of
    them. With digests such rows are refused, and so are rows that were never counted."""
    generator = torch.Generator().manual_seed(0)
    model = tiny("bert", num_labels=2)
    features = HeadFeatures([(-1, "mean")], {"component": "relu", "projection": "gaussian", "num_features": 200})
    ids = torch.randint(3, 100, (300, 9), generator=generator)
    labels = ids[:, 1] % 2

    def batches(order: torch.Tensor, size: int) -> list[dict[str, torch.Tensor]]:
        return [{"input_ids": ids[part], "labels": labels[part]} for part in order.split(size)]

    head = ClosedFormHead(model, features)
    vectors = head.vectors({"input_ids": ids})
    # What stays are examples that are alike, so that some columns are 0 for all of them.
    order = (vectors - vectors[0]).norm(dim=1).argsort()
    stay, go = order[:12], order[12:]
    assert int((vectors[stay].std(0) == 0).sum()) > 5
    head.add(batches(torch.cat((go, stay)), 8))
    head.remove(batches(go.flip(0), 1))
    never = ClosedFormHead(model, features)
    never.add(batches(stay, 8))
    found, wanted = (each.fit(batches(stay, 8)) for each in (head, never))
    assert torch.equal(found.scores(vectors).argmax(1), wanted.scores(vectors).argmax(1))
    torch.testing.assert_close(found.scores(vectors[stay]), wanted.scores(vectors[stay]), rtol=1e-3, atol=1e-3)

    certain = ClosedFormHead(model, features, remember=True)
    certain.add(batches(order, 8))
    with pytest.raises(ConfigError, match="4 of 4 examples that are to be forgotten were not counted"):
        certain.remove([{"input_ids": ids[:4].flip(1), "labels": labels[:4]}])
    assert certain.remove(batches(order, 8)[:3]) == 24


def test_the_larger_sample_gives_the_temperature() -> None:
    """Of merged heads; of equal ones its own."""
    model, batches = tiny("bert", num_labels=3), text_batches(10)

    def counted(part: slice) -> ClosedFormHead:
        head = ClosedFormHead(model)
        head.add(batches[part])
        return head

    for own, theirs, sample in (
        (slice(0, 6), slice(6, 10), slice(0, 6)),
        (slice(0, 4), slice(4, 10), slice(4, 10)),
        (slice(0, 5), slice(5, 10), slice(0, 5)),
    ):
        head, alike = counted(own), counted(own)
        head.merge(counted(theirs))
        alike.merge(counted(theirs).statistics)
        assert head.fit().temperature == pytest.approx(alike.fit(batches[sample]).temperature, rel=1e-6)


# === heads fitted in place ============================================================================================


def regression_batches(model, width=None, count=6, size=16):
    generator = torch.Generator().manual_seed(3)
    for _ in range(count):
        ids = torch.randint(3, 100, (size, 6), generator=generator)
        labels = ids[:, 1].float() / 100 if width is None else ids[:, 1] % width
        yield {"input_ids": ids, "labels": labels}


def bundled(labels: int):
    model = tiny("bert", num_labels=labels)
    return bundle(get_snnk_model(model, SNNKConfig(pooler=PoolerPart(num_features=12))))


def test_closed_form_chooses_the_ridge_in_one_pass():
    model = bundled(1)
    batches = iter(list(regression_batches(model, count=10)))
    fit = fit_closed_form(model, batches)
    assert fit.ridge > 0
    assert fit.examples == 160
    assert set(fit.to_dict()) == {"head", "examples", "ridge", "relative_error", "seconds", "taken"}


def test_closed_form_refusals():
    model = bundled(3)
    small = [{"input_ids": torch.randint(3, 50, (4, 6)), "labels": torch.tensor([0, 1, 0, 1])}]
    with pytest.raises(ConfigError, match="at least one batch"):
        fit_closed_form(model, [], ridge=1.0)
    with pytest.raises(ConfigError, match="batch 0 has no 'label'; found input_ids, labels"):
        fit_closed_form(model, regression_batches(model, 3), targets="label")
    with pytest.raises(ConfigError, match="targets run from 0 to 3; expected 0 to 2"):
        fit_closed_form(model, regression_batches(model, 4), ridge=1.0)
    with pytest.raises(ConfigError, match="expected floating targets"):
        fit_closed_form(bundled(1), regression_batches(model, 2), ridge=1.0)
    with pytest.raises(ConfigError, match="1 columns; the head has 3 outputs"):
        fit_closed_form(model, regression_batches(model), ridge=1.0)
    with pytest.raises(UnsupportedError, match="no Linear of BertModel gives its logits"):
        fit_closed_form(tiny("bert", "BertModel"), regression_batches(model), ridge=1.0)
    with pytest.raises(UnsupportedError, match="no Linear of LlamaForSequenceClassification gives its logits"):
        fit_closed_form(build("llama", "LlamaForSequenceClassification"), small, ridge=1.0)


PLAIN = {
    "bert": lambda model, ids: model.bert(ids).pooler_output,
    "distilbert": lambda model, ids: torch.relu(model.pre_classifier(model.distilbert(ids).last_hidden_state[:, 0])),
    "roberta": lambda model, ids: torch.tanh(model.classifier.dense(model.roberta(ids).last_hidden_state[:, 0])),
}


@pytest.mark.parametrize("form", ["plain", "patched", "lora", "bundle"])
@pytest.mark.parametrize("family", PLAIN)
def test_any_classifier_is_fitted_on_what_its_last_linear_reads(family, form):
    plain = tiny(family, num_labels=3)
    batches = list(regression_batches(plain, 3))
    with torch.no_grad():
        features = torch.cat([PLAIN[family](plain, batch["input_ids"]) for batch in batches]).double()
    labels = torch.cat([batch["labels"] for batch in batches])
    oracle = Ridge(alpha=0.3).fit(features.numpy(), nn.functional.one_hot(labels, 3).double().numpy())
    model = tiny(family, num_labels=3)
    if form == "lora":
        model = peft.get_peft_model(
            model,
            peft.LoraConfig(
                task_type="SEQ_CLS", target_modules=["q_lin", "v_lin"] if family == "distilbert" else ["query", "value"]
            ),
        )
    elif form != "plain":
        model = get_snnk_model(model, SNNKConfig(adapter=AdapterPart(num_features=4)))
    model = bundle(model) if form == "bundle" else model
    before = {key: value.clone() for key, value in model.state_dict().items()}
    fit = fit_closed_form(model.train(), batches, ridge=0.3)
    assert model.training
    head = model.get_submodule(fit.head)
    assert "classifier" in fit.head
    assert fit.head.endswith(".out_proj") == (family == "roberta")
    torch.testing.assert_close(head.weight.double(), torch.tensor(oracle.coef_), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(head.bias.double(), torch.tensor(oracle.intercept_), rtol=1e-4, atol=1e-5)
    moved = {key for key, value in model.state_dict().items() if not torch.equal(value, before[key])}
    assert moved == {f"{fit.head}.weight", f"{fit.head}.bias"}


def test_words_with_labels_are_fitted_one_by_one():
    model = tiny("bert", "BertForTokenClassification", num_labels=3)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 100, (10, 6), generator=generator)
    labels = torch.randint(-1, 3, (10, 6), generator=generator).where(ids > 10, -100)
    with torch.no_grad():
        features = model.bert(ids).last_hidden_state
    rows = [(x, y) for xs, ys in zip(features, labels.tolist(), strict=True) for x, y in zip(xs, ys, strict=True)]
    counted = [(x.numpy(), np.eye(3)[y]) for x, y in rows if y >= 0]
    assert 20 < len(counted) < 60
    oracle = Ridge(alpha=0.3).fit(np.stack([x for x, _ in counted]), np.stack([y for _, y in counted]))
    fit = fit_closed_form(model, [{"input_ids": ids, "labels": labels}], ridge=0.3)
    assert fit.examples == len(counted)
    weight = torch.tensor(oracle.coef_, dtype=torch.float32)
    torch.testing.assert_close(model.classifier.weight, weight, rtol=1e-3, atol=1e-4)


def test_logits_have_the_fitted_shares_to_first_order():
    """Little is known of labels of very different frequency: the softmax gives the shares that were fitted."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 100, (12, 40, 6), generator=generator)
    labels = torch.multinomial(torch.tensor([0.7, 0.25, 0.05]), 480, replacement=True, generator=generator).view(12, 40)
    batches = [{"input_ids": x, "labels": y} for x, y in zip(ids, labels, strict=True)]
    shares, logits = tiny("bert", num_labels=3), tiny("bert", num_labels=3)
    fit_closed_form(shares, batches, ridge=30.0)
    fit_closed_form(logits, batches, ridge=30.0, as_logits=True)
    with torch.no_grad():
        wanted, found = (m(input_ids=ids.flatten(0, 1)).logits for m in (shares, logits))
    found = found.softmax(-1)
    prior = torch.bincount(labels.flatten(), minlength=3) / 480
    signal = (wanted - prior).abs().amax(0)
    assert signal.max() > 0.02
    assert ((found - wanted).abs().amax(0) < 0.25 * signal + 0.01).all()
    torch.testing.assert_close(found.mean(0), prior, rtol=0, atol=0.01)


def test_labels_that_do_not_exclude_each_other_have_logits():
    """To first order as many as were fitted; without `as_logits` above 0 where the ridge regression is above 1/2."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 100, (12, 40, 6), generator=generator)
    labels = (torch.rand(12, 40, 3, generator=generator) < torch.tensor([0.6, 0.3, 0.1])).float()
    labels[..., 0] = torch.where(ids[..., 0] > 60, 1.0, labels[..., 0])
    batches = [{"input_ids": x, "labels": y} for x, y in zip(ids, labels, strict=True)]
    several = {"num_labels": 3, "problem_type": "multi_label_classification"}
    numbers, plain, logits = (tiny("bert", **how) for how in ({"num_labels": 3}, several, several))
    fit_closed_form(numbers, batches, ridge=30.0)
    fit_closed_form(plain, batches, ridge=30.0)
    fit_closed_form(logits, batches, ridge=30.0, as_logits=True)
    with torch.no_grad():
        wanted, lower, found = (m(input_ids=ids.flatten(0, 1)).logits for m in (numbers, plain, logits))
    torch.testing.assert_close(lower, wanted - 0.5)
    prior = labels.mean((0, 1))
    signal = (wanted - prior).abs().amax(0)
    assert signal.max() > 0.02
    assert ((found.sigmoid() - wanted).abs().amax(0) < 0.25 * signal + 0.01).all()
    torch.testing.assert_close(found.sigmoid().mean(0), prior, rtol=0, atol=0.01)


def test_logits_of_numbers_are_the_numbers():
    batches = list(regression_batches(tiny("bert", num_labels=1)))
    plain, again = tiny("bert", num_labels=1), tiny("bert", num_labels=1)
    assert fit_closed_form(plain, batches, ridge=1.0).ridge == 1.0
    fit_closed_form(again, batches, ridge=1.0, as_logits=True)
    assert torch.equal(plain.classifier.weight, again.classifier.weight)
