"""One step of SGD on eight examples, however they are divided: `python -m tests.global_batch FOLDER` in each process.

Of every kind of loss that the recipes train with. What an example holds follows from its number alone.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from safetensors.torch import save_file
from torch import nn
from torch.nn.functional import one_hot
from transformers import BertConfig, BertForMaskedLM, BertForTokenClassification, GPT2Config, GPT2LMHeadModel

from snnk_peft import AdapterPart, SNNKConfig, get_snnk_model
from tests.tiny_models import tiny

sys.path.append(str(Path(__file__).resolve().parent.parent / "recipes"))

from papers.lib.masked_model import MaskedLanguageModel

from snnk_cli.convert_settings import UptrainSection
from snnk_cli.data import share
from snnk_cli.teacher import Distilled
from snnk_cli.training import mean_loss, train_step

Tensors = dict[str, torch.Tensor]
LENGTHS = (2, 3, 2, 3, 19, 18, 20, 17)  # so that words and examples are far from proportional
IGNORED = -100
BERT = {"vocab_size": 100, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
BERT |= {"intermediate_size": 24, "max_position_embeddings": 32, "pad_token_id": 0}
GPT2 = {"vocab_size": 100, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32, "pad_token_id": 0}
KINDS = ("words", "some words", "causal", "masked", "classes", "unreadable", "soft", "numbers", "several", "distilled")


def model_of(kind: str) -> nn.Module:
    """Without dropout, its adapters at work."""
    torch.manual_seed(0)
    if kind in ("words", "some words"):
        plain: Any = BertForTokenClassification(BertConfig(**BERT, num_labels=3))
        model: nn.Module = get_snnk_model(plain, SNNKConfig(adapter=AdapterPart(num_features=4)))
    elif kind == "causal":
        model = get_snnk_model(GPT2LMHeadModel(GPT2Config(**GPT2)), SNNKConfig(adapter=AdapterPart(num_features=4)))
    elif kind == "masked":
        model = MaskedLanguageModel(BertForMaskedLM(BertConfig(**BERT)))
    elif kind == "distilled":
        teacher = tiny("bert", num_labels=3).requires_grad_(False)
        student = copy.deepcopy(teacher).requires_grad_(True)
        with torch.no_grad():
            for value in student.parameters():
                value.add_(0.05 * torch.randn(value.shape))
        model = Distilled(student, teacher, UptrainSection(labels=1.0, logits=1.0, layers=0.1))
        model.train()
        student.eval()
        return model
    else:
        more = {"problem_type": "multi_label_classification"} if kind == "several" else {}
        model = tiny("bert", num_labels=1 if kind == "numbers" else 3, **more)
    return model.eval()


def batch_of(kind: str, indices: Sequence[int]) -> Tensors:
    """Model inputs of these examples."""
    longest = max(LENGTHS[index] for index in indices)
    ids, mask = torch.zeros(2, len(indices), longest, dtype=torch.long)
    asked = torch.full_like(ids, IGNORED)
    labels = torch.tensor([index % 3 for index in indices])
    for row, index in enumerate(indices):
        length, generator = LENGTHS[index], torch.Generator().manual_seed(index)
        ids[row, :length] = torch.randint(3, 100, (length,), generator=generator)
        mask[row, :length] = 1
        asked[row, :length] = torch.randint(0, 3, (length,), generator=generator)
    if kind == "some words":  # the first four examples, whole batches of them, have no word with a label
        asked[[row for row, index in enumerate(indices) if index < 4]] = IGNORED
    if kind == "causal":
        asked = ids.masked_fill(mask == 0, IGNORED)
    if kind == "masked":  # windows of one length, which hide different numbers of pieces
        return windows_of(indices)
    inputs = {"input_ids": ids, "attention_mask": mask}
    if kind in ("words", "some words", "causal"):
        return {**inputs, "labels": asked}
    if kind == "soft":
        return {**inputs, "soft_labels": (one_hot(labels, 3) + 0.5) / 2.5}
    if kind == "unreadable":
        labels = torch.tensor([IGNORED if index in (0, 1, 5) else index % 3 for index in indices])
    if kind == "numbers":
        labels = labels.float() - 0.7
    if kind == "several":
        labels = torch.stack([labels == 0, labels < 2, labels == 2], 1).float()
    return {**inputs, "labels": labels}


def windows_of(indices: Sequence[int]) -> Tensors:
    """Inputs of a masked language model."""
    ids = torch.stack([torch.randint(3, 100, (20,), generator=torch.Generator().manual_seed(i)) for i in indices])
    asked = torch.arange(20) < torch.tensor([LENGTHS[index] for index in indices])[:, None]
    return {"input_ids": ids.masked_fill(asked, 4), "labels": ids.masked_fill(~asked, IGNORED)}


def trained(model: nn.Module) -> Tensors:
    """The parameters."""
    return {name: value.detach().clone() for name, value in model.named_parameters() if value.requires_grad}


def by_hand(kind: str) -> tuple[float, Tensors]:
    """The loss of all examples in one forward pass, and what w − ∂loss/∂w is."""
    model = model_of(kind)
    loss = mean_loss(model, batch_of(kind, range(8)))
    loss.backward()
    with torch.no_grad():
        for value in model.parameters():
            if value.requires_grad and value.grad is not None:
                value -= value.grad
    return loss.item(), trained(model)


def one_step(kind: str, batches: Sequence[Sequence[int]], accelerator: Accelerator) -> tuple[float, Tensors]:
    """The mean loss of the step over all processes, and the weights behind it."""
    bare = model_of(kind)
    optimizer = torch.optim.SGD([value for value in bare.parameters() if value.requires_grad], lr=1.0)
    model, prepared = accelerator.prepare(bare, optimizer)
    mine = [share(batch, accelerator.process_index, accelerator.num_processes)[0] for batch in batches]
    feed = iter([batch_of(kind, indices) for indices in mine])
    values = train_step(accelerator, model, prepared, feed, batches, 1.0, None)
    return accelerator.reduce(values[0], "mean").item(), trained(bare)


def main(folder: Path) -> None:
    """All kinds, in three batches of which the last is shorter than there are processes; words, one example a step."""
    accelerator, found = Accelerator(cpu=True), {}
    for kind in KINDS:
        loss, weights = one_step(kind, [[0, 1, 2], [3, 4, 5, 6], [7]], accelerator)
        found |= {f"{kind}/{name}": value.contiguous() for name, value in weights.items()}
        found[f"{kind} loss"] = torch.tensor(loss)
    for kind in ("words", "classes"):  # a process without an example takes part
        found[f"one of {kind}"] = torch.tensor(one_step(kind, [[7]], accelerator)[0])
    save_file(found, folder / f"{accelerator.process_index}.safetensors")


if __name__ == "__main__":
    main(Path(sys.argv[-1]))
