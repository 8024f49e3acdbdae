"""Where tensors are: offloaded to memory or disk, and on the meta device."""

from __future__ import annotations

import copy

import accelerate
import peft
import pytest
import torch
from peft import LoraConfig, PeftModel, inject_adapter_in_model, set_peft_model_state_dict
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForSequenceClassification, LlamaConfig, LlamaForCausalLM

from snnk_peft import (
    AdapterPart,
    AttentionPart,
    FFNPart,
    SNNKConfig,
    bundle,
    calibrate,
    get_snnk_model,
)
from snnk_peft.errors import ConfigError, UnsupportedError
from snnk_peft.functional.adapter_sum import residual_linear
from snnk_peft.layers.folded import FoldedAdapter
from tests.every_part import PAIRS, pair
from tests.every_part import PARTS as EVERY_PART
from tests.tiny_models import TEXT, TOKENS, inputs_for, tiny, trained

CPU = torch.device("cpu")
LEARNED = ("gmm", "generative", "fastfood")
PARTS = {
    **EVERY_PART,
    **{f"houlsby-{name}": {"adapter": AdapterPart(projection=name, num_features=4)} for name in LEARNED},
    "houlsby-saderf": {"adapter": AdapterPart("saderf", num_features=4)},
    "pfeiffer-random": {"adapter": AdapterPart(num_features=4, placement="pfeiffer", init="random")},
    "attention-per-head": {"attention": AttentionPart(num_features=6, near_field=2, per_head=True)},
    "seed-only": {"adapter": AdapterPart(num_features=4), "save_projection": False},
}
cases = pytest.mark.parametrize("part", PARTS)


def patched(part: str, base: nn.Module | None = None) -> PeftModel:
    base = tiny("bert") if base is None else base
    return trained(get_snnk_model(base, SNNKConfig(**copy.deepcopy(PARTS[part])))).eval()


@torch.no_grad()
def logits(model: nn.Module) -> torch.Tensor:
    return model(**inputs_for(tiny("bert"))).logits


def offload(model: nn.Module, kind: str, folder: str) -> None:
    if kind == "memory":
        accelerate.cpu_offload(model, CPU)
    elif kind == "memory-and-buffers":
        accelerate.cpu_offload(model, CPU, offload_buffers=True)
    else:
        accelerate.disk_offload(model, folder, CPU, offload_buffers=True)


@pytest.mark.parametrize(
    ("part", "kind"),
    [("houlsby", "memory"), ("ffn-drawn", "memory"), *((part, "memory-and-buffers") for part in PARTS)]
    + [(part, "disk") for part in ("parallel", "pooler", "attention")],
)
def test_offloaded_models_compute_the_same(part, kind, tmp_path):
    model = patched(part)
    small = bundle(model)
    for name, one in (("patched", model), ("bundle", small)):
        expected = logits(one)
        offload(one, kind, str(tmp_path / name))
        assert any(parameter.is_meta for parameter in one.parameters())
        for _ in range(2):  # what was brought is taken away again, and found again
            assert torch.equal(logits(one), expected)
        assert all(parameter.is_meta for parameter in one.parameters())


@pytest.mark.parametrize("part", ["houlsby", "parallel", "query_value", "ffn", "pooler", "attention", "seed-only"])
def test_a_saved_bundle_loads_onto_the_disk(part, tmp_path):
    small = bundle(patched(part))
    small.save_pretrained(tmp_path / "bundle")
    loaded = AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "bundle", device_map={"": "disk"}, offload_folder=str(tmp_path / "disk")
    )
    torch.testing.assert_close(logits(loaded), logits(small))


@cases
def test_adapters_go_onto_an_offloaded_base(part):
    config = SNNKConfig(**copy.deepcopy(PARTS[part]))
    base, expected = tiny("bert"), get_snnk_model(tiny("bert"), config).eval()
    accelerate.cpu_offload(base, CPU)
    model = get_snnk_model(base, config).eval()
    slots = {name: tensor for name, tensor in model.state_dict().items() if "snnk_slots" in name}
    assert slots
    state = expected.state_dict()
    assert all(torch.equal(slots[name], state[name]) for name in slots)  # Nyström readouts and landmarks included
    torch.testing.assert_close(logits(model), logits(expected))


def test_a_checkpoint_loads_onto_an_offloaded_base(tmp_path):
    config = SNNKConfig(**copy.deepcopy(PARTS["houlsby"]), modules_to_save=[])
    expected = trained(get_snnk_model(tiny("bert"), config)).eval()
    expected.save_pretrained(tmp_path)
    base = tiny("bert")
    accelerate.cpu_offload(base, CPU)
    torch.testing.assert_close(logits(PeftModel.from_pretrained(base, tmp_path).eval()), logits(expected))


