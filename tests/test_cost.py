"""`snnk_peft.cost` against the real thing: sizes, products, memory and traffic of real small models, and large configs."""

from __future__ import annotations

import json
import shlex
import sys
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode
from transformers import BertConfig, BertForSequenceClassification, LlamaConfig, ViTConfig

from snnk_peft import AdapterPart, AttentionPart, FFNPart, SNNKConfig, bundle, get_snnk_model
from snnk_peft.cost import estimate_cost
from snnk_peft.cost.build import Builder, inputs_for, labels_for, prepare
from snnk_peft.cost.command import main
from snnk_peft.cost.meter import held, measure_inference, measure_training
from tests.fresh_process import run_python, start_python
from tests.test_documentation import blocks
from tests.test_meta_device import PARTS
from tests.tiny_families import CONFIGS, build, main_head
from tests.tiny_models import TEXT, TOKENS, inputs_for as real_inputs, tiny

ADAPTER = SNNKConfig(adapter=AdapterPart(num_features=4))


def builder_of(model: Any, dtype: torch.dtype = torch.float32) -> Builder:
    """Builds models like this one."""
    prepare(model.config)
    made = Builder(model.config, None, dtype)
    made.cls = type(model)
    return made


def layout(model: Any) -> dict[str, Any]:
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return {name: (tuple(t.shape), t.dtype, t.requires_grad) for name, t in tensors}


def ones(inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Real inputs without padding."""
    return {name: torch.ones(value.shape, dtype=value.dtype) for name, value in inputs.items()}


# --- sizes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("part", PARTS)
def test_a_part_has_the_same_tensors_on_meta_and_in_its_bundle(part):
    config = SNNKConfig(**PARTS[part])
    real = tiny("bert")
    make = builder_of(real)
    real, made = get_snnk_model(real, config), make.patched(config)
    assert all(t.is_meta for t in [*made.parameters(), *made.buffers()])
    assert layout(made) == layout(real)
    assert layout(make.bundled(made)) == layout(bundle(real))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_has_the_dtypes_of_a_real_model(dtype):
    real = tiny("bert").to(dtype)
    make = builder_of(real, dtype)
    assert layout(make.patched(ADAPTER)) == layout(get_snnk_model(real, ADAPTER))


def test_rows_have_the_sizes_of_real_models():
    peft = pytest.importorskip("peft")
    config = SNNKConfig(ffn=FFNPart(num_features=8), adapter=AdapterPart(num_features=4))
    report = estimate_cost(tiny("bert").config, config, task="sequence-classification", batch_size=2)
    real = {"full": tiny("bert"), "snnk": get_snnk_model(tiny("bert"), config)}
    rank = int(report.row("lora").detail.removeprefix("r = "))
    lora = peft.LoraConfig(r=rank, target_modules=["query", "value"], modules_to_save=["classifier"])
    real["lora"] = peft.get_peft_model(tiny("bert"), lora)
    for name, model in real.items():
        row = report.row(name)
        assert row.parameters == sum(p.numel() for p in model.parameters())
        assert row.trained == sum(p.numel() for p in model.parameters() if p.requires_grad)
        assert row.buffers == sum(b.numel() for b in model.buffers())
    small = bundle(real["snnk"])
    assert report.row("bundle").parameters == sum(p.numel() for p in small.parameters())
    assert report.row("bundle").trained is None
    # "Equal size" is the nearest rank.
    per_rank = sum(p.numel() for n, p in lora_only(real["lora"])) / rank
    assert abs(report.row("lora").trained - report.row("snnk").trained) <= per_rank / 2


def lora_only(model: Any) -> list[tuple[str, Any]]:
    return [(name, p) for name, p in model.named_parameters() if "lora_" in name]


# --- products ---------------------------------------------------------------------------------------------------------


def test_macs_of_bert_and_vit_by_hand():
    L, d, h, layers, batch = 20, 32, 64, 2, 3
    per_layer = L * (4 * d * d + 2 * d * h) + 2 * L * L * d
    bert = builder_of(tiny("bert")).pretrained()
    found = measure_inference(bert, inputs_for(bert, batch, L, torch.float32), "cuda")
    assert found.macs == batch * (layers * per_layer + d * d + 2 * d)  # pooler and classifier
    L = 5  # 4 patches of 4 × 4 × 3 numbers, and [CLS]
    per_layer = L * (4 * d * d + 2 * d * h) + 2 * L * L * d
    vit = builder_of(tiny("vit")).pretrained()
    found = measure_inference(vit, inputs_for(vit, batch, None, torch.float32), "cuda")
    assert found.macs == batch * (4 * 48 * d + layers * per_layer + 2 * d)


class Kept:
    """A tensor that autograd keeps."""

    def __init__(self, tensor: torch.Tensor):
        self.tensor = tensor


def kept_bytes(model: Any, batch: dict[str, torch.Tensor]) -> int:
    """Between forward and backward on real tensors: what autograd keeps, inputs and outputs; each storage once."""
    alive: weakref.WeakSet[Kept] = weakref.WeakSet()

    def pack(tensor: torch.Tensor) -> Kept:
        alive.add(kept := Kept(tensor))
        return kept

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept.tensor):
        out = model(**batch)
        loss = out["loss"] if "loss" in out else next(iter(out.values())).float().sum()
    assert loss.requires_grad
    found = [*(kept.tensor for kept in alive), *(t for t in tree_leaves(out) if isinstance(t, torch.Tensor)), loss]
    sizes = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in [*found, *batch.values()]}
    return sum(size for key, size in sizes.items() if key not in {t.untyped_storage()._cdata for t in held(model)})


def check(build_real: Callable[[], Any], config: SNNKConfig, length: int) -> None:
    """MACs against FlopCounterMode, which knows no fused kernel of a CPU: softmax is written out. What is kept for the
    backward pass against what autograd keeps with the kernels that torch takes."""
    written_out, usual = build_real(), build_real()
    written_out.set_attn_implementation("eager")
    make = builder_of(usual)
    inputs = inputs_for(usual, 2, length, torch.float32)
    labelled = {**inputs, **labels_for(usual, inputs)}
    made, real, usual = (make.patched(config), *(get_snnk_model(m, config) for m in (written_out, usual)))
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        real.eval()(**ones(inputs))
    assert measure_inference(made, inputs, "cpu").macs == pytest.approx(counter.get_total_flops() / 2, rel=0.05)
    with FlopCounterMode(display=False) as counter:
        out = real.train()(**ones(labelled))
        (out["loss"] if "loss" in out else next(iter(out.values())).sum()).backward()
    found = measure_training(made, labelled, "cpu")
    assert found.macs == pytest.approx(counter.get_total_flops() / 2, rel=0.05)
    assert found.saved == pytest.approx(kept_bytes(usual.train(), ones(labelled)), rel=0.05)


@pytest.mark.parametrize("family", CONFIGS)
def test_macs_and_kept_bytes_of_every_family(family):
    check(lambda: build(family, main_head(family)), ADAPTER, 7)


@pytest.mark.parametrize("part", PARTS)
def test_macs_and_kept_bytes_of_every_part(part):
    check(lambda: tiny("bert", vocab_size=30), SNNKConfig(**PARTS[part]), 40)
