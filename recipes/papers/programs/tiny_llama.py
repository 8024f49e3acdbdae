"""A Llama-like language model with linear attention, from scratch: trained, bundled, reloaded, generating.

    python recipes/papers/programs/tiny_llama.py --output runs/tiny_llama  about four minutes on one core
    python recipes/papers/programs/tiny_llama.py --output runs/mine --text book.txt --steps 2000 --near-field 32

Two layers of width 128, rotary positions, 4 query heads over 2 key heads, one token per byte. All layers get linear
attention (positive random features over orthogonal rows) before training; all weights are trained. The text is on
every machine: sentences from the docstrings of Python's standard library, held out by module
(snnk_peft/tasks/stdlib_docs.py); of --text, the last tenth is held out. The result is loaded in a fresh process, where
it generates with a cache of constant size, next to the usual one that keeps all keys.

`--output` receives bundle/ (loads with AutoModelForCausalLM), metrics.json and learning_curve.png with the records of
the run. A run killed at any moment continues with `--resume`; SIGTERM and Ctrl-C save first (exit codes 143, 130) and
print the command that continues.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable
from dataclasses import MISSING, asdict, dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from papers.lib.byte_windows import ByteWindows, bits_per_byte, read_texts
from papers.lib.generation import in_fresh_process, reloaded
from papers.lib.plots import loss_curves
from snnk_cli.config import option, resume_command
from snnk_cli.data import ExampleSet
from snnk_cli.experiment import Data, Experiment, Finished, Schedule, learning_rate, make_optimizer
from snnk_cli.files import write_folder
from snnk_cli.launch import Request, perform
from snnk_cli.run_folder import check_folder
from snnk_cli.settings import StepSettings
from snnk_cli.terminal import quiet, read_log
from snnk_peft import AttentionPart, SNNKConfig, bundle, get_snnk_model
from snnk_peft.errors import ConfigError

WINDOW, BATCH = 256, 16  # bytes, sequences per step
HELD_OUT = 64  # windows to measure the loss on


@dataclass
class TextSection:
    """The text to read."""

    train_file: str | None = option(None, "UTF-8 text; null: docstrings of the standard library")


@dataclass
class AttentionSection:
    """The attention that replaces softmax."""

    component: str = option("posrf", "component function of the feature map")
    projection: str = option("orf", "its weight matrix")
    num_features: int = option(64, "rows of it", low=1)
    near_field: int | None = option(None, "width of an exact softmax band beside it")


@dataclass
class LanguageTrain(StepSettings):
    """The optimisation."""

    steps: int = option(400, "optimizer steps of 16 × 256 bytes", low=1)


@dataclass
class LanguageOutput:
    """The run folder, and the prompt of the sample."""

    dir: str = option(MISSING, "the run folder")
    prompt: str = option("Return the ", "what the sample starts with")
    tensorboard: bool = option(False, "write TensorBoard events to tensorboard/")


@dataclass
class TinyLlamaConfig:
    """The settings of a run as stored in its folder; on the command line they are options."""

    output: LanguageOutput
    task: str = option("language", "the kind of run", choices=("language",))
    data: TextSection = field(default_factory=TextSection)
    attention: AttentionSection = field(default_factory=AttentionSection)
    train: LanguageTrain = field(default_factory=LanguageTrain)


class TinyLlama(Experiment[TinyLlamaConfig]):
    """Experiment that gives all layers linear attention before training, and trains all weights."""

    settings, program = TinyLlamaConfig, "papers/programs/tiny_llama.py"
    advice = "Try more features or another --component."

    @property
    def method(self) -> str:
        return f"{self.config.attention.component}/{self.config.attention.projection}"

    @property
    def title(self) -> str:
        return f"{self.method}, {self.config.attention.num_features} features"

    def data(self, accelerator: Any) -> Data:
        train, test = read_texts(self.config.data.train_file, WINDOW)
        return Data(ByteWindows(train, WINDOW), {"held out": ByteWindows(test, WINDOW)})

    def model(self, data: Data, accelerator: Any, resumed: bool) -> torch.nn.Module:
        """Build an untrained Llama whose softmax attention is replaced at once."""
        part = AttentionPart(**asdict(self.config.attention))
        config = SNNKConfig(attention=part, modules_to_save=[], seed=self.config.train.seed)
        model = get_snnk_model(LlamaForCausalLM(llama_config()), config)
        model.get_base_model().requires_grad_(True)  # PEFT froze what it wraps
        return model

    def optimizer(self, model: torch.nn.Module) -> torch.optim.Optimizer:
        """Create AdamW with a short memory, as is usual for language models."""
        return make_optimizer(model, self.config.train, beta2=0.95)

    def schedule(self, per_epoch: int) -> Schedule:
        """Return a warm-up, capped by a cosine that decays to a tenth; ten evaluations, and one before training."""
        steps, peak = self.config.train.steps, self.config.train.learning_rate
        rise = learning_rate("constant_with_warmup", peak, max(1, steps // 20), steps)
        fall = learning_rate("cosine_with_min_lr", peak, 0, steps, min_lr_rate=0.1)
        return Schedule(
            total=steps,
            eval_every=max(1, steps // 10),
            rate=lambda step, position: min(rise(step, position), fall(step, position)),
            eval_first=True,
        )

    def score(
        self, model: torch.nn.Module, splits: dict[str, ExampleSet], accelerator: Any, stopped: Callable[[], bool]
    ) -> dict[str, float] | None:
        """Return the held-out loss; lower is better."""
        bits = bits_per_byte(model, splits["held out"], HELD_OUT, BATCH, accelerator.device, stopped)
        return None if bits is None else {"score": -bits, "bits_per_byte": bits}

    def report(self, done: Finished) -> dict[str, Any]:
        """Write a plain transformers model, which a fresh process reloads to generate and to time."""
        config, held_out = self.config, done.data.splits["held out"]
        small = bundle(done.model)
        write_folder(done.folder / "bundle", small.save_pretrained)
        probe = held_out.batch([0])["input_ids"]
        given = {"prompt": list(config.output.prompt.encode()), "probe": probe[0].tolist(), "seed": config.train.seed}
        print("generating in a fresh process", flush=True)
        fresh = in_fresh_process(done.folder / "bundle", given)
        with torch.no_grad():
            here = small(input_ids=probe).logits[0, -1]
        difference = (torch.tensor(fresh.pop("logits")) - here).abs().max() / here.abs().max()
        before = read_log(done.folder / "log.jsonl")[0]["bits_per_byte"]
        settings = {
            "steps": config.train.steps,
            **asdict(config.attention),
            "prompt": config.output.prompt,
            "seed": config.train.seed,
        }
        return {
            "settings": {key: value for key, value in settings.items() if value is not None},
            "text": config.data.train_file or "docstrings of the standard library",
            "bytes_of_text": {"train": len(done.data.train.text), "held_out": len(held_out.text)},
            "parameters": small.num_parameters(),
            "bits_per_byte": {"before": before, "after": done.best["metrics"]["bits_per_byte"]},
            "training_seconds": done.state.train_seconds,
            "bundle_parity_error": small.bundle_report.parity_error,
            "reload_parity_error": difference.item(),
            **fresh,
        }

    def curve(self, rows: list[dict[str, Any]], file: Path) -> None:
        curves = {
            "training": [(row["step"], row["loss"] / math.log(2)) for row in rows if "loss" in row],
            "held out": [(row["step"], row["bits_per_byte"]) for row in rows if "bits_per_byte" in row],
        }
        loss_curves(curves, file, self.title, "bits per byte")

    def summary(self, done: Finished, figures: dict[str, Any]) -> str:
        bits = figures["bits_per_byte"]
        costs = [
            f"{name} cache, {prefix} tokens before: {row['tokens_per_second']:.0f} tokens/s, "
            f"{row['cache_bytes']:,} bytes"
            for name, rows in figures["decoding"].items()
            for prefix, row in rows.items()
        ]
        return "\n".join(
            [
                f"{figures['parameters']:,} parameters, held out {bits['before']:.3f} -> {bits['after']:.3f} bits per "
                "byte",
                f"reloaded in a fresh process, largest relative difference {figures['reload_parity_error']:.1e}",
                *costs,
                f"sample: {figures['sample']!r}",
                f"written: {done.folder}",
            ]
        )


def main(argv: list[str] | None = None) -> int:
    """Train, bundle, reload, measure; return the exit code (0 done, 1 diverged, 2 wrong input, 130 or 143 stopped)."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="folder to write; must not exist, or see --overwrite")
    parser.add_argument("--overwrite", action="store_true", help="replace the results of an earlier run")
    parser.add_argument("--resume", action="store_true", help="continue the run in --output")
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
    if arguments.reload is not None:
        quiet()
        print(json.dumps(reloaded(arguments.reload, json.load(sys.stdin))))
        return 0
    given = [word for word in (sys.argv[1:] if argv is None else argv) if word not in ("--resume", "--overwrite")]
    command = resume_command(TinyLlama.program, given)
    return perform(lambda: prepare(arguments), Request(command, arguments.resume, None, arguments.overwrite))


