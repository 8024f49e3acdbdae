"""The batches of a fit: checked once before anything runs, then read repeatedly."""

from __future__ import annotations

import contextlib
import inspect
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from typing import Any

import torch
from torch import nn

from snnk_peft.arguments import in_words
from snnk_peft.calibrating.inputs import FLOATS, GIVES, Batch, InputCheck, as_tensors, masked_tokens
from snnk_peft.errors import ConfigError, NumericalWarning
from snnk_peft.functional.at_hand import place_of
from snnk_peft.repeats import LABELS, count_repeated, label_note, rows
from snnk_peft.solvers.reduce import gathered, global_index, process

IMAGE_TOKENS = 196  # in an image of the usual size
GOLDEN = 0.6180339887498949
Batches = Iterable[Batch] | Callable[[], Iterable[Batch]]


def read(batches: Batches) -> Iterator[Any]:
    """Return a fresh iterator over the batches.

    Raises:
        ConfigError: a function that does not return batches.
    """
    given = batches() if callable(batches) else batches
    try:
        return iter(given)
    except TypeError as error:
        raise ConfigError(
            f"batches is a function that returned {in_words(given)}; expected one that returns a fresh iterator"
        ) from error


def refuse_no_batches(batches: Any) -> None:
    """Raise ConfigError for anything but batches: a single batch, a text, a tokenizer, None."""
    expected = f"expected a list of dicts of model inputs, such as a tokenizer {GIVES}, or a DataLoader"
    if isinstance(batches, Mapping):
        inside = ", ".join(map(str, batches))
        single = any(hasattr(value, "column_names") for value in batches.values())  # splits of a data set
        raise ConfigError(
            f"batches is a {type(batches).__name__} ({inside}); {expected}. "
            + ("Give one of its splits" if single else "Give a batch alone as [batch]")
        )
    if hasattr(batches, "columns") and hasattr(batches, "iloc"):  # iterating over a DataFrame gives its column names
        inside = ", ".join(map(str, batches.columns))
        raise ConfigError(f"batches is a {type(batches).__name__} ({inside}); {expected}")
    # Models, tokenizers and classes are callable, and some are iterable, but they yield no batches.
    other = isinstance(batches, (str, bytes, type)) or hasattr(batches, "from_pretrained")
    if other or not (_starts(batches) or hasattr(batches, "__iter__") or hasattr(batches, "__getitem__")):
        raise ConfigError(
            f"batches is {in_words(batches)}; {expected}, or a function without arguments that returns one"
        )


def _starts(batches: Any) -> bool:
    """Return whether an object can be called without arguments."""
    try:
        inspect.signature(batches).bind()
    except TypeError:
        return False
    except ValueError:  # unknown for some functions written in C
        return callable(batches)
    return not isinstance(batches, nn.Module)


def checked(model: nn.Module, batches: Iterable[Any], targets: str | None = None) -> Iterator[Batch]:
    """Yield batches as tensors, reading them once and checking each before a model runs on it.

    Raises:
        ConfigError: faults of the first unusable batch, missing targets included.
    """
    refuse_no_batches(batches)
    empty = True
    for index, given in enumerate(read(batches)):
        check = InputCheck(model)
        batch = check.look(index, given, targets=targets)
        faults = check.faults()
        if batch is not None and targets is not None and targets not in batch:
            faults = [f"batch {index} has no {targets!r}; found {', '.join(sorted(map(str, batch)))}", *faults]
        if faults:
            raise ConfigError(faults)
        assert batch is not None
        empty = False
        yield batch
    if empty and hasattr(batches, "__next__"):
        raise ConfigError(
            f"batches is a {type(batches).__name__} that gives nothing: it was read before. Expected a fresh one, or a "
            "list, which can be read again"
        )


def labelled(model: nn.Module, batches: Iterable[Any], targets: str) -> Iterator[tuple[int, dict[str, Any], Any]]:
    """Yield (index, inputs, targets) for batches as `checked` reads them."""
    for index, batch in enumerate(checked(model, batches, targets)):
        yield index, {name: value for name, value in batch.items() if name != targets}, batch[targets]


