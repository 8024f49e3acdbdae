"""The answers of a model, their distance from those of another model, and the loss that shows what they depend on.

    logits z of classes, tokens, positions  KL(p ‖ q) in nats; drawn: Σ s √p (z − p·z), with random signs s
    regression, multi-label logits          squared difference over the variance; drawn: s·z
    embeddings                              1 − v·v' of the normalised pooled vectors; drawn: ε·v, ε normal

No labels are needed. With g the gradient of `drawn_loss` with respect to any activation inside the model, E g gᵀ is the
Fisher information of the answers there: a small change δ of that activation moves the answers by δᵀ E[g gᵀ] δ (in nats,
by half of that). Labels drawn from p give the same second moment, diag p − p pᵀ at the logits, but with a larger
variance.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from snnk_peft.errors import ConfigError
from snnk_peft.heads.features import pooled
from snnk_peft.solvers.reduce import ErrorMeter
from snnk_peft.tuner.slot_layer import root_of

POOLINGS = ("mean", "first", "last")
OTHER_PROBLEMS = ("regression", "multi_label_classification")
VECTORS = 2000  # embeddings whose similarities are compared
NEIGHBOURS = 10
Rows = dict[str, Tensor]  # by output name
Pooling = str | Callable[[Tensor, Mapping[str, Any]], Tensor]  # one of POOLINGS, or (states, inputs) -> (n, dim)


class Answers:
    """Reader of the answers in the outputs of a model and of models made from it.

    Args:
        model: a transformers model, patched or not.
        pooling: how token states become one vector if the model has no logits: "mean" over the mask, "first" or "last"
            token, or a function of the states and the inputs, such as the modules after the encoder of a
            SentenceTransformer.

    Raises:
        ConfigError: an unknown pooling.
    """

    def __init__(self, model: Any, pooling: Pooling = "mean"):
        if not callable(pooling) and pooling not in POOLINGS:
            raise ConfigError(
                f"pooling is {pooling!r}; expected one of {', '.join(POOLINGS)}. Of a SentenceTransformer, give "
                "it whole: it pools as it says; or give a function of (states, inputs)"
            )
        root = root_of(model)
        self.pooling, self.problem = pooling, getattr(getattr(root, "config", None), "problem_type", None)
        self.causal = "ForCausalLM" in type(root).__name__

    def read(self, outputs: Any, inputs: Mapping[str, Any]) -> Rows:
        """Return the rows (n, dim) of each relevant output, without padding: logits, or embeddings of unit length."""
        mask, outputs = inputs.get("attention_mask"), _named(outputs)
        logits = {name: value for name, value in outputs.items() if name.endswith("logits") and value is not None}
        if logits:
            return {name: _rows(value, mask) for name, value in logits.items()}
        name = next((name for name in outputs if name.endswith("_embeds")), None)
        name = name or next(n for n, v in outputs.items() if isinstance(v, Tensor) and v.is_floating_point())
        states = outputs[name].float()
        vectors = self.pooling(states, inputs) if callable(self.pooling) else _pooled(states, mask, self.pooling)
        return {"embedding": torch.nn.functional.normalize(vectors, dim=-1)}

    def kind(self, name: str, width: int) -> str:
        """Return "classes", "numbers" (regression) or "vectors" for the output `name` of `read`, `width` wide."""
        if not name.endswith("logits"):
            return "vectors"
        return "classes" if width > 1 and self.problem not in OTHER_PROBLEMS else "numbers"

    def drawn_loss(self, answers: Rows, generator: torch.Generator) -> Tensor:
        """Sum over the rows a loss whose gradients have the Fisher information as their second moment.

        Args:
            answers: the result of `read`, with gradients.
            generator: a CPU generator for the random signs and directions.
        """
        total = torch.zeros(())
        for name, given in answers.items():
            rows, kind = given.float(), self.kind(name, given.shape[-1])
            if kind == "classes":
                p = rows.detach().softmax(-1)
                if rows.shape[-1] == 2:  # without any noise: √(p q) (z − z')
                    signs = _draws(rows[:, 0], generator).sign()
                    loss = (signs * p.prod(-1).sqrt() * (rows[:, 0] - rows[:, 1])).sum()
                else:
                    centred = rows - (p * rows).sum(-1, keepdim=True)
                    loss = (_draws(rows, generator).sign() * p.sqrt() * centred).sum()
            else:
                draws = _draws(rows, generator)
                loss = ((draws.sign() if kind == "numbers" else draws) * rows).sum()
            total = total.to(loss.device) + loss
        return total

    def distances(self, original: Rows, other: Rows) -> Rows:
        """Return distances from the original, (n,) per output, differentiable: nats, squares or 1 − cosine."""
        return {name: self._distance(name, rows, other[name]) for name, rows in original.items()}

    def _distance(self, name: str, original: Tensor, other: Tensor) -> Tensor:
        kind = self.kind(name, original.shape[-1])
        original, other = (rows if rows.dtype == torch.float64 else rows.float() for rows in (original, other))
        if kind == "classes":
            log_p, log_q = original.log_softmax(-1), other.log_softmax(-1)
            # A class that the original rules out (-inf) adds nothing.
            return torch.where(log_p.isneginf(), 0.0, log_p.exp() * (log_p - log_q)).sum(-1)
        if kind == "numbers":
            return (original - other).square().sum(-1)
        return 1 - (original * other).sum(-1)


class Comparison:
    """Comparison of a model's answers with those of the original, batch by batch.

    Example:
        >>> import torch
        >>> from transformers import BertConfig, BertForSequenceClassification
        >>> tiny = BertConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8)
        >>> answers = Answers(BertForSequenceClassification(tiny))
        >>> comparison = Comparison(answers)
        >>> same = {"logits": torch.tensor([[0.0, 1.0], [1.0, 0.0]])}
        >>> comparison.update(same, same, {})
        >>> comparison.figures()
        {'agreement': 1.0, 'divergence': 0.0}
    """

    def __init__(self, answers: Answers):
        self.answers = answers
        self.sums: dict[str, dict[str, float]] = {}  # by output
        self.meters: dict[str, ErrorMeter] = {}
        self.kept: dict[str, list[tuple[Tensor, Tensor]]] = {}  # numbers and vectors

    @torch.no_grad()
    def update(self, original: Any, other: Any, inputs: Mapping[str, Any]) -> None:
        """Add the outputs of both models for the same inputs."""
        expected, given = (self.answers.read(outputs, inputs) for outputs in (original, other))
        self.add(expected, given)
        for name, rows in expected.items():
            theirs, sums = given[name], self.sums[name]
            if self.answers.kind(name, rows.shape[-1]) == "classes":
                sums["same"] += float((rows.argmax(-1) == theirs.argmax(-1)).sum())
                if self.answers.causal:
                    self._told_words(sums, _named(original)[name], _named(other)[name], inputs)
            else:
                kept = self.kept.setdefault(name, [])
                if sum(len(each) for each, _ in kept) < VECTORS:
                    kept.append((rows.double().cpu(), theirs.double().cpu()))

    @torch.no_grad()
    def add(self, original: Rows, other: Rows) -> None:
        """Add answers of both models, for `distance` alone."""
        for name, rows in original.items():
            rows, theirs = rows.double(), other[name].double()
            sums = self.sums.setdefault(name, {"rows": 0.0, "distance": 0.0, "same": 0.0})
            sums["rows"] += len(rows)
            sums["distance"] += float(self.answers._distance(name, rows, theirs).sum())
            if self.answers.kind(name, rows.shape[-1]) == "numbers":
                self.meters.setdefault(name, ErrorMeter()).update(rows, theirs)

    def _told_words(self, sums: dict[str, float], original: Tensor, other: Tensor, inputs: Mapping[str, Any]) -> None:
        """Add the negative log-likelihood of the next tokens under each model."""
        ids, mask = inputs.get("input_ids"), inputs.get("attention_mask")
        if ids is None or original.shape[:2] != ids.shape or ids.shape[1] < 2:
            return
        real = (
            torch.ones_like(ids[:, 1:], dtype=torch.bool) if mask is None else mask[:, 1:].bool() & mask[:, :-1].bool()
        )
        for name, logits in (("expected", original), ("given", other)):
            loss = torch.nn.functional.cross_entropy(logits[:, :-1][real].float(), ids[:, 1:][real], reduction="sum")
            sums[name] = sums.get(name, 0.0) + float(loss)
        sums["words"] = sums.get("words", 0.0) + float(real.sum())

    def distance(self) -> float:
        """Return the mean distance: nats for logits, 1 − cosine for embeddings, relative squares for regression.

        Squares are relative to the variance; outputs are averaged. 0 for equal answers, NaN if an answer is NaN.

        Raises:
            ConfigError: no row was compared.
        """
        if not self.sums or any(not sums["rows"] for sums in self.sums.values()):
            raise ConfigError(
                "the batches that are held out have no token that counts (attention_mask is 0 everywhere), so there is "
                "nothing to compare outputs on; expected real tokens in every batch"
            )
        errors = [
            self.meters[name].value()
            if name in self.meters
            else max(0.0, sums["distance"] / sums["rows"])
            if sums["distance"] == sums["distance"]
            else sums["distance"]
            for name, sums in self.sums.items()
        ]
        return sum(errors) / len(errors)

    def figures(self) -> dict[str, float]:
        """Return the metrics of the comparison, averaged over outputs.

        Returns:
            For classes, `agreement`, the share of rows with the same class, and `divergence` in nats; for causal
            models, also `perplexity` and `original_perplexity` of the texts; for regression, `correlation` (Pearson)
            and `difference`, the root mean square; for embeddings, `cosine` with the original's vectors,
            `similarity_correlation` (Spearman, over the similarities of all pairs of texts) and `neighbours`, the share
            of each text's ten nearest that stay among the ten nearest.
        """
        found: dict[str, list[float]] = {}
        for name, sums in self.sums.items():
            kept = self.kept.get(name)
            if kept is None:
                figures = {"agreement": sums["same"] / sums["rows"], "divergence": sums["distance"] / sums["rows"]}
                if "words" in sums:
                    for figure, model in (("perplexity", "given"), ("original_perplexity", "expected")):
                        figures[figure] = math.exp(min(sums[model] / max(1.0, sums["words"]), 700.0))
            else:
                original, other = (torch.cat(each) for each in zip(*kept, strict=True))
                figures = _of_numbers(original, other) if name in self.meters else _of_vectors(original, other)
                if "cosine" in figures:
                    figures["cosine"] = 1 - sums["distance"] / sums["rows"]
            for key, value in figures.items():
                found.setdefault(key, []).append(value)
        return {key: sum(values) / len(values) for key, values in found.items()}


def _draws(like: Tensor, generator: torch.Generator) -> Tensor:
    return torch.randn(like.shape, generator=generator).to(like.device)


def _named(outputs: Any) -> Mapping[str, Any]:
    """Return the outputs by name; from a tuple or tensor, which has no names, the first one."""
    if isinstance(outputs, Mapping):
        return outputs
    return {"output": outputs if isinstance(outputs, Tensor) else outputs[0]}


def _of_numbers(original: Tensor, other: Tensor) -> dict[str, float]:
    pair = torch.stack((original.flatten(), other.flatten()))
    return {
        "correlation": float(torch.corrcoef(pair)[0, 1]) if pair.shape[1] > 1 else float("nan"),
        "difference": float((pair[0] - pair[1]).square().mean().sqrt()),
    }


def _of_vectors(original: Tensor, other: Tensor) -> dict[str, float]:
    figures = {"cosine": float((original * other).sum(-1).mean())}
    count = len(original)
    if count > 2:
        apart = torch.triu_indices(count, count, 1)
        alike = [rows @ rows.T for rows in (original, other)]
        ranks = [each[apart[0], apart[1]].argsort().argsort().double() for each in alike]
        figures["similarity_correlation"] = float(torch.corrcoef(torch.stack(ranks))[0, 1])
        most = min(NEIGHBOURS, count - 1)
        near = [each.fill_diagonal_(-torch.inf).topk(most).indices for each in alike]
        figures["neighbours"] = float((near[0].unsqueeze(2) == near[1].unsqueeze(1)).any(2).double().mean())
    return figures


def _rows(output: Tensor, mask: Any) -> Tensor:
    """Flatten an output to (n, classes): one row per example, real token or pixel."""
    if output.ndim == 4:  # (batch, classes, height, width)
        output = output.movedim(1, -1)
    rows = output.reshape(-1, output.shape[-1])
    if output.ndim == 3 and isinstance(mask, Tensor) and mask.shape == output.shape[:-1]:
        return rows[mask.bool().flatten()]
    return rows


def _pooled(states: Tensor, mask: Any, pooling: str) -> Tensor:
    """Pool states (batch, tokens, dim), (batch, dim, height, width) or (batch, dim) to (batch, dim)."""
    if states.ndim == 4:
        return states.mean((2, 3))
    if states.ndim != 3:
        return states
    counted = mask if isinstance(mask, Tensor) and mask.shape == states.shape[:-1] else None
    return pooled(states, counted, pooling)
