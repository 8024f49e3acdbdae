"""Fine-tune a pretrained Transformer on a task: SNNK parts, or a peer (LoRA, full, linear probe) under the same recipe.

    python recipes/finetune.py recipes/configs/glue/rte_adapter.yaml data.dir=path/to/glue
    python recipes/finetune.py recipes/configs/glue/rte_adapter.yaml method.name=lora output.dir=runs/rte_lora
    torchrun --nproc_per_node 2 recipes/finetune.py ...          (two processes; on GPUs also `accelerate launch`)

Settings are `section.key=value`; `--help` lists them. A run killed at any moment continues with `--resume` and ends
with the same weights, bit for bit, as one that was never interrupted (on the same number of threads: another one takes
sums in another order). SIGTERM and Ctrl-C save first (exit codes 143, 130) and tell the command that
continues.
"""

from __future__ import annotations

import sys
from dataclasses import replace

from _lib.checkpoint import load_model
from _lib.data import Examples, calibration_batches, steps_per_epoch
from _lib.evaluation import evaluation_splits
from _lib.launch import ROOT, Request, launch, open_run
from _lib.loop import learning_rate, make_optimizer
from _lib.models import build_model, check_length, load_pretrained, load_tokenizer, parameter_counts, resolve_model
from _lib.results import save_models, write_report
from _lib.run_folder import StopSignal
from _lib.settings import FinetuneConfig, completed, find_task
from _lib.tracking import Tracker
from _lib.training import Training
from accelerate.utils import set_seed


def main(argv: list[str] | None = None) -> int:
    """Train as the command line says; returns the exit code (0 done, 1 diverged, 2 wrong input, 130 or 143 stopped)."""
    return launch("finetune.py", __doc__, FinetuneConfig, finetune, argv)


def finetune(request: Request[FinetuneConfig]) -> int:
    """The whole run; returns the exit code."""
    stop = StopSignal()
    task = find_task(request.config)
    request = replace(request, config=completed(request.config, task))
    run = open_run(request)
    if run.finished:
        return 0
    config, accelerator, folder, start = request.config, run.accelerator, run.folder, run.start
    train, world = config.train, accelerator.num_processes

    # --- data: read, checked and tokenised once ----------------------------------------------------------------------
    base_folder = resolve_model(config.model.name_or_path)
    tokenizer = load_tokenizer(base_folder, task)
    for note in task.notes:
        accelerator.print(f"note: {note}")
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
    check_length(base, config.data.max_length)
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
    state = run.restore(bare, plain_optimizer, identity)
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
        command=request.command,
    )
    code = training.run()
    if code != 0:
        return code

    # --- results: the best checkpoint, not the last ------------------------------------------------------------------
    assert state.best is not None
    load_model(folder / "checkpoints" / f"step-{state.best['step']:07d}", bare)
    bare = accelerator.unwrap_model(model, keep_fp32_wrapper=False).eval()
    if accelerator.is_main_process:
        sizes = {"train": len(examples), **{name: len(part) for name, part in splits.items()}}
        if config.output.save_model:
            save_models(bare, tokenizer, config, folder, state.best["metrics"], sizes)
        write_report(folder, config, state, (per_epoch, total), counts, sizes, accelerator.device, ROOT)
        print(f"best score {state.best['score']:.4f} at step {state.best['step']}; everything is in {folder}")
    accelerator.end_training()
    return 0


if __name__ == "__main__":
    sys.exit(main())