def prepare(arguments: argparse.Namespace) -> TinyLlama:
    """Build the run described by the options; a ConfigError lists all faults that can be found in advance."""
    train = LanguageTrain(
        steps=arguments.steps,
        seed=arguments.seed,
        batch_size=BATCH,
        learning_rate=4e-3,
        log_every=1,
        device="cpu",
    )
    attention = AttentionSection(
        arguments.component, arguments.projection, arguments.num_features, arguments.near_field
    )
    text = None if arguments.text is None else str(arguments.text)
    output = LanguageOutput(str(arguments.output), arguments.prompt)
    config = TinyLlamaConfig(output, data=TextSection(text), attention=attention, train=train)
    faults = []
    if arguments.output is None:
        faults.append("--output is missing; expected a folder to write")
    else:
        try:
            check_folder(arguments.output, config, arguments.resume, arguments.overwrite)
        except ConfigError as error:
            faults += error.faults
    if arguments.steps < 1:
        faults.append(f"--steps is {arguments.steps}; expected >= 1")
    if not arguments.prompt:
        faults.append("--prompt is empty; expected at least one character")
    if faults:
        raise ConfigError(faults)
    return TinyLlama(config)


def llama_config() -> LlamaConfig:
    """Return a config of two layers of width 128; bytes are tokens, and 0, which text does not contain, is padding."""
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


if __name__ == "__main__":
    sys.exit(main())
