"""A tiny pretrained BERT, stand-ins for GLUE files, and the settings of small runs: what tests of the recipes share."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import yaml
from data_files import write_task
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
    BertModel,
    BertTokenizerFast,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from snnk_peft.errors import ConfigError

RECIPES = Path(__file__).resolve().parent.parent / "recipes"
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}


def program_file(name: str) -> Path:
    """The file of a recipe, or of a program of the papers."""
    places = (RECIPES, RECIPES / "papers", RECIPES / "papers/programs")
    return next(file for place in places if (file := place / f"{name}.py").is_file())


def recipe(name: str) -> ModuleType:
    """A recipe, or a program of the papers, by name, imported anew."""
    spec = importlib.util.spec_from_file_location(f"recipe_{name}", program_file(name))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def write_world(folder: Path, positions: int = 512, pieces: Sequence[str] = ()) -> Path:
    """`bert/` (random, with a tokenizer; `pieces` join its vocabulary) and `glue/` (RTE) below `folder`."""
    write_task(folder / "glue", "rte", n_train=40, n_dev=10)
    text = (folder / "glue/RTE/train.tsv").read_text().lower().split()
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *sorted({word.strip('".') for word in text} - {""}), "."]
    words += [piece for piece in pieces if piece not in words]
    (folder / "vocab.txt").write_text("\n".join(words) + "\n")
    torch.manual_seed(0)
    BertModel(BertConfig(vocab_size=len(words), max_position_embeddings=positions, **SIZES)).save_pretrained(
        folder / "bert"
    )
    BertTokenizerFast(str(folder / "vocab.txt")).save_pretrained(folder / "bert")
    return folder


def write_decoder(folder: Path, positions: int) -> None:
    """A random Llama of two layers and two key heads, and its tokenizer, for which each byte is a token."""
    special = ["<pad>", "<s>", "</s>"]
    words = {word: number for number, word in enumerate([*special, *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    by_bytes = Tokenizer(models.BPE(vocab=words, merges=[]))
    by_bytes.pre_tokenizer, by_bytes.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    names = dict(zip(("pad_token", "bos_token", "eos_token"), special, strict=True))
    PreTrainedTokenizerFast(tokenizer_object=by_bytes, **names).save_pretrained(folder)
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    tokens = {"vocab_size": 300, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    config = LlamaConfig(
        num_key_value_heads=2, initializer_range=0.2, max_position_embeddings=positions, **sizes, **tokens
    )
    LlamaForCausalLM(config).save_pretrained(folder)


def write_settings(file: Path, model: str, data: str, output: str, method: str = "full") -> str:
    """A YAML file of a small run (paths as given); returns its name."""
    content = {
        "task": "rte",
        "model": {"name_or_path": model},
        "data": {"dir": data},
        "method": {"name": method, "adapter": {"num_features": 4}},
        "train": {"epochs": 2, "batch_size": 8, "log_every": 2, "save_every_steps": 2},
        "output": {"dir": output, "tensorboard": False, "save_model": False},
    }
    file.write_text(yaml.safe_dump(content))
    return file.name


def last_weights(run: Path) -> dict[str, torch.Tensor]:
    """The model in the newest checkpoint of a run."""
    return load_file(max((run / "checkpoints").glob("step-*")) / "model.safetensors")


def same_tensors(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    """Equal bit for bit."""
    return first.keys() == second.keys() and all(torch.equal(value, second[name]) for name, value in first.items())


def scored(folder: Path, *arguments: str) -> dict[str, Any]:
    """What score.py reports of a run, or of a saved model."""
    import score  # a program, which needs the extra

    assert score.main([str(folder), *arguments]) == 0
    name = "evaluation" if (folder / "config.yaml").is_file() else "metrics"
    return json.loads((folder / f"{name}.json").read_text())


def faults_of(call: Callable[[], Any]) -> list[str]:
    """The faults of the ConfigError that a call raises."""
    with pytest.raises(ConfigError) as caught:
        call()
    return caught.value.faults


class InterruptedRun(Exception):
    """The end of a process that could not say anything, for the process that tests it."""


def die() -> None:
    """What `at_step` lets happen: a process that is gone."""
    raise InterruptedRun


def stop() -> None:
    """What `at_step` lets happen: the system asks the process to end."""
    os.kill(os.getpid(), signal.SIGTERM)


def at_step(patched: pytest.MonkeyPatch, step: int, happens: Callable[[], None]) -> None:
    """`happens()` while optimizer step `step` (from 1) runs, of any program."""
    from snnk_cli import training  # which needs the extra

    train_step, done = training.train_step, iter(range(1, sys.maxsize))

    def stepping(*arguments: Any) -> torch.Tensor:
        values = train_step(*arguments)
        if next(done) == step:
            happens()
        return values

    patched.setattr(training, "train_step", stepping)


def reset_accelerate() -> None:
    """Forget the one state per process that accelerate keeps; each run of a recipe normally has its own."""
    if "accelerate.state" in sys.modules:
        sys.modules["accelerate.state"].AcceleratorState._reset_state(reset_partial_state=True)


def save_classifier(target: Path, tokenizer: Path, task: Any, **config: Any) -> None:
    """A random classifier with lively features."""
    reader = AutoTokenizer.from_pretrained(tokenizer)
    torch.manual_seed(1)
    names = {} if task.id2label is None else {"id2label": task.id2label, "label2id": task.label2id}
    known = {"vocab_size": len(reader), "num_labels": task.num_labels, "problem_type": task.problem_type, **names}
    model = BertForSequenceClassification(BertConfig(**SIZES, initializer_range=0.25, **known, **config))
    model.save_pretrained(target)
    reader.save_pretrained(target)
