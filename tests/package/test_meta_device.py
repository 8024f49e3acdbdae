"""Forward and backward passes on the meta device, which stands in for a GPU: no tensor is made on the CPU, none is
read by the CPU (`.item()`), which a GPU would wait for."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import LlamaConfig, LlamaForCausalLM

from snnk_peft import AdapterPart, AttentionPart, SNNKConfig, bundle, get_snnk_model
from snnk_peft.functional.adapter_sum import residual_linear
from tests.every_part import PAIRS, PARTS, pair
from tests.tiny_models import TEXT, TOKENS, tiny


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


@pytest.mark.parametrize("part", PARTS)
def test_every_part_and_its_bundle(part):
    model = get_snnk_model(tiny("bert"), SNNKConfig(**PARTS[part])).train()
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
