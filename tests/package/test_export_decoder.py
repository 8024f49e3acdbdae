"""A converted decoder with its state in ONNX: token by token equal to torch, from a loop that knows numpy alone."""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import numpy as np
import pytest
import torch

from snnk_peft import AttentionPart, SNNKConfig, bundle, export, get_snnk_model
from snnk_peft.errors import ConfigError, UnsupportedError
from tests.attention_models import causal_model
from tests.tiny_families import build
from tests.tiny_models import trained

ABSENT = [name for name in ("onnx", "onnxscript", "onnxruntime") if importlib.util.find_spec(name) is None]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(ABSENT), reason=f"pip install snnk-peft[onnx] ({', '.join(ABSENT)})"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]
JOINT: dict[str, Any] = {"near_field": 6, "near_field_normalisation": "joint", "sinks": 2, "num_features": 4}
FULL: dict[str, Any] = {"full_heads": [[0, 1]], "position_free": True}
KINDS: dict[str, dict[str, Any]] = {
    "features": {},
    "position-free": {"position_free": True},
    "no sinks": {"sinks": 0},
    "a full head": FULL,
    "a full head in 8 bits": {**FULL, "cache_bits": 8},
    "a full head in 4 bits": {**FULL, "cache_bits": 4},
}
TYPES = {"tensor(float)": np.float32, "tensor(bool)": bool, "tensor(int64)": np.int64, "tensor(uint8)": np.uint8}
TYPES |= {"tensor(float16)": np.float16}


def decoder(**options: Any) -> Any:
    part = AttentionPart(**(JOINT | options))
    model = get_snnk_model(causal_model("llama"), SNNKConfig(attention=part, modules_to_save=[]))
    return bundle(trained(model.eval())).eval()


def read(file: str, ids: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Logits of every token, by ONNX Runtime and numpy."""
    onnxruntime = pytest.importorskip("onnxruntime")
    session = onnxruntime.InferenceSession(file)
    past = {
        entry.name: np.zeros(
            [len(ids) if at == 0 else 0 if isinstance(n, str) else n for at, n in enumerate(entry.shape)],
            TYPES[entry.type],
        )
        for entry in session.get_inputs()
        if entry.name.startswith("past.")
    }
    found = []
    for place in range(ids.shape[1]):
        now = {"input_ids": ids[:, place : place + 1], "attention_mask": mask[:, place : place + 1]}
        outputs = dict(zip([entry.name for entry in session.get_outputs()], session.run(None, now | past), strict=True))
        past = {name: outputs[name.replace("past.", "present.", 1)] for name in past}
        found.append(outputs["logits"])
    return np.concatenate(found, 1)


@pytest.mark.parametrize("kind", KINDS)
def test_token_by_token(kind: str, tmp_path: Any) -> None:
    """256 tokens of three rows, two of which begin later."""
    model = decoder(**KINDS[kind])
    report = export(model, "onnx", tmp_path / "model.onnx", cache=True)
    assert os.listdir(tmp_path) == ["model.onnx"]
    assert len(report.parity) == 2
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(model.config.vocab_size, (3, 256), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, :5], mask[2, :90] = 0, 0
    found = torch.from_numpy(read(report.path, ids.numpy(), mask.numpy()))
    positions = (mask.cumsum(-1) - 1).clamp_min(0)
    with torch.no_grad():
        expected = model(input_ids=ids, attention_mask=mask, position_ids=positions).logits
    difference = (found - expected)[mask.bool()].abs()
    # A number between two codes may be rounded to either: the two libraries add up in different orders.
    rounds = "bits" in kind
    assert difference.max() < (0.05 if rounds else 1e-4) * expected.abs().max()
    assert difference.mean() < (1e-3 if rounds else 1e-5) * expected.abs().max()


def test_eight_bits(tmp_path: Any) -> None:
    model = decoder(**FULL)
    report = export(model, "onnx", tmp_path / "model.onnx", cache=True, int8=True)
    assert report.int8 is not None
    assert set(report.int8.milliseconds) == {"torch", "onnx", "int8"}
    ids = torch.randint(model.config.vocab_size, (1, 40), generator=torch.Generator().manual_seed(0))
    found = torch.from_numpy(read(report.path, ids.numpy(), np.ones((1, 40), np.int64)))
    with torch.no_grad():
        expected = model(input_ids=ids).logits
    error = (found - expected).norm() / expected.norm()
    assert 0 < error < 0.1


def test_what_has_no_such_state_is_refused(tmp_path: Any) -> None:
    part = AttentionPart(num_features=4, near_field=3)
    model = get_snnk_model(causal_model("llama"), SNNKConfig(attention=part, modules_to_save=[])).eval()
    with pytest.raises(UnsupportedError, match=r"state of constant size in every layer, and that of layers \[0, 1\]"):
        export(model, "onnx", tmp_path / "model.onnx", cache=True)
    with pytest.raises(ConfigError, match="cache is True and format"):
        export(model, "torch", tmp_path / "model.pt2", cache=True)
    with pytest.raises(UnsupportedError, match="linear attention"):
        export(causal_model("llama"), "onnx", tmp_path / "model.onnx", cache=True)
    part = AttentionPart(**JOINT)
    classifier = build("llama", "LlamaForSequenceClassification").eval()
    with pytest.raises(UnsupportedError, match="SequenceClassification answers once per text: leave cache out"):
        export(
            get_snnk_model(classifier, SNNKConfig(attention=part, modules_to_save=[])),
            "onnx",
            tmp_path / "a.onnx",
            cache=True,
        )
    assert not os.listdir(tmp_path)
