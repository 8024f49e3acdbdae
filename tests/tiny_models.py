"""Tiny random transformers models of every family, and small inputs for them; shared by several test files."""

from __future__ import annotations

from typing import Any

import torch
import transformers

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2}
TEXT = {"vocab_size": 100, "max_position_embeddings": 40, **SIZES}
IMAGE = {"image_size": 8, "patch_size": 4, **SIZES}
DISTIL = {"vocab_size": 100, "max_position_embeddings": 40, "dim": 32, "n_layers": 2, "n_heads": 2, "hidden_dim": 64}
# Layers 0 and 3 see all tokens, 1 and 2 the two neighbours on each side.
MODERN = {**TEXT, **TOKENS, "num_hidden_layers": 4, "local_attention": 4}

# Family -> (config class, its arguments, sequence or image classifier).
CLASSIFIERS: dict[str, tuple[str, dict[str, Any], str]] = {
    "bert": ("BertConfig", TEXT, "BertForSequenceClassification"),
    "deit": ("DeiTConfig", IMAGE, "DeiTForImageClassification"),
    "distilbert": ("DistilBertConfig", DISTIL, "DistilBertForSequenceClassification"),
    "electra": ("ElectraConfig", {"embedding_size": 16, **TEXT}, "ElectraForSequenceClassification"),
    "modernbert": ("ModernBertConfig", MODERN, "ModernBertForSequenceClassification"),
    "roberta": ("RobertaConfig", TEXT, "RobertaForSequenceClassification"),
    "vit": ("ViTConfig", IMAGE, "ViTForImageClassification"),
    "xlm-roberta": ("XLMRobertaConfig", TEXT, "XLMRobertaForSequenceClassification"),
}


def tiny(family: str, model_class: str | None = None, **changes: Any) -> Any:
    """A tiny random model in eval mode; `model_class` other than the classifier, `changes` to the config."""
    config_class, sizes, classifier = CLASSIFIERS[family]
    config = getattr(transformers, config_class)(**{**sizes, **changes})
    torch.manual_seed(0)
    return getattr(transformers, model_class or classifier)(config).eval()


def inputs_for(model: Any, batch: int = 3, tokens: int = 7, seed: int = 1) -> dict[str, torch.Tensor]:
    """Random inputs, the same every time; the last example of a text batch is padded."""
    generator = torch.Generator().manual_seed(seed)
    if model.main_input_name == "pixel_values":
        return {"pixel_values": torch.randn(batch, 3, 8, 8, generator=generator)}
    mask = torch.ones(batch, tokens, dtype=torch.long)
    mask[-1, tokens // 2 :] = 0
    words = min(100, model.config.vocab_size)
    return {"input_ids": torch.randint(3, words, (batch, tokens), generator=generator), "attention_mask": mask}


def half_padded(
    count: int = 10, size: int = 8, length: int = 12, words: tuple[int, int] = (1, 200), seed: int = 1
) -> list[dict[str, torch.Tensor]]:
    """Batches of texts, every second of which ends after half of its length."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for _ in range(count):
        mask = torch.ones(size, length, dtype=torch.long)
        mask[::2, length // 2 :] = 0
        made.append({"input_ids": torch.randint(*words, (size, length), generator=generator), "attention_mask": mask})
    return made


def odd_or_even(count: int = 6) -> list[dict[str, torch.Tensor]]:
    """Batches of texts without padding, labelled by their first token."""
    texts = torch.randint(3, 100, (count, 4, 9), generator=torch.Generator().manual_seed(3))
    return [{"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids[:, 0] % 2} for ids in texts]


@torch.no_grad()
def logits(model: Any, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """What a model gives first, in eval mode."""
    return model.eval()(**inputs)[0]


def far_from_linear(**changes: Any) -> Any:
    """A BERT with weights so large that its FFN blocks are far from linear, and what is left out of it shows."""
    return tiny("bert", **{"vocab_size": 200, "initializer_range": 0.2, **changes})


def trained(model: Any, std: float = 0.3) -> Any:
    """The model with every trainable parameter set to random numbers, as if it had been trained."""
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)
    return model


def same(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Equal outputs of equal weights. Loaded weights are aligned differently in memory, which picks other kernels in
    the matrix library: the last bits may differ. Weights that must be equal are compared with `torch.equal`."""
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    return True
