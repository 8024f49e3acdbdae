"""A bundle's code file in a process that has the package: neither takes the other's attention function away."""

from __future__ import annotations

import copy

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.dynamic_module_utils import get_class_from_dynamic_module

from snnk_peft import bundle
from snnk_peft.attention import NAME, RecurrentCache, kernel_attention_forward, padding_mask
from tests.attention_models import causal_model, left_padded, patched
from tests.tiny_models import same


def test_code_file_and_package_side_by_side(tmp_path):
    model = patched(causal_model("llama"), num_features=16)
    inputs = left_padded()
    expected = model(**inputs).logits
    small = bundle(copy.deepcopy(model))
    small.save_pretrained(tmp_path)
    cls = get_class_from_dynamic_module("modeling_snnk_bundle.SnnkLlamaForCausalLM", str(tmp_path))
    assert cls.__module__ != type(small).__module__
    remote = cls.from_pretrained(tmp_path)
    assert AttentionInterface()[NAME] is kernel_attention_forward
    assert AttentionMaskInterface()[NAME] is padding_mask
    own = AttentionInterface()[remote.config._attn_implementation]
    assert own.__module__ == cls.__module__ != kernel_attention_forward.__module__
    for each in (model, small, remote):
        torch.testing.assert_close(each(**inputs).logits, expected)
    text = small.generate(**inputs, max_new_tokens=6, do_sample=False)
    for cache in ({}, {"past_key_values": RecurrentCache(remote)}):
        assert same(remote.generate(**inputs, **cache, max_new_tokens=6, do_sample=False), text)
