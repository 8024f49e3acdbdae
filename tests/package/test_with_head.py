"""A new task head over several layers: where it starts, and training, saving and folding behind it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from sklearn.linear_model import Ridge
from torch.nn.functional import cross_entropy, one_hot
from transformers import AutoModelForSequenceClassification

from snnk_peft import (
    AdapterPart,
    ClosedFormHead,
    FFNPart,
    HeadFeatures,
    NormsPart,
    SNNKConfig,
    bundle,
    fit_closed_form,
    get_snnk_model,
    with_head,
)
from snnk_peft.errors import ConfigError, UnsupportedError
from snnk_peft.heads.start import RATIO, starting_head
from tests.elsewhere import check_elsewhere, save_known
from tests.tiny_families import CONFIGS, build, main_head
from tests.tiny_models import tiny

CLASSIFIERS = [name for name in CONFIGS if main_head(name).endswith("ForSequenceClassification")]


def rows(count: int, width: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Vectors of columns of very different spread, and classes that every fourth of them tells with some error."""
    generator = torch.Generator().manual_seed(seed)
    x, told = torch.randn(count, width, generator=generator), torch.randn(count, generator=generator)
    x[:, ::4] += told[:, None]
    y = (told + 0.5 * torch.randn(count, generator=generator) > 0.3).long()
    return x * torch.logspace(-1, 1, width) + 5, one_hot(y, 2)


def cross_validated(x: np.ndarray, y: np.ndarray, alpha: float) -> tuple[float, float]:
    """R² by generalised cross-validation from the hat matrix itself, and the share of degrees of freedom left."""
    centred = x - x.mean(0)
    hat = centred @ np.linalg.solve(centred.T @ centred + alpha * np.eye(x.shape[1]), centred.T) + 1 / len(x)
    left = 1 - np.trace(hat) / len(x)
    return 1 - np.square(y - hat @ y).sum() / np.square(y - y.mean(0)).sum() / left**2, left


@pytest.mark.parametrize(("count", "width"), [(300, 40), (60, 90), (50, 50)])
def test_the_start_is_ridge_regression_with_the_best_penalty_that_leaves_enough(count: int, width: int) -> None:
    x, y = rows(count, width)
    start = starting_head(x, y)
    standard = ((x.double() - start.mean) * start.scale).numpy()
    np.testing.assert_allclose(standard.std(0), 1, rtol=1e-6)
    unit = np.square(standard).sum() / width
    found = {r: cross_validated(standard, y.double().numpy(), r * unit) for r in 10 ** np.arange(-8, 3.5, 0.5)}
    fair = {ridge: r2 for ridge, (r2, left) in found.items() if left**-2 <= RATIO}
    assert start.ridge == pytest.approx(max(fair, key=fair.__getitem__))
    assert start.explained == pytest.approx(max(fair.values()), abs=1e-9)
    fit = Ridge(alpha=start.ridge * unit).fit(standard, y.double().numpy())
    assert start.taken
    np.testing.assert_allclose(start.weight, fit.coef_, atol=1e-10)
    np.testing.assert_allclose(start.bias, fit.intercept_, atol=1e-10)
    left_over = y.double().numpy() - fit.predict(standard)
    relative = np.square(left_over).sum() / np.square(y.double().numpy() - y.double().numpy().mean(0)).sum()
    assert start.relative_error == pytest.approx(relative)


def test_labels_that_are_noise_are_never_taken_for_more() -> None:
    taken = 0
    for seed in range(100):
        generator = torch.Generator().manual_seed(seed)
        x, y = torch.randn(80, 120, generator=generator), torch.randint(0, 2, (80,), generator=generator)
        start = starting_head(x, one_hot(y, 2), seed=seed)
        taken += start.taken
        assert start.taken or not start.weight.any()
    assert taken <= 2  # one in 200 is allowed: three and more of 100 have a probability of 1.4%
    assert all(starting_head(*rows(80, 120, seed)).taken for seed in range(20))


@pytest.mark.parametrize(
    ("x", "y"),
    [
        (torch.ones(40, 5), one_hot(torch.arange(40) % 2)),  # constant vectors
        (torch.randn(40, 5), torch.ones(40, 1)),  # one number
        (torch.randn(40, 5), one_hot(torch.zeros(40, dtype=torch.long), 2)),  # one class
        (torch.randn(3, 50), one_hot(torch.tensor([0, 1, 1]))),
    ],
    ids=["constant", "one number", "one class", "three rows"],
)
def test_little_to_go_by(x: torch.Tensor, y: torch.Tensor) -> None:
    start = starting_head(x, y)
    assert not start.taken
    assert not start.weight.any()
    assert start.relative_error == 1
    torch.testing.assert_close(start.bias, y.double().mean(0))
    assert start.scale.isfinite().all()
    assert start.mean.isfinite().all()


