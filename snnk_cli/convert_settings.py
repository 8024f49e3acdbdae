"""The settings of recipes/convert.py, section by section. Nothing here imports torch, so `--help` answers at once."""

# `option` returns a dataclasses.field, which is a valid dataclass default.
# ruff: noqa: RUF009

from __future__ import annotations

from dataclasses import MISSING, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from snnk_cli.config import option
from snnk_cli.settings import DataSection, RunOutput, TrainSection, snnk_config
from snnk_cli.task_settings import task_faults, task_modality
from snnk_peft.errors import ConfigError

if TYPE_CHECKING:
    from snnk_peft.config import SNNKConfig


@dataclass
class TeacherSection:
    """The fine-tuned model that is converted."""

    name_or_path: str = option(
        MISSING, "folder or Hub name of a fine-tuned classifier, such as RUN/model from full fine-tuning"
    )


@dataclass
class ConvertData(DataSection):
    """The data for calibration and scoring."""

    texts: str | None = option(
        None,
        "unlabelled texts, instead of the task's training examples: a .txt file with one text per line, or a table "
        "(.csv, .tsv, .jsonl, .parquet) with the column data.text, for pairs also data.text_pair; without a task, 15% "
        "are held out to compare both models on",
    )
    splits: list[str] | None = option(None, "splits of the task to score; null: its validation splits")


@dataclass
class ConversionSection:
    """The parts to replace, and how to fit them. Nothing here reads labels."""

    budget: str | float | None = option(
        None,
        "'2x', or the share that may remain: `plan` chooses layers and sizes, from the parts given here if there are "
        "any; null converts these parts as they are",
    )
    of: str = option("latency", "what the budget applies to", choices=("latency", "macs", "bytes"))
    quality: float | None = option(
        None,
        "without a task, instead of a budget: the share of the answers to keep (for embeddings, the cosine); finds the "
        "smallest model that does",
        above=0,
        high=0.9999,
    )
    cache: float | None = option(
        None,
        "for a decoder without a task, instead of a budget: the share of its cache that may remain after the longest "
        "text that it reads",
        above=0,
        below=1,
    )
    ffn: dict[str, Any] | None = option(None, "fields of snnk_peft.FFNPart")
    attention: dict[str, Any] | None = option(None, "fields of snnk_peft.AttentionPart")
    pooler: dict[str, Any] | None = option(None, "fields of snnk_peft.PoolerPart")
    low_rank: dict[str, Any] | None = option(None, "fields of snnk_peft.LowRankPart")
    parts: list[dict[str, Any]] | None = option(
        None, "further parts, possibly several of one kind: each gives its 'part' name next to its fields"
    )
    samples: int | None = option(
        None, "examples to read, drawn with train.seed; null: 2,500 of a task, or 20,000 texts", low=8
    )
    batch_size: int = option(32, "examples per forward pass, of similar length", low=1)
    landmarks: str = option("greedy", "how landmarks are chosen", choices=("greedy", "importance"))
    held_out: float = option(0.2, "share of the batches used to choose the regularisation", above=0, high=0.9)
    steps: int = option(0, "gradient steps per layer after the closed form, where a part supports them", low=0)
    recover: float | None = option(
        None,
        "seconds of training the whole model towards the original's answers and states; 0: none; null: 20, or what 60 "
        "steps take if that is longer, at most 120",
        low=0,
    )
    int8: bool = option(
        False, "without a task, also write an ONNX file with int8 Linears, and compare it with the original's"
    )

    @property
    def given(self) -> list[str]:
        """The kinds of the parts described here."""
        named = [name for name in ("ffn", "attention", "pooler", "low_rank") if getattr(self, name) is not None]
        return [*named, *(str(part.get("part")) for part in self.parts or [])]

    def snnk_config(self, seed: int = 0) -> SNNKConfig:
        """Return the SNNKConfig of the parts described here; raise a ConfigError with all their faults."""
        named: dict[str, Any] = {name: getattr(self, name) for name in ("ffn", "attention", "pooler", "low_rank")}
        return snnk_config(**named, parts=self.parts or [], modules_to_save=[], seed=seed)

    def check(self) -> list[str]:
        """Return the faults of the parts; without any parts, `plan` uses its own candidates."""
        named = {name: getattr(self, name) for name in ("budget", "quality", "cache")}
        aims = [f"convert.{name} is {value}" for name, value in named.items() if value is not None]
        if len(aims) > 1:
            return [f"{' and '.join(aims)}; expected one of them"]
        if aims and not self.given:
            return []
        try:
            self.snnk_config()
        except ConfigError as error:
            return error.faults
        return []


