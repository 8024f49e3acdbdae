"""A Llama-like language model with linear attention, from nothing: trained, bundled, reloaded, generating.

    python recipes/tiny_llama.py --output runs/tiny_llama                      about four minutes on one core
    python recipes/tiny_llama.py --output runs/mine --text book.txt --steps 2000 --near-field 32

Two layers of width 128, rotary positions, 4 query heads over 2 key heads, one token per byte. All layers get linear
attention (positive random features over orthogonal rows) before training; all weights are trained. The text is what
every machine has: sentences from the docstrings of Python's standard library, held out by module
(snnk_peft/tasks/stdlib_docs.py); of a --text the last tenth is held out. The result is loaded in a fresh process, where
it generates with a cache of constant size, next to the usual one that keeps all keys.

`--output` receives bundle/ (loads with AutoModelForCausalLM), metrics.json and learning_curve.png.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from _lib.files import check_writable, write_folder, write_json
from _lib.guard import guarded
from _lib.plots import loss_curves
from _lib.run_folder import environment
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from torch import nn
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig, LlamaForCausalLM

from snnk_peft import AttentionPart, SNNKConfig, bundle, get_snnk_model
from snnk_peft.attention import RecurrentCache
from snnk_peft.errors import ConfigError
from snnk_peft.tasks.stdlib_docs import load_sentences

ROOT = Path(__file__).resolve().parent.parent
CONTENT = {"bundle", "metrics.json", "learning_curve.png"}
WINDOW, BATCH = 256, 16  # bytes, sequences per step
HELD_OUT = 64  # windows that the loss is measured on
PREFIXES, DECODED = (512, 8192), 32  # tokens already in the cache, tokens timed
SAMPLE = 200  # tokens


def main(argv: list[str] | None = None) -> None:
    """Train, bundle, reload, measure, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="folder to write; must not exist, or see --overwrite")
    parser.add_argument("--overwrite", action="store_true", help="replace the results of an earlier run")
    parser.add_argument("--text", type=Path, help="UTF-8 text to train on (docstrings of the standard library)")
    parser.add_argument("--steps", type=int, default=400, help="optimizer steps of 16 × 256 bytes (400)")
    parser.add_argument("--component", default="posrf", help="component function of the feature map (posrf)")
    parser.add_argument("--projection", default="orf", help="its weight matrix (orf)")
    parser.add_argument("--num-features", type=int, default=64, help="rows of it (64)")
    parser.add_argument("--near-field", type=int, help="width of an exact softmax band beside it (none)")
    parser.add_argument("--prompt", default="Return the ", help="what the sample starts with")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--reload", type=Path, help=argparse.SUPPRESS)  # the fresh process calls this file again
    arguments = parser.parse_args(argv)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    if arguments.reload is not None:
        print(json.dumps(reloaded(arguments.reload, json.load(sys.stdin))))
        return
    try:
        check(arguments)
        train_text, test_text = texts(arguments.text)
    except ConfigError as error:
        parser.error(str(error))
    console = Console(stderr=True)

    # 1. The model: an untrained Llama whose softmax attention is exchanged at once. PEFT freezes what it wraps; here
    #    everything is to be learned.
    torch.manual_seed(arguments.seed)
    part = AttentionPart(
        component=arguments.component,
        projection=arguments.projection,
        num_features=arguments.num_features,
        near_field=arguments.near_field,
    )
    model = get_snnk_model(
        LlamaForCausalLM(llama_config()), SNNKConfig(attention=part, modules_to_save=[], seed=arguments.seed)
    )
    model.get_base_model().requires_grad_(True)
    before = bits_per_byte(model, test_text)

    # 2. Training on random windows.
    start = time.perf_counter()
    curves = train(model, train_text, test_text, arguments.steps, arguments.seed, console)
    seconds = time.perf_counter() - start
    after = bits_per_byte(model, test_text)
    console.print(f"held-out loss: {before:.3f} -> {after:.3f} bits per byte in {seconds:.0f} s")

    # 3. A plain transformers model, loaded again by a fresh process, which generates and takes the time.
    small = bundle(model)
    prompt = list(arguments.prompt.encode())
    probe = test_text[:WINDOW].tolist()

    def fill(folder: Path) -> None:
        small.save_pretrained(folder / "bundle")
        title = f"{arguments.component}/{arguments.projection}, {arguments.num_features} features"
        loss_curves(curves, folder / "learning_curve.png", title, "bits per byte")
        with console.status("generating in a fresh process"):
            given = {"prompt": prompt, "probe": probe, "seed": arguments.seed}
            fresh = in_fresh_process(folder / "bundle", given)
        with torch.no_grad():
            here = small(input_ids=torch.tensor([probe])).logits[0, -1]
        difference = (torch.tensor(fresh.pop("logits")) - here).abs().max() / here.abs().max()
        figures = {
            "settings": {key: value for key, value in vars(arguments).items() if isinstance(value, (str, int))},
            "text": str(arguments.text or "docstrings of the standard library"),
            "bytes_of_text": {"train": len(train_text), "held_out": len(test_text)},
            "parameters": small.num_parameters(),
            "bits_per_byte": {"before": before, "after": after},
            "training_seconds": seconds,
            "bundle_parity_error": small.bundle_report.parity_error,
            "reload_parity_error": difference.item(),
            **fresh,
            "environment": environment(ROOT),
        }
        write_json(folder / "metrics.json", figures)

    write_folder(arguments.output, fill)
    report(json.loads((arguments.output / "metrics.json").read_text(encoding="utf-8")), arguments.output)


