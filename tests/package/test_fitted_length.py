"""Behind the length that a far field was fitted to, a decoder's tokens see near keys and sinks alone: in every form."""

from __future__ import annotations

import logging
import warnings
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, BertConfig, BertModel, DynamicCache, LlamaConfig, LlamaForCausalLM

from snnk_peft import AttentionPart, SNNKConfig, bundle, calibrate, get_snnk_model
from snnk_peft.errors import ConfigError, UnsupportedError
from snnk_peft.layers.kernel_attention import KernelAttention
from snnk_peft.parts.attention.cache import RecurrentCache
from tests.fresh_process import run_python

FITTED, LONG, WIDTH, SINKS = 12, 20, 3, 1
JOINT = AttentionPart(
    "mixture", "centroids", num_features=4, near_field=WIDTH, near_field_normalisation="joint", sinks=SINKS
)
ALONE = AttentionPart("mixture", "centroids", num_features=4)


def llama() -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(vocab_size=90, intermediate_size=48, initializer_range=0.3, pad_token_id=0, **sizes)
    return LlamaForCausalLM(config).eval()


def texts(count: int = 4, length: int = FITTED) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [{"input_ids": torch.randint(3, 90, (4, length), generator=generator)} for _ in range(count)]


def calibrated(part: AttentionPart) -> Any:
    model = get_snnk_model(llama(), SNNKConfig(attention=part))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # tiny data
        report = calibrate(model, texts(), progress=False)
    assert f"at most {FITTED} tokens" in str(report)
    return model.eval()


@pytest.fixture(scope="module")
def joint() -> Any:
    return calibrated(JOINT)


def logits(model: Any, **inputs: Any) -> torch.Tensor:
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return model(**inputs).logits


def test_weights_behind_the_fitted_length_are_softmax_of_near_keys_and_sinks(joint):
    """Before it they are what they were."""
    kernel = next(module for module in joint.modules() if isinstance(module, KernelAttention))
    assert kernel.fitted_length == FITTED
    generator = torch.Generator().manual_seed(2)
    q, k = (torch.randn(2, heads, LONG, 8, generator=generator) for heads in (4, 2))
    counts = torch.ones(2, LONG, dtype=torch.bool)
    counts[1, :5] = False  # padding is no text
    with torch.no_grad():
        found = kernel.weights(q, k, counts, causal=True)
        kernel.fitted_length = None
        endless = kernel.weights(q, k, counts, causal=True)
        kernel.fitted_length = FITTED
    scores = q @ k.repeat_interleave(2, 1).mT / 8**0.5
    for row, first in ((0, 0), (1, 5)):
        for i in range(first, LONG):
            if i - first < FITTED:
                assert torch.equal(found[row, :, i], endless[row, :, i])
                continue
            seen = [j for j in range(first, i + 1) if i - j < WIDTH or j - first < SINKS]
            expected = torch.zeros(4, LONG)
            expected[:, seen] = scores[row, :, i, seen].softmax(-1)
            torch.testing.assert_close(found[row, :, i], expected)
            assert not torch.allclose(endless[row, :, i], expected, atol=1e-3)


@pytest.mark.parametrize("steps", [[LONG], [5, 9, 6], [1] * LONG], ids=["once", "pieces", "tokens"])
@pytest.mark.parametrize("cache", ["recurrent", "dynamic"])
def test_caches(joint, cache, steps):
    ids = texts(1, LONG)[0]["input_ids"]
    model = joint.get_base_model()
    kept = RecurrentCache(model) if cache == "recurrent" else DynamicCache(config=model.config)
    found = [logits(joint, input_ids=piece, past_key_values=kept) for piece in ids.split(steps, 1)]
    torch.testing.assert_close(torch.cat(found, 1), logits(joint, input_ids=ids), rtol=1e-3, atol=1e-4)


def test_padding_on_the_left_is_no_text(joint):
    ids = texts(1, LONG)[0]["input_ids"]
    padded = torch.cat((ids.new_zeros(4, 7), ids), 1)
    mask = (padded != 0).long()
    places = (mask.cumsum(-1) - 1).clamp_min(0)
    found = logits(joint, input_ids=padded, attention_mask=mask, position_ids=places)
    torch.testing.assert_close(found[:, 7:], logits(joint, input_ids=ids), rtol=1e-3, atol=1e-4)


