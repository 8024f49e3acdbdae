"""Fine-tune a pretrained Transformer on a task: SNNK parts, or a peer (LoRA, full, linear probe) under the same recipe.

    python recipes/finetune.py recipes/configs/glue/rte_adapter.yaml data.dir=path/to/glue
    python recipes/finetune.py recipes/configs/glue/rte_adapter.yaml method.name=lora output.dir=runs/rte_lora
    torchrun --nproc_per_node 2 recipes/finetune.py ...          (two processes; on GPUs also `accelerate launch`)

Settings are `section.key=value`; `--help` lists them. A run killed at any moment continues with `--resume` and ends
with the same weights, bit for bit, as one that was never interrupted. SIGTERM saves first (exit code 143).
"""

from __future__ import annotations

import argparse
import dataclasses
import shlex
import sys
from pathlib import Path

import torch
from _lib.checkpoint import discard_newer, load_checkpoint, load_model
from _lib.config import describe, dump_yaml, load_config
from _lib.data import Examples, calibration_batches, steps_per_epoch
from _lib.evaluation import evaluation_splits
from _lib.loop import RunState, learning_rate, make_optimizer
from _lib.models import build_model, load_pretrained, load_tokenizer, parameter_counts, resolve_model
from _lib.results import save_models, write_report
from _lib.run_folder import StopSignal, check_folder, choose_checkpoint, claim_folder
from _lib.settings import FinetuneConfig
from _lib.terminal import quiet
from _lib.tracking import Tracker
from _lib.training import Training
from accelerate import Accelerator
from accelerate.utils import set_seed

from snnk_peft.errors import ConfigError, UnsupportedError
from snnk_peft.tasks import TASKS

ROOT = Path(__file__).resolve().parent.parent


