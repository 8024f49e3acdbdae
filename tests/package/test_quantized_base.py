"""Rows and norms on a base whose Linears hold 4 or 8 bits: called, never read; against the same base dequantised."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import nn
from transformers import AutoModelForSequenceClassification

from snnk_peft import AdapterPart, FFNPart, NormsPart, SNNKConfig, bundle, calibrate_adapters, get_snnk_model
from snnk_peft.errors import ConfigError, UnsupportedError
from tests.tiny_models import tiny

PACKAGES = {"8 bits": "torchao", "4 bits": "bitsandbytes"}
ROWS = AdapterPart(component="gelu", projection="free", num_features=4, placement="query_value", normalize=False)
HEAD = ["classifier"]


def quantized(folder: Path, bits: str, kept: list[str]) -> Any:
    if importlib.util.find_spec(PACKAGES[bits]) is None:
        pytest.skip(f"needs {PACKAGES[bits]}")
    if bits == "8 bits":
        from torchao.quantization import Int8WeightOnlyConfig
        from transformers import TorchAoConfig

        how: Any = TorchAoConfig(Int8WeightOnlyConfig(), modules_to_not_convert=kept)
    else:
        from transformers import BitsAndBytesConfig

        how = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", llm_int8_skip_modules=kept)
    return AutoModelForSequenceClassification.from_pretrained(folder, quantization_config=how, dtype=torch.float32)


def dequantized(weight: Any) -> torch.Tensor:
    if hasattr(weight, "quant_state"):
        from bitsandbytes.functional import dequantize_4bit

        return dequantize_4bit(weight.data, weight.quant_state).float()
    return weight.dequantize().float()


def size_of(model: nn.Module) -> int:
    """Bytes of all Linears of the layers; a tensor of torchao tells those of the numbers that it stands for."""
    total = 0
    for name, value in model.named_parameters():
        if ".layer." in name:
            inner = value.__tensor_flatten__()[0] if hasattr(value, "__tensor_flatten__") else []
            parts = [getattr(value, each) for each in inner] or [value]
            total += sum(part.numel() * part.element_size() for part in parts)
    return total


@pytest.fixture
def base(tmp_path: Path) -> Path:
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_labels": 3}
    quiet = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    tiny("bert", **sizes, **quiet).save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def logits(model: Any, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model.eval()(input_ids=inputs["input_ids"]).logits
    return found


@pytest.mark.parametrize("bits", sorted(PACKAGES))
def test_rows_on_a_quantized_base(base: Path, tmp_path: Path, bits: str) -> None:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 100, (48, 8), generator=generator)
    inputs = {"input_ids": ids, "labels": ids[:, 1] % 3}
    whole = AutoModelForSequenceClassification.from_pretrained(base)
    plain = quantized(base, bits, HEAD)
    assert size_of(plain) < {"8 bits": 0.4, "4 bits": 0.3}[bits] * size_of(whole)
    config = SNNKConfig(adapter=ROWS, parts=[NormsPart()], task_type="SEQ_CLS")
    model = get_snnk_model(plain, config)
    linears = {n: m for n, m in whole.named_modules() if isinstance(m, nn.Linear) and not set(HEAD) & set(n.split("."))}
    assert len(linears) == 13
    before = {name: dequantized(plain.get_submodule(name).weight) for name in linears if "query" not in name}
    thirds = [{name: value[start::3] for name, value in inputs.items()} for start in range(3)]
    print(calibrate_adapters(model, thirds, progress=False))  # from gradients alone
    own = [value for value in model.parameters() if value.requires_grad]
    assert {value.dtype for value in own} == {torch.float32}
    optimizer, losses = torch.optim.AdamW(own, lr=5e-3), []
    for _ in range(25):
        loss = model.train()(**inputs).loss
        losses.append(float(loss))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < 0.7 * losses[0]

    # The frozen weights are what they were; a reloaded adapter computes the same. All is read before the first call in
    # eval mode: there bitsandbytes goes over to bf16, and reorders the weights, on processors that have it.
    exact = model(input_ids=ids).logits.detach()
    rounding = {name: dequantized(quantized_linear(model, name).weight) for name in linears}
    assert all(torch.equal(rounding[name], weight) for name, weight in before.items())
    trained = logits(model, inputs)
    model.save_pretrained(tmp_path / "adapter")
    again = peft.PeftModel.from_pretrained(quantized(base, bits, HEAD), tmp_path / "adapter")
    assert torch.equal(logits(again, inputs), trained)
    # An oracle that knows of no bits: the same adapter on the base as it was rounded.
    for name, linear in linears.items():
        linear.weight.data = rounding[name]
    rounded = peft.PeftModel.from_pretrained(whole, tmp_path / "adapter")
    torch.testing.assert_close(logits(rounded, inputs), exact, rtol=1e-3, atol=1e-3)
    with pytest.raises(UnsupportedError, match="quantized; load it in full precision"):
        bundle(model)
    torch.testing.assert_close(logits(bundle(rounded), inputs), exact, rtol=1e-3, atol=1e-3)


def quantized_linear(model: Any, name: str) -> Any:
    found = model.get_base_model().get_submodule(name)
    return getattr(found, "base_layer", found)


@pytest.mark.parametrize("bits", sorted(PACKAGES))
def test_what_reads_weights_is_refused(base: Path, bits: str) -> None:
    with pytest.raises(UnsupportedError, match=r"quantized; expected weights.*AdapterPart and NormsPart do go onto"):
        get_snnk_model(quantized(base, bits, HEAD), SNNKConfig(adapter=ROWS, ffn=FFNPart(num_features=8)))
    model = quantized(base, bits, ["bert.pooler"])
    with pytest.raises(ConfigError, match=r"classifier is trained in full and holds quantized weights.*leaves 'class"):
        get_snnk_model(model, SNNKConfig(adapter=ROWS, task_type="SEQ_CLS"))
    assert not any("snnk" in name for name, _ in model.named_parameters())
