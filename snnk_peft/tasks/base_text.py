"""`TextTask`: tasks whose examples are texts."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from snnk_peft.tasks._extras import require
from snnk_peft.tasks.base import Task

if TYPE_CHECKING:
    import datasets

IGNORED = -100
"""The label of tokens that are not scored, as in torch's cross entropy."""


class TextTask(Task):
    """A task whose examples are texts (or words): a split is a `datasets.Dataset`, all splits a `DatasetDict`.

    Its columns are sentence1, (sentence2), label, idx; of tagged words: words, label, idx.
    """

    modality: ClassVar[str] = "text"

    @property
    @abstractmethod
    def text_columns(self) -> tuple[str, ...]:
        """("sentence1",) or ("sentence1", "sentence2"); ("words",) where every word has a label."""

    def _dataset(self, texts: Sequence[Sequence[Any]], labels: Sequence[Any], idx: Sequence[int]) -> datasets.Dataset:
        """One split from its columns, one list per text column."""
        columns = dict(zip((*self.text_columns, "label", "idx"), (*texts, labels, idx), strict=True))
        return require("datasets").Dataset.from_dict(columns, features=self._features())

    def _features(self) -> datasets.Features:
        hf = require("datasets")
        label: Any = hf.Value("float32") if self.label_names is None else hf.ClassLabel(names=list(self.label_names))
        text: Any = hf.Value("string")
        if self.tokens:
            label, text = hf.List(label), hf.List(text)
        return hf.Features({**dict.fromkeys(self.text_columns, text), "label": label, "idx": hf.Value("int32")})
