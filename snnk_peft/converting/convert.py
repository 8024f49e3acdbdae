"""convert: plan, patch, calibrate, bundle, recover, compare. The given model is not touched: all happens to a copy."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from snnk_peft.arguments import folder_of, number_faults, takes_declared
from snnk_peft.bundling.bundle import bundle
from snnk_peft.calibrating.answers import POOLINGS, Answers
from snnk_peft.calibrating.calibrate import calibrate
from snnk_peft.config import SNNKConfig
from snnk_peft.converting.compared import LEAST_COSINE, compared, seconds, size
from snnk_peft.converting.examples import Examples, examples_of
from snnk_peft.converting.opened import check_reader, opened
from snnk_peft.converting.report import ConversionReport
from snnk_peft.errors import ConfigError
from snnk_peft.model_card import write_model_card
from snnk_peft.parts import Part
from snnk_peft.planning.candidates import shared_copy
from snnk_peft.planning.plan import plan
from snnk_peft.planning.result import Plan
from snnk_peft.saved_folder import written_whole
from snnk_peft.tuner.get_model import get_snnk_model
from snnk_peft.tuner.given_model import as_usual, of_transformers, refuse_patched, refuse_prepared


@dataclass(frozen=True)
class Converted:
    """What `convert` returns.

    Args:
        model: a plain transformers model, or a SentenceTransformer if one was given.
        report: original and conversion side by side; print it.
        reader: tokenizer or image processor, if there is one.
    """

    model: Any
    report: ConversionReport
    reader: Any = None

    def save_pretrained(self, folder: str | Path) -> None:
        """Write the model, its tokenizer, a card, and conversion.json with its plot.

        Raises:
            ConfigError: the folder cannot be written to; what was there before is unchanged.
        """
        with written_whole(folder_of("folder", folder)) as target:
            self.model.save_pretrained(str(target))
            self.report.save(target)
            if hasattr(self.model, "bundle_report"):  # a SentenceTransformer writes tokenizer and card itself
                if self.reader is not None:
                    self.reader.save_pretrained(str(target))
                figures = {name: value for name, value in self.report.figures.items() if isinstance(value, float)}
                write_model_card(
                    target,
                    report=self.model.bundle_report,
                    metrics={**figures, "speed_up": self.report.speed_up},
                    training=dict(self.report.settings),
                    title=f"{target.name}, converted without labels",
                )


@takes_declared
def convert(
    model: Any,
    data: Any,
    budget: str | float | None = "2x",
    *,
    of: str = "latency",
    parts: Sequence[Part] | None = None,
    tokenizer: Any = None,
    text: str | Sequence[str] | None = None,
    samples: int | None = None,
    max_length: int | None = None,
    pooling: str | None = None,
    seed: int = 0,
    progress: bool = True,
) -> Converted:
    """Make a fine-tuned model smaller and faster, without labels: plan, calibrate, bundle, compare, in one call.

    The model that is given is left as it was, whatever happens; nothing is written.

    Args:
        model: a transformers model, its folder or its id on the Hub.
        data: examples of the kind that the model will see. A list of texts, or of pairs of texts; a file of texts (.txt
            with one per line, .csv, .tsv, .jsonl, .parquet); a `datasets.Dataset` or DataFrame; images, or a folder of
            them; or batches of model inputs, as `calibrate` takes them. Some are held out from everything, to compare
            the two models on.
        budget: "2x" for half of the cost, or the share of it that may remain, in (0, 1), for which `plan` chooses parts
            and sizes. None converts `parts` as they are.
        of: what the budget is of: "latency", "macs" or "bytes".
        parts: the candidates of the plan, or what is converted; None for all that suit the model.
        tokenizer: tokenizer or image processor; None takes the one beside the model.
        text: name of the column with the texts, or names of the two with pairs; None for "text".
        samples: examples that are read at most, drawn by the seed; None: 2,500 texts or 640 images.
        max_length: tokens per text; None for as many as the model reads, but 512 at most.
        pooling: of an encoder without a head, how token states become a vector: "mean", "first" or "last".
        seed: of all draws.
        progress: show progress bars.

    Returns:
        `.model`, a plain transformers model, and `.report`.

    Raises:
        ConfigError: what is wrong with the arguments or the data, and what to do.
        UnsupportedError: a model that cannot be converted.

    Example:
        >>> import torch
        >>> from transformers import BertConfig, BertForSequenceClassification
        >>> from snnk_peft import FFNPart, convert
        >>> tiny = BertConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64)
        >>> batches = [{"input_ids": torch.randint(0, 1000, (8, 16))} for _ in range(12)]
        >>> parts = [FFNPart(num_features=16)]
        >>> done = convert(BertForSequenceClassification(tiny), batches, None, parts=parts, progress=False)
        >>> 0 <= done.report.figures["agreement"] <= 1
        True
    """
    if faults := _faults(budget, parts, tokenizer, pooling, samples, max_length):
        raise ConfigError(faults)
    door = opened(model, tokenizer, pooling)
    refuse_prepared(door.model)
    refuse_patched(door.model)
    of_transformers(door.model, "it cannot be converted")
    with as_usual(door.model):
        original = shared_copy(door.model)
        examples = examples_of(data, door._replace(model=original), text, samples, max_length, seed)
        stages = _Stages()
        found = None
        if budget is not None:
            with stages("plan"):
                chosen = list(parts) if parts is not None else None
                found = plan(original, examples.fitted, budget, of=of, parts=chosen, seed=seed, progress=progress)
        config = SNNKConfig(parts=list(parts or []), seed=seed, modules_to_save=[]) if found is None else found.config
        with stages("calibrate"):
            patched = get_snnk_model(shared_copy(original), config)
            calibration = calibrate(patched, examples.fitted, progress=progress)
            small = bundle(patched)
        answers = Answers(original, door.pooling)
        with stages("compare"):
            report = _report(original, small, examples, answers, found, calibration, stages.seconds)
    return Converted(door.close(small), report, door.reader)


def _report(
    original: Any,
    small: Any,
    examples: Examples,
    answers: Answers,
    found: Plan | None,
    calibration: Any,
    spent: dict[str, float],
) -> ConversionReport:
    figures, layers = compared(original, small, examples.held_out, answers)
    batch = max(examples.held_out, key=lambda each: next(iter(each.values())).numel())
    took = seconds({"original": original, "converted": small}, batch)
    rows: dict[str, dict[str, float]] = {
        name: {"milliseconds": 1000 * took[name], **size(model)}
        for name, model in (("original", original), ("converted", small))
    }
    rows["converted"] |= figures
    return ConversionReport(
        models=rows,
        examples=examples.sizes,
        timed=" x ".join(map(str, next(iter(batch.values())).shape)),
        layers=layers,
        seconds=spent,
        recovery={},
        plan=found,
        calibration=calibration,
        warnings=_warnings(figures),
    )


def _warnings(figures: dict[str, float]) -> list[str]:
    found = []
    if figures.get("cosine", 1.0) < LEAST_COSINE:
        found.append(
            f"the vectors are at a cosine of {figures['cosine']:.3f} to the original's: make stored ones anew with the "
            "converted model, and do not mix the two. A larger budget keeps them nearer"
        )
    return found


class _Stages:
    """Seconds of each stage."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[name] = time.perf_counter() - start


def _faults(budget: Any, parts: Any, tokenizer: Any, pooling: Any, samples: Any, max_length: Any) -> list[str]:
    faults = check_reader(tokenizer)
    if budget is None and not parts:
        faults.append("budget is None and no parts are given; expected a budget such as '2x', or parts=[...]")
    if pooling is not None and pooling not in POOLINGS:
        faults.append(f"pooling is {pooling!r}; expected one of {', '.join(POOLINGS)}")
    for name, value, low in (("samples", samples, 4), ("max_length", max_length, 1)):
        if value is not None:
            faults += number_faults(name, value, int, low=low)
    return faults
