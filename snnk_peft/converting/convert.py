"""convert: a model and examples in, a smaller and faster model and a report out.

The given model is not changed: copies share its tensors and do not write to them.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from snnk_peft.arguments import folder_of, number_faults, takes_declared
from snnk_peft.calibrating.answers import POOLINGS, Answers
from snnk_peft.calibrating.batches import checked_one, model_inputs
from snnk_peft.converting.door import Opened
from snnk_peft.converting.examples import examples_of
from snnk_peft.converting.int8 import FILE
from snnk_peft.converting.opened import check_reader, opened
from snnk_peft.converting.pipeline import Pipeline
from snnk_peft.converting.quality import smallest
from snnk_peft.converting.report import ConversionReport
from snnk_peft.converting.reporting import report_of
from snnk_peft.errors import ConfigError
from snnk_peft.exporting.program import FORMATS, missing_packages
from snnk_peft.model_card import write_model_card
from snnk_peft.parts import Part
from snnk_peft.planning.candidates import shared_copy
from snnk_peft.saved_folder import written_whole
from snnk_peft.tuner.given_model import as_usual, of_transformers, refuse_patched, refuse_prepared

DEFAULT_BUDGET = "2x"


@dataclass(frozen=True)
class Converted:
    """Result of `convert`.

    Args:
        model: a plain transformers model, or a SentenceTransformer if one was given.
        report: original and conversion side by side; print it.
        tokenizer: tokenizer or image processor, if there is one.
    """

    model: Any
    report: ConversionReport
    tokenizer: Any = None
    _files: tempfile.TemporaryDirectory[str] | None = field(default=None, repr=False)  # of int8 models

    def save_pretrained(self, folder: str | os.PathLike[str]) -> None:
        """Write the model, its tokenizer, a card, conversion.json with its plot and, with `int8`, model_int8.onnx.

        Raises:
            ConfigError: the folder cannot be written to; what was there before is unchanged.
        """
        with written_whole(folder_of("folder", folder)) as target:
            self.model.save_pretrained(str(target))
            self.report.save(target)
            if self._files is not None:
                for file in (Path(self._files.name) / "converted").glob(f"{FILE}*"):
                    shutil.copy(file, target / file.name)
            plain = hasattr(self.model, "bundle_report")  # a SentenceTransformer holds one, and writes its tokenizer
            if plain and self.tokenizer is not None:
                self.tokenizer.save_pretrained(str(target))
            figures = {name: value for name, value in self.report.figures.items() if isinstance(value, float)}
            write_model_card(
                target,
                report=(self.model if plain else self.model[0].model).bundle_report,
                metrics={**figures, "speed_up": self.report.speed_up},
                training=dict(self.report.settings),
                title=f"{target.name}, converted without labels",
                remarks=self.report.warnings,
            )


@takes_declared
def convert(
    model: Any,
    data: Any,
    budget: str | float | None = DEFAULT_BUDGET,
    *,
    of: str = "latency",
    quality: float | None = None,
    cache: float | None = None,
    parts: Sequence[Part] | None = None,
    tokenizer: Any = None,
    text: str | Sequence[str] | None = None,
    samples: int | None = None,
    max_length: int | None = None,
    pooling: str | None = None,
    inputs: Mapping[str, Any] | None = None,
    recover: float | None = None,
    steps: int | None = None,
    int8: bool = False,
    seed: int = 0,
    progress: bool = True,
) -> Converted:
    """Make a fine-tuned model smaller and faster, without labels: plan, calibrate, bundle and recover in one call.

    The given model is never changed, and nothing is written. A half-precision model on a CPU is timed and compared in
    float32; its conversion is returned in the original precision.

    Args:
        model: a transformers model, a SentenceTransformer, or the folder or Hub id of one.
        data: examples of the kind that the model will see. A list of texts, or of pairs of texts; a file of texts (.txt
            with one per line, .csv, .tsv, .jsonl, .parquet); a `datasets.Dataset` or DataFrame; images, or a folder of
            them; or batches of model inputs, as for `calibrate`. A share (15%, but at most 500 examples and
            100,000 tokens of text) is held out from everything, to compare the two models.
        budget: "2x" for half of the cost, or the share of the cost to keep, in (0, 1), for which `plan` chooses parts
            and sizes. None converts `parts` as they are.
        of: unit of the budget: "latency", "macs" or "bytes".
        quality: instead of a budget, the share of the answers to keep on the held-out examples (the cosine for
            embeddings, the correlation for regression), in (0, 1): the smallest model that keeps it. Takes several
            conversions.
        cache: for a decoder, instead of a budget: the share of its cache's bytes (in half precision) to keep after the
            longest text that it reads, in (0, 1). The key heads that attend far back keep softmax, over keys in 8 bits;
            all others become linear. `parts` are converted as they are in addition.
        parts: the candidates of the plan, or the parts to convert; None for all that suit the model.
        tokenizer: tokenizer or image processor; None loads the one saved with the model.
        text: name of the text column, or names of the two columns with pairs; None for "text".
        samples: maximum number of examples, drawn by the seed; None: 20,000 texts (fewer long ones, but at least 2,500)
            or 640 images. Fits read some of them; the recovery reads each once before it repeats any.
        max_length: tokens per text; None for the model's maximum, but at most 512.
        pooling: how an encoder without a head turns token states into a vector: "mean", "first" or "last". A
            SentenceTransformer has its own.
        inputs: model inputs as in production, such as a batch of 32 texts of 64 tokens, on which cost and time are
            measured. None for the batch of median size.
        recover: seconds of training towards the original's answers and states; 0 for none. None: 20 s, or what 60
            steps take if that is longer, at most 120 s. Steps that bring the conversion no closer are discarded.
        steps: number of steps instead of seconds: the same result on every run.
        int8: also write an ONNX file with int8 Linears; the report compares it with an int8 version of the original
            (`pip install snnk-peft[onnx]`).
        seed: seed of all random draws.
        progress: show progress bars.

    Returns:
        `.model`, a plain transformers model (or a SentenceTransformer, if one was given), and `.report`;
        `.save_pretrained(folder)` writes both.

    Raises:
        ConfigError: all faults of the arguments or the data; a budget or quality that cannot be met.
        UnsupportedError: a model that cannot be converted.
        ImportError: int8 without the ONNX packages.

    Example:
        >>> import torch
        >>> from transformers import BertConfig, BertForSequenceClassification
        >>> from snnk_peft import FFNPart, convert
        >>> tiny = BertConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64)
        >>> batches = [{"input_ids": torch.randint(0, 1000, (8, 16))} for _ in range(12)]
        >>> parts = [FFNPart(num_features=16)]
        >>> model = BertForSequenceClassification(tiny)
        >>> done = convert(model, batches, 0.8, of="macs", parts=parts, steps=2, progress=False)
        >>> 0 <= done.report.figures["agreement"] <= 1
        True
    """
    settings: dict[str, Any] = {
        "budget": budget,
        "of": of,
        "quality": quality,
        "cache": cache,
        "recover": recover,
        "steps": steps,
        "seed": seed,
    }
    faults = _faults(parts=parts, samples=samples, max_length=max_length, pooling=pooling, **settings)
    if faults := faults + check_reader(tokenizer):
        raise ConfigError(faults)
    if int8 and (missing := missing_packages(FORMATS["onnx"])):
        raise ImportError(f"int8=True needs {', '.join(missing)}: pip install snnk-peft[onnx]")
    door = opened(model, tokenizer, pooling)
    refuse_prepared(door.model)
    refuse_patched(door.model)
    of_transformers(door.model, "it cannot be converted")
    with as_usual(door.model):
        door = door._replace(model=shared_copy(door.model))
        timed = {} if inputs is None else model_inputs(door.model, checked_one(door.model, inputs, "inputs"))
        examples = examples_of(data, door, text, samples, max_length, seed)
        answers = Answers(door.model, door.pooling)
        chosen = None if parts is None else list(parts)
        how = (of, chosen, recover, steps, seed, progress, timed)
        pipeline = Pipeline(door.model, examples, answers, *how, cache=cache)
        return converted(door, pipeline, None if cache is not None else budget, quality, int8, settings)


def converted(
    door: Opened,
    pipeline: Pipeline,
    budget: str | float | None,
    quality: float | None,
    int8: bool,
    settings: Mapping[str, Any],
) -> Converted:
    """Convert a model once it and the data are read; arguments as for `convert`, `settings` for the report."""
    result = pipeline.run(budget) if quality is None else smallest(quality, pipeline.run)
    files = tempfile.TemporaryDirectory(prefix="snnk-convert-") if int8 else None
    with pipeline.stages("compare"):
        report = report_of(pipeline, result, None if files is None else Path(files.name), settings)
    return Converted(door.close(result.model.to(pipeline.stored)), report, door.reader, files)


def _faults(
    *,
    budget: object,
    of: object,
    quality: object,
    cache: object,
    parts: object,
    samples: object,
    max_length: object,
    pooling: object,
    recover: object,
    steps: object,
    seed: object,
) -> list[str]:
    """List the faults of the arguments; `plan` checks budget, unit and candidates."""
    faults = []
    if quality is not None:
        faults += number_faults("quality", quality, above=0, below=1)
        if budget not in (None, DEFAULT_BUDGET):
            faults.append(f"budget is {budget!r} and quality {quality!r}; expected one of them")
    if cache is not None:
        faults += number_faults("cache", cache, above=0, below=1)
        if quality is not None or budget not in (None, DEFAULT_BUDGET):
            faults.append(f"cache is {cache!r} beside a budget or quality; expected one of them")
    elif quality is None and budget is None and not parts:
        faults.append("budget is None and no parts are given; expected a budget such as '2x', or parts=[...]")
    if pooling is not None and pooling not in POOLINGS:
        faults.append(f"pooling is {pooling!r}; expected one of {', '.join(POOLINGS)}")
    if recover is not None:
        faults += number_faults("recover", recover, low=0)
    for name, value, low in (("samples", samples, 4), ("max_length", max_length, 1), ("steps", steps, 0)):
        if value is not None:
            faults += number_faults(name, value, int, low=low)
    return faults