def test_generation_from_memory():
    torch.manual_seed(0)
    special = {key: TOKENS[key] for key in ("pad_token_id", "bos_token_id", "eos_token_id")}
    base = LlamaForCausalLM(LlamaConfig(**TEXT, **special))
    parts = {"attention": AttentionPart(num_features=8, near_field=2), "adapter": AdapterPart(num_features=4)}
    model = trained(get_snnk_model(base, SNNKConfig(**parts))).eval()
    ids = torch.randint(3, 100, (2, 6))
    for one in (model, bundle(model)):
        expected = one.generate(input_ids=ids, max_new_tokens=5, do_sample=False)
        accelerate.cpu_offload(one, CPU)
        assert torch.equal(one.generate(input_ids=ids, max_new_tokens=5, do_sample=False), expected)


def test_calibration_reads_an_offloaded_base_and_refuses_offloaded_readouts():
    config = SNNKConfig(ffn=FFNPart(num_features=6, layers="top-1"))
    batches = [inputs_for(tiny("bert"), tokens=5 + i) for i in range(5)]
    expected = get_snnk_model(tiny("bert"), config).eval()
    base = tiny("bert")
    accelerate.cpu_offload(base, CPU)
    model = get_snnk_model(base, config).eval()
    for one in (expected, model):
        calibrate(one, batches, progress=False)
    torch.testing.assert_close(logits(model), logits(expected))
    accelerate.cpu_offload(expected, CPU)
    with pytest.raises(ConfigError, match=r"intermediate.dense are offloaded.*Calibrate before dispatching"):
        calibrate(expected, batches, progress=False)


def test_an_offloaded_model_is_not_bundled():
    model = patched("houlsby")
    accelerate.cpu_offload(model, CPU)
    with pytest.raises(UnsupportedError, match=r"offloaded to memory or disk.*without device_map"):
        bundle(model)


# --- Linears of a bundle that others wrap or exchange ---------------------------------------------------------------


class Doubled(nn.Module):
    """Stands for whatever takes the place of a Linear: it has no weight, and computes something else."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.inner = [linear]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * self.inner[0](x)


@pytest.mark.parametrize("part", ["houlsby", "pfeiffer"])
def test_lora_on_the_adapters_of_a_bundle_is_not_ignored(part):
    small = bundle(patched(part))
    before = logits(small)
    targets = [name + ".linear" for name, m in small.named_modules() if isinstance(m, FoldedAdapter)]
    assert targets
    lora = peft.get_peft_model(small, LoraConfig(r=2, target_modules=targets, init_lora_weights=False)).eval()
    assert not torch.allclose(logits(lora), before, atol=1e-4)
    lora(**inputs_for(tiny("bert"))).logits.sum().backward()
    gradients = [p.grad for n, p in lora.named_parameters() if "lora_" in n]
    assert gradients
    assert all(gradient is not None and gradient.count_nonzero() for gradient in gradients)


@pytest.mark.filterwarnings("ignore")  # torch announces the end of its own quantization
@pytest.mark.parametrize("part", ["houlsby", "query_value", "ffn-drawn", "pooler"])
def test_linears_of_a_bundle_can_be_exchanged(part):
    small = bundle(patched(part))
    quantized = torch.ao.quantization.quantize_dynamic(copy.deepcopy(small), {nn.Linear}, dtype=torch.qint8)
    error = (logits(quantized) - logits(small)).abs().max() / logits(small).abs().max()
    assert 0 < error < 0.2
    exchanged = copy.deepcopy(small)
    for name, module in list(exchanged.named_modules()):
        if type(module) is nn.Linear:
            parent, _, leaf = name.rpartition(".")
            setattr(exchanged.get_submodule(parent), leaf, Doubled(module))
    assert torch.isfinite(logits(exchanged)).all()
    assert not torch.allclose(logits(exchanged), logits(small))


# --- empty adapters, to be filled by a loader -----------------------------------------------------------------------


def meta(model: nn.Module) -> list[str]:
    return [name for name, tensor in [*model.named_parameters(), *model.named_buffers()] if tensor.is_meta]


# What these two copy out of the base is there at once.
@pytest.mark.parametrize("part", [part for part in PARTS if part not in ("norms", "attention-joint")])
def test_low_cpu_mem_usage_makes_empty_tensors_that_a_state_dict_fills(part, tmp_path):
    config = SNNKConfig(**copy.deepcopy(PARTS[part]))
    given = trained(inject_adapter_in_model(copy.deepcopy(config), tiny("bert"))).eval()
    state = peft.get_peft_model_state_dict(given)
    empty = inject_adapter_in_model(copy.deepcopy(config), tiny("bert"), low_cpu_mem_usage=True).eval()
    trainable = [n for n, p in given.named_parameters() if p.requires_grad and "snnk_slots" in n]
    assert set(trainable) <= set(meta(empty))
    result = set_peft_model_state_dict(empty, state, low_cpu_mem_usage=True)
    assert not result.unexpected_keys
    assert not meta(empty)
    torch.testing.assert_close(logits(empty), logits(given))

    expected = patched(part)
    expected.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(tiny("bert"), tmp_path, low_cpu_mem_usage=True).eval()
    assert not meta(loaded)
    torch.testing.assert_close(logits(loaded), logits(expected))


@pytest.mark.parametrize("part", ["houlsby", "parallel", "query_value", "ffn"])
def test_an_empty_adapter_does_not_compute(part):
    empty = inject_adapter_in_model(SNNKConfig(**copy.deepcopy(PARTS[part])), tiny("bert"), low_cpu_mem_usage=True)
    with pytest.raises((ValueError, RuntimeError), match="meta"):
        logits(empty)


# === on the meta device ===============================================================================================


class NothingOnTheCPU(TorchDispatchMode):
    """Refuses every operation that makes a CPU tensor, or a Python number of a tensor."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._local_scalar_dense.default:
            raise AssertionError("a tensor was read as a number")
        out = func(*args, **(kwargs or {}))
        made = [leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor) and leaf.device.type != "meta"]
        assert not made, f"{func} made a tensor on {made[0].device}"
        return out