def check(arguments: argparse.Namespace) -> None:
    """All that can be wrong before the work starts."""
    faults = []
    if arguments.output is None:
        faults.append("--output is missing; expected a folder to write")
    elif arguments.output.exists():
        strange = {entry.name for entry in arguments.output.iterdir()} - CONTENT if arguments.output.is_dir() else {""}
        if strange:
            faults.append(
                f"{arguments.output} holds other things than a result of this recipe; choose another --output"
            )
        elif not arguments.overwrite:
            faults.append(f"{arguments.output} exists; choose another --output, or replace it with --overwrite")
    else:
        check_writable(arguments.output)
    if arguments.steps < 1:
        faults.append(f"--steps is {arguments.steps}; expected >= 1")
    if not arguments.prompt:
        faults.append("--prompt is empty; expected at least one character")
    if faults:
        raise ConfigError(faults)


def texts(file: Path | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Bytes to train on and bytes to test on, as integers."""
    if file is None:
        parts = ["\n".join(sentence.text for sentence in half).encode() for half in load_sentences()]
    else:
        try:
            whole = file.read_bytes()
        except OSError as error:
            raise ConfigError(f"--text {file}: cannot be read ({error.strerror})") from error
        parts = [whole[: len(whole) * 9 // 10], whole[len(whole) * 9 // 10 :]]
    for part in parts:
        if len(part) <= WINDOW:
            raise ConfigError(f"--text {file}: too short; expected more than {10 * (WINDOW + 1)} bytes")
    train, test = (torch.frombuffer(bytearray(part), dtype=torch.uint8).long() for part in parts)
    return train, test


def llama_config() -> LlamaConfig:
    """Two layers of width 128; bytes are tokens, and 0, which text does not contain, is padding."""
    return LlamaConfig(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=344,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=16384,
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=None,
    )


def train(
    model: nn.Module, train_text: torch.Tensor, test_text: torch.Tensor, steps: int, seed: int, console: Console
) -> dict[str, list[tuple[int, float]]]:
    """AdamW with a warm-up and a cosine; training and held-out loss, in bits per byte, over steps."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, betas=(0.9, 0.95), weight_decay=0.01)
    warmup = max(1, steps // 20)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warmup, 0.55 + 0.45 * math.cos(math.pi * step / steps))
    )
    generator = torch.Generator().manual_seed(seed)
    held_out = [(0, bits_per_byte(model, test_text))]
    losses: list[tuple[int, float]] = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=console) as progress:
        task = progress.add_task("training", total=steps)
        for step in range(1, steps + 1):
            model.train()
            begin = torch.randint(len(train_text) - WINDOW, (BATCH,), generator=generator)
            ids = train_text[begin[:, None] + torch.arange(WINDOW)]
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
            if not loss.isfinite():
                raise SystemExit(f"the loss is {loss.item()} at step {step}; try more features or another --component")
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            losses.append((step, loss.item() / math.log(2)))
            if step % max(1, steps // 10) == 0 or step == steps:
                held_out.append((step, bits_per_byte(model, test_text)))
            progress.update(task, advance=1, description=f"training, {losses[-1][1]:.2f} bits per byte")
    return {"training": losses, "held out": held_out}


@torch.no_grad()
def bits_per_byte(model: nn.Module, text: torch.Tensor) -> float:
    """Mean loss over windows spread evenly over the text."""
    model.eval()
    windows = text[: len(text) // WINDOW * WINDOW].unflatten(0, (-1, WINDOW))
    windows = windows[torch.linspace(0, len(windows) - 1, min(HELD_OUT, len(windows))).long()]
    losses = [model(input_ids=part, labels=part, use_cache=False).loss * len(part) for part in windows.split(BATCH)]
    return float(sum(losses)) / len(windows) / math.log(2)


def in_fresh_process(folder: Path, given: dict[str, Any]) -> dict[str, Any]:
    """What `reloaded` finds out in a new Python."""
    command = [sys.executable, __file__, "--reload", str(folder)]
    done = subprocess.run(command, input=json.dumps(given), capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"the bundle in {folder} could not be used in a fresh process:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


@torch.no_grad()
def reloaded(folder: Path, given: dict[str, Any]) -> dict[str, Any]:
    """Load the bundle; its answer to the probe, a sample, and speed and size of both kinds of cache."""
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    torch.manual_seed(given["seed"])
    prompt = torch.tensor([given["prompt"]])
    settings = {"max_new_tokens": SAMPLE, "return_dict_in_generate": True}
    sampled = model.generate(prompt, **settings, do_sample=True, temperature=0.7)
    greedy = model.generate(prompt, **settings, do_sample=False)
    if not torch.equal(
        greedy.sequences, model.generate(prompt, **settings, do_sample=False, use_cache=False).sequences
    ):
        raise SystemExit("greedy generation with the recurrent cache differs from generation without a cache")
    caches = {"recurrent": lambda: RecurrentCache(model), "growing": lambda: DynamicCache(config=model.config)}
    decoding = {
        name: {str(length): decode(model, make(), length) for length in PREFIXES} for name, make in caches.items()
    }
    return {
        "logits": model(input_ids=torch.tensor([given["probe"]])).logits[0, -1].tolist(),
        "cache": type(sampled.past_key_values).__name__,
        "sample": bytes(sampled.sequences[0].tolist()).decode(errors="replace"),
        "greedy": bytes(greedy.sequences[0].tolist()).decode(errors="replace"),
        "decoding": decoding,
    }


def decode(model: nn.Module, cache: Any, prefix: int) -> dict[str, float]:
    """Fill the cache with `prefix` tokens in chunks, then time single tokens."""
    ids = torch.randint(32, 127, (1, prefix), generator=torch.Generator().manual_seed(0))
    for chunk in ids.split(1024, -1):
        model(input_ids=chunk, past_key_values=cache, logits_to_keep=1)
    times = []
    for _ in range(DECODED):
        start = time.perf_counter()
        model(input_ids=ids[:, :1], past_key_values=cache)
        times.append(time.perf_counter() - start)
    layers = [getattr(layer, "nbytes", None) or layer.keys.nbytes + layer.values.nbytes for layer in cache.layers]
    return {"tokens_per_second": 1 / statistics.median(times), "cache_bytes": sum(layers)}


def report(figures: dict[str, Any], folder: Path) -> None:
    """The main figures, for people."""
    bits = figures["bits_per_byte"]
    print(f"{figures['parameters']:,} parameters, held out {bits['before']:.3f} -> {bits['after']:.3f} bits per byte")
    print(f"reloaded in a fresh process, largest relative difference {figures['reload_parity_error']:.1e}")
    for name, rows in figures["decoding"].items():
        for prefix, row in rows.items():
            print(
                f"{name} cache, {prefix} tokens before: {row['tokens_per_second']:.0f} tokens/s, "
                f"{row['cache_bytes']:,} bytes"
            )
    print(f"sample: {figures['sample']!r}\nwritten: {folder}")


if __name__ == "__main__":
    sys.exit(guarded(main))
