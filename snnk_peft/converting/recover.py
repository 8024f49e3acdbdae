"""recover: a few steps of AdamW towards the original's answers and states, without labels; never worse than before.

The loss of a batch is the mean distance of its answers (`Answers.distances`: nats for logits, squares for regression, 1
− cosine for embeddings); for embeddings also the mean squared error of the similarities within the batch; and,
weighted, the mean over layers of the squared error of the states relative to their variance. Texts that were trained on
before are cropped to a span of tokens, so that a small set of texts is not memorised. The learning rate warms up over
the first steps and decays to zero as the time runs out. The weights kept are those with the smallest distance on
batches that were not trained on: an average over the latest steps, or the original ones.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from snnk_peft.calibrating.answers import Answers, Comparison, Rows
from snnk_peft.calibrating.batches import examples_in, is_held_out, model_inputs, tokens_of
from snnk_peft.feature_map import FeatureMap
from snnk_peft.layers.slots import real_tokens

HELD_OUT = 0.125  # share of the batches, to choose the weights
JUDGES, JUDGED_TOKENS = 320, 40_000  # examples and tokens that suffice for this
CHECKS = 4  # number of times that the weights are compared on them
WARM_UP, DECAY = 10, 0.01
USUAL = 0.05  # root mean square of a matrix's entries; in narrower heads, values have .006 and outputs .7
AVERAGE = 0.9  # decay of the weights' average, per step
# States weigh ten times as much as logits, which would overfit to a few thousand texts: 200 steps of a MiniLM on
# SST-2 took the divergence on its dev set from .042 to .039; 120 at equal weights to .041, at twice the rate to .048.
RATE, STATES = 1e-4, 10.0
VECTOR_RATE, VECTOR_STATES = 4e-4, 1.0  # all-MiniLM is closer after 400 steps than at 1e-3 or with answers alone
# The rates are for conversions at this distance. The noise of the steps adds a distance that grows with the square of
# the rate, so closer ones take smaller steps: 60 of a MiniLM at .0066 led to .0059 at a third of the rate, and to .0072
# at the full rate.
AWAY = 0.05
SIMILARITIES = 1.0
LEAST = 0.5  # share of a text's tokens that remain after cropping
SECONDS, STEPS, LONGEST = 20.0, 60, 120.0  # defaults: at least so many seconds and steps, but no longer than the last
KEPT = 1 << 29  # bytes of the original's answers and states; beyond that they are computed again


@dataclass(frozen=True)
class Recovery:
    """Result of the recovery steps.

    Args:
        steps: number of steps taken.
        before: distance to the original's answers on batches that were not trained on.
        after: the same for the weights that were kept.
        seconds: wall time.
    """

    steps: int
    before: float
    after: float
    seconds: float


class Wanted:
    """The original's answers and states, computed once per batch and kept while there is room.

    Args:
        original: the model.
        answers: reader of its answers.
    """

    def __init__(self, original: nn.Module, answers: Answers):
        self.original, self.answers = original, answers
        self.kept: dict[int, tuple[Rows, list[Tensor]]] = {}
        self.room = KEPT

    def of(self, number: int, inputs: Mapping[str, Any], states: bool = True) -> tuple[Rows, list[Tensor]]:
        """Return the answers and, unless only these are asked for, the states after each layer for one batch."""
        if number in self.kept:
            return self.kept[number]
        found = self.computed(inputs, states)
        size = sum(each.numel() * each.element_size() for each in (*found[0].values(), *found[1]))
        if size <= self.room:
            self.kept[number] = found
            self.room -= size
        return found

    @torch.no_grad()
    def computed(self, inputs: Mapping[str, Any], states: bool = True) -> tuple[Rows, list[Tensor]]:
        """Compute the same for any inputs, without keeping them."""
        outputs = self.original(**inputs, output_hidden_states=states)
        return self.answers.read(outputs, inputs), list(outputs.get("hidden_states") or ())[1:]


def cut(inputs: Mapping[str, Any], generator: torch.Generator) -> dict[str, Tensor] | None:
    """Crop each text to its first and last token and a random span of those between, at least half of them.

    Return None for inputs other than texts, for pairs, packed texts and left padding.

    Args:
        inputs: `input_ids`, `attention_mask` and, all 0, `token_type_ids`, each (n, tokens); nothing else.
        generator: generator of the draws.
    """
    ids, mask, types = (inputs.get(name) for name in ("input_ids", "attention_mask", "token_type_ids"))
    if ids is None or inputs.keys() - {"input_ids", "attention_mask", "token_type_ids"}:
        return None
    mask = torch.ones_like(ids) if mask is None else mask
    if mask.shape != ids.shape or not mask[:, 0].all() or (types is not None and types.any()):
        return None
    inner = (mask.sum(1).cpu() - 2).clamp_min(0)
    least = (LEAST * inner).ceil().long()
    drawn = torch.rand(2, len(ids), generator=generator)
    length = least + (drawn[0] * (inner - least + 1)).long()
    start = 1 + (drawn[1] * (inner - length + 1)).long()
    places = torch.arange(ids.shape[1])
    kept = (places >= start[:, None]) & (places < (start + length)[:, None])
    kept |= (places == 0) | ((places == inner[:, None] + 1) & (mask.sum(1).cpu() > 1)[:, None])
    order = (~kept).long().argsort(dim=1, stable=True)[:, : int(kept.sum(1).max())].to(ids.device)
    kept = kept.to(ids.device).gather(1, order)
    found = {"input_ids": ids.gather(1, order), "attention_mask": kept.to(mask.dtype)}
    if types is not None:
        found["token_type_ids"] = types.gather(1, order)
    return found


def judging(batches: Sequence[Mapping[str, Any]]) -> list[int]:
    """Return the indices of the batches that select the weights: evenly spaced, an eighth, or enough of them."""
    examples, tokens = (sum(map(count, batches)) for count in (examples_in, tokens_of))
    share = min(HELD_OUT, JUDGES / max(1, examples), JUDGED_TOKENS / max(1, tokens))
    return [number for number in range(len(batches)) if is_held_out(number, share)] or [len(batches) - 1]


def recover(
    model: nn.Module,
    original: nn.Module,
    batches: Sequence[Mapping[str, Any]],
    answers: Answers,
    *,
    seconds: float | None = None,
    steps: int | None = None,
    seed: int = 0,
    progress: bool = True,
) -> Recovery:
    """Train a converted model towards the original, in place.

    Args:
        model: plain, in full precision; left in eval mode, and unchanged if no step brought it closer.
        original: the model that it was made from.
        batches: inputs of both; an eighth of them, or enough, selects the weights and is not trained on.
        answers: reader of both models' answers.
        seconds: wall time; the number of steps depends on the machine. None: 20 s, or what 60 steps take if that is
            longer, at most 120 s.
        steps: number of steps instead, the same on every run.
        seed: seed of the order of the batches.
        progress: show a progress bar.
    """
    started = time.perf_counter()
    held = judging(batches)
    fitted = [number for number in range(len(batches)) if number not in held]
    weights = trained_weights(model)
    if not fitted or not weights:
        return Recovery(0, math.nan, math.nan, 0.0)
    wanted = Wanted(original, answers)
    vectors = "embedding" in wanted.of(held[0], model_inputs(model, batches[held[0]]), states=False)[0]

    def distance() -> float:
        return _distance(model, wanted, batches, held)

    before = best = distance()
    rate = (VECTOR_RATE if vectors else RATE) * min(2.0, max(0.1, math.sqrt(before / AWAY)))
    kept = [each.detach().clone() for each in weights]
    average = [each.detach().clone() for each in weights]
    everything: list[Tensor] = [*model.parameters(), *weights]
    asked = [each.requires_grad for each in everything]
    generator, order = torch.Generator().manual_seed(seed), list[int]()
    trained, check, taken, done = set[int](), 0, 0, 0.0
    begun = time.perf_counter()
    bar = tqdm(total=100, desc="recover", unit="%", disable=not progress)
    try:
        for each in everything:
            each.requires_grad_(False)
        for each in weights:
            each.requires_grad_(True)
        linears = [part for part in model.modules() if isinstance(part, nn.Linear) and part.bias is not None]
        shares = {id(part.bias): share_of_rate(part.weight) for part in linears}
        groups = [{"params": [each], "rate": rate * shares.get(id(each), share_of_rate(each))} for each in weights]
        optimizer = torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.98), weight_decay=DECAY)
        while done < 1:
            order = order or [fitted[place] for place in torch.randperm(len(fitted), generator=generator).tolist()]
            for group in optimizer.param_groups:
                group["lr"] = group["rate"] * min(1.0, (taken + 1) / WARM_UP) * (1 - done)
            inputs = model_inputs(model, batches[number := order.pop()])
            if (shorter := cut(inputs, generator)) is None:
                loss = loss_of(model, inputs, *wanted.of(number, inputs), answers)
            else:
                given = shorter if number in trained else inputs
                loss = loss_of(model, given, *wanted.computed(given), answers)
            trained.add(number)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            taken += 1
            with torch.no_grad():
                decay = min(AVERAGE, taken / (taken + 9))
                for mean, each in zip(average, weights, strict=True):
                    mean.lerp_(each, 1 - decay)
            spent = time.perf_counter() - begun
            usual = min(LONGEST, max(SECONDS, STEPS * spent / taken))
            done = taken / steps if steps else spent / (usual if seconds is None else seconds)
            bar.update(min(100, round(100 * done)) - bar.n)
            if done >= (check + 1) / CHECKS or done >= 1:
                check = math.floor(done * CHECKS)
                now = _assigned(weights, average)
                if (found := distance()) < best:
                    best = found
                    _assigned(kept, average)
                bar.set_postfix_str(f"distance {found:.4f}, at first {before:.4f}")
                _assigned(weights, now)
    finally:
        bar.close()
        _assigned(weights, kept)
        for each, flag in zip(everything, asked, strict=True):
            each.requires_grad_(flag)
            each.grad = None
    return Recovery(taken, before, best, time.perf_counter() - started)


@torch.no_grad()
def _assigned(target: Sequence[Tensor], source: Sequence[Tensor]) -> list[Tensor]:
    """Write values into tensors; return the previous ones."""
    before = [each.detach().clone() for each in target]
    for each, value in zip(target, source, strict=True):
        each.copy_(value)
    return before


def share_of_rate(weight: Tensor) -> float:
    """Return 1, or less for a matrix with small entries, whose steps later layers amplify.

    A bias takes the share of its matrix.
    """
    if weight.ndim < 2:
        return 1.0
    return min(1.0, float(weight.detach().square().mean().sqrt()) / USUAL)


def trained_weights(model: nn.Module) -> list[Tensor]:
    """Return all floating-point weights except embeddings, with rows of feature maps taken from a layer."""
    tables = {id(each) for part in model.modules() if isinstance(part, nn.Embedding) for each in part.parameters()}
    rows = [
        buffer
        for part in model.modules()
        if isinstance(part, FeatureMap) and part.projection.needs_layer
        for name, buffer in part.projection.named_buffers()
        if name in ("weight", "bias") and buffer.is_floating_point()
    ]
    weights: list[Tensor] = [each for each in model.parameters() if each.is_floating_point() and id(each) not in tables]
    return [*weights, *rows]


def loss_of(
    model: nn.Module, inputs: Mapping[str, Any], answers: Rows, states: Sequence[Tensor], reader: Answers
) -> Tensor:
    """Compute the loss described in the module's docstring, a scalar.

    Args:
        model: the model being trained.
        inputs: inputs of one batch.
        answers: the original's.
        states: the original's states after each layer; empty to omit this term.
        reader: reader of the answers.
    """
    outputs = model(**inputs, output_hidden_states=bool(states))
    mine = reader.read(outputs, inputs)
    loss = torch.zeros((), device=next(iter(mine.values())).device)
    for name, distances in reader.distances(answers, mine).items():
        kind, rows = reader.kind(name, mine[name].shape[-1]), answers[name]
        scale = rows.float().var(0).sum().clamp_min(1e-6) if kind == "numbers" and len(rows) > 1 else 1.0
        loss = loss + distances.mean() / scale
        if kind == "vectors":
            loss = loss + SIMILARITIES * (rows @ rows.T - mine[name] @ mine[name].T).square().mean()
    if states:
        mask = inputs.get("attention_mask")
        pairs = zip(states, outputs["hidden_states"][1:], strict=True)
        weight = VECTOR_STATES if "embedding" in mine else STATES
        loss = loss + weight * torch.stack([state_error(*pair, mask) for pair in pairs]).mean()
    return loss


def state_error(wanted: Tensor, given: Tensor, mask: Any) -> Tensor:
    """Compute the squared difference relative to the variance, over tokens that are not padding."""
    wanted, given = (real_tokens(each, mask).float() for each in (wanted, given))
    spread = (wanted - wanted.mean(0)).square().sum()
    return (wanted - given).square().sum() / spread.clamp_min(1e-12)


@torch.no_grad()
def _distance(model: nn.Module, wanted: Wanted, batches: Sequence[Mapping[str, Any]], held: Sequence[int]) -> float:
    """Compute `Comparison.distance` from the stored answers of the original."""
    comparison = Comparison(wanted.answers)
    for number in held:
        inputs = model_inputs(model, batches[number])
        expected = wanted.of(number, inputs, states=False)[0]
        comparison.add(expected, wanted.answers.read(model(**inputs), inputs))
    return comparison.distance()
