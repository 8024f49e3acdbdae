"""What counts as a model's answer, how far two models' answers are apart, and the Fisher information of them."""

from __future__ import annotations

import pytest
import torch
from scipy.stats import spearmanr
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertForTokenClassification,
    BertModel,
    LlamaConfig,
    LlamaForCausalLM,
)

from snnk_peft.calibrating.answers import Answers, Comparison
from snnk_peft.errors import ConfigError

TINY = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32, "vocab_size": 50}


def answers_of(kind=BertForSequenceClassification, **config):
    return Answers(kind(BertConfig(**TINY, **config)))


@pytest.mark.parametrize("logits", [[[0.3, -0.5]], [[0.3, -0.5, 1.0]]])
def test_fisher_information_of_classes_is_that_of_the_softmax(logits):
    """E g gᵀ of the drawn loss is diag(p) − p pᵀ, the Hessian of the divergence."""
    logits = torch.tensor(logits)
    answers, generator = answers_of(num_labels=logits.shape[1]), torch.Generator().manual_seed(0)
    rows = logits.repeat(20_000, 1).requires_grad_()
    answers.drawn_loss({"logits": rows}, generator).backward()
    p = logits.softmax(-1)[0]
    found = rows.grad.T @ rows.grad / len(rows)
    hessian = torch.autograd.functional.hessian(
        lambda z: answers.distances({"logits": logits}, {"logits": z[None]})["logits"][0], logits[0]
    )
    assert torch.allclose(hessian, p.diag() - torch.outer(p, p), atol=1e-6)
    assert torch.allclose(found, hessian, atol=0.02)


@pytest.mark.parametrize("problem", ["regression", "multi_label_classification"])
def test_fisher_information_of_numbers_is_the_identity(problem):
    answers, generator = answers_of(num_labels=2, problem_type=problem), torch.Generator().manual_seed(0)
    rows = torch.zeros(10_000, 2, requires_grad=True)
    answers.drawn_loss({"logits": rows}, generator).backward()
    assert torch.allclose(rows.grad.T @ rows.grad / len(rows), torch.eye(2), atol=0.05)


def test_embeddings_are_pooled_over_the_mask_and_have_unit_length():
    states = torch.randn(2, 4, 16)
    mask = torch.tensor([[0, 1, 1, 0], [1, 1, 1, 1]])
    inputs, outputs = {"attention_mask": mask}, {"last_hidden_state": states}
    model = BertModel(BertConfig(**TINY))
    expected = {"mean": states[0, 1:3].mean(0), "first": states[0, 1], "last": states[0, 2]}
    for pooling, vector in expected.items():
        read = Answers(model, pooling).read(outputs, inputs)["embedding"]
        assert torch.allclose(read[0], vector / vector.norm(), atol=1e-6)
    with pytest.raises(ConfigError, match="pooling is 'max'; expected one of mean, first, last"):
        Answers(model, "max")


def test_figures_of_embeddings_against_scipy():
    model = BertModel(BertConfig(**TINY))
    comparison, generator = Comparison(Answers(model)), torch.Generator().manual_seed(1)
    pairs = []
    for _ in range(5):
        states = torch.randn(4, 3, 16, generator=generator)
        other = states + 0.7 * torch.randn(4, 3, 16, generator=generator)
        comparison.update({"last_hidden_state": states}, {"last_hidden_state": other}, {})
        pairs.append([torch.nn.functional.normalize(each.mean(1), dim=-1) for each in (states, other)])
    original, other = (torch.cat(each) for each in zip(*pairs, strict=True))
    upper = torch.triu_indices(20, 20, 1)
    alike = [(each @ each.T)[upper[0], upper[1]].numpy() for each in (original, other)]
    near = [set(map(tuple, _nearest(each))) for each in (original, other)]
    figures = comparison.figures()
    assert figures["cosine"] == pytest.approx(float((original * other).sum(-1).mean()), abs=1e-6)
    assert figures["similarity_correlation"] == pytest.approx(spearmanr(*alike).statistic, abs=1e-4)
    assert figures["neighbours"] == pytest.approx(len(near[0] & near[1]) / 200)
    assert comparison.distance() == pytest.approx(1 - figures["cosine"], abs=1e-6)


def _nearest(vectors):
    for row, each in enumerate(vectors @ vectors.T):
        order = [column for column in each.argsort(descending=True).tolist() if column != row][:10]
        yield from ((row, column) for column in order)


def test_words_under_padding_do_not_count():
    answers = answers_of(BertForTokenClassification, num_labels=3)
    comparison = Comparison(answers)
    logits, mask = torch.randn(2, 4, 3), torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1]])
    other = logits.clone()
    other[0, 2:] = -other[0, 2:] * 50
    comparison.update({"logits": logits}, {"logits": other}, {"attention_mask": mask})
    assert comparison.figures() == {"agreement": 1.0, "divergence": 0.0}
    other[1, 0] = other[1, 0].flip(0) * 50
    comparison.update({"logits": logits}, {"logits": other}, {"attention_mask": mask})
    assert comparison.distance() > 0


def test_perplexity_is_that_of_transformers_own_loss():
    sizes = {"num_key_value_heads": 2, "max_position_embeddings": 32}
    model = LlamaForCausalLM(LlamaConfig(**TINY, **sizes)).eval()
    comparison, ids = Comparison(Answers(model)), torch.randint(0, 50, (3, 9))
    with torch.no_grad():
        outputs = model(input_ids=ids, labels=ids)
    comparison.update(outputs, outputs, {"input_ids": ids})
    figures = comparison.figures()
    assert figures["perplexity"] == figures["original_perplexity"]
    assert figures["perplexity"] == pytest.approx(float(outputs.loss.exp()), rel=1e-5)


@pytest.mark.parametrize("side", ["left", "right"])
def test_perplexity_of_padded_texts_is_that_of_each_alone(side):
    model = LlamaForCausalLM(LlamaConfig(**TINY, num_key_value_heads=2, max_position_embeddings=32)).eval()
    ids, logits, mask = torch.randint(0, 50, (2, 6)), torch.randn(2, 6, 50), torch.ones(2, 6, dtype=torch.long)
    mask[0, slice(0, 3) if side == "left" else slice(3, 6)] = 0
    comparison = Comparison(Answers(model))
    comparison.update({"logits": logits}, {"logits": logits}, {"input_ids": ids, "attention_mask": mask})
    texts = [(each[own == 1], words[own == 1]) for each, words, own in zip(logits, ids, mask, strict=True)]
    losses = [torch.nn.functional.cross_entropy(each[:-1], words[1:], reduction="none") for each, words in texts]
    assert comparison.figures()["perplexity"] == pytest.approx(float(torch.cat(losses).mean().exp()), rel=1e-5)