def test_a_dead_column_stays_small_when_the_model_is_trained() -> None:
    x, y = rows(60, 8)
    x[:, 3] = 1e-33 * torch.randn(60)
    start = starting_head(x, y)
    assert float(((1e-3 - start.mean) * start.scale)[3].abs()) < 1


def batches(model: Any, count: int = 12) -> list[dict[str, torch.Tensor]]:
    """Sentences of different lengths; the class follows from how often a token occurs."""
    generator = torch.Generator().manual_seed(3)
    made = []
    for _ in range(count):
        ids = torch.randint(3, 50, (8, 9), generator=generator)
        mask = torch.ones_like(ids)
        mask[::3, 6:] = 0
        labels = ids[:, 1] % model.config.num_labels
        ids[:, 2:6] = torch.where(torch.rand(8, 4, generator=generator) < 0.8, 3 + labels[:, None], ids[:, 2:6])
        made.append({"input_ids": torch.where(mask.bool(), ids, 0), "attention_mask": mask, "labels": labels})
    return made


ADAPTER = {"component": "gelu", "projection": "free", "num_features": 3, "placement": "query_value"}


def adapted(model: Any, **how: Any) -> Any:
    return get_snnk_model(model, SNNKConfig(adapter=AdapterPart(**ADAPTER), parts=[NormsPart()], **how))


def for_classes(model: Any) -> Any:
    return adapted(model, task_type="SEQ_CLS")


def lora(model: Any) -> Any:
    """With PEFT's own choice of modules."""
    return peft.get_peft_model(model, peft.LoraConfig(task_type="SEQ_CLS", modules_to_save=["snnk_head"]))


def train(model: Any, data: list[dict[str, torch.Tensor]], steps: int = 12) -> list[float]:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 3e-3)
    losses = []
    for step in range(steps):
        loss = model(**data[step % len(data)]).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


@torch.no_grad()
def logits(model: Any, data: list[dict[str, torch.Tensor]]) -> torch.Tensor:
    return torch.cat([model.eval()(**{k: v for k, v in batch.items() if k != "labels"}).logits for batch in data])


@pytest.mark.parametrize("family", CLASSIFIERS)
def test_the_head_reads_means_of_all_layers_of_every_family(family: str) -> None:
    model = build(family, main_head(family)).eval()
    wide = with_head(model)
    data = batches(model, 2)
    states = model(**data[0], output_hidden_states=True).hidden_states
    mask = data[0]["attention_mask"].bool()
    means = [torch.stack([h[m].mean(0) for h, m in zip(state, mask, strict=True)]) for state in states[1:]]
    torch.testing.assert_close(logits(wide, data[:1]), wide.snnk_head.linear(torch.cat(means, 1)), atol=1e-5, rtol=1e-5)
    assert wide.snnk_head.linear.out_features == model.config.num_labels