def test_every_packed_document_begins_anew(joint):
    parts = [each["input_ids"][:1] for each in texts(2, 16)]
    places = torch.arange(16).repeat(2)[None]
    found = logits(joint, input_ids=torch.cat(parts, 1), position_ids=places, use_cache=False)
    alone = torch.cat([logits(joint, input_ids=part) for part in parts], 1)
    torch.testing.assert_close(found, alone, rtol=1e-3, atol=1e-4)


def test_folders_keep_it(joint, tmp_path, caplog):
    """Adapter, bundle, bundle in a process without the package; what an earlier version wrote has a note."""
    ids = texts(1, LONG)[0]["input_ids"]
    expected = logits(joint, input_ids=ids)
    joint.save_pretrained(tmp_path / "adapter")
    again = PeftModel.from_pretrained(llama(), tmp_path / "adapter").eval()
    torch.testing.assert_close(logits(again, input_ids=ids), expected)
    assert f"texts of at most {FITTED} tokens" in (tmp_path / "adapter" / "README.md").read_text()
    bundle(again).save_pretrained(tmp_path / "bundle")
    assert f"texts of at most {FITTED} tokens" in (tmp_path / "bundle" / "README.md").read_text()
    with caplog.at_level(logging.WARNING, "snnk_peft"):
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "bundle")
        torch.testing.assert_close(logits(loaded, input_ids=ids), expected, rtol=1e-4, atol=1e-4)
        assert "does not say how long" not in caplog.text
        config = loaded.config
        for spec in config.snnk_plan["modules"].values():
            spec.pop("fitted_length", None)
        old = type(loaded)(config)
        assert "does not say how long" in caplog.text
    old.load_state_dict(loaded.state_dict())
    assert not torch.allclose(logits(old.eval(), input_ids=ids), expected, atol=1e-2)
    torch.save({"ids": ids, "expected": expected}, tmp_path / "known.pt")
    code = f"""
import sys; sys.modules["snnk_peft"] = None
import torch
from transformers import AutoModelForCausalLM
known = torch.load({str(tmp_path / "known.pt")!r}, weights_only=True)
model = AutoModelForCausalLM.from_pretrained({str(tmp_path / "bundle")!r}, trust_remote_code=True).eval()
with torch.no_grad():
    torch.testing.assert_close(model(input_ids=known["ids"]).logits, known["expected"], rtol=1e-4, atol=1e-4)
"""
    run_python(["-c", code])


def test_generation_warns_once_and_goes_on(joint):
    ids = texts(1, FITTED - 2)[0]["input_ids"]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        made = joint.generate(input_ids=ids, max_new_tokens=8, do_sample=False)
    assert made.shape[1] == FITTED + 6
    told = [str(each.message) for each in caught if "linear attention was fitted" in str(each.message)]
    assert len(told) == 1
    assert f"at most {FITTED} tokens" in told[0]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        joint.generate(input_ids=ids, max_new_tokens=2, do_sample=False)


def test_without_a_near_field_longer_texts_are_refused():
    model = calibrated(ALONE)
    ids = texts(1, LONG)[0]["input_ids"]
    assert logits(model, input_ids=ids[:, :FITTED]).isfinite().all()
    for run in (lambda: model(input_ids=ids), lambda: bundle(model)(input_ids=ids)):
        with pytest.raises(UnsupportedError, match=rf"at most {FITTED} tokens.*This text has {LONG} tokens"):
            run()
    with pytest.raises(UnsupportedError, match=f"This text has {FITTED + 1} tokens"):
        model.generate(input_ids=ids[:, : FITTED - 2], max_new_tokens=8, do_sample=False)
    mask = torch.ones_like(ids)
    mask[:, : LONG - FITTED] = 0
    model(input_ids=ids, attention_mask=mask)  # padding is no text


def test_calibrating_again_on_longer_texts_moves_it():
    model = calibrated(ALONE)
    calibrate(model, texts(4, LONG), progress=False)
    assert logits(model, input_ids=texts(1, LONG)[0]["input_ids"]).isfinite().all()
    assert model.peft_config["default"].attention.fitted_length == LONG


def test_encoders_are_not_cut():
    """They see texts whole, and their positions end where their config says."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
    model = get_snnk_model(BertModel(BertConfig(vocab_size=90, **sizes)), SNNKConfig(attention=ALONE))
    calibrate(model, texts(), progress=False)
    assert model(input_ids=texts(1, LONG)[0]["input_ids"]).last_hidden_state.isfinite().all()


def test_bad_lengths_are_told():
    with pytest.raises(ConfigError, match="fitted_length is 0"):
        get_snnk_model(llama(), SNNKConfig(attention=AttentionPart("mixture", "centroids", fitted_length=0)))
