"""Scoring a causal language model on texts: perplexity by position, recall from far back, cache and speed.

Everything is read through the cache that `generate` would use, in pieces of 512 tokens:

- perplexity: of the texts, concatenated and cut into stretches, at positions below 512, below 1,024, ...
- copying: the share of a passage's tokens, after its first 16, that the model predicts as most likely when the passage
  recurs after a given number of other tokens
- passkey: how often the model repeats a number that is hidden somewhere in a given number of tokens
- bytes of the cache, and milliseconds for one more token after a stretch

Perplexity alone hides what a smaller cache loses: in ordinary text, hardly any token depends on what is far back.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from snnk_cli.config import ROOT, load_config
from snnk_cli.files import check_writable, write_json, writing
from snnk_cli.lock import alone
from snnk_cli.models import local_folder
from snnk_cli.plots import make_axes, store
from snnk_cli.run_folder import environment
from snnk_cli.settings import LanguageConfig
from snnk_cli.terminal import bar, quiet, show_table
from snnk_peft.attention import RecurrentCache
from snnk_peft.errors import ConfigError
from snnk_peft.tasks.texts import read_texts

PIECE = 512  # tokens of a forward pass
PASSAGE, KNOWN, PASSAGES = 64, 16, 4
DEPTHS = (0.1, 0.4, 0.6, 0.9)  # relative position of the number
FILLER = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. "
KEY = "The pass key is {0}. Remember it. {0} is the pass key. "
QUESTION = "What is the pass key? The pass key is"
STEPS = 10  # timed tokens
KINDS = ("perplexity", "copied", "passkey")


class Read:
    """A model read through the cache that its users get."""

    def __init__(self, model: Any):
        self.model = model
        self.device = next(model.parameters()).device

    def cache(self) -> Any:
        """Create an empty cache."""
        linear = any(hasattr(module, "snnk_kernel") for module in self.model.modules())
        return RecurrentCache(self.model) if linear else DynamicCache(config=self.model.config)

    @torch.inference_mode()
    def logits(self, ids: Tensor) -> Iterator[Tensor]:
        """Yield next-token logits for `ids` (L,), piece by piece: (n, vocabulary)."""
        cache = self.cache()
        for piece in ids.to(self.device).split(PIECE):
            yield self.model(input_ids=piece[None], past_key_values=cache).logits[0]

    def losses(self, ids: Tensor) -> Tensor:
        """Return the loss of each token but the first, in nats: (L − 1,)."""
        wanted, found = ids[1:].to(self.device).split(PIECE), []
        for logits, tokens in zip(self.logits(ids), wanted, strict=False):
            found.append(nn.functional.cross_entropy(logits[: len(tokens)].float(), tokens, reduction="none").cpu())
        return torch.cat(found)

    def copied(self, ids: Tensor) -> float:
        """Return the share of the last tokens of the passage that are predicted as most likely."""
        likely = torch.cat([logits.argmax(-1).cpu() for logits in self.logits(ids)])
        count = PASSAGE - KNOWN
        return float((likely[-count - 1 : -1] == ids[-count:]).float().mean())

    @torch.inference_mode()
    def written(self, ids: Tensor, count: int) -> list[int]:
        """Return the `count` most likely tokens after `ids`, decoded greedily."""
        cache, found = self.cache(), []
        for piece in ids.to(self.device).split(PIECE):
            likely = self.model(input_ids=piece[None], past_key_values=cache, logits_to_keep=1).logits[0, -1].argmax()
        for _ in range(count):
            found.append(int(likely))
            step = torch.tensor([[found[-1]]], device=self.device)
            likely = self.model(input_ids=step, past_key_values=cache).logits[0, -1].argmax()
        return found

    @torch.inference_mode()
    def decoding(self, ids: Tensor, repetitions: int = STEPS) -> tuple[int, float]:
        """Return the bytes of the cache after the tokens, and the milliseconds per further token."""
        cache, ids = self.cache(), ids.to(self.device)
        for piece in ids.split(PIECE):
            self.model(input_ids=piece[None], past_key_values=cache, logits_to_keep=1)
        seconds = []
        for token in ids[:repetitions]:
            start = time.perf_counter()
            int(self.model(input_ids=token[None, None], past_key_values=cache).logits.argmax())  # waits for a GPU
            seconds.append(time.perf_counter() - start)
        return bytes_of(cache), 1000 * statistics.median(seconds)


def bytes_of(cache: Any) -> int:
    """Return the bytes of the cache over all layers."""
    return sum(getattr(layer, "nbytes", None) or layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)


def recalled(ids: Tensor, first: int, between: int) -> Tensor:
    """Return a passage of `ids`, other text, and the passage again."""
    passage, other = ids[first : first + PASSAGE], ids[first + PASSAGE : first + PASSAGE + between]
    return torch.cat((ids[:1], passage, other, passage))


def copying(read: Read, ids: Tensor, between: int) -> float:
    """Return the mean copied share over passages spread over `ids`."""
    step = max(1, (len(ids) - PASSAGE - between) // PASSAGES)
    return statistics.fmean(read.copied(recalled(ids, number * step, between)) for number in range(PASSAGES))


def told(tokenizer: Any, tokens: int, depth: float, key: int) -> Tensor:
    """Return a text of about `tokens` tokens with a number at a relative depth, and a question about it."""

    def ids(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    sentence, told, question = ids(FILLER), ids(KEY.format(key)), ids(QUESTION)
    room = max(2, (tokens - len(told) - len(question)) // len(sentence))
    before = round(depth * room)
    return torch.tensor([*begin(tokenizer), *sentence * before, *told, *sentence * (room - before), *question])


def passkeys(read: Read, tokenizer: Any, tokens: int) -> float:
    """Return the share of texts for which the model gives the number."""
    right = 0
    for number, depth in enumerate(DEPTHS):
        key = 10_000 + 17_041 * (number + 1)
        given = told(tokenizer, tokens, depth, key)
        right += str(key) in str(tokenizer.decode(read.written(given, 8)))
    return right / len(DEPTHS)


def begin(tokenizer: Any) -> list[int]:
    """Return the tokens that a text begins with."""
    return [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]


def strung(tokenizer: Any, texts: Sequence[str]) -> Tensor:
    """Return the concatenated texts, (tokens,)."""
    parts = (begin(tokenizer) + list(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in texts)
    return torch.tensor([token for part in parts for token in part])


def doubling(least: int, most: int) -> list[int]:
    """Return `least`, doubled repeatedly, while below `most`."""
    found = []
    while least < most:
        found.append(least)
        least *= 2
    return found


def score_language(
    folder: Path, texts: Path, overrides: list[str], output: Path | None, results: list[dict[str, Any]] | None = None
) -> int:
    """Score a causal language model, and optionally another one with it; return the exit code, 0.

    Args:
        folder: folder of the model and its tokenizer.
        texts: a .txt file, which is one text, or a table (.csv, .tsv, .jsonl, .parquet).
        overrides: settings from the command line, see LanguageConfig.
        output: file of the result, next to which a plot is drawn; None for neither.
        results: list that the result is appended to.

    Raises:
        ConfigError: not a causal model, no text, or too little text.
    """
    quiet()
    config = load_config(LanguageConfig, None, overrides)
    if output is not None:
        check_writable(output.parent)
    with alone(output) if output is not None else nullcontext():
        device = "cuda" if torch.cuda.is_available() and config.device == "auto" else "cpu"
        models = {folder.name: folder}
        if config.beside is not None:
            other = local_folder(config.beside)
            models[other.name if other.name != folder.name else str(other)] = other
        rows: list[dict[str, Any]] = []
        ids: Tensor | None = None
        for name, where in models.items():
            model, tokenizer = _loaded(where)
            if ids is None:
                length = config.length or min(4 * 2048, getattr(model.config, "max_position_embeddings", 8192))
                ids = strung(tokenizer, _read(texts, config.text))
                if len(ids) < length:
                    raise ConfigError(
                        f"{texts} holds {len(ids)} tokens; expected {length}. Give longer texts, or length={PIECE}"
                    )
            own = ids[: config.stretches * length]
            rows.append({"model": name, **_scored(Read(model.to(device)), tokenizer, own, length, name)})
        result = {"texts": texts.name, "tokens": min(len(ids), config.stretches * length), "length": length}  # type: ignore[arg-type]
        result |= {"device": device, "rows": rows, "environment": environment(ROOT)}
        _show(rows)
        if output is not None:
            with writing(output.parent):
                output.parent.mkdir(parents=True, exist_ok=True)
            write_json(output, result)
            _draw(rows, output.with_suffix(".png"))
            print(f"written to {output}")
        if results is not None:
            results.append(result)
    return 0


def _loaded(folder: Path) -> tuple[Any, Any]:
    """Load a causal language model and its tokenizer; ConfigError for any other model."""
    try:
        given: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
        tokenizer = AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError) as error:
        told = " ".join(str(error).split())[:200]
        raise ConfigError(f"{folder} holds no causal language model with its tokenizer ({told})") from error
    model, found = given
    if fresh := sorted(found["missing_keys"]):
        raise ConfigError(
            f"{folder} has no weights for {', '.join(fresh[:4])} of a {type(model).__name__}; expected a causal "
            "language model"
        )
    return model.eval(), tokenizer


def _read(texts: Path, column: str) -> list[str]:
    if texts.suffix.lower() != ".txt":
        return read_texts(texts, [column], "--texts")[column]
    try:
        return [texts.read_text(encoding="utf-8")]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--texts is {texts}, which cannot be read ({error}); expected UTF-8 text") from error


def _scored(read: Read, tokenizer: Any, ids: Tensor, length: int, name: str) -> dict[str, Any]:
    stretches = [part for part in ids.split(length) if len(part) == length]
    first, losses = min(PIECE, length // 4), []
    ends = [*doubling(first, length), length]
    found: dict[str, Any] = {kind: {} for kind in KINDS}

    def put(kind: str, key: str, value: Callable[[], float]) -> Callable[[], None]:
        return lambda: found[kind].update({key: value()})

    work: list[Callable[[], None]] = [lambda part=part: losses.append(read.losses(part)) for part in stretches]  # type: ignore[misc]
    for start, end in zip([0, *ends], ends, strict=False):
        work.append(put("perplexity", f"to {end}", partial(_perplexity, losses, start, end)))
    for between in doubling(first, length - PASSAGE):
        work.append(put("copied", f"after {between}", partial(copying, read, ids, between)))
    for tokens in doubling(first, length + 1):
        work.append(put("passkey", f"in {tokens}", partial(passkeys, read, tokenizer, tokens)))
    for step in bar(work, name):
        step()
    size, taken = read.decoding(stretches[0])
    return {**found, "cache bytes": size, "ms per token": taken}


def _perplexity(losses: Sequence[Tensor], start: int, end: int) -> float:
    """Return the perplexity of the tokens at positions start to end − 1; a text's first token is not predicted."""
    return math.exp(float(torch.stack(list(losses))[:, max(0, start - 1) : end - 1].mean()))


