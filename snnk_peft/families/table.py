"""The architectures of the package, one entry each; most differ from an earlier one in a few fields.

BERT      post-norm encoder: separate query, key and value, an expansion and an activation, dropout before each sum
ROBERTA   BERT layers; the head is dense + tanh (a function) + out_proj on the first token
LLAMA     causal pre-norm decoder: separate query, key and value, an FFN that multiplies two expansions
VIT       pre-norm image encoder: the layers are in the encoder itself
DINO      pre-norm image encoder with a learned scale before each sum; [CLS] and the mean of the patches are read
CLIP      pre-norm encoder of one of two towers: the layers are in `encoder`

Your own architecture needs no entry here: `register_family` adds it from anywhere.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from snnk_peft.families.base import FAMILIES, ModelFamily


def ours(family: ModelFamily) -> ModelFamily:
    """Register a family that users cannot replace."""
    FAMILIES.register(family.name, family)
    return family


def add(name: str, like: ModelFamily, **differences: Any) -> ModelFamily:
    """Register an architecture that differs from another one in these fields."""
    return ours(dataclasses.replace(like, name=name, **differences))


# --- text encoders ----------------------------------------------------------------------------------------------------

# Pooler = dense + tanh on [CLS], then dropout and the classifier.
BERT = ours(
    ModelFamily(
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
)

# The "pooler" is classifier.dense, followed by torch.tanh called inline.
ROBERTA = add(
    "roberta",
    BERT,
    pooler="classifier.dense",
    pooler_activation=None,
    classifier_of_pooler=None,
    head_output="classifier.out_proj",
)
add("camembert", ROBERTA)
add("xlm-roberta", ROBERTA)

# ESM-2, for proteins: BERT's modules in pre-norm order. The FFN calls GELU inline, so it cannot be replaced.
add("esm", ROBERTA, key=None, activation=None, ffn_norm=None, last_norm=None)

# A bias per pair of positions, so attention remains softmax; the head is RoBERTa's.
add(
    "mpnet",
    ROBERTA,
    attention="attention.attn",
    query="attention.attn.q",
    value="attention.attn.v",
    key=None,
    attention_out="attention.attn.o",
    attention_adapter="attention.dropout",
    ffn_norm="attention.LayerNorm",
)

# The head is dense + GELU module + out_proj on [CLS].
add(
    "electra",
    BERT,
    pooler="classifier.dense",
    pooler_activation="classifier.activation",
    head_output="classifier.out_proj",
    classifier_of_pooler="classifier.out_proj",
)

# DeBERTa-v2 and v3: disentangled attention, which remains softmax; the pooler calls its GELU inline. The query
# projection also projects the relative positions, so an adapter parallel to it acts on both.
add(
    "deberta-v2",
    BERT,
    query="attention.self.query_proj",
    value="attention.self.value_proj",
    key=None,
    pooler="pooler.dense",
    pooler_activation=None,
    classifier_of_pooler=None,
)

# All layers of a group share one set of weights. One entry of "layers" is one set: `layers="all"` is every group
# (most checkpoints have one), and a slot in it acts in each of its runs. The FFN's dropout is never called.
ours(
    ModelFamily(
        name="albert",
        layers="{base}.encoder.albert_layer_groups.*.albert_layers",
        attention="attention",
        query="attention.query",
        value="attention.value",
        key="attention.key",
        attention_out="attention.dense",
        attention_adapter="attention.output_dropout",
        ffn_in="ffn",
        activation="activation",
        ffn_out="ffn_output",
        ffn_adapter="ffn_output",
        ffn_norm="attention.LayerNorm",
        last_norm="full_layer_layer_norm",
        pooler="{base}.pooler",
        pooler_activation="{base}.pooler_activation",
        classifier="classifier",
        classifier_of_pooler="classifier",
    )
)

# The "pooler" is pre_classifier, followed by an inline ReLU.
ours(
    ModelFamily(
        name="distilbert",
        layers="{base}.transformer.layer",
        attention="attention",
        query="attention.q_lin",
        value="attention.v_lin",
        key="attention.k_lin",
        attention_out="attention.out_lin",
        attention_adapter="attention.out_lin",
        ffn_in="ffn.lin1",
        activation="ffn.activation",
        ffn_out="ffn.lin2",
        ffn_adapter="ffn.dropout",
        ffn_norm="sa_layer_norm",
        last_norm="output_layer_norm",
        pooler="pre_classifier",
        classifier="classifier",
    )
)

# Pre-norm, rotary positions. Two of three layers attend only to a band of neighbours, and `layers="all"` leaves them
# unchanged. The FFN is gated (GeGLU); the "pooler" is head.dense, followed by a LayerNorm.
ours(
    ModelFamily(
        name="modernbert",
        layers="{base}.layers",
        attention="attn",
        attention_adapter="attn.out_drop",
        ffn_in="mlp.Wi",
        activation="mlp.act",
        ffn_out="mlp.Wo",
        ffn_adapter="mlp.Wo",
        ffn_norm="mlp_norm",
        pooler="head.dense",
        pooler_activation="head.act",
        classifier="classifier",
        gated=True,
    )
)

# --- decoders ---------------------------------------------------------------------------------------------------------

# Rotary positions, grouped-query attention, gated FFN (SwiGLU).
LLAMA = ours(
    ModelFamily(
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
        rotary=True,
        gated=True,
        ffn_up="mlp.up_proj",
    )
)

# Checkpoints with a sliding window keep it in layers whose attention remains softmax.
add("mistral", LLAMA)

# The FFN is gated by GELU; norms scale by one plus their weight.
add("gemma", LLAMA)

# The attention projections have biases; Qwen3 normalises queries and keys per head.
add("qwen2", LLAMA)
add("qwen3", LLAMA)

# The norms come after attention and FFN, and adapters after the norms.
add(
    "olmo2",
    LLAMA,
    attention_adapter="post_attention_layernorm",
    ffn_adapter="post_feedforward_layernorm",
)

# One matrix for query, key and value, and one for both expansions; dropout before each sum.
add(
    "phi3",
    LLAMA,
    query=None,
    value=None,
    attention_adapter="resid_attn_dropout",
    ffn_in="mlp.gate_up_proj",
    ffn_up=None,
    activation="mlp.activation_fn",
    ffn_adapter="resid_mlp_dropout",
)

# Matrices are Conv1D; query, key and value are a single one.
ours(
    ModelFamily(
        name="gpt2",
        layers="{base}.h",
        attention="attn",
        attention_adapter="attn.resid_dropout",
        ffn_in="mlp.c_fc",
        activation="mlp.act",
        ffn_out="mlp.c_proj",
        ffn_adapter="mlp.dropout",
        ffn_norm="ln_2",
        classifier="score",
        causal=True,
    )
)

# Pythia: one matrix for query, key and value; attention and FFN may be parallel.
ours(
    ModelFamily(
        name="gpt_neox",
        layers="{base}.layers",
        attention="attention",
        attention_adapter="post_attention_dropout",
        ffn_in="mlp.dense_h_to_4h",
        activation="mlp.act",
        ffn_out="mlp.dense_4h_to_h",
        ffn_adapter="post_mlp_dropout",
        ffn_norm="post_attention_layernorm",
        classifier="score",
        causal=True,
        rotary=True,
    )
)

# The FFN is two Linears in the layer itself. The 350m model is rejected: it normalises after the sums.
ours(
    ModelFamily(
        name="opt",
        layers="{base}.decoder.layers",
        attention="self_attn",
        query="self_attn.q_proj",
        value="self_attn.v_proj",
        key="self_attn.k_proj",
        attention_out="self_attn.out_proj",
        attention_adapter="self_attn.out_proj",
        ffn_in="fc1",
        activation="activation_fn",
        ffn_out="fc2",
        ffn_adapter="fc2",
        ffn_norm="final_layer_norm",
        classifier="score",
        causal=True,
        expects={"do_layer_norm_before": True},
    )
)

# --- image and audio encoders -----------------------------------------------------------------------------------------

# Image classifiers have no pooler and get a new one; the bare encoder has one.
VIT = ours(
    ModelFamily(
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
)
add("vit_msn", VIT, pooler=None, pooler_activation=None)

# A distilled model has a second head, on the distillation token.
add("deit", VIT, pooled_heads=("classifier", "cls_classifier", "distillation_classifier"))

# A learned scale inside the layer, no dense layer in the pooler. Attention remains softmax if the config asks for a
# bias per pair of positions, as published ones do.
add("beit", VIT, last_norm="{base}.pooler.layernorm", pooler=None, pooler_activation=None)

# The giant model's gated FFN is rejected.
DINO = add(
    "dinov2",
    VIT,
    layers="{base}.encoder.layer",
    attention_adapter="layer_scale1",
    ffn_adapter="layer_scale2",
    ffn_norm="norm2",
    last_norm=None,
    pooler=None,
    pooler_activation=None,
    expects={"use_swiglu_ffn": False},
)
add("dinov2_with_registers", DINO)

# BERT's modules in the order of ViT; attention is computed inside the module and remains softmax.
add(
    "data2vec-vision",
    BERT,
    attention="attention.attention",
    query="attention.attention.query",
    value="attention.attention.value",
    key=None,
    attention_out="attention.output.dense",
    ffn_norm="layernorm_after",
    last_norm="{base}.pooler.layernorm",
    pooler=None,
    pooler_activation=None,
    pooled_heads=("classifier",),
    classifier_of_pooler=None,
)

# The towers of CLIP and SigLIP, bare or with their projection; CLIP's text encoder is causal, SigLIP's is not.
CLIP = ours(
    ModelFamily(
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
)
add("clip_text_model", CLIP, causal=True)
add("siglip_vision_model", CLIP)
add("siglip_text_model", CLIP)

# Image classification by the image encoder alone. A model of both towers is rejected: patch one of them.
for name in ("clip", "siglip"):
    add(
        name,
        CLIP,
        layers="vision_model.encoder.layers",
        classifier="classifier",
        pooled_heads=("classifier",),
        sizes="vision_config",
        excludes="text_model",
    )

# The encoder, bare or with the head for audio classification; models with the decoder are rejected.
add(
    "whisper",
    CLIP,
    layers="{base}.layers",
    ffn_in="fc1",
    activation="activation_fn",
    ffn_out="fc2",
    ffn_adapter="fc2",
    ffn_norm="final_layer_norm",
    classifier="classifier",
    encoder="encoder",
    excludes="decoder",
    attention_backend=True,
)