@contextlib.contextmanager
def of_batch(index: int) -> Iterator[None]:
    """Prefix the faults of a ConfigError raised inside the context with the batch."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"batch {index}: {fault}" for fault in error.faults) from error


def checked_one(model: nn.Module, batch: Any, name: str) -> dict[str, Any]:
    """Return one batch as tensors on the device of the model, labels included.

    Raises:
        ConfigError: all faults of the batch.
    """
    check = InputCheck(model)
    made = check.look(None, batch, name)
    if faults := check.faults():
        raise ConfigError(faults)
    assert made is not None
    return placed(model, made)


def is_held_out(index: int, fraction: float) -> bool:
    """Spread the held-out batches evenly: whenever the running count of index·fraction passes a half.

    The count runs over all processes, which take turns, so the choice does not depend on how many there are.
    """
    index = global_index(index)
    return int((index + 1) * fraction + 0.5) > int(index * fraction + 0.5)


def tokens_of(batch: Mapping[str, Any]) -> int:
    """Count the real tokens of a batch; approximate for images."""
    mask = batch.get("attention_mask")
    if isinstance(mask, torch.Tensor) and mask.ndim == 2:
        return int((mask != 0).sum())
    main = next((value for value in batch.values() if isinstance(value, torch.Tensor)), None)
    if main is None:
        return 0
    return main.numel() if main.ndim == 2 else IMAGE_TOKENS * len(main)


def examples_in(batch: Mapping[str, Any]) -> int:
    """Return the number of examples in a batch."""
    return next((len(value) for value in batch.values() if isinstance(value, torch.Tensor) and value.ndim), 0)


def split(inputs: Mapping[str, Any], size: int) -> Iterator[dict[str, Any]]:
    """Split a batch into pieces of `size` examples; yield it whole if some tensor does not have a row per example."""
    examples = examples_in(inputs)
    tensors = {name: value for name, value in inputs.items() if isinstance(value, torch.Tensor) and value.ndim}
    if examples < 2 or any(len(value) != examples for value in tensors.values()):
        yield dict(inputs)
        return
    for start in range(0, examples, size):
        yield {name: value[start : start + size] if name in tensors else value for name, value in inputs.items()}


def spread(number: int, share: float) -> bool:
    """Choose a share of batches by index, evenly spread and independently of which ones are held out."""
    return number * GOLDEN % 1 < share


class Survey:
    """Result of reading all batches once; iterate over it to read them again, any number of times.

    All checks that need no forward pass are made here; later reads are checked to give the same batches. With several
    processes, each checks its own share, and all of them report the same faults.

    Attributes:
        total: number of batches of this process.
        tokens: approximate number of tokens in them.
        examples: number of examples in them.
        faults: messages about everything that is wrong with them.
        padding: token ids at masked positions.

    Raises:
        ConfigError: an iterator, which can be read only once.
    """

    def __init__(self, model: nn.Module, batches: Batches, held_out: float):
        refuse_no_batches(batches)
        if not callable(batches) and iter(batches) is batches:
            raise ConfigError(
                f"batches is a {type(batches).__name__}, which can be read only once; expected a list, a DataLoader, "
                "or a function that returns a fresh iterator"
            )
        self.batches = batches
        self._first_rows: list[bytes | None] = []
        self._warned = False
        check, known = InputCheck(model), HeldOutRows()
        self.padding: set[int] = set()
        self.tokens = self.examples = 0
        for index, given in enumerate(read(batches)):
            if (batch := check.look(index, given)) is None:
                break  # nothing to count
            self.padding |= masked_tokens(batch)
            self.tokens += tokens_of(batch)
            self.examples += examples_in(batch)
            row_digests = list(rows(batch))
            known.add(row_digests, is_held_out(index, held_out))
            self._first_rows.append(row_digests[0] if row_digests else None)
        self.total = len(self._first_rows)
        self.faults = self._faults(check.faults(), held_out)
        if not self.faults:
            known.warn_if_repeated()

    def _faults(self, faults_here: list[str], held_out: float) -> list[str]:
        fitted = sum(not is_held_out(index, held_out) for index in range(self.total))
        shares = gathered((self.total, fitted, faults_here))
        total, fitted = (sum(column) for column in list(zip(*shares, strict=True))[:2])
        several = len(shares) > 1
        faults = [f"process {n}: {text}" if several else text for n, share in enumerate(shares) for text in share[2]]
        if faults:
            return faults
        if empty := [number for number, share in enumerate(shares) if share[0] == 0]:
            who = f" in processes {empty} of {len(shares)}" if several else ""
            return [
                f"batches is empty{who}; expected dicts of model inputs, at least two and better a few dozen, such as "
                "a DataLoader of tokenized sentences of the kind that the model will see"
            ]
        if fitted in (0, total):
            return [
                f"batches holds {total}, of which held_out={held_out} leaves {fitted} to fit; expected at least one to "
                "fit and one to hold out. Give more, or smaller batches"
            ]
        return []

    def __iter__(self) -> Iterator[tuple[int, Batch]]:
        """Yield (index, batch) once more.

        Raises:
            ConfigError: there are fewer or more batches than in the first read.
        """
        index = -1
        for index, given in enumerate(read(self.batches)):
            if index == self.total:
                raise ConfigError(self._other(f"more than {self.total}"))
            batch = as_tensors(given)[0]
            self._compare(index, batch)
            yield index, batch
        if index + 1 < self.total:
            raise ConfigError(self._other(str(index + 1)))

    def _other(self, count: str) -> str:
        here = f" of process {process()}" if process() else ""
        return (
            f"batches{here} gave {self.total} when first read, and {count} when read again; expected the same each "
            "time. A function has to return a fresh iterator in every call, an object has to begin anew in __iter__"
        )

    def _compare(self, index: int, batch: Batch) -> None:
        first = self._first_rows[index]
        if not self._warned and first is not None and first != next(rows(batch), None):
            self._warned = True
            warnings.warn(
                f"batch {index} is not what it was when batches was first read: other texts are held out than before, "
                "so the reported errors are partly those of fitted ones. Use a DataLoader with shuffle=False, and no "
                "random changes of the data",
                NumericalWarning,
                stacklevel=6,
            )


def model_inputs(model: nn.Module, batch: Batch) -> dict[str, Any]:
    """Return a batch as the model's inputs: without labels, on its device, images and audio in its dtype."""
    return {key: value for key, value in placed(model, batch).items() if key not in LABELS}