def main(argv: list[str] | None = None) -> int:
    """Read the command line; returns the exit code (0 done, 1 diverged, 2 wrong input, 143 stopped by SIGTERM)."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog="settings (default):\n" + "\n".join(describe(FinetuneConfig)),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("config", help="a YAML file, see recipes/configs")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="settings that replace the file's")
    parser.add_argument("--resume", action="store_true", help="continue the run in output.dir")
    parser.add_argument("--checkpoint", metavar="NAME", help="with --resume: this checkpoint instead of the newest")
    parser.add_argument("--overwrite", action="store_true", help="delete the run in output.dir first")
    arguments = parser.parse_intermixed_args(argv)
    quiet()
    try:
        config = load_config(FinetuneConfig, arguments.config, arguments.overrides)
        if arguments.checkpoint and not arguments.resume:
            raise ConfigError("--checkpoint needs --resume")
        command = shlex.join(["python", "recipes/finetune.py", arguments.config, *arguments.overrides, "--resume"])
        return finetune(config, command, arguments.resume, arguments.checkpoint, arguments.overwrite)
    except (ConfigError, UnsupportedError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def finetune(config: FinetuneConfig, command: str, resume: bool, checkpoint: str | None, overwrite: bool) -> int:
    """The whole run; returns the exit code."""
    stop = StopSignal()
    train, folder, task = config.train, Path(config.output.dir), TASKS[config.task]
    cpu = train.device == "cpu" or not torch.cuda.is_available()
    if cpu and train.mixed_precision == "fp16":
        raise ConfigError("train.mixed_precision is fp16, which needs a CUDA device; use bf16 or no")
    accelerator = Accelerator(cpu=cpu, mixed_precision=train.mixed_precision)
    world = accelerator.num_processes

    # --- the run folder: refused before any work is done, claimed once data and model are known to be good ----------
    if accelerator.is_main_process:
        check_folder(folder, dataclasses.asdict(config), resume, overwrite)
    accelerator.wait_for_everyone()
    if resume and (folder / "metrics.json").is_file() and checkpoint is None:
        accelerator.print(f"{folder} is finished; its results are in {folder / 'metrics.json'}")
        return 0
    start = choose_checkpoint(folder / "checkpoints", checkpoint) if resume else None

    # --- data: read, checked and tokenised once ----------------------------------------------------------------------
    base_folder = resolve_model(config.model.name_or_path)
    tokenizer = load_tokenizer(base_folder)
    data = task.load(config.data.dir, max_train_samples=config.data.max_train_samples, seed=train.seed)
    examples = Examples(data["train"], tokenizer, config.data.max_length)
    splits = {
        name: Examples(rows, tokenizer, config.data.max_length)
        for name, rows in evaluation_splits(task, data, config.data.max_eval_samples).items()
    }
    identity = {
        "data": [part.fingerprint() for part in (examples, *splits.values())],
        "processes": world,
    }

    # --- model and optimizer -----------------------------------------------------------------------------------------
    set_seed(train.seed)
    base, fresh = load_pretrained(base_folder, task)
    frozen_fresh = [name for name in fresh if "pooler." in name and config.method.pooler == "frozen"]
    if frozen_fresh and config.method.name != "full":
        accelerator.print(f"note: {base_folder} has no pooler weights; the frozen pooler is random: {frozen_fresh}")
    calibration = None
    if config.method.calibrate and start is None:
        calibration = calibration_batches(examples, config, accelerator.device)
    bare = build_model(base.to(accelerator.device), config.method, train.seed, calibration).to(accelerator.device)
    bare.train()
    counts = parameter_counts(bare)
    plain_optimizer = make_optimizer(bare, train)
    model, optimizer = accelerator.prepare(bare, plain_optimizer)
    # From here on only dropout draws random numbers, differently in every process.
    set_seed(train.seed + 1 + accelerator.process_index)

    # --- where we are ------------------------------------------------------------------------------------------------
    batch_size = train.batch_size * world
    per_epoch = steps_per_epoch(len(examples), batch_size, train.gradient_accumulation)
    total = train.epochs * per_epoch
    state = RunState()
    if start is not None:
        saved = load_checkpoint(start, bare, plain_optimizer, identity, accelerator.process_index)
        state = RunState(**saved["run"])
        if accelerator.scaler is not None:
            accelerator.scaler.load_state_dict(saved["scaler"])
    accelerator.wait_for_everyone()  # all processes have read it
    if accelerator.is_main_process:
        claim_folder(folder, dump_yaml(config), ROOT, resume)
        for name in discard_newer(start) if start is not None else []:
            print(f"discarded {name}, which is newer than {start.name}")
    tracker = Tracker(folder, total, state.step, config.output.tensorboard, accelerator.is_main_process)
    tracker.say(
        f"{config.task}, {config.method.name}: {len(examples)} examples, {per_epoch} steps per epoch, {total} in all; "
        f"{counts['trainable']:,} of {counts['total']:,} parameters trained"
        + (f"; continuing after step {state.step}" if start is not None else "")
    )

    # --- training ----------------------------------------------------------------------------------------------------
    training = Training(
        train=train,
        task=task,
        folder=folder,
        accelerator=accelerator,
        model=model,
        bare=bare,
        optimizer=optimizer,
        plain_optimizer=plain_optimizer,
        examples=examples,
        splits=splits,
        identity=identity,
        per_epoch=per_epoch,
        total=total,
        eval_every=per_epoch if train.eval_every == "epoch" else int(train.eval_every),
        rate=lambda now: learning_rate(train, now.step, total),
        state=state,
        tracker=tracker,
        stop=stop,
        command=command,
    )
    code = training.run()
    if code != 0:
        return code

    # --- results: the best checkpoint, not the last ------------------------------------------------------------------
    assert state.best is not None
    load_model(folder / "checkpoints" / f"step-{state.best['step']:07d}", bare)
    bare = accelerator.unwrap_model(model, keep_fp32_wrapper=False).eval()
    if accelerator.is_main_process:
        if config.output.save_model:
            save_models(bare, tokenizer, config, folder, state.best["metrics"])
        sizes = {"train": len(examples), **{name: len(part) for name, part in splits.items()}}
        write_report(folder, config, state, (per_epoch, total), counts, sizes, accelerator.device, ROOT)
        print(f"best score {state.best['score']:.4f} at step {state.best['step']}; everything is in {folder}")
    accelerator.end_training()
    return 0


if __name__ == "__main__":
    sys.exit(main())
