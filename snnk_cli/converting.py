"""Label-free conversion of a classifier: the experiment of recipes/convert.py."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset

from snnk_cli.config import Request, load_config
from snnk_cli.conversion import RECORD, SAMPLES, Conversion, converted, of_task, restored, timed_inputs
from snnk_cli.convert_settings import ConvertConfig, ConvertData
from snnk_cli.converting_texts import convert_texts
from snnk_cli.data import ExampleSet
from snnk_cli.evaluation import Alone, evaluation_splits, predict, repeat_notes
from snnk_cli.experiment import Data, Experiment, Finished, Schedule, learning_rate
from snnk_cli.files import guarded, read_json, write_folder
from snnk_cli.hub import push
from snnk_cli.launch import perform
from snnk_cli.modality import modality_of
from snnk_cli.models import train_in_use
from snnk_cli.tables import grid
from snnk_cli.task_settings import tasks
from snnk_cli.teacher import Distilled, load_teacher, stored_dtype
from snnk_cli.timing import forward_seconds, ratio
from snnk_peft import bundle
from snnk_peft.calibrating.answers import Answers, Comparison
from snnk_peft.model_card import write_model_card
from snnk_peft.tasks.texts import drawn
from snnk_peft.tasks.texts import read_texts as texts_of

FEW = 100  # examples to compare predictions on


class Converting(Experiment[ConvertConfig]):
    """The conversion of a classifier of texts or images, with optional training afterwards."""

    settings, program, records = ConvertConfig, "convert.py", ("conversion.json",)

    def __init__(self, config: ConvertConfig):
        self.task = tasks()[str(config.task)].with_settings(vars(config.data))
        config = replace(config, data=replace(config.data, **self.task.inferred))
        super().__init__(config)
        self.conversion: Conversion | None = None

    @property
    def method(self) -> str:
        """The parts, or the budget that chooses them."""
        convert = self.config.convert
        return f"{convert.budget} of {convert.of}" if convert.budget is not None else " and ".join(convert.given)

    @property
    def title(self) -> str:
        """The name of the model and how it is converted."""
        return f"{Path(self.config.model.name_or_path).name} converted, {self.method}"

    def data(self, accelerator: Any) -> Data:
        """Load the examples for calibration and training, and those for comparing original and conversion."""
        config, task, seed = self.config, self.task, self.config.train.seed
        self.modality = modality = modality_of(task)
        self.teacher, self.reader = load_teacher(config.model.name_or_path, task)
        self.teacher.to(accelerator.device).requires_grad_(False)
        modality.check(self.teacher, self.reader, config.data)
        # Without training, only what the calibration reads.
        limit = config.data.max_train_samples
        if not config.train.epochs:
            limit = min(most := config.convert.samples or SAMPLES, limit or most)
        texts = None if config.data.texts is None else read_texts(config.data)
        wanted = tuple(config.data.splits or task.validation_splits)
        # One of two validation sets may be missing; the task accepts this only without `splits`.
        names = None if config.data.splits is None and len(wanted) > 1 else ["train", *wanted]
        rows = task.load(config.data.dir, splits=names, max_samples={"train": limit}, seed=seed)
        splits = evaluation_splits(task, rows, config.data.max_eval_samples, wanted)
        train = rows["train"] if texts is None else texts
        if texts is not None:
            train = train.select(drawn(len(train), len(train) if limit is None else limit, seed))
        for note in repeat_notes(task, train, splits, labelled=texts is None):
            accelerator.print(f"note: {note}")
        made = [modality.examples(part, self.reader, config.data, task) for part in (train, *splits.values())]
        return Data(made[0], dict(zip(splits, made[1:], strict=True)))

    def model(self, data: Data, accelerator: Any, resumed: bool) -> torch.nn.Module:
        """Return the patched model, fitted unless a checkpoint will fill it."""
        config = self.config
        if resumed:
            patched = restored(self.teacher, Path(config.output.dir), config.train.seed)
        else:
            accelerator.print("measuring what each layer saves and costs, and fitting what is replaced")
            # A copy, because the patched model shares its tensors and training would change them.
            pipeline = of_task(copy.deepcopy(self.teacher), data, config, accelerator)
            self.conversion = converted(pipeline, config)
            patched = self.conversion.model
            if self.conversion.plan is not None:
                accelerator.print(self.conversion.plan)
            accelerator.print(self.conversion.report)
        if config.train.trained == "all":
            train_in_use(patched)
        return Distilled(patched, self.teacher, config.train)

    def schedule(self, per_epoch: int) -> Schedule:
        """Return a schedule of whole epochs, if any; the conversion is scored before training."""
        train = self.config.train
        total = train.epochs * per_epoch
        named = {"epoch": per_epoch, "end": max(1, total)}
        return Schedule(
            total=total,
            eval_every=named.get(train.eval_every, train.eval_every),
            rate=learning_rate(train.schedule, train.learning_rate, math.ceil(train.warmup_ratio * total), total),
            eval_first=True,
        )

    def score(
        self,
        model: torch.nn.Module,
        splits: Mapping[str, ExampleSet],
        accelerator: Any,
        stopped: Callable[[], bool],
    ) -> dict[str, float] | None:
        """Score against the labels, after writing the record of the conversion, which `--resume` does not repeat."""
        if self.conversion is not None and accelerator.is_main_process:
            self.conversion.save(Path(self.config.output.dir))
            self.conversion = None
        return super().score(model, splits, accelerator, stopped)

    def report(self, done: Finished) -> dict[str, Any]:
        """Write bundle/, and compare original and conversion: scores, agreement, speed, size."""
        config, task = self.config, self.task
        student: Any = done.model.student
        stored = stored_dtype(config.model.name_or_path)
        small = bundle(student.to(stored))
        pipeline = of_task(self.teacher, done.data, config, Alone(done.device))
        recovery = pipeline.recovered(small.float())
        small.to(stored)
        # Measure the stored weights, in full precision as for the original.
        measured = copy.deepcopy(small).float()
        best: Mapping[str, Any] = done.best
        models, rows, alone = {"original": self.teacher, "converted": measured}, {}, Alone(done.device)
        logits: dict[str, dict[str, torch.Tensor]] = {}
        for name, model in models.items():
            found: dict[str, Any] = {
                split: predict(model, part, config.train.eval_batch_size, alone)
                for split, part in done.data.splits.items()
            }
            logits[name] = {split: values[0] for split, values in found.items()}
            scores = task.summarize({split: task.compute(*values) for split, values in found.items()})
            if name == "converted" and recovery is not None:
                best = {"score": scores["score"], "metrics": scores}  # of the stored model, after training
            shown = {key: value for key, value in scores.items() if key.rpartition("/")[2] != "score"}
            rows[name] = {"parameters": _numbers(model), **shown}
        near = {split: _near(self.teacher, *(logits[name][split] for name in models)) for split in done.data.splits}
        inputs = timed_inputs(done.data, config, done.device)
        seconds = forward_seconds(models, inputs, config.timing.repetitions)
        for name, values in seconds.items():
            rows[name]["milliseconds"] = 1000 * min(values)  # the least disturbed pass
        record = read_json(done.folder / RECORD)
        figures = {
            "score": best["score"],
            "metrics": best["metrics"],
            "models": rows,
            "agreement": {"mean": task.summarize(near), "splits": near},
            "speed_up": ratio(seconds["original"], seconds["converted"]),
            "timed": " x ".join(str(size) for size in next(iter(inputs.values())).shape),
            "conversion_seconds": record["seconds"]
            + done.state.train_seconds
            + (recovery.seconds if recovery else 0.0),
            "recovery": None if recovery is None else dataclasses.asdict(recovery),
            "calibration": record["calibration"],
            "device": str(done.device),
        }
        self._save(small, figures, done)
        return figures

    def _save(self, small: Any, figures: Mapping[str, Any], done: Finished) -> None:
        """Write bundle/ with tokenizer or image processor and model card."""

        config, task = self.config, self.task
        made = {
            "original": figures["models"]["original"],
            "converted": figures["models"]["converted"],
            "speed-up": round(figures["speed_up"], 2),
            "timed on": f"{figures['timed']} ({figures['device']})",
            "agreement": figures["agreement"]["mean"],
            "convert": dataclasses.asdict(config.convert),
            "train": dataclasses.asdict(config.train) if config.train.epochs else "no training",
        }

        def fill(target: Path) -> None:
            small.save_pretrained(str(target))
            self.reader.save_pretrained(str(target))
            scores = {key: value for key, value in figures["metrics"].items() if key != "score"}
            write_model_card(
                target,
                report=small.bundle_report,
                base_model=config.model.name_or_path,
                metrics=scores,
                training=made,
                title=f"{Path(config.model.name_or_path).name}, converted to SNNK layers without labels",
                dataset=task.hub_path,
                data=task.source,
                examples=done.data.sizes,
            )

        write_folder(done.folder / "bundle", fill)

    def curve(self, rows: list[dict[str, Any]], file: Path) -> None:
        """Draw the learning curve if there was any training."""
        if self.config.train.epochs:
            super().curve(rows, file)

    def summary(self, done: Finished, figures: Mapping[str, Any]) -> str:
        """Return a table of both models, and upload bundle/ if requested: all figures are written by now."""
        columns = list(figures["models"]["original"])
        rows = [
            [name, *(f"{values[key]:.4g}" if isinstance(values[key], float) else f"{values[key]:,}" for key in columns)]
            for name, values in figures["models"].items()
        ]
        near = "  ".join(f"{name} {value:.4f}" for name, value in figures["agreement"]["mean"].items())
        count = sum(len(part) for part in done.data.splits.values())
        few = ", too few to resolve one percent" if count < FEW else ""
        lines = [
            *grid(["model", *columns], rows),
            f"compared with the original on {count:,} examples{few}: {near}; {figures['speed_up']:.2f} x its speed "
            f"({figures['timed']}); converted in {figures['conversion_seconds']:.0f} s; the model is in "
            f"{done.folder / 'bundle'}",
        ]
        repository = self.config.output.push_to_hub
        if repository is not None:
            lines.append(f"uploaded to {push(done.folder / 'bundle', repository, self.config.output.private)}")
        return "\n".join(lines)


def convert(request: Request) -> int:
    """Convert as requested; return the exit code (0 done, 1 diverged, 2 wrong input, 130 or 143 stopped)."""

    def work() -> int:
        config = load_config(ConvertConfig, request.file, request.overrides)
        if config.task is None:
            convert_texts(config, request.resume, request.overwrite)
            return 0
        return perform(lambda: Converting(config), request)

    return guarded(work)


def _near(teacher: Any, original: torch.Tensor, other: torch.Tensor) -> dict[str, float]:
    """Compare the logits of two models, both (examples, outputs)."""
    comparison = Comparison(Answers(teacher))
    comparison.update({"logits": original}, {"logits": other}, {})
    return comparison.figures()


def _numbers(model: torch.nn.Module) -> int:
    """Count parameters and floating-point buffers: the rows of a bundle are buffers."""
    return sum(t.numel() for t in (*model.parameters(), *model.buffers()) if t.is_floating_point())


def read_texts(data: ConvertData) -> Any:
    """Read the texts of `data.texts` in the format of `Examples`; every label is 0.

    Raises:
        ConfigError: see `snnk_peft.tasks.texts.read_texts`.
    """
    names = [data.text or "text", *([data.text_pair] if data.text_pair is not None else [])]
    found = texts_of(Path(str(data.texts)).expanduser(), names, "data.texts")
    columns = {f"sentence{place}": found[name] for place, name in enumerate(names, start=1)}
    return Dataset.from_dict({**columns, "label": [0] * len(columns["sentence1"])})