def _show(rows: Sequence[dict[str, Any]]) -> None:
    names = [row["model"] for row in rows]
    lines: list[tuple[str, Callable[[dict[str, Any]], str]]] = []
    for kind in KINDS:
        for key in rows[0][kind]:
            lines.append((f"{kind} {key}", lambda row, k=kind, n=key: f"{row[k][n]:.2f}"))  # type: ignore[misc]
    lines += [
        ("cache, MB", lambda row: f"{row['cache bytes'] / 1e6:.1f}"),
        ("ms per token", lambda row: f"{row['ms per token']:.0f}"),
    ]
    show_table("Language models", ["", *names], [[name, *map(cell, rows)] for name, cell in lines], text=[""])


def _draw(rows: Sequence[dict[str, Any]], file: Path) -> None:
    """Plot perplexity, copying and passkeys over position or distance, one line per model."""
    figure, panels = make_axes(1, 3, size=(13, 4))
    for panel, kind in zip(panels, KINDS, strict=True):
        for row in rows:
            places = [int(key.split()[-1]) for key in row[kind]]
            panel.plot(places, list(row[kind].values()), "o-", label=row["model"])
        panel.set(xlabel="tokens", ylabel=kind, xscale="log")
        if kind != "perplexity":
            panel.set_ylim(-0.02, 1.02)
    panels[0].legend(frameon=False)
    store(figure, file)
