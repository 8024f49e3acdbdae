"""A head from one pass over the training examples: the experiment of recipes/fit_head.py."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from lib.finetuning import Finetuning
from lib.head_settings import FitHeadConfig
from lib.results import card_of
from snnk_cli.data import ExampleSet
from snnk_cli.experiment import Data, Finished, Schedule
from snnk_cli.files import read_json, write_folder, write_json, writing
from snnk_cli.models import load_pretrained
from snnk_cli.plots import score_over_seconds
from snnk_cli.tables import grid
from snnk_cli.terminal import bar, read_log
from snnk_peft import ClosedFormHead, HeadFeatures
from snnk_peft.bundling.pooled_head import separator_of
from snnk_peft.errors import NumericalWarning
from snnk_peft.heads.fitted import FittedHead, expected_calibration_error
from snnk_peft.model_card import write_model_card
from snnk_peft.tasks.texts import batches_by_length, drawn

STATISTICS, RECORD = "statistics.safetensors", "head.json"  # the fitted head, written before the first checkpoint
PLOT = "score_over_seconds.png"
SAMPLE = 512  # training examples with reported leave-one-out scores


class FitHead(Finetuning):
    """Experiment without training: the head is fitted when the model is built."""

    settings, program = FitHeadConfig, "fit_head.py"
    paths = (("method", "beside"),)
    leaves = (STATISTICS, RECORD, PLOT)
    records = (STATISTICS, RECORD)

    @property
    def method(self) -> str:
        """The name of the method."""
        return "head in closed form"

    @property
    def choose_share(self) -> None:
        """None: there is no epoch to choose."""

    def model(self, data: Data, accelerator: Any, resumed: bool) -> torch.nn.Module:
        """Return a bundle with the fitted head; for a resumed run, from the saved statistics."""
        config, task = self.config.method, self.task
        base, _ = load_pretrained(self.pretrained, task)
        self.modality.check(base, self.reader, self.config.data)
        base.to(accelerator.device)
        kind = "numbers" if task.num_labels == 1 else "classes"
        layers = base.config.num_hidden_layers
        if config.views is None:
            features = HeadFeatures.across(layers, config.feature_map, pairs=self._pairs(base, data, accelerator))
        else:
            features = HeadFeatures(config.views, config.feature_map)

        def empty() -> ClosedFormHead:
            return ClosedFormHead(base, features, kind=kind)

        head = empty()
        self.record: dict[str, Any] | None = None
        self.head = head
        if resumed:
            folder = Path(self.config.output.dir)
            head.merge(folder / STATISTICS)
            head.fit().temperature = read_json(folder / RECORD)["fit"]["temperature"]
        else:
            with accelerator.autocast():
                self.record = self._fitted(head, empty, data, accelerator)
        made = head.bundle()
        for name, parameter in made.named_parameters():
            parameter.requires_grad_(name.startswith("snnk_head.linear."))
        return made

    def _pairs(self, base: Any, data: Data, accelerator: Any) -> bool:
        """Return True if the examples are pairs of texts that the head can tell apart."""
        if not data.train.pairs or "token_type_ids" in data.train.batch([0]) or separator_of(base.config) is not None:
            return data.train.pairs
        accelerator.print(
            f"note: the head reads both texts of a pair as one: the tokenizer gives no token_type_ids, and the "
            f"configuration of {self.pretrained} names no separator (sep_token_id)"
        )
        return False

    def _fitted(
        self, head: ClosedFormHead, empty: Callable[[], ClosedFormHead], data: Data, accelerator: Any
    ) -> dict[str, Any]:
        """Accumulate all examples, a share at a time, and fit after each; return the record of the fit."""
        config = self.config
        size, rank, world = config.train.eval_batch_size, accelerator.process_index, accelerator.num_processes
        shares = _shares(data.train.lengths, config.method.points, config.train.seed, size)
        held = {name: _read(head, part, size, f"read {name}") for name, part in data.splits.items()}
        points, reading = [], 0.0
        for number, batches in enumerate(shares, start=1):
            start = time.perf_counter()
            part = empty()
            mine = [data.train.batch(indices) for indices in batches[rank::world]]
            part.add(bar(mine, f"read train {number} of {len(shares)}"))
            part.reduce()
            head.merge(part)
            read = time.perf_counter()
            fitted = _fit(head, number == len(shares))
            reading += read - start
            seconds = reading + time.perf_counter() - read  # a run that stopped here would need only this fit
            scores = {name: self.task.compute(fitted.scores(x).float(), y) for name, (x, y) in held.items()}
            found = self.task.summarize(scores)
            points.append({"examples": head.statistics.count, "seconds": seconds, "score": found["score"]})
        report = head.fitted.report.to_dict()  # type: ignore[union-attr]
        return {"points": points, "fit": report, **self._honesty(head, held, data)}

    def _honesty(self, head: ClosedFormHead, held: Mapping[str, Any], data: Data) -> dict[str, Any]:
        """Return the leave-one-out scores of training examples, and the expected calibration error."""

        fitted = head.fitted
        assert fitted is not None
        batch = data.train.batch(drawn(len(data.train), SAMPLE, self.config.train.seed))
        labels = batch.pop("labels")
        found = fitted.leave_one_out(head.vectors(batch), labels).float().cpu()
        told: dict[str, Any] = {"leave_one_out": self.task.compute(found, labels.cpu())}
        if fitted.kind == "classes":
            told["expected_calibration_error"] = {
                name: expected_calibration_error(fitted.probabilities(x).cpu(), y) for name, (x, y) in held.items()
            }
        return told

    def schedule(self, per_epoch: int) -> Schedule:
        """Return a schedule without steps."""
        return Schedule(total=0, eval_every=1, rate=lambda step, position: 0.0, eval_first=True)

    def score(
        self,
        model: torch.nn.Module,
        splits: Mapping[str, ExampleSet],
        accelerator: Any,
        stopped: Callable[[], bool],
    ) -> dict[str, float] | None:
        """Score the bundle, after writing the record of the fit, which `--resume` does not repeat."""
        if self.record is not None and accelerator.is_main_process:
            folder = Path(self.config.output.dir)
            with writing(folder / STATISTICS):
                self.head.save(folder / STATISTICS)
            write_json(folder / RECORD, self.record)
            self.record = None
        return super().score(model, splits, accelerator, stopped)

    def report(self, done: Finished) -> dict[str, Any]:
        """Write bundle/, and return the scores and the record of the fit."""
        record = read_json(done.folder / RECORD)
        model, reader = done.model, self.reader
        card = card_of(self.config, self.task, done.best["metrics"], done.data.sizes)
        card |= {"title": f"{Path(self.config.model.name_or_path).name} with a head for {self.task.title}"}
        card |= {"training": {"head": "ridge regression in closed form", "seconds": record["points"][-1]["seconds"]}}

        def fill(target: Path) -> None:
            model.save_pretrained(str(target))  # type: ignore[operator]
            reader.save_pretrained(str(target))
            write_model_card(target, report=model.bundle_report, **card)  # type: ignore[arg-type]

        write_folder(done.folder / "bundle", fill)
        return {
            "score": done.best["score"],
            "metrics": done.best["metrics"],
            "seconds": record["points"][-1]["seconds"],
            **record,
            "device": str(done.device),
        }

    def curve(self, rows: list[dict[str, Any]], file: Path) -> None:
        """Plot scores over seconds, of this head and of the runs in `method.beside`."""
        record = read_json(file.parent / RECORD)
        lines = {"head in closed form": [(point["seconds"], point["score"]) for point in record["points"]]}
        for folder in map(Path, self.config.method.beside or []):
            figures = read_json(folder / "metrics.json")
            lines[f"{figures['method']}, {folder.name}"] = _evaluations(folder, figures)
        score_over_seconds(lines, file.with_name(PLOT), self.title)

    def summary(self, done: Finished, figures: Mapping[str, Any]) -> str:
        """Return the points as a table."""
        rows = [
            [f"{point['examples']:,}", f"{point['seconds']:.1f}", f"{point['score']:.4f}"]
            for point in figures["points"]
        ]
        foretold = "  ".join(f"{name} {value:.4f}" for name, value in figures["leave_one_out"].items())
        return "\n".join(
            [
                *grid(["examples", "seconds", "score"], rows),
                f"leave-one-out on the training examples: {foretold}; the model is in {done.folder / 'bundle'}",
            ]
        )


def _fit(head: ClosedFormHead, all_counted: bool) -> FittedHead:
    """Fit the head; warnings that concern only the first examples (such as a missing class) are silenced."""
    with warnings.catch_warnings():
        if not all_counted:
            warnings.simplefilter("ignore", NumericalWarning)
        return head.fit()


def _shares(lengths: Sequence[int], points: int, seed: int, size: int) -> list[list[list[int]]]:
    """Split the drawn order into batches: of the first n/2^k examples, of as many more, of twice as many, ..."""
    order = drawn(len(lengths), len(lengths), seed)
    ends = sorted({max(2, len(order) >> power) for power in range(points)})  # one example is too few for a head
    starts = [0, *ends[:-1]]
    return [batches_by_length(lengths, order[start:end], size) for start, end in zip(starts, ends, strict=True)]


def _read(head: ClosedFormHead, examples: ExampleSet, size: int, title: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the vectors that the head reads from all examples, with their labels."""
    found = []
    for indices in bar(list(examples.by_length(size)), title):
        batch = examples.batch(indices)
        labels = batch.pop("labels")
        found.append((head.vectors(batch), labels))
    vectors, labels = zip(*found, strict=True)
    return torch.cat(vectors), torch.cat(labels)


def _evaluations(folder: Path, figures: Mapping[str, Any]) -> list[tuple[float, float]]:
    """Return (training seconds, score) of a finetune.py run; only the last if the others used held-back rows."""
    if "score_held_back" in figures:
        return [(figures["train_seconds"], figures["score"])]
    rows = [row for row in read_log(folder / "log.jsonl") if "score" in row]
    last = max(row["step"] for row in rows)
    return [(figures["train_seconds"] * row["step"] / last, row["score"]) for row in rows]
