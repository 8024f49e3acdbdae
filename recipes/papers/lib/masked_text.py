"""Masked language modelling: texts, a WordPiece vocabulary built from them, windows of tokens, and masks.

    text -> [CLS] piece ... piece [SEP]     windows of a fixed length that do not overlap; [SEP] also ends every text
    15 % of the pieces are masked: 80 % of these by [MASK], 10 % by a random piece, 10 % by themselves (BERT)

The masks of a window depend only on (seed, epoch, index), so a resumed run has the same ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from data import TASKS
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers
from transformers import BertTokenizer

from snnk_cli.data import ExampleSet, check_not_empty, digest
from snnk_peft.errors import ConfigError
from snnk_peft.tasks.base import IGNORED

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
WIKITEXT = "wikitext"
TO_MASK, TO_RANDOM = 0.8, 0.1  # shares of the masked pieces; the rest are unchanged
_EVALUATED = 2**31 - 1  # instead of an epoch, so that evaluations always use the same masks


def read_texts(task: str, folder: str | None) -> tuple[list[str], list[str]]:
    """Return training texts and held-out texts.

    Raises:
        ConfigError: files are missing or contain no text.
    """
    if task != WIKITEXT:
        spec = TASKS[task]
        rows = spec.load(folder)
        held_out = spec.validation_splits[0]
        train, test = (list(rows[split]["sentence1"]) for split in ("train", held_out))
        return train, test
    if folder is None:
        raise ConfigError("data.dir is null; expected the folder of wiki.train.tokens and wiki.valid.tokens")
    train, test = (_articles(Path(folder) / f"wiki.{split}.tokens") for split in ("train", "valid"))
    return train, test


def _articles(file: Path) -> list[str]:
    """Return the text lines of a WikiText file, without blank lines and headings, which are enclosed in "="."""
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: cannot be read ({error}); expected WikiText's official layout") from error
    found = [text for line in lines if (text := line.strip()) and not (text.startswith("=") and text.endswith("="))]
    if not found:
        raise ConfigError(f"{file} holds no line of text; expected WikiText's official layout")
    return found


def train_tokenizer(texts: Sequence[str], vocabulary: int, max_length: int) -> BertTokenizer:
    """Train a lower-casing WordPiece tokenizer on `texts`; the same texts give the same one.

    Args:
        texts: training texts.
        vocabulary: maximum number of pieces; all characters are included even if there are more.
        max_length: maximum number of tokens per example, stored in the tokenizer.
    """
    cleaner, splitter = normalizers.BertNormalizer(lowercase=True), pre_tokenizers.BertPreTokenizer()
    characters = sorted({sign for text in texts for sign in cleaner.normalize_str(text) if not sign.isspace()})
    # The trainer numbers characters in an order that differs between processes, and breaks ties by number, so their
    # numbers are fixed in advance.
    fixed = [*SPECIAL, *characters, *(f"##{sign}" for sign in characters)]
    counter = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    counter.normalizer, counter.pre_tokenizer = cleaner, splitter
    trainer = trainers.WordPieceTrainer(vocab_size=vocabulary, special_tokens=fixed, show_progress=False)
    counter.train_from_iterator(texts, trainer)
    return BertTokenizer(vocab=counter.get_vocab(), do_lower_case=True, model_max_length=max_length)


class MaskedWindows(ExampleSet):
    """Windows of a text with masked pieces.

    Args:
        texts: texts of one split.
        tokenizer: tokenizer from `train_tokenizer`.
        length: tokens per window, with [CLS] and [SEP].
        share: share of masked pieces.
        seed: seed of the masks.
        count: maximum number of windows, evenly spread over the text; None for all.
    """

    def __init__(
        self, texts: Iterable[str], tokenizer: Any, length: int, share: float, seed: int, count: int | None = None
    ):
        end = [tokenizer.sep_token_id]
        encoded = tokenizer(list(texts), add_special_tokens=False, return_attention_mask=False, verbose=False)
        stream = np.concatenate([np.asarray(ids + end, dtype=np.int64) for ids in encoded["input_ids"]])
        width = length - 2
        whole = stream[: len(stream) // width * width].reshape(-1, width)
        check_not_empty(whole)
        if count is not None and count < len(whole):
            whole = whole[np.linspace(0, len(whole) - 1, count).astype(int)]
        edges = [np.full((len(whole), 1), index) for index in (tokenizer.cls_token_id, tokenizer.sep_token_id)]
        self.ids = torch.from_numpy(np.concatenate((edges[0], whole, edges[1]), 1))
        self.lengths = [length] * len(whole)
        self._share, self._seed = share, seed
        self._mask, self._vocabulary = tokenizer.mask_token_id, len(tokenizer)

    def masked(self, index: int, epoch: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return input ids and labels (`IGNORED` at unmasked pieces) of one window, (length,) each."""
        ids = self.ids[index]
        random = np.random.default_rng((self._seed, epoch, index))
        chance, kind = torch.from_numpy(random.random((2, len(ids))))
        other = torch.from_numpy(random.integers(len(SPECIAL), self._vocabulary, len(ids)))
        pieces = ids >= len(SPECIAL)
        asked = pieces & (chance < self._share)
        if not asked.any():  # a window without masked pieces has no loss
            asked = chance == chance[pieces].min() if pieces.any() else chance == chance.min()
        given = torch.where(asked & (kind < TO_MASK), self._mask, ids)
        given = torch.where(asked & (kind >= 1 - TO_RANDOM), other, given)
        return given, torch.where(asked, ids, IGNORED)

    def batch(
        self, indices: Sequence[int], device: torch.device | str = "cpu", epoch: int | None = None
    ) -> dict[str, torch.Tensor]:
        """Return model inputs: input_ids and labels (batch, length); without an epoch, with the evaluation masks."""
        pairs = [self.masked(index, _EVALUATED if epoch is None else epoch) for index in indices]
        ids, labels = (torch.stack(part).to(device) for part in zip(*pairs, strict=True))
        return {"input_ids": ids, "labels": labels}

    def batches(
        self, wanted: Sequence[Sequence[int]], device: torch.device | str = "cpu", epoch: int | None = None
    ) -> Iterator[dict[str, torch.Tensor]]:
        """Yield batches as `ExampleSet.batches`; the masks differ between epochs."""
        return (self.batch(indices, device, epoch) for indices in wanted)

    def loss_without_context(self, held_out: MaskedWindows) -> float:
        """Return the held-out loss of guessing by the piece frequencies of these windows, in nats per masked piece.

        A model with a loss near this one makes no use of attention. Counts are smoothed by adding one.
        """
        counts = torch.bincount(self.ids[self.ids >= len(SPECIAL)], minlength=self._vocabulary).double()
        counts[len(SPECIAL) :] += 1
        labels = held_out.batch(range(len(held_out)))["labels"]
        return float((counts / counts.sum()).log()[labels[labels != IGNORED]].mean().neg())

    def fingerprint(self) -> str:
        how = f"{self._share} {self._seed} {self._vocabulary}".encode()
        return digest(how, [("", list(self.ids.numpy()))], np.int64)