def passes(module: nn.Module, *inputs: torch.Tensor, **named: torch.Tensor) -> None:
    """Forward and backward; every trained tensor gets a gradient."""
    with NothingOnTheCPU():
        out = module(*inputs, **named)
        out = out if isinstance(out, torch.Tensor) else next(iter(out.values()))
        out.float().sum().backward()
    assert out.device.type == "meta"
    missing = [name for name, p in module.named_parameters() if p.requires_grad and p.grad is None]
    assert not missing, missing


@pytest.mark.filterwarnings("ignore::snnk_peft.errors.NumericalWarning")
@pytest.mark.parametrize(("component", "projection"), PAIRS)
def test_every_pair(component, projection):
    feature_map = pair(component, projection).to("meta")
    x = torch.empty(2, 3, 8, device="meta", requires_grad=True)
    passes(feature_map, x)
    if component != "arccos" or feature_map.component.params.get("order", 1):
        assert x.grad is not None
    with NothingOnTheCPU():
        assert feature_map.psi(x).dense().device.type == "meta"


@pytest.mark.parametrize("part", EVERY_PART)
def test_every_part_and_its_bundle(part):
    model = get_snnk_model(tiny("bert"), SNNKConfig(**EVERY_PART[part])).train()
    small = bundle(model)
    ids = torch.zeros(2, 7, dtype=torch.long, device="meta")
    passes(model.to("meta"), input_ids=ids)
    passes(small.requires_grad_(False).train().to("meta").requires_grad_(True), input_ids=ids)


@pytest.mark.parametrize("fields", [{}, {"near_field": 2}, {"projection": "gmm", "per_head": True}], ids=str)
def test_causal_attention(fields):
    special = {key: TOKENS[key] for key in ("pad_token_id", "bos_token_id", "eos_token_id")}
    llama = LlamaForCausalLM(LlamaConfig(**TEXT, **special))
    config = SNNKConfig(attention=AttentionPart(num_features=6, **fields), adapter=AdapterPart(num_features=4))
    passes(
        get_snnk_model(llama, config).train().to("meta"), input_ids=torch.zeros(2, 7, dtype=torch.long, device="meta")
    )


def test_the_guard_sees_what_it_should():
    x = torch.empty(3, device="meta")
    with NothingOnTheCPU(), pytest.raises(AssertionError, match="made a tensor on cpu"):
        x + torch.ones(3)
    with pytest.raises(AssertionError, match="made a tensor"), NothingOnTheCPU():
        torch.arange(3)


@pytest.mark.parametrize("autocast", [False, True])
def test_autocast_is_still_heeded_where_there_is_one(autocast):
    x, z, M = torch.randn(4, 8), torch.randn(4, 2), torch.randn(8, 2)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        out = residual_linear(x, z, M)
    assert out.dtype == torch.float32
    exact = x + z @ M.T
    assert torch.allclose(out, exact, atol=1e-6) != autocast
    torch.testing.assert_close(out, exact, rtol=0.05, atol=0.05)