def placed(model: nn.Module, batch: Batch) -> dict[str, Any]:
    """Move a batch to the device of the model, images and audio to its dtype."""
    device, dtype = place_of(model), getattr(model, "dtype", None)
    return {
        key: value.to(device, dtype if key in FLOATS else None) if isinstance(value, torch.Tensor) else value
        for key, value in batch.items()
    }


class HeldOutRows:
    """Digests of the rows of all batches."""

    def __init__(self) -> None:
        self.fitted: set[bytes] = set()
        self.held_out: list[bytes] = []

    def add(self, digests: Iterable[bytes], is_held_out: bool) -> None:
        """Add the digests of one batch, as computed by `rows`."""
        if is_held_out:
            self.held_out += digests
        else:
            self.fitted.update(digests)

    def warn_if_repeated(self) -> None:
        """Warn (NumericalWarning) if most held-out rows are also among the fitted ones, over all processes."""
        shares = gathered((self.fitted, self.held_out))
        fitted, held_out = set().union(*(rows for rows, _ in shares)), [row for _, rows in shares for row in rows]
        repeated = count_repeated(held_out, fitted)
        if 2 * repeated > len(held_out):
            warnings.warn(
                f"{repeated} of {len(held_out)} held-out rows are also among those that are fitted: the reported error "
                "is that of known texts and the regularisation is chosen too small. Give every text once",
                NumericalWarning,
                stacklevel=5,
            )


class LabelledRows:
    """Digests of the rows of all batches, with their labels."""

    def __init__(self) -> None:
        self.rows: list[bytes] = []
        self.labels: list[Any] = []

    def add(self, inputs: Mapping[str, Any], labels: torch.Tensor) -> None:
        """Add the digests of one batch and its labels, (n,) or, for token classification, (n, tokens)."""
        row_digests = list(rows(inputs))
        if len(row_digests) == len(labels):
            self.rows += row_digests
            self.labels += [tuple(each) if isinstance(each, list) else each for each in labels.tolist()]

    def reduce(self) -> None:
        """Gather the rows of all processes; every process calls this."""
        shares = gathered((self.rows, self.labels))
        self.rows, self.labels = (list(chain.from_iterable(column)) for column in zip(*shares, strict=True))

    def warn_if_contradicting(self, stacklevel: int = 3) -> None:
        """Warn if rows occur with more than one label (NumericalWarning); `stacklevel` as in `warnings.warn`."""
        note = label_note("batches", self.rows, self.labels)
        if note is not None:
            warnings.warn(note, NumericalWarning, stacklevel=stacklevel)
