"""A BERT of any size for masked language modelling, with softmax or linear attention, and its reuse for other tasks.

    loss = −mean log softmax(decoder(gelu(W h)))[piece]     over the masked pieces

A run writes a transformers folder (BertForMaskedLM, with softmax) and in it, for linear attention, the folder
attention/: an SNNK adapter with the learned and drawn parts of its feature maps. `with_attention` puts it back into a
model with any head.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from torch import nn
from transformers import BertForMaskedLM, PreTrainedModel
from transformers.modeling_outputs import MaskedLMOutput

from papers.lib.lra_model import bert_config, make_sinusoidal, with_linear_attention
from papers.lib.lra_settings import SOFTMAX, AttentionMethod
from papers.lib.mlm_settings import MaskedModelSection
from snnk_cli.data import ExampleSet
from snnk_peft.tasks.base import IGNORED

ATTENTION = "attention"  # subfolder of the model


class MaskedLanguageModel(nn.Module):
    """A masked language model whose decoder, most of the work, reads only the masked pieces.

    Args:
        model: a BertForMaskedLM, or a PeftModel around one.
    """

    def __init__(self, model: Any):
        super().__init__()
        self.model = model

    @property
    def plain(self) -> Any:
        """The BertForMaskedLM, patched or not."""
        return self.model if isinstance(self.model, PreTrainedModel) else self.model.get_base_model()

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> MaskedLMOutput:
        """Map ids and labels (batch, length), `IGNORED` at unmasked pieces, to loss and logits (masked, vocabulary)."""
        plain, asked = self.plain, labels != IGNORED
        hidden = plain.bert(input_ids=input_ids, attention_mask=torch.ones_like(input_ids)).last_hidden_state
        logits = plain.cls(hidden[asked]).float()
        return MaskedLMOutput(loss=nn.functional.cross_entropy(logits, labels[asked]), logits=logits)

    def save_pretrained(self, folder: Path) -> None:
        """Write the folder described above, without the tokenizer."""
        if self.model is self.plain:
            self.plain.save_pretrained(folder)
            return
        self.model.save_pretrained(folder / ATTENTION)
        self.model.unload().save_pretrained(folder)  # softmax again; the model is no longer needed


def build_masked(sizes: MaskedModelSection, method: AttentionMethod, vocabulary: int, length: int, seed: int) -> Any:
    """Build a freshly initialised model (from torch's global generator), all of whose parameters are trained."""
    plain = BertForMaskedLM(bert_config(sizes, vocabulary, length))
    model = with_linear_attention(plain, method, seed)
    if sizes.positions == "sinusoidal":
        make_sinusoidal(plain.bert)
    return MaskedLanguageModel(model)


def with_attention(model: PreTrainedModel, folder: Path) -> Any:
    """Return the model with the linear attention saved with its weights, if any, all of it trained.

    Args:
        model: model loaded from `folder`, with any head.
        folder: transformers folder written by `MaskedLanguageModel.save_pretrained`.
    """
    if not (folder / ATTENTION).is_dir():
        return model

    patched = PeftModel.from_pretrained(model, str(folder / ATTENTION), is_trainable=True)
    patched.requires_grad_(True)
    return patched


def attention_of(model: Any) -> str:
    """Return "softmax", or component-projection of the attention that `with_attention` put into a model."""
    config = getattr(model, "peft_config", {}).get("default")
    if config is None:
        return SOFTMAX
    part = config.named_parts()["attention"]
    return f"{part.component}-{part.projection}"


@torch.no_grad()
def masked_scores(
    model: nn.Module, windows: ExampleSet, batch_size: int, device: torch.device, stopped: Callable[[], bool]
) -> dict[str, float] | None:
    """Compute score = −loss, loss and masked_accuracy over all masked pieces; None if `stopped` became true."""
    was_training, loss, right, count = model.training, 0.0, 0, 0
    model.eval()
    for batch in windows.by_length(batch_size):
        if stopped():
            break
        inputs = windows.batch(batch, device)
        result, asked = model(**inputs), inputs["labels"] != IGNORED
        loss += result.loss.item() * int(asked.sum())
        right += int((result.logits.argmax(-1) == inputs["labels"][asked]).sum())
        count += int(asked.sum())
    model.train(was_training)
    return None if stopped() else {"score": -loss / count, "loss": loss / count, "masked_accuracy": right / count}
