"""The mean over the tokens instead of [CLS]: against means taken example by example, through every door."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from sklearn.linear_model import Ridge
from torch import Tensor

from snnk_peft import (
    AdapterPart,
    AttentionPart,
    FFNPart,
    MeanPoolingPart,
    NormsPart,
    PoolerPart,
    SNNKConfig,
    bundle,
    calibrate,
    calibrate_adapters,
    fit_closed_form,
    get_snnk_model,
)
from snnk_peft.errors import UnsupportedError
from snnk_peft.layers.folded import counted_tokens, mean_first
from tests.tiny_families import CONFIGS, build, main_head
from tests.tiny_models import logits

# What each head makes of the last hidden states, by its own modules.
HEADS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "bert": lambda model, h: model.classifier(model.bert.pooler(h)),
    "distilbert": lambda model, h: model.classifier(torch.relu(model.pre_classifier(h[:, 0]))),
    "deberta-v2": lambda model, h: model.classifier(model.pooler(h)),
    **dict.fromkeys(("camembert", "electra", "mpnet", "roberta", "xlm-roberta"), lambda model, h: model.classifier(h)),
}
PADDINGS = {"right": [[1] * 7, [1] * 4 + [0] * 3], "left": [[1] * 7, [0] * 3 + [1] * 4], "none": [[1] * 7] * 2}


def padded(padding: str = "right") -> dict[str, Tensor]:
    ids = torch.randint(3, 50, (2, 7), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "attention_mask": torch.tensor(PADDINGS[padding])}


def mean_in_front(hidden: Tensor, mask: Tensor) -> Tensor:
    """One example after the other."""
    hidden = hidden.detach().clone()
    for example, counted in zip(hidden, mask, strict=True):
        example[0] = torch.stack([token for token, real in zip(example, counted, strict=True) if real]).mean(0)
    return hidden


def expected_logits(family: str, model: Any, inputs: dict[str, Tensor]) -> Tensor:
    with torch.no_grad():
        hidden = model.base_model(**inputs).last_hidden_state
        return HEADS[family](model, mean_in_front(hidden, inputs["attention_mask"]))


def mean_pooled(family: str, *parts: Any, **options: Any) -> Any:
    return get_snnk_model(build(family, main_head(family)), SNNKConfig(parts=[MeanPoolingPart(), *parts], **options))


@pytest.mark.parametrize("family", list(CONFIGS))
def test_every_family_reads_the_mean_or_is_refused(family: str) -> None:
    if family in HEADS:
        assert mean_pooled(family) is not None
        return
    with pytest.raises(UnsupportedError, match="expected an encoder of texts with a pooler"):
        mean_pooled(family)


@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("backend", ["sdpa", "eager"])
@pytest.mark.parametrize("family", HEADS)
def test_logits_are_those_of_the_mean(family: str, backend: str, padding: str) -> None:
    model = build(family, main_head(family))
    if family not in ("deberta-v2", "mpnet"):  # which have one way to attend
        model.set_attn_implementation(backend)
    inputs = padded(padding)
    first, expected = logits(model, inputs), expected_logits(family, model, inputs)
    patched = get_snnk_model(model, SNNKConfig(parts=[MeanPoolingPart()]))
    found = logits(patched, inputs)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    assert not torch.allclose(found, first, atol=1e-4)
    with patched.disable_adapter():
        assert torch.equal(logits(patched, inputs), first)
    small = bundle(patched)
    torch.testing.assert_close(logits(small, inputs), expected, rtol=1e-5, atol=1e-6)
    assert small.num_parameters() == build(family, main_head(family)).num_parameters()


def test_modernbert_says_how_it_does_so_by_itself() -> None:
    with pytest.raises(UnsupportedError, match=r"set config\.classifier_pooling to 'mean'"):
        mean_pooled("modernbert")


@pytest.mark.parametrize(("head", "reason"), [("BertForMaskedLM", "no pooler"), ("BertForTokenClassification", "no p")])
def test_heads_that_read_every_token_are_refused(head: str, reason: str) -> None:
    with pytest.raises(UnsupportedError, match=reason):
        get_snnk_model(build("bert", head), SNNKConfig(parts=[MeanPoolingPart()]))


def test_an_example_does_not_depend_on_the_others() -> None:
    model, inputs = mean_pooled("bert"), padded()
    alone = {name: values[1:, :4] for name, values in inputs.items()}
    torch.testing.assert_close(logits(model, inputs)[1:], logits(model, alone), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype) -> None:
    model, inputs = build("bert", main_head("bert")), padded()
    expected = expected_logits("bert", model, inputs)
    patched = get_snnk_model(model.to(dtype), SNNKConfig(parts=[MeanPoolingPart()], modules_to_save=[]))
    found = logits(patched, inputs)
    assert found.dtype == dtype
    torch.testing.assert_close(found.float(), expected, rtol=0, atol=0.02)


def test_beside_parts_of_the_last_layer_and_linear_attention() -> None:
    parts = (AdapterPart(num_features=4), NormsPart(), AttentionPart(num_features=6))
    model, inputs = mean_pooled("bert", *parts), padded()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    found = logits(model, inputs)
    without = get_snnk_model(build("bert", main_head("bert")), SNNKConfig(parts=list(parts)))
    own = model.state_dict()  # the same tensors, but for the layer's second wrapper
    without.load_state_dict({name: own[_wrapped(name, own)] for name in without.state_dict()})
    hidden = without.eval().base_model.model.bert(**inputs).last_hidden_state
    inside = without.base_model.model
    expected = inside.classifier(inside.bert.pooler(mean_in_front(hidden, inputs["attention_mask"])))
    torch.testing.assert_close(found, expected.detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(logits(bundle(model), inputs), found, rtol=1e-4, atol=1e-5)


def _wrapped(name: str, among: Any) -> str:
    inside = name.replace(".encoder.layer.1.", ".encoder.layer.1.base_layer.")
    return inside if inside in among else name


@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradients_are_those_of_the_mean(checkpointing: bool) -> None:
    model, inputs = mean_pooled("bert", NormsPart()), {**padded(), "labels": torch.tensor([0, 1])}
    plain = build("bert", main_head("bert"))
    hidden = plain.bert(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).last_hidden_state
    counted = inputs["attention_mask"].unsqueeze(-1)
    front = torch.cat(((hidden * counted).sum(1, keepdim=True) / counted.sum(1, keepdim=True), hidden[:, 1:]), 1)
    score = plain.classifier(plain.bert.pooler(front))
    torch.nn.functional.cross_entropy(score, inputs["labels"]).backward()
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    model(**inputs).loss.backward()
    name = "encoder.layer.0.output.LayerNorm"
    own = model.base_model.model.bert.get_submodule(name).snnk_slots["default"][0].module
    expected = plain.bert.get_submodule(name).weight.grad
    assert expected.abs().max() > 1e-4
    torch.testing.assert_close(own.weight.grad, expected, rtol=1e-4, atol=1e-7)


def test_the_report_of_a_bundle_tells_it() -> None:
    small = bundle(mean_pooled("bert", PoolerPart(num_features=6)))
    assert any(entry.after == "the mean over the tokens" for entry in small.bundle_report.folded)


@pytest.fixture(scope="module")
def batches() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(5)
    return [
        {
            "input_ids": torch.randint(3, 50, (8, 7), generator=generator),
            "attention_mask": (torch.arange(7) < torch.randint(3, 8, (8, 1), generator=generator)).long(),
            "labels": torch.randn(8, 2, generator=generator),
        }
        for _ in range(12)
    ]


def means(batch: dict[str, Tensor]) -> Tensor:
    """(B, width) of the plain model."""
    with torch.no_grad():
        hidden = build("bert", main_head("bert")).bert(batch["input_ids"], batch["attention_mask"]).last_hidden_state
    return mean_in_front(hidden, batch["attention_mask"])[:, 0]


def with_new_pooler() -> Any:
    config = SNNKConfig(pooler=PoolerPart(num_features=16), parts=[MeanPoolingPart()], modules_to_save=[])
    return get_snnk_model(build("bert", main_head("bert")), config)


def test_calibrate_fits_the_pooler_on_means(batches: list[dict[str, Tensor]]) -> None:
    """It gives what the original makes of the means, and fits these better than first tokens."""
    model = with_new_pooler()
    pooler = build("bert", main_head("bert")).bert.pooler
    report = calibrate(model, batches, progress=False)
    assert report.slots[0].error_after < 0.5 * report.slots[0].error_before
    with torch.no_grad():
        mean = torch.cat([means(batch) for batch in batches])
        found, wanted = model.base_model.model.bert.pooler(mean.unsqueeze(1)), pooler(mean.unsqueeze(1))
    assert (found - wanted).square().sum() < 0.2 * (wanted - wanted.mean(0)).square().sum()


def test_reports_name_modules_of_the_plain_model(batches: list[dict[str, Tensor]]) -> None:
    """Those of the last layer too, around which the part stands."""
    rows = AdapterPart(
        "gelu", "free", num_features=2, placement="query_value", normalize=False, scaling=4.0, layers=[1]
    )
    model = mean_pooled("bert", rows, FFNPart(num_features=4, layers=[1]))
    plain = {path for path, _ in build("bert", main_head("bert")).named_modules()}
    labelled = [{**batch, "labels": torch.arange(8) % 2} for batch in batches]
    paths = [slot.path for slot in calibrate_adapters(model, labelled, progress=False).slots]
    paths += [slot.path for slot in calibrate(model, batches, progress=False).slots]
    assert len(paths) == 3
    assert set(paths) <= plain


def test_closed_form_is_ridge_regression_on_means(batches: list[dict[str, Tensor]]) -> None:
    small = bundle(with_new_pooler())
    fit_closed_form(small, batches, ridge=0.3)
    stage = small.bert.pooler.dense
    with torch.no_grad():
        features = torch.cat([stage(means(batch)) for batch in batches])
    oracle = Ridge(alpha=0.3).fit(features.numpy(), torch.cat([batch["labels"] for batch in batches]).numpy())
    torch.testing.assert_close(small.classifier.weight, torch.tensor(oracle.coef_), rtol=1e-4, atol=1e-4)


def test_masks_that_say_nothing_are_refused() -> None:
    hidden = torch.zeros(2, 7, 4)
    with pytest.raises(UnsupportedError, match="is missing for hidden states"):
        counted_tokens(hidden, (), {})
    with pytest.raises(UnsupportedError, match=r"is \(2, 1, 1, 5\) for hidden states \(2, 7, 4\)"):
        counted_tokens(hidden, (torch.zeros(2, 1, 1, 5),), {})


def test_only_the_first_token_changes():
    hidden = torch.randn(2, 5, 3)
    got = mean_first(hidden, (None,), {})
    assert torch.equal(got[:, 1:], hidden[:, 1:])
    torch.testing.assert_close(got[:, 0], hidden.mean(1))
