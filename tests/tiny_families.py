"""Tiny random models of every family and every head of transformers, and inputs for them.

A family that registers itself is tested once it has an entry here; `test_families.py` fails where one is missing.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from snnk_peft.bundling.classes import AUTO_CLASSES

SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
TEXT = {"vocab_size": 50, "max_position_embeddings": 24, **SIZES, **TOKENS}
GROUPED = {**TEXT, "num_key_value_heads": 1, "head_dim": 8}
IMAGE = {"image_size": 8, "patch_size": 4, **SIZES}
TOWERS = {"text_config": TEXT, "vision_config": IMAGE}
DISTIL = {"dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 24}
GPT2 = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 24}
OPT = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 16, "ffn_dim": 24, "word_embed_proj_dim": 16}
WHISPER = {
    "d_model": 16,
    "num_mel_bins": 4,
    "max_source_positions": 6,
    "max_target_positions": 6,
    "classifier_proj_size": 8,
    **{
        f"{side}_{what}": size
        for side in ("encoder", "decoder")
        for what, size in (("layers", 2), ("attention_heads", 2), ("ffn_dim", 24))
    },
}
# Segmentation reads four layers.
BEIT = {"num_hidden_layers": 4, "out_indices": [1, 2, 3, 4], "pool_scales": [1]}
IDS = {"vocab_size": 50, **TOKENS}

# Family -> arguments of its config. Layers that attend to a band are tested in test_attention.py.
CONFIGS: dict[str, dict[str, Any]] = {
    "albert": {"embedding_size": 8, **TEXT},
    "beit": {**IMAGE, "use_relative_position_bias": True, **BEIT},
    "bert": TEXT,
    "camembert": TEXT,
    "clip": TOWERS,
    "clip_text_model": TEXT,
    "clip_vision_model": IMAGE,
    "data2vec-vision": {**IMAGE, **BEIT},
    "deberta-v2": {**TEXT, "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 8},
    "deit": IMAGE,
    "dinov2": {**IMAGE, "mlp_ratio": 2},
    "dinov2_with_registers": {**IMAGE, "mlp_ratio": 2, "num_register_tokens": 2},
    "distilbert": {**IDS, **DISTIL, "max_position_embeddings": 24},
    "electra": {"embedding_size": 8, **TEXT},
    "esm": {**TEXT, "mask_token_id": 3, "position_embedding_type": "rotary", "token_dropout": True},
    "gemma": GROUPED,
    "gpt2": {**IDS, **GPT2},
    "gpt_neox": TEXT,
    "llama": GROUPED,
    "mistral": {**GROUPED, "sliding_window": None},
    "modernbert": {**TEXT, "local_attention": 4, "cls_token_id": 1, "sep_token_id": 2},
    "mpnet": TEXT,
    "olmo2": GROUPED,
    "opt": {**IDS, **OPT, "max_position_embeddings": 24},
    "phi3": {**GROUPED},
    "qwen2": GROUPED,
    "qwen3": GROUPED,
    "roberta": TEXT,
    "siglip": TOWERS,
    "siglip_text_model": {**TEXT, "projection_size": 16},
    "siglip_vision_model": IMAGE,
    "vit": IMAGE,
    "vit_msn": IMAGE,
    "whisper": {**IDS, **WHISPER},
    "xlm-roberta": TEXT,
}

# Classes that no Auto class of transformers leads to.
ELSEWHERE = {
    "clip_text_model": ["CLIPTextModelWithProjection"],
    "clip_vision_model": ["CLIPVisionModelWithProjection"],
    "siglip_text_model": ["SiglipTextModel"],
    "whisper": ["WhisperEncoder"],
}


def heads(family: str) -> dict[str, str]:
    """Every model class that an Auto class gives for the family's config -> the name of that Auto class.

    By the names in transformers' tables, which imports no model. AutoModelForDecision is left out: what it gives for a
    Qwen2Config is a model of another config class.
    """
    found: dict[str, str] = {}
    for auto in AUTO_CLASSES:
        names = auto._model_mapping._model_mapping.get(family, ())
        for name in names if isinstance(names, (tuple, list)) else (names,):
            if auto.__name__ != "AutoModelForDecision":
                found.setdefault(name, auto.__name__)
    return found | dict.fromkeys(ELSEWHERE.get(family, ()), "AutoModel")


def main_head(family: str) -> str:
    """A classifier, or a head with a projection, or what there is."""
    kinds = ("SequenceClassification", "ImageClassification", "AudioClassification", "WithProjection", "Model")
    return next(name for kind in kinds for name in heads(family) if name.endswith(kind))


def config_for(family: str, **changes: Any) -> Any:
    return CONFIG_MAPPING[family](**{**CONFIGS[family], **changes})


def build(family: str, model_class: str, **changes: Any) -> Any:
    """A tiny random model in eval mode."""
    torch.manual_seed(0)
    config = config_for(family, **changes)
    home = import_module(type(config).__module__.replace(".configuration_", ".modeling_"))
    return getattr(home, model_class)(config).eval()