@pytest.mark.parametrize("method", [adapted, for_classes, lora])
def test_what_was_trained_behind_it_comes_back_onto_a_new_one(method: Any, tmp_path: Path) -> None:
    base = tiny("bert", num_labels=3)
    data = batches(base)
    wide = with_head(base)
    fit = fit_closed_form(wide, data, as_logits=True)
    assert fit.taken
    assert fit.examples == 96
    assert fit.cross_validated is not None
    assert fit.relative_error < fit.cross_validated <= RATIO * fit.relative_error + 1e-9
    model = method(wide)
    assert {n for n, p in model.named_parameters() if p.requires_grad and "snnk_head" in n}
    before = train(model.train(), data)
    assert before[-1] < before[0] < np.log(3)
    after = logits(model, data)
    model.save_pretrained(tmp_path / "adapter")
    again = peft.PeftModel.from_pretrained(with_head(base), tmp_path / "adapter")
    torch.testing.assert_close(logits(again, data), after, atol=0, rtol=0)
    folded = model.merge_and_unload() if method is lora else bundle(model)
    torch.testing.assert_close(logits(folded, data), after, atol=1e-5, rtol=1e-5)
    folded.save_pretrained(tmp_path / "folded")
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path / "folded")
    torch.testing.assert_close(logits(loaded, data), after, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("method", [adapted, for_classes, lora])
def test_a_head_behind_an_adapter_is_fitted_as_one_before(method: Any) -> None:
    """Adapters start as the identity, so that both give the same head: with chance tested, and standardised."""
    base = tiny("bert", num_labels=3)
    data = batches(base)
    before, behind = with_head(base), method(with_head(base))
    first, second = (fit_closed_form(model, data, as_logits=True) for model in (before, behind))
    assert (second.head, second.taken, second.examples) == (first.head, True, 96)
    assert second.cross_validated == pytest.approx(first.cross_validated, rel=1e-4)
    assert second.ridge == pytest.approx(first.ridge, rel=1e-4)
    torch.testing.assert_close(logits(behind, data), logits(before, data), atol=1e-4, rtol=1e-4)


def test_the_start_as_logits_is_that_of_the_fit() -> None:
    base = tiny("bert", num_labels=3)
    data = batches(base)
    wide = with_head(base)
    fit_closed_form(wide, data, as_logits=True)
    reader = wide.snnk_head.reader
    found: list[torch.Tensor] = []
    reader.register_forward_hook(lambda module, args, out: found.append(out))
    given = logits(wide, data)
    labels = torch.cat([batch["labels"] for batch in data])
    start = starting_head(torch.cat(found), one_hot(labels, 3))
    scores = ((torch.cat(found).double() - start.mean) * start.scale) @ start.weight.T
    shares = (labels.bincount() + 1) / (len(labels) + 3)
    expected = shares.log() + (scores + start.bias - labels.bincount() / len(labels)) / shares
    torch.testing.assert_close(given.log_softmax(1), expected.float().log_softmax(1), atol=1e-4, rtol=1e-4)
    assert cross_entropy(given, labels) < np.log(3)


def test_noise_leaves_the_prior() -> None:
    base = tiny("bert", num_labels=3)
    generator = torch.Generator().manual_seed(0)
    data = [batch | {"labels": torch.randint(0, 4, (8,), generator=generator).clamp(max=2)} for batch in batches(base)]
    wide = with_head(base)
    fit = fit_closed_form(wide, data, as_logits=True)
    assert not fit.taken
    assert "no better than chance" in str(fit)
    counts = torch.cat([batch["labels"] for batch in data]).bincount(minlength=3)
    torch.testing.assert_close(logits(wide, data).softmax(1)[0], (counts + 1) / (96 + 3), atol=1e-6, rtol=1e-5)


def test_numbers_are_regressed_and_pairs_told_apart() -> None:
    base = tiny("bert", num_labels=1, type_vocab_size=2)
    wide = with_head(base, HeadFeatures.means(2, pairs=True))
    assert wide.snnk_head.linear.in_features == 4 * base.config.hidden_size
    data = []
    for batch in batches(tiny("bert", num_labels=3)):
        types = torch.zeros_like(batch["input_ids"])
        types[:, 5:] = 1
        data.append(batch | {"token_type_ids": types, "labels": batch["labels"].float() * 10})
    fit = fit_closed_form(wide, data, as_logits=True)
    labels = torch.cat([batch["labels"] for batch in data])
    assert fit.taken
    assert np.corrcoef(logits(wide, data)[:, 0], labels)[0, 1] > 0.7
    model = adapted(wide)
    train(model.train(), data, 3)
    torch.testing.assert_close(logits(bundle(model), data), logits(model, data), atol=1e-4, rtol=1e-5)


def test_a_fitted_head_takes_adapters_and_a_folded_encoder_does_not(tmp_path: Path) -> None:
    base = tiny("bert", num_labels=3)
    data = batches(base)
    head = ClosedFormHead(base, HeadFeatures.means(2))
    head.add(data)
    head.fit()
    model = adapted(head.bundle())
    train(model.train(), data, 3)
    expected = logits(model, data)
    torch.testing.assert_close(logits(bundle(model), data), expected, atol=1e-5, rtol=1e-5)
    with pytest.raises(ConfigError, match="nothing to bundle"):
        bundle(head.bundle())
    small = bundle(get_snnk_model(tiny("bert"), SNNKConfig(ffn=FFNPart(num_features=4), modules_to_save=[])))
    with pytest.raises(UnsupportedError, match="is a bundle; expected a plain"):
        adapted(with_head(small))
    with pytest.raises(UnsupportedError, match="holds an adapter; expected a plain encoder"):
        with_head(model)
    with pytest.raises(ConfigError, match="features is the text 'all'; expected HeadFeatures or None"):
        with_head(base, "all")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="views name the hidden states 7; the model has 3"):
        with_head(base, HeadFeatures([(7, "mean")]))


def test_it_loads_without_this_package(tmp_path: Path) -> None:
    base = tiny("bert", num_labels=3)
    data = batches(base)
    wide = with_head(base)
    fit_closed_form(wide, data, as_logits=True)
    model = adapted(wide)
    train(model.train(), data, 3)
    inputs = {k: v for k, v in data[0].items() if k != "labels"}
    check_elsewhere(save_known(bundle(model), inputs, tmp_path / "folder", logits(model, data[:1])))
