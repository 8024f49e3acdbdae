"""Layouts that several architectures share; a family says in which fields it differs.

BERT      post-norm encoder: query, key and value apart, an expansion and an activation, dropout before each sum
ROBERTA   BERT layers; the head is dense + tanh (a function) + out_proj on the first token
LLAMA     causal pre-norm decoder: query, key and value apart, an FFN that multiplies two expansions
VIT       pre-norm encoder of images: the layers stand in the encoder itself
DINO      pre-norm encoder of images with a learned scale before each sum; [CLS] and the mean of the patches are read
CLIP      pre-norm encoder of one of two towers: the layers stand in `encoder`
"""

from __future__ import annotations

import dataclasses

from snnk_peft.families.base import ModelFamily

BERT = ModelFamily(
    name="bert",
    layers="{base}.encoder.layer",
    attention="attention.self",
    query="attention.self.query",
    value="attention.self.value",
    key="attention.self.key",
    attention_out="attention.output.dense",
    attention_adapter="attention.output.dropout",
    ffn_in="intermediate.dense",
    activation="intermediate.intermediate_act_fn",
    ffn_out="output.dense",
    ffn_adapter="output.dropout",
    ffn_norm="attention.output.LayerNorm",
    last_norm="output.LayerNorm",
    pooler="{base}.pooler.dense",
    pooler_activation="{base}.pooler.activation",
    classifier="classifier",
    classifier_of_pooler="classifier",
)

ROBERTA = dataclasses.replace(
    BERT,
    name="roberta",
    pooler="classifier.dense",
    pooler_activation=None,
    classifier_of_pooler=None,
    head_output="classifier.out_proj",
)

LLAMA = ModelFamily(
    name="llama",
    layers="{base}.layers",
    attention="self_attn",
    query="self_attn.q_proj",
    value="self_attn.v_proj",
    attention_out="self_attn.o_proj",
    attention_adapter="self_attn.o_proj",
    ffn_in="mlp.gate_proj",
    activation="mlp.act_fn",
    ffn_out="mlp.down_proj",
    ffn_adapter="mlp.down_proj",
    ffn_norm=None,
    classifier="score",
    causal=True,
    gated=True,
    ffn_up="mlp.up_proj",
)

VIT = ModelFamily(
    name="vit",
    layers="{base}.layers",
    attention="attention",
    query="attention.q_proj",
    value="attention.v_proj",
    key="attention.k_proj",
    attention_out="attention.o_proj",
    attention_adapter="attention.o_proj",
    ffn_in="mlp.fc1",
    activation="mlp.activation_fn",
    ffn_out="mlp.fc2",
    ffn_adapter="mlp.fc2",
    ffn_norm="layernorm_after",
    last_norm="{base}.layernorm",
    pooler="{base}.pooler.dense",
    pooler_activation="{base}.pooler.activation",
    pooled_heads=("classifier",),
    classifier="classifier",
)

DINO = dataclasses.replace(
    VIT,
    name="dinov2",
    layers="{base}.encoder.layer",
    attention_adapter="layer_scale1",
    ffn_adapter="layer_scale2",
    ffn_norm="norm2",
    last_norm=None,
    pooler=None,
    pooler_activation=None,
    expects={"use_swiglu_ffn": False},
)

CLIP = ModelFamily(
    name="clip_vision_model",
    layers="{base}.encoder.layers",
    attention="self_attn",
    query="self_attn.q_proj",
    value="self_attn.v_proj",
    key="self_attn.k_proj",
    attention_out="self_attn.out_proj",
    attention_adapter="self_attn.out_proj",
    ffn_in="mlp.fc1",
    activation="mlp.activation_fn",
    ffn_out="mlp.fc2",
    ffn_adapter="mlp.fc2",
    ffn_norm="layer_norm2",
    classifier=None,
)
