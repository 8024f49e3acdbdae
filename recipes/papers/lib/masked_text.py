"""Masked language modelling: texts, a vocabulary of word pieces made from them, windows of tokens, and masks.

    text -> [CLS] piece ... piece [SEP]     windows of a fixed length that do not overlap; [SEP] also ends every text
    15 % of the pieces are asked for: of these 80 % read [MASK], 10 % another piece at random, 10 % themselves (BERT)

What a window hides is a function of (seed, epoch, index) alone, so that a continued run hides the same.
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
TO_MASK, TO_RANDOM = 0.8, 0.1  # shares of the pieces that are asked for; the rest read themselves
_EVALUATED = 2**31 - 1  # in the place of an epoch, so that what is scored hides the same throughout


def read_texts(task: str, folder: str | None) -> tuple[list[str], list[str]]:
    """Texts to train on and held-out texts.

    Raises:
        ConfigError: files that are not there or hold no text.
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
    """The lines of a file of WikiText that are text: no blank ones and no headings, which stand between "="."""
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: cannot be read ({error}); expected WikiText's official layout") from error
    found = [text for line in lines if (text := line.strip()) and not (text.startswith("=") and text.endswith("="))]
    if not found:
        raise ConfigError(f"{file} holds no line of text; expected WikiText's official layout")
    return found


def train_tokenizer(texts: Sequence[str], vocabulary: int, max_length: int) -> BertTokenizer:
    """A lower-casing WordPiece tokenizer whose vocabulary is made from `texts`; the same texts give the same one.

    Args:
        texts: to count pieces in.
        vocabulary: pieces at most; all characters are among them, also if they are more.
        max_length: tokens of an example, kept in the tokenizer.
    """
    cleaner, splitter = normalizers.BertNormalizer(lowercase=True), pre_tokenizers.BertPreTokenizer()
    characters = sorted({sign for text in texts for sign in cleaner.normalize_str(text) if not sign.isspace()})
    # The trainer numbers characters in an order that differs from process to process, and breaks ties by number: here
    # they have their numbers before.
    fixed = [*SPECIAL, *characters, *(f"##{sign}" for sign in characters)]
    counter = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    counter.normalizer, counter.pre_tokenizer = cleaner, splitter
    trainer = trainers.WordPieceTrainer(vocab_size=vocabulary, special_tokens=fixed, show_progress=False)
    counter.train_from_iterator(texts, trainer)
    return BertTokenizer(vocab=counter.get_vocab(), do_lower_case=True, model_max_length=max_length)


class MaskedWindows(ExampleSet):
    """Windows of a text, pieces of which are hidden.

    Args:
        texts: of one split.
        tokenizer: from `train_tokenizer`.
        length: tokens of a window, with [CLS] and [SEP].
        share: of the pieces that are asked for.
        seed: of what is hidden.
        count: windows at most, evenly over the text; None for all.
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
        """(what the model reads, what it is asked for, `IGNORED` elsewhere), (length,) each, of one window."""
        ids = self.ids[index]
        random = np.random.default_rng((self._seed, epoch, index))
        chance, kind = torch.from_numpy(random.random((2, len(ids))))
        other = torch.from_numpy(random.integers(len(SPECIAL), self._vocabulary, len(ids)))
        pieces = ids >= len(SPECIAL)
        asked = pieces & (chance < self._share)
        if not asked.any():  # a window without a question has no loss
            asked = chance == chance[pieces].min() if pieces.any() else chance == chance.min()
        given = torch.where(asked & (kind < TO_MASK), self._mask, ids)
        given = torch.where(asked & (kind >= 1 - TO_RANDOM), other, given)
        return given, torch.where(asked, ids, IGNORED)

    def batch(
        self, indices: Sequence[int], device: torch.device | str = "cpu", epoch: int | None = None
    ) -> dict[str, torch.Tensor]:
        """Model inputs, input_ids and labels (batch, length); without an epoch, what is hidden when scoring."""
        pairs = [self.masked(index, _EVALUATED if epoch is None else epoch) for index in indices]
        ids, labels = (torch.stack(part).to(device) for part in zip(*pairs, strict=True))
        return {"input_ids": ids, "labels": labels}

    def batches(
        self, wanted: Sequence[Sequence[int]], device: torch.device | str = "cpu", epoch: int | None = None
    ) -> Iterator[dict[str, torch.Tensor]]:
        """See `ExampleSet.batches`; every epoch hides other pieces."""
        return (self.batch(indices, device, epoch) for indices in wanted)

    def loss_without_context(self, held_out: MaskedWindows) -> float:
        """What a guess by how often pieces occur in these windows costs on others, in nats per hidden piece.

        Attention has nothing to do with a loss near this one. Every piece counts once more than it occurs.
        """
        counts = torch.bincount(self.ids[self.ids >= len(SPECIAL)], minlength=self._vocabulary).double()
        counts[len(SPECIAL) :] += 1
        labels = held_out.batch(range(len(held_out)))["labels"]
        return float((counts / counts.sum()).log()[labels[labels != IGNORED]].mean().neg())

    def fingerprint(self) -> str:
        how = f"{self._share} {self._seed} {self._vocabulary}".encode()
        return digest(how, [("", list(self.ids.numpy()))], np.int64)
