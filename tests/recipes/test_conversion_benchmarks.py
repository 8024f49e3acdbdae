"""Programs that convert whole models: from end to end on a random Llama, and the training that follows."""

from __future__ import annotations

import copy
import io
import json
import tarfile
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from tests.fresh_process import run_python
from tests.tiny_families import build


def test_narrower_ffn_blocks(root, tmp_path):
    """The program from end to end, on a Llama of two layers and twenty reviews."""
    words = [f"word{number}" for number in range(40)]
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2} | {word: 3 + number for number, word in enumerate(words)}
    core = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    core.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", unk_token="<unk>").save_pretrained(
        tmp_path / "model"
    )
    build("llama", "LlamaForCausalLM").save_pretrained(tmp_path / "model")
    with tarfile.open(tmp_path / "reviews.tar.gz", "w:gz") as archive:
        for number in range(20):
            chosen = torch.randint(40, (30,), generator=torch.Generator().manual_seed(number)).tolist()
            text = " ".join(words[index] for index in chosen).encode()
            member = tarfile.TarInfo(f"aclImdb/{('train', 'test')[number % 2]}/pos/{number}_1.txt")
            member.size = len(text)
            archive.addfile(member, io.BytesIO(text))
    output = tmp_path / "metrics.json"
    given = ["--model", str(tmp_path / "model"), "--data", str(tmp_path / "reviews.tar.gz"), "--output", str(output)]
    given += [
        "--units",
        "12",
        "--rules",
        "greedy",
        "leverage",
        "--tokens",
        "192",
        "--length",
        "8",
        "--test-tokens",
        "64",
        "--uptraining",
        "3",
    ]
    done = run_python([str(root / "recipes" / "benchmarks" / "convert_models.py"), "llama_ffn", *given])
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(output.read_text())
    names = [f"12 units, {rule}{rest}" for rule in ("greedy", "leverage") for rest in ("", ", 3 steps")]
    assert [row["model"] for row in found["rows"]] == ["original", *names]
    sizes = [row["parameters"] for row in found["rows"]]
    assert [sizes[0] - size for size in sizes] == [0, *[2 * 3 * 12 * 16] * 4]  # layers, matrices, units, width
    seconds = [row["conversion seconds"] for row in found["rows"]]
    assert seconds[2] > seconds[1]
    assert found["rows"][2]["perplexity"] != found["rows"][1]["perplexity"]
    assert all(20 < row["perplexity"] < 100 for row in found["rows"])
    assert all(len(report["slots"]) == 2 for report in found["calibration"].values())


def test_uptraining_brings_a_model_nearer_to_the_original(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a model that was disturbed: the divergence, by torch's own, falls; what is not trained stays."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "recipes" / "benchmarks"))
    from _conversions.uptraining import next_token_divergence, uptrain

    torch.manual_seed(0)
    original = build("llama", "LlamaForCausalLM").eval()
    original.model.norm.weight.data.mul_(20.0)  # distributions that are far from uniform
    student = copy.deepcopy(original)
    with torch.no_grad():
        for parameter in student.model.layers.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    ids = torch.randint(5, original.config.vocab_size, (40, 2, 12))

    def distance() -> torch.Tensor:
        with torch.no_grad():
            wanted, given = (torch.distributions.Categorical(logits=m(ids[0]).logits) for m in (original, student))
            return torch.distributions.kl_divergence(wanted, given).mean()

    before, embedded = distance(), student.get_input_embeddings().weight.clone()
    torch.testing.assert_close(next_token_divergence(original, student, ids[0]), before)
    uptrain(original, student, list(student.model.layers.parameters()), list(ids), 1e-2)
    assert distance() < 0.7 * before
    assert torch.equal(student.get_input_embeddings().weight, embedded)
    assert all(parameter.requires_grad for parameter in student.parameters())


def test_linear_attention_of_centroids(tmp_path: Path):
    """On a random Llama and a stand-in of IMDb's archive."""
    pytest.importorskip("rich", reason="pip install snnk-peft[recipes]")
    recipes = Path(__file__).resolve().parents[2] / "recipes"
    special = ["<pad>", "<s>", "</s>"]
    words = {word: number for number, word in enumerate([*special, *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    by_bytes = Tokenizer(models.BPE(vocab=words, merges=[]))
    by_bytes.pre_tokenizer, by_bytes.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    names = dict(zip(("pad_token", "bos_token", "eos_token"), special, strict=True))
    PreTrainedTokenizerFast(tokenizer_object=by_bytes, **names).save_pretrained(tmp_path / "model")
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    tokens = {"vocab_size": 300, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    config = LlamaConfig(num_key_value_heads=2, initializer_range=0.2, **sizes, **tokens)
    LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    with tarfile.open(tmp_path / "imdb.tar.gz", "w:gz") as archive:
        for split in ("train", "test"):
            for number in range(4):
                review = tmp_path / f"{number}_7.txt"
                review.write_text("a film about the sea, and what comes of it. <br />" * 20, encoding="utf-8")
                archive.add(review, f"aclImdb/{split}/{'pos' if number % 2 else 'neg'}/{review.name}")
    output = tmp_path / "metrics.json"
    given = {
        "model": tmp_path / "model",
        "data": tmp_path / "imdb.tar.gz",
        "window": 6,
        "sinks": 2,
        "features": 6,
        "tokens": 160,
        "length": 32,
        "steps": 2,
        "uptraining": 3,
        "test-tokens": 96,
        "written": 4,
        "repetitions": 1,
        "output": output,
    }
    words = [word for name, value in given.items() for word in (f"--{name}", str(value))]
    words += ["--lengths", "32", "48", "--behind", "16", "64", "--autocast"]
    done = run_python([str(recipes / "benchmarks" / "convert_models.py"), "llama", *words])
    assert done.returncode == 0, done.stderr
    found = json.loads(output.read_text())
    near = "window 6, 2 sinks"
    names = ["original", f"{near}, no far field", f"{near}, 6 features", f"{near}, 6 features, 3 steps"]
    assert [row["model"] for row in found["rows"]] == names
    assert found["rows"][3]["perplexity at 32"] != found["rows"][2]["perplexity at 32"]
    assert found["rows"][3]["seconds of conversion"] > found["rows"][2]["seconds of conversion"] > 0
    assert all(row["perplexity at 32"] > 1 for row in found["rows"])
    first, second, *behind = [row["cache bytes"] for row in found["decoding"]]
    assert behind[0] > 2 * first
    assert behind[1] == second
    assert len(found["calibration"]["slots"]) == 2
    assert set(found["written"]) == {"original", "converted"}
