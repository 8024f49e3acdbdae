"""Normalisation layers trained with an adapter: trained alone or beside rows, saved, switched, disabled, bundled."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from torch import nn
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from snnk_peft import AdapterPart, NormsPart, SNNKConfig, bundle, calibrate_adapters, get_snnk_model
from snnk_peft.errors import ConfigError, UnsupportedError
from snnk_peft.parts.norms import is_norm
from tests.tiny_families import CONFIGS, build, main_head
from tests.tiny_models import inputs_for, logits, tiny

ROWS = AdapterPart(
    placement="query_value", component="gelu", projection="free", num_features=3, normalize=False, scaling=4.0
)


def norms_of(model: nn.Module) -> dict[str, nn.Module]:
    """By what they compute, and not by their class: the gain has the length of what is normalised."""
    return {
        path: module
        for path, module in model.named_modules()
        if "norm" in type(module).__name__.lower() and [*module.parameters()] and not [*module.children()]
    }


@pytest.mark.parametrize("family", list(CONFIGS))
def test_every_norm_of_every_family(family: str) -> None:
    model = build(family, main_head(family))
    expected = norms_of(model)
    patched = get_snnk_model(model, SNNKConfig(parts=[NormsPart()], modules_to_save=[]))
    assert set(patched.peft_config["default"].target_modules) == set(expected)
    numbers = sum(parameter.numel() for module in expected.values() for parameter in module.parameters())
    assert sum(p.numel() for p in patched.parameters() if p.requires_grad) == numbers


def test_gains_and_biases_learn() -> None:
    """One step of SGD moves exactly the norms, by minus the gradient that an unpatched model has for them."""
    plain = tiny("bert", num_labels=3)
    inputs = {**inputs_for(plain), "labels": torch.tensor([0, 1, 2])}
    plain.eval()(**inputs).loss.backward()
    norms = norms_of(plain)
    expected = {path: (norm.weight - norm.weight.grad, norm.bias - norm.bias.grad) for path, norm in norms.items()}
    patched = get_snnk_model(tiny("bert", num_labels=3), SNNKConfig(parts=[NormsPart()], modules_to_save=[]))
    optimizer = torch.optim.SGD([p for p in patched.parameters() if p.requires_grad], lr=1.0)
    patched.eval()(**inputs).loss.backward()
    optimizer.step()
    small = bundle(patched)
    for path, (weight, bias) in expected.items():
        norm = small.get_submodule(path)
        torch.testing.assert_close(norm.weight, weight, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(norm.bias, bias, rtol=1e-5, atol=1e-6)


def test_half_precision_keeps_small_steps() -> None:
    """A gain of 1 in bf16 does not see 0.001; what is trained is in fp32."""
    model = tiny("bert").to(torch.bfloat16)
    patched = get_snnk_model(model, SNNKConfig(parts=[NormsPart()], modules_to_save=[]))
    own = [p for p in patched.parameters() if p.requires_grad]
    assert {p.dtype for p in own} == {torch.float32}
    assert logits(patched, inputs_for(model)).dtype == torch.bfloat16


def test_a_pattern_and_one_without_match() -> None:
    patched = get_snnk_model(tiny("bert"), SNNKConfig(parts=[NormsPart(targets="*.layer.1.*")], modules_to_save=[]))
    assert set(patched.peft_config["default"].target_modules) == {
        "bert.encoder.layer.1.attention.output.LayerNorm",
        "bert.encoder.layer.1.output.LayerNorm",
    }
    top = get_snnk_model(tiny("bert"), SNNKConfig(parts=[NormsPart(layers="top-1")], modules_to_save=[]))
    assert top.peft_config["default"].target_modules == patched.peft_config["default"].target_modules
    with pytest.raises(ConfigError, match=r"layers has \[2\]; the model has 2 layers"):
        get_snnk_model(tiny("bert"), SNNKConfig(parts=[NormsPart(layers=[2])]))
    with pytest.raises(ConfigError, match=r"layers is 'top'; expected"):
        SNNKConfig(parts=[NormsPart(layers="top")])
    with pytest.raises(UnsupportedError, match=r"'\*\.layer\.9\.\*'; expected a pattern for some of 'bert"):
        get_snnk_model(tiny("bert"), SNNKConfig(parts=[NormsPart(targets="*.layer.9.*")]))
    with pytest.raises(UnsupportedError, match="none at all"):
        get_snnk_model(nn.Sequential(nn.Linear(3, 3)), SNNKConfig(parts=[NormsPart()]))
    with pytest.raises(ConfigError, match="both replace"):
        get_snnk_model(tiny("bert"), SNNKConfig(parts=[NormsPart(), NormsPart(targets="*.layer.1.*")]))


def test_rows_of_the_adapter_begin_as_small_as_those_of_a_linear() -> None:
    """Without normalisation: U(±d^-½) has the variance 1 / (3 d)."""
    patched = get_snnk_model(tiny("bert", hidden_size=128, num_attention_heads=2), SNNKConfig(adapter=ROWS))
    rows = torch.cat([p.flatten() for name, p in patched.named_parameters() if name.endswith("projection.weight")])
    assert len(rows) == 4 * 3 * 128
    assert rows.std().item() == pytest.approx((3 * 128) ** -0.5, rel=0.1)


@pytest.mark.parametrize(("rows", "layers", "kilobytes"), [(6, "all", 300), (8, "top-5", 300)])
def test_on_minilm(rows: int, layers: str, kilobytes: int, minilm_dir: Path, tmp_path: Path) -> None:
    """The form of the GLUE table: rows from a labelled pass, trained for some steps, saved, loaded again, bundled."""
    said = ["a fine film", "nothing works here and nobody cares", "well made, warm and funny", "a waste of time"]
    texts = [f"{text} {end}" for end in (".", ", they said", "to me", "in the end") for text in said]
    inputs = AutoTokenizer.from_pretrained(minilm_dir)(texts, padding=True, return_tensors="pt")
    labels = torch.tensor([1, 0, 1, 0])
    batches = [{**{k: v[i : i + 4] for k, v in inputs.items()}, "labels": labels} for i in range(0, 16, 4)]
    targets = "*" if layers == "all" else "*.layer.[1-5].*"
    form = replace(ROWS, num_features=rows, scaling=4 * rows**0.5, layers=layers)

    def base() -> Any:
        torch.manual_seed(0)
        return AutoModelForSequenceClassification.from_pretrained(minilm_dir, num_labels=2)

    model = get_snnk_model(base(), SNNKConfig(adapter=form, parts=[NormsPart(targets=targets)], task_type="SEQ_CLS"))
    report = calibrate_adapters(model, batches, progress=False)
    assert len(report.slots) == (12 if layers == "all" else 10)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-3)
    for _ in range(3):
        loss = model.train()(**batches[0]).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    expected = logits(model, inputs)
    assert not torch.allclose(expected, logits(base(), inputs), atol=1e-2)

    model.save_pretrained(tmp_path / "adapter")
    assert (tmp_path / "adapter/adapter_model.safetensors").stat().st_size < 1000 * kilobytes
    again = PeftModel.from_pretrained(base(), tmp_path / "adapter")
    torch.testing.assert_close(logits(again, inputs), expected, rtol=0, atol=1e-6)
    bundle(model).save_pretrained(tmp_path / "bundle")
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path / "bundle")
    torch.testing.assert_close(logits(loaded, inputs), expected, rtol=0, atol=1e-5)


def test_norms_without_gains_are_none() -> None:
    """OLMo's have neither gain nor bias; a gain that is a buffer is not trained either."""

    class FrozenRMSNorm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("weight", torch.ones(4))

    assert is_norm(nn.LayerNorm(4))
    for other in (nn.LayerNorm(4, elementwise_affine=False), FrozenRMSNorm(), nn.Linear(4, 4)):
        assert not is_norm(other)
    model = tiny("bert")
    for layer in model.modules():
        if hasattr(layer, "LayerNorm"):
            layer.LayerNorm = nn.LayerNorm(32, elementwise_affine=False)
    with pytest.raises(UnsupportedError, match="expected a pattern for some of none at all"):
        get_snnk_model(model, SNNKConfig(parts=[NormsPart()]))
