"""Sensitivity of a model's answers: one backward pass of the original gives the metric of every module's output.

Let y be the output of a module and g the gradient there of a loss that needs no labels (`Answers.drawn_loss`). An error
δ of the tokens moves the answers by about δᵀ E[g gᵀ] δ. The errors of a fit are therefore weighted by R with

    RᵀR = G / (tr G / d) + MIXED · I,      G = E g gᵀ over tokens

(a diagonal G from `DENSE` dimensions on), and tokens by half 1, half ‖g‖² over its mean, clipped: [CLS] of a classifier
counts more than a comma.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from snnk_peft.calibrating.answers import Answers
from snnk_peft.calibrating.batches import Survey, examples_in, model_inputs, split, spread, tokens_of
from snnk_peft.errors import UnsupportedError
from snnk_peft.layers.slots import real_tokens
from snnk_peft.projections.base_drawn import site_generator
from snnk_peft.solvers.reduce import global_index, summed, summed_number

TOKENS, EXAMPLES = 16_384, 256  # approximate numbers whose gradients are computed; more tokens if examples are long
PIECE = 2048  # approximate number of tokens of a graph
DENSE = 1536  # dimensions up to which the metric is a full matrix
MIXED = 0.05  # weight of the identity, in a metric whose mean eigenvalue is 1
CLIPPED = 20.0  # times the mean: the most that ‖g‖² may count


@dataclass
class Sensitivity:
    """Gradients at the output of one module.

    Attributes:
        moment: Σ g gᵀ (d, d), or its diagonal (d,); None before the first batch.
        tokens: number of tokens summed.
        squares: ‖g‖² of every token, (n,), by batch index.
    """

    moment: Tensor | None = None
    tokens: int = 0
    squares: dict[int, Tensor] = field(default_factory=dict)

    def add(self, index: int, gradient: Tensor) -> None:
        """Add the gradients (n, d) for the tokens of a batch."""
        rows = gradient.double()
        squared = rows.square()
        new = squared.sum(0) if rows.shape[1] > DENSE else rows.T @ rows
        self.moment = new if self.moment is None else self.moment + new
        self.tokens += len(rows)
        self.squares[index] = squared.sum(1).float()

    def reduce(self, width: int) -> None:
        """Sum over all processes; `width` is d."""
        shape = (width,) if width > DENSE else (width, width)
        self.moment = summed(torch.zeros(shape, dtype=torch.float64) if self.moment is None else self.moment)
        self.tokens = int(summed_number(self.tokens))

    def root(self) -> Tensor:
        """Return R (d, d), symmetric, fp64; the identity if there are no gradients."""
        assert self.moment is not None
        moment = self.moment.diag() if self.moment.ndim == 1 else self.moment
        identity = torch.eye(len(moment)).to(moment)
        mean = float(moment.diagonal().mean())
        if mean <= 0:
            return identity
        values, vectors = torch.linalg.eigh(moment / mean)
        return (vectors * (values.clamp_min(0) + MIXED).sqrt()) @ vectors.T

    def weights(self, index: int) -> Tensor | None:
        """Return the weights of the tokens of a batch, (n,); None (equal weights) if it has no gradients."""
        squares = self.squares.get(index)
        assert self.moment is not None
        total = float(self.moment.sum() if self.moment.ndim == 1 else self.moment.trace())
        if squares is None or total <= 0:
            return None
        return 0.5 + 0.5 * (squares * (self.tokens / total)).clamp_max(CLIPPED)


def sensitivities(
    model: Any, paths: Mapping[str, nn.Module], survey: Survey, answers: Answers, tick: Callable[[], Any]
) -> dict[str, Sensitivity]:
    """Measure the modules at `paths` in the model as it is, on a share of the batches, evenly spread.

    Raises:
        UnsupportedError: the model cannot be differentiated.
        ValueError: a gradient is NaN or infinite.
    """
    found = {path: Sensitivity() for path in paths}
    widths = dict.fromkeys(paths, 0)
    totals = [max(1.0, summed_number(each)) for each in (survey.tokens, survey.examples)]
    share = max(TOKENS / totals[0], EXAMPLES / totals[1])
    for index, batch in survey:
        number = global_index(index)
        tick()
        if not spread(number, share):  # the same batches for any number of processes
            continue
        inputs = model_inputs(model, batch)
        generator = site_generator(0, f"answers.{number}")
        pieces = [_gradients(model, paths, piece, answers, generator) for piece in _pieces(inputs)]
        for path in paths if all(pieces) else ():
            rows = torch.cat([rows for run in zip(*(piece[path] for piece in pieces), strict=True) for rows in run])
            if not torch.isfinite(rows).all():
                raise ValueError(
                    f"batch {index}: gradients at {path} hold NaN or infinity; expected finite numbers. Run the model "
                    'in fp32 or bf16, or calibrate with metric="local", which takes none'
                )
            found[path].add(index, rows)
            widths[path] = rows.shape[1]
    for path, each in found.items():
        each.reduce(widths[path])
    return found


def _gradients(
    model: Any,
    paths: Mapping[str, nn.Module],
    inputs: Mapping[str, Any],
    answers: Answers,
    generator: torch.Generator,
) -> dict[str, list[Tensor]]:
    """Compute gradients (n, d) of the drawn loss at the modules' outputs, per call; none if answers are not finite."""
    added: dict[str, list[Tensor]] = {path: [] for path in paths}
    with differentiating(model), adding(paths, added):
        read = answers.read(model(**inputs), inputs)
        if not all(bool(each.isfinite().all()) for each in read.values()):
            return {}  # the fit that follows will report where that begins
        loss = answers.drawn_loss(read, generator)
        flat = [each for runs in added.values() for each in runs]
        taken = torch.autograd.grad(loss, flat, allow_unused=True) if loss.requires_grad else [None] * len(flat)
    rest, mask = iter(taken), inputs.get("attention_mask")
    pairs = {path: [(each, next(rest)) for each in runs] for path, runs in added.items()}
    return {
        path: [real_tokens(torch.zeros_like(zero) if each is None else each, mask).detach() for zero, each in runs]
        for path, runs in pairs.items()
    }


