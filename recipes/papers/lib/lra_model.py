"""The classifier of Long Range Arena: a small BERT encoder from scratch, softmax or linear attention, and a head.

    one document:   classes(act(W h)),             h = the mean over unpadded tokens, or the first position
    two documents:  h = [a, b, a ⊙ b, a − b]       both read by the same encoder

The encoder is transformers' BertModel; linear attention comes from an `AttentionPart`, or from the baseline
library (`performer_peer.py`). All parameters are trained.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from data import SequenceTask
from torch import nn
from transformers import BertConfig, BertModel, PreTrainedModel
from transformers.modeling_outputs import SequenceClassifierOutput

from papers.lib.lra_settings import PERFORMER, AttentionMethod, LongRangeModel
from papers.lib.performer_peer import use_performer
from snnk_peft import get_snnk_model


class LongRangeClassifier(nn.Module):
    """Encoder, pooling and head.

    Args:
        encoder: a BertModel, patched or not.
        width: width of its output.
        hidden: width of the head's hidden layer.
        task: determines the numbers of classes and documents; its token ids end below that of the classification token.
        pooling: "mean" over unpadded tokens, or "cls": a token put in front of the sequence.
        dropout: dropout on the pooled vector.
    """

    def __init__(self, encoder: nn.Module, width: int, hidden: int, task: SequenceTask, pooling: str, dropout: float):
        super().__init__()
        self.encoder, self.pooling, self.cls_id = encoder, pooling, task.vocab_size
        pooled = width if task.documents == 1 else 4 * width
        self.head = nn.Sequential(
            nn.Dropout(dropout), nn.Linear(pooled, hidden), nn.GELU(), nn.Linear(hidden, task.num_labels)
        )

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, labels: torch.Tensor | None = None
    ) -> SequenceClassifierOutput:
        """Map ids and mask (batch, documents, length) to logits (batch, classes) and, given labels (batch,), loss."""
        documents = input_ids.shape[1]
        ids, mask = input_ids.flatten(0, 1), attention_mask.flatten(0, 1)
        if self.pooling == "cls":
            ids, mask = nn.functional.pad(ids, (1, 0), value=self.cls_id), nn.functional.pad(mask, (1, 0), value=1)
        hidden = self.encoder(input_ids=ids, attention_mask=mask).last_hidden_state
        if self.pooling == "cls":
            pooled = hidden[:, 0]
        else:
            weights = mask.unsqueeze(-1).to(hidden.dtype)
            pooled = (hidden * weights).sum(1) / weights.sum(1)
        if documents == 2:
            first, second = pooled.unflatten(0, (-1, 2)).unbind(1)
            pooled = torch.cat((first, second, first * second, first - second), -1)
        logits = self.head(pooled)
        loss = None if labels is None else nn.functional.cross_entropy(logits.float(), labels)
        return SequenceClassifierOutput(loss=loss, logits=logits)


def build_classifier(
    task: SequenceTask, model: LongRangeModel, method: AttentionMethod, max_length: int, seed: int
) -> LongRangeClassifier:
    """Build a freshly initialised classifier (from torch's global generator), all of whose parameters are trained."""
    with_cls = model.pooling == "cls"
    config = bert_config(model, task.vocab_size + with_cls, max_length + with_cls, type_vocab_size=1)
    bert = BertModel(config, add_pooling_layer=False)
    encoder = with_linear_attention(bert, method, seed)
    if method.attention == PERFORMER:
        use_performer(bert, method.performer, seed)
    if model.positions == "sinusoidal":
        make_sinusoidal(bert)
    return LongRangeClassifier(encoder, model.dim, model.hidden_dim, task, model.pooling, model.dropout)


def bert_config(sizes: Any, vocabulary: int, positions: int, **further: Any) -> BertConfig:
    """Return the config of a BERT trained from scratch; token 0 is padding."""
    return BertConfig(
        vocab_size=vocabulary,
        hidden_size=sizes.dim,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads,
        intermediate_size=sizes.hidden_dim,
        hidden_dropout_prob=sizes.dropout,
        attention_probs_dropout_prob=sizes.attention_dropout,
        max_position_embeddings=positions,
        pad_token_id=0,
        **further,
    )


def with_linear_attention(model: PreTrainedModel, method: AttentionMethod, seed: int) -> Any:
    """Return the model with an `AttentionPart`'s attention, all of it trained; unchanged if the method has none."""
    snnk = method.snnk_config(seed)
    if snnk is None:
        return model
    patched = get_snnk_model(model, snnk)
    patched.requires_grad_(True)  # PEFT froze everything it did not add
    return patched


def make_sinusoidal(bert: BertModel) -> None:
    """Replace position embeddings by untrained sinusoids."""
    positions = bert.embeddings.position_embeddings.weight
    with torch.no_grad():
        # Scaled to learned positions at initialisation, or they would drown the words (the sinusoids' rms is 1/√2).
        positions.copy_(sinusoids(*positions.shape) * (bert.config.initializer_range * math.sqrt(2)))
    positions.requires_grad_(False)


def sinusoids(length: int, width: int) -> torch.Tensor:
    """Return (length, width): sines in the first half, cosines in the second, wavelengths from 2π to 10000 · 2π."""
    half = (width + 1) // 2
    frequencies = torch.exp(torch.arange(half) * (-math.log(10000.0) / max(1, half - 1)))
    angles = torch.arange(length)[:, None] * frequencies
    return torch.cat((angles.sin(), angles.cos()), -1)[:, :width]
