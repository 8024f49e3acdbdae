"""Learned feature maps fitted to softmax: on tiny models of every kind of attention, and on a real one."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from snnk_peft import AttentionPart, SNNKConfig, get_snnk_model
from snnk_peft.calibrating.attention import LOSSES, fit_attention
from snnk_peft.errors import ConfigError, NumericalError
from snnk_peft.parts.attention.recording import Observer
from snnk_peft.parts.attention.slots import Attend
from tests.attention_models import causal_model
from tests.tiny_models import tiny

LEARNED = AttentionPart(
    component="softmax_pm", projection="free", projection_params={"bias": True}, num_features=12, separate_maps=True
)


def sharp(model: Any, factor: float = 10) -> Any:
    """Random models attend to everything alike; larger queries make something to be fitted."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "query.weight" in name or "q_proj.weight" in name:
                parameter.mul_(factor**2)
    return model


def batches(count: int = 8) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)
    made = []
    for _ in range(count):
        ids = torch.randint(3, 100, (8, 10), generator=generator)
        mask = torch.ones_like(ids)
        mask[::3, 6:] = 0
        made.append({"input_ids": ids, "attention_mask": mask, "labels": ids[:, 0] % 2})
    return made


def patched(part: AttentionPart = LEARNED, model: Any = None) -> Any:
    return get_snnk_model(sharp(tiny("bert")) if model is None else model, SNNKConfig(attention=part))


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("part", [LEARNED, AttentionPart(projection="gmm", near_field=2)], ids=["free", "gmm"])
def test_it_lowers_the_error_of_every_layer(part, loss):
    model = patched(part)
    start = {name: value.clone() for name, value in model.state_dict().items()}
    report = fit_attention(model, batches(), steps=25, loss=loss, progress=False)
    assert [slot.path for slot in report.slots] == [f"bert.encoder.layer.{i}.attention.self" for i in range(2)]
    for slot in report.slots:
        assert slot.error_after < slot.error_before
        assert slot.held_out_tokens == 2 * (5 * 10 + 3 * 6)  # two of eight batches
        assert slot.tokens == 25 * (5 * 10 + 3 * 6)
    changed = {name for name, value in model.state_dict().items() if not torch.equal(value, start[name])}
    learned = {name for name, parameter in model.named_parameters() if parameter.requires_grad and ".kernel." in name}
    assert changed
    assert changed <= learned


def test_errors_are_those_of_the_outputs():
    """By hand, from hooks on the original and the patched model; layer 0, which both give the same inputs."""
    model = patched(model=sharp(tiny("bert")))
    report = fit_attention(model, batches(), steps=15, progress=False)
    held_out = [batch for index, batch in enumerate(batches()) if index in (2, 7)]
    wrong, rows = 0.0, []
    seen: list[torch.Tensor] = []
    place = model.get_submodule("base_model.model.bert.encoder.layer.0.attention.self")
    hook = place.register_forward_hook(lambda module, args, out: seen.append(out[0]))
    with torch.no_grad():
        for batch in held_out:
            model(**batch)
            with model.disable_adapter():
                model(**batch)
            linear, softmax = (out[batch["attention_mask"].bool()].double() for out in seen)
            wrong += float((linear - softmax).square().sum())
            rows.append(softmax)
            seen.clear()
    hook.remove()
    truth = torch.cat(rows)
    expected = wrong / float((truth - truth.mean(0)).square().sum())
    assert report.slots[0].error_after == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("loss", LOSSES)
def test_losses_are_what_they_say(loss):
    torch.manual_seed(1)
    kernel = next(slot.kernel for slot in patched().modules() if isinstance(slot, Attend))
    q, k, v = torch.randn(3, 2, 2, 5, 16)
    mask = torch.tensor([[True] * 5, [True] * 3 + [False] * 2])
    observer = Observer("here", torch.nn.Module(), kernel, loss)
    observer.fitting = True
    out = observer(q, k, v, mask)
    target = (q @ k.mT / 4).masked_fill(~mask[:, None, None], -torch.inf).softmax(-1)
    torch.testing.assert_close(out, target @ v)
    own = kernel.weights(q, k, mask)
    per_query = {
        "cross_entropy": torch.nn.functional.kl_div(own.clamp_min(1e-30).log(), target, reduction="none").sum(-1),
        "output": (own @ v - target @ v).square().mean(-1),
        "weights": (own - target).square().sum(-1),
    }[loss]
    torch.testing.assert_close(observer.losses[0], torch.cat([per_query[0, :, :5], per_query[1, :, :3]], 1).mean())
    # Definition 10.2: the squared error for values drawn apart from the weights is that of the weights.
    if loss == "weights":
        values = torch.randn(4000, 1, 1, 5, 1)
        drawn = ((own - target) @ values).square().mean(0)[..., 0]
        torch.testing.assert_close(drawn, per_query, rtol=0.2, atol=1e-3)


def test_causal_attention_with_grouped_heads():
    model = patched(model=sharp(causal_model("llama", wide=False)))
    report = fit_attention(model, batches(), steps=25, progress=False)
    assert all(slot.error_after < slot.error_before for slot in report.slots)


def test_what_the_model_was_it_is_again():
    model = patched().train()
    model.requires_grad_(True)
    plain, batch = copy.deepcopy(model).eval(), batches()[0]
    model.classifier.weight.grad = torch.ones_like(model.classifier.weight)
    fit_attention(model, batches(), steps=1, learning_rate=1e-30, progress=False)
    assert model.training
    assert [n for n, p in model.named_parameters() if p.grad is not None] == [
        n for n, p in model.named_parameters() if p is model.classifier.weight
    ]
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(**batch).logits, plain(**batch).logits)  # linear again


def test_local_layers_keep_their_maps():
    model = patched(AttentionPart(projection="gmm", layers=[0, 1], near_field=3), tiny("modernbert"))
    data = [{key: value for key, value in batch.items() if key != "labels"} for batch in batches()]
    report = fit_attention(model, data, steps=2, progress=False)
    assert [slot.path for slot in report.slots] == ["model.layers.0.attn"]


def test_faults():
    model = patched(AttentionPart(component="trigrf", projection="gmm", num_features=8))
    with pytest.raises(ConfigError) as caught:
        fit_attention(model, batches(), steps=0, learning_rate=-1.0, held_out=1.0, progress=False)
    text = "\n".join(caught.value.faults)
    for part in ("steps is 0", "learning_rate is -1.0", "held_out is 1.0", "TrigRF", "Use loss='output'"):
        assert part.lower() in text.lower()
    with pytest.raises(ConfigError, match="loss is 'kl'; expected one of cross_entropy, output, weights"):
        fit_attention(model, batches(), loss="kl")
    with pytest.raises(ConfigError, match="no active linear attention over all tokens with something to learn"):
        fit_attention(patched(AttentionPart()), batches())
    with pytest.raises(ConfigError, match=r"batches holds 1, of which held_out=0\.2 leaves"):
        fit_attention(patched(), batches(1))


def test_a_loss_that_is_not_finite_ends_it():
    model = patched()
    with torch.no_grad():
        model.base_model.model.bert.encoder.layer[1].attention.self.base_layer.query.weight.fill_(torch.inf)
    with pytest.raises((NumericalError, ValueError)):
        fit_attention(model, batches(), steps=3, progress=False)
    owner = model.base_model.model.bert.encoder.layer[0].attention.self.base_layer.snnk_owner
    assert not isinstance(owner(), Observer)
