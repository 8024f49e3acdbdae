"""The differences between texts and images: the model class, the preprocessor of inputs, and how batches are made.

Every recipe that fine-tunes or reads such a model calls `modality_of(task)`; a new kind of example needs one more
class here. The preprocessor of inputs, a tokenizer or an image processor, is called the reader; it is saved with the
model.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoImageProcessor,
    AutoModelForImageClassification,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from snnk_cli.data import Examples, ExampleSet
from snnk_cli.images import Augmentation, ImageExamples, channels_of, input_size
from snnk_cli.settings import AugmentSection, DataSection
from snnk_peft.errors import ConfigError


class Modality(ABC):
    """A kind of examples.

    Attributes:
        files: names of files that identify a saved reader in a folder.
    """

    files: tuple[str, ...]

    @abstractmethod
    def auto_class(self, task: Any) -> Any:
        """Return the auto class of transformers that loads a model for the task."""

    @abstractmethod
    def reader(self, folder: str, task: Any) -> Any:
        """Load the preprocessor of the model in `folder` or on the Hub; a ConfigError if there is none."""

    @abstractmethod
    def examples(self, rows: Any, reader: Any, data: DataSection, task: Any) -> ExampleSet:
        """Return examples to evaluate."""

    def training_examples(
        self, rows: Any, reader: Any, data: DataSection, task: Any, augment: AugmentSection, seed: int
    ) -> ExampleSet:
        """Return examples to train on."""
        return self.examples(rows, reader, data, task)

    @abstractmethod
    def check(self, model: PreTrainedModel, reader: Any, data: DataSection) -> None:
        """Raise a ConfigError if the model cannot read such examples."""

    def has_reader(self, folder: Path) -> bool:
        """Return True if `folder` contains a saved reader."""
        return any((folder / name).is_file() for name in self.files)


class Texts(Modality):
    """Sentences, pairs of sentences, or words with one label each."""

    files = ("tokenizer_config.json",)

    def auto_class(self, task: Any) -> Any:
        """Return the class for sequence or token classification."""
        return AutoModelForTokenClassification if task.tokens else AutoModelForSequenceClassification

    def reader(self, folder: str, task: Any) -> Any:
        """Load the tokenizer."""
        return load_tokenizer(folder, task)

    def examples(self, rows: Any, reader: Any, data: DataSection, task: Any) -> ExampleSet:
        """Tokenise the examples once."""
        return Examples(rows, reader, data.max_length)

    def check(self, model: PreTrainedModel, reader: Any, data: DataSection) -> None:
        """Check that examples are not longer than the model has positions."""
        check_length(model, data.max_length)


class Images(Modality):
    """Images with one class each."""

    files = ("preprocessor_config.json", "processor_config.json")

    def auto_class(self, task: Any) -> Any:
        """Return the class for image classification."""
        return AutoModelForImageClassification

    def reader(self, folder: str, task: Any) -> Any:
        """Load the image processor, with Pillow: nothing else needs torchvision."""
        try:
            return AutoImageProcessor.from_pretrained(folder, backend="pil")
        except (OSError, ValueError, ImportError) as error:
            raise ConfigError(
                f"no image processor could be read from {folder!r}{nowhere(folder)}: {error}; expected a "
                "preprocessor_config.json beside the model, as ViTImageProcessorPil(size=...).save_pretrained writes it"
            ) from error

    def examples(self, rows: Any, reader: Any, data: DataSection, task: Any) -> ExampleSet:
        """Return the images without augmentation."""
        return self._made(rows, reader, data, task, None)

    def training_examples(
        self, rows: Any, reader: Any, data: DataSection, task: Any, augment: AugmentSection, seed: int
    ) -> ExampleSet:
        """Return the images with random augmentation that differs between epochs."""
        changes = Augmentation(augment, input_size(reader), reader.resample, seed)
        return self._made(rows, reader, data, task, changes)

    def _made(self, rows: Any, reader: Any, data: DataSection, task: Any, changes: Augmentation | None) -> ExampleSet:
        return ImageExamples(
            rows, reader, channels_of(reader), task.num_labels, changes, data.workers, data.max_unreadable
        )

    def check(self, model: PreTrainedModel, reader: Any, data: DataSection) -> None:
        """Check that size and channels match the model."""
        wanted = getattr(model.config, "image_size", None), getattr(model.config, "num_channels", None)
        size = wanted[0] if not isinstance(wanted[0], int) else (wanted[0], wanted[0])
        if size is not None and tuple(size) != input_size(reader):
            raise ConfigError(
                f"the image processor produces images of {' x '.join(map(str, input_size(reader)))} pixels; "
                f"{type(model).__name__} reads {' x '.join(map(str, size))} (config.image_size): set `size` in its "
                "preprocessor_config.json"
            )
        if wanted[1] is not None and wanted[1] != channels_of(reader):
            raise ConfigError(
                f"the image processor has {channels_of(reader)} means (image_mean), one per channel; "
                f"{type(model).__name__} reads {wanted[1]} channels (config.num_channels)"
            )


_MODALITIES: dict[str, Modality] = {"text": Texts(), "image": Images()}


def modality_of(task: Any) -> Modality:
    """Return the modality of the task's examples."""
    return _MODALITIES[task.modality]


def load_tokenizer(folder: str, task: Any = None) -> PreTrainedTokenizerBase:
    """Load the tokenizer in `folder` or on the Hub; for a task that labels words, one that accepts words."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError) as error:
        raise ConfigError(f"no tokenizer could be read from {folder!r}{nowhere(folder)}: {error}") from error
    if tokenizer.pad_token is None and tokenizer.eos_token is not None:
        tokenizer.pad_token = tokenizer.eos_token  # common for decoders without a padding token
    if task is None or not task.tokens:
        return tokenizer
    if not tokenizer.is_fast:
        raise ConfigError(f"the tokenizer in {folder!r} does not map tokens to words; expected a fast tokenizer")
    # Byte-level tokenizers make the space before a word part of its token; a separate word has none.
    alone = "ByteLevel" in str(tokenizer.backend_tokenizer.pre_tokenizer)
    return (
        AutoTokenizer.from_pretrained(folder, add_prefix_space=True, pad_token=tokenizer.pad_token)
        if alone
        else tokenizer
    )


def nowhere(folder: str) -> str:
    """Return a remark, for messages, if there is no such folder."""
    return (
        "" if Path(folder).is_dir() else f" (there is no such folder in {Path.cwd()}, so it was taken for a Hub name)"
    )


def check_length(model: PreTrainedModel, max_length: int) -> None:
    """Raise a ConfigError if `max_length` exceeds the model's number of positions."""
    room = positions(model)
    if room is not None and max_length > room:
        raise ConfigError(
            f"data.max_length is {max_length}; {type(model).__name__} has positions for {room} tokens: set "
            f"data.max_length={room} or less (longer examples are cut)"
        )


def positions(model: torch.nn.Module) -> int | None:
    """Return the number of tokens that a model with a position table can read; None if positions are computed."""
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Embedding) and name.rpartition(".")[2] in ("position_embeddings", "wpe"):
            # RoBERTa and its relatives count from the row after the padding token's.
            return module.num_embeddings - (0 if module.padding_idx is None else module.padding_idx + 1)
    return None
