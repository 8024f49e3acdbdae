"""Docstrings of Python's standard library (`snnk_peft.tasks.stdlib_docs`) as a task."""

from __future__ import annotations

import platform
from typing import TYPE_CHECKING

from data import TASKS, TaskSpec, TsvLayout
from snnk_peft.tasks.base import Request
from snnk_peft.tasks.stdlib_docs import AREAS, load_sentences

if TYPE_CHECKING:
    import datasets


class StdlibDocs(TaskSpec):
    """The task; without files, sentences come from the running Python."""

    @property
    def source(self) -> str:
        """Description of the data set, for model cards."""
        return f"sentences from the docstrings of the standard library of Python {platform.python_version()}"

    def _fetched(self, request: Request) -> dict[str, datasets.Dataset]:
        """Load the sentences from the running Python, never from the Hub."""
        return self._made(request, *([(s.text, s.area) for s in half] for half in load_sentences()))


STDLIB_DOCS = StdlibDocs(
    name="stdlib_docs",
    folder="stdlib_docs",
    tsv=TsvLayout(text=("sentence",), label="area", labels=AREAS),
    hub_columns=("sentence",),
    label_names=AREAS,
    metrics=("accuracy",),
    hub_path=None,
)
TASKS.register(STDLIB_DOCS.name, STDLIB_DOCS)
