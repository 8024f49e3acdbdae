"""convert: a model and examples in, a plain model and a report out; the given model stays as it was."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForSequenceClassification, PreTrainedTokenizerFast

from snnk_peft import FFNPart, convert
from snnk_peft.errors import ConfigError
from tests.tiny_models import same, tiny

WORDS = ["[PAD]", "[UNK]", *(f"w{number}" for number in range(60))]
PARTS = [FFNPart(num_features=12)]


def tokenizer() -> Any:
    """One token per word, by its place in the list."""
    bare = Tokenizer(models.WordLevel({word: place for place, word in enumerate(WORDS)}, unk_token="[UNK]"))
    bare.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=bare, pad_token="[PAD]", unk_token="[UNK]", model_max_length=16)


def texts(count: int = 48) -> list[str]:
    generator = torch.Generator().manual_seed(5)
    lengths = torch.randint(4, 12, (count,), generator=generator).tolist()
    return [
        " ".join(f"w{word}" for word in torch.randint(60, (length,), generator=generator).tolist())
        for length in lengths
    ]


def converted(model: Any, data: Any, **given: Any) -> Any:
    fixed = {"parts": PARTS, "progress": False, "tokenizer": tokenizer(), "steps": 2}
    return convert(model, data, None, **{**fixed, **given})


def test_texts_in_a_plain_model_out(tmp_path: Path) -> None:
    """From a folder, whose tokenizer is found; what is saved loads with transformers and answers the same."""
    tiny("bert").save_pretrained(tmp_path / "in")
    tokenizer().save_pretrained(tmp_path / "in")
    done = convert(str(tmp_path / "in"), texts(), None, parts=PARTS, steps=2, progress=False)
    assert done.report.examples == {"fitted": 41, "held_out": 7}
    done.save_pretrained(tmp_path / "out")
    again = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out")
    inputs = tokenizer()(texts(5), padding=True, return_tensors="pt", return_token_type_ids=False)
    with torch.no_grad():
        assert same(again(**inputs).logits, done.model(**inputs).logits)
    stored = json.loads((tmp_path / "out/conversion.json").read_text())
    assert stored["models"]["converted"]["agreement"] == done.report.figures["agreement"]
    assert (tmp_path / "out/conversion.png").read_bytes().startswith(b"\x89PNG")
    assert "import snnk_peft" in (tmp_path / "out/README.md").read_text()


def test_no_tokenizer_anywhere() -> None:
    with pytest.raises(ConfigError, match=r"AutoTokenizer.from_pretrained"):
        convert(tiny("bert"), texts(), None, parts=PARTS, steps=2, progress=False)


def test_the_given_model_stays_as_it_was() -> None:
    model = tiny("bert").train()
    before, state = copy.deepcopy(model.state_dict()), torch.random.get_rng_state()
    converted(model, texts())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert model.training
    assert torch.equal(torch.random.get_rng_state(), state)
