"""A tiny BERT and sentences for the peers in `convert_models.py curve`, and where its modules are."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import BertConfig, BertForSequenceClassification

BENCHMARKS = Path(__file__).resolve().parent.parent / "recipes/benchmarks"
LAYER = "bert.encoder.layer.0"


def modules(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The modules of the peers, as the program sees them."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    names = ("blocks", "distilling", "fisher_pruning", "modegpt")
    return SimpleNamespace(**{name: importlib.import_module(f"_peers.{name}") for name in names})


def teacher(seed: int = 0) -> BertForSequenceClassification:
    """Tiny, with weights large enough for attention to differ between tokens, and biases."""
    torch.manual_seed(seed)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 24}
    model = BertForSequenceClassification(BertConfig(vocab_size=50, max_position_embeddings=16, **sizes)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "LayerNorm" not in name:
                parameter.normal_(0, 0.4)
    return model


def sentences(count: int = 4, seed: int = 0) -> list[dict[str, torch.Tensor]]:
    """Batches of six padded sentences of up to nine tokens, with labels."""
    generator = torch.Generator().manual_seed(seed)
    batches = []
    for _ in range(count):
        lengths = torch.randint(3, 10, (6, 1), generator=generator)
        mask = (torch.arange(9) < lengths).long()
        ids = torch.randint(1, 50, (6, 9), generator=generator) * mask
        batches.append(
            {"input_ids": ids, "attention_mask": mask, "labels": torch.randint(2, (6,), generator=generator)}
        )
    return batches


def logits(model, batches):
    with torch.no_grad():
        return torch.cat([model(b["input_ids"], b["attention_mask"]).logits for b in batches])


def seen_by(model, path, batches):
    """Real tokens that reach a module, (tokens, dim), fp64."""
    found = []
    module = model.get_submodule(path)
    handle = module.register_forward_pre_hook(lambda _, given: found.append(given[0]))
    logits(model, batches)
    handle.remove()
    real = [b["attention_mask"].bool() for b in batches]
    return torch.cat([x[mask] for x, mask in zip(found, real, strict=True)]).double()