def _pieces(inputs: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Split a batch into a few examples at a time, since the graph holds the outputs of all layers."""
    tokens = max(1, tokens_of({name: value for name, value in inputs.items() if name != "attention_mask"}))
    yield from split(inputs, max(1, PIECE * examples_in(inputs) // tokens))


@contextlib.contextmanager
def differentiating(model: nn.Module) -> Iterator[None]:
    """Enable gradients in a context.

    Raises:
        UnsupportedError: they cannot be.
    """
    try:
        with torch.inference_mode(False), torch.enable_grad():
            yield
    except torch.OutOfMemoryError:  # says nothing about the model
        raise
    except RuntimeError as error:  # includes NotImplementedError, raised where a derivative is missing
        raise UnsupportedError(
            f"the answers of {type(model).__name__} cannot be differentiated ({error}); calibrate with "
            'metric="local", which needs no gradients'
        ) from error


@contextlib.contextmanager
def adding(paths: Mapping[str, nn.Module], added: Mapping[str, list[Tensor]]) -> Iterator[None]:
    """Add zeros to the outputs of modules in a context, to have a tensor with a gradient even if nothing is trained."""

    def add(path: str, module: nn.Module, args: Any, output: Any) -> Any:
        first = output[0] if isinstance(output, tuple) else output
        zeros = torch.zeros_like(first, requires_grad=True)
        added[path].append(zeros)
        return (first + zeros, *output[1:]) if isinstance(output, tuple) else first + zeros

    with contextlib.ExitStack() as hooks:
        for path, module in paths.items():
            hooks.enter_context(module.register_forward_hook(partial(add, path)))
        yield