@dataclass
class UptrainSection(TrainSection):
    """Training after the conversion; none if `epochs` is 0."""

    epochs: int = option(0, "passes over the training examples; 0 leaves the model as calibrated", low=0)
    trained: str = option(
        "converted", "what is trained: the converted modules, or the whole model", choices=("converted", "all")
    )
    labels: float = option(0.0, "weight of the loss on the labels", low=0)
    logits: float = option(1.0, "weight of the divergence from the original's logits", low=0)
    layers: float = option(0.0, "weight of the relative squared error of the layers' outputs", low=0)
    temperature: float = option(2.0, "divides the logits in that divergence", above=0)

    def check(self) -> list[str]:
        """Check that at least one loss has a weight."""
        if self.epochs and not self.labels + self.logits + self.layers:
            return ["labels, logits and layers are all 0; expected a weight above 0 for at least one, or epochs=0"]
        return []


@dataclass
class TimingSection:
    """Settings of the speed comparison between the original and its conversion."""

    batch_size: int = option(32, "how many of the longest examples go into one forward pass", low=1)
    repetitions: int = option(9, "forward passes of each model, in turn", low=1)


@dataclass
class ConvertOutput(RunOutput):
    """The run folder, and where to upload the model."""

    push_to_hub: str | None = option(None, "also upload bundle/ to this Hub repository, 'owner/model'")
    private: bool = option(False, "make that repository private")


@dataclass
class ConvertConfig:
    """All settings of recipes/convert.py."""

    output: ConvertOutput
    model: TeacherSection
    task: str | None = option(None, "a data set (recipes/data), its labels only for scoring; null: data.texts alone")
    data: ConvertData = field(default_factory=ConvertData)
    convert: ConversionSection = field(default_factory=ConversionSection)
    train: UptrainSection = field(default_factory=UptrainSection)
    timing: TimingSection = field(default_factory=TimingSection)

    def check(self) -> list[str]:
        """Check that the task exists and fits the data settings; without a task, data.texts is required."""
        faults = []
        if self.task is None:
            if self.data.texts is None:
                faults.append("task and data.texts are missing: expected one of them, to calibrate with")
            if self.data.splits is not None:
                faults.append(f"data.splits is {self.data.splits}, but there is no task; leave it out, or give one")
            if self.train.epochs:
                faults.append(
                    f"train.epochs is {self.train.epochs}, but there is no task; with texts alone, "
                    "convert.recover=SECONDS trains the model towards the original"
                )
        else:
            alone = {"quality": self.convert.quality, "cache": self.convert.cache, "int8": self.convert.int8}
            faults += [
                f"convert.{name} is {value} with task {self.task}; expected data.texts alone for that"
                for name, value in alone.items()
                if value
            ]
            # The same settings name the columns of a file of texts and those of a table.
            named = self.data.texts is not None and self.task != "table"
            data = replace(self.data, text=None, text_pair=None) if named else self.data
            faults += task_faults(self.task, data)
        if not faults and self.task is not None and self.data.texts and task_modality(self.task) != "text":
            faults.append(f"data.texts is given, but the examples of task {self.task} are not texts; leave it out")
        if self.data.texts is not None and self.train.labels:
            faults.append(
                f"train.labels is {self.train.labels}, but data.texts have no labels; expected 0, or training on the "
                "task's examples without data.texts"
            )
        return faults
