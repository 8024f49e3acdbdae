"""A classification head without backpropagation: closed form against a trained head, on the same frozen features.

    python recipes/closed_form.py --task stsb --data path/to/glue --output runs/closed_form/stsb.json
    python recipes/closed_form.py --task mrpc --data path/to/glue --output runs/closed_form/mrpc.json

The pooler becomes Φ(x)A with random features and is bundled with the classifier, so the head is one matrix W̄ that reads
Φ of the frozen encoder's [CLS] vector. `fit_closed_form` finds it in one pass (ridge regression, one-hot targets for
classes; the ridge chosen on every fifth batch). Next to it the same head is trained with AdamW on cached features, and
scikit-learn's Ridge is fitted to them as an independent check. Writes metrics.json.
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from _lib.launch import ROOT

if TYPE_CHECKING:
    import torch
    from _lib.data import Examples
    from torch import nn

# What imports torch is imported in the functions, so that `--help` answers at once.


def main(argv: list[str] | None = None) -> int:
    """Read the command line; returns the exit code (0 done, 2 wrong input)."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", required=True, metavar="TASK", help="a name of snnk_peft.tasks")
    parser.add_argument("--data", required=True, help="folder of the official GLUE files")
    parser.add_argument("--model", default="minilm", help="pretrained model (minilm: the one of the demo extra)")
    parser.add_argument("--num-features", type=int, default=512, help="rows of W (512)")
    parser.add_argument("--component", default="cos", help="component function of the features (cos)")
    parser.add_argument("--epochs", type=int, default=30, help="of the trained head (30)")
    parser.add_argument("--max-length", type=int, default=128, help="tokens per example; longer ones are cut (128)")
    parser.add_argument("--max-train-samples", type=int, default=None)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, required=True, help="metrics.json to write")
    arguments = parser.parse_args(argv)
    from _lib.guard import guarded
    from _lib.terminal import quiet

    quiet()
    return guarded(lambda: compare(arguments))


def compare(arguments: argparse.Namespace) -> None:
    """Fit both heads, compare, write."""
    import torch
    from _lib.data import Examples
    from _lib.files import check_writable, write_json
    from _lib.models import check_length, load_pretrained, load_tokenizer, resolve_model
    from _lib.run_folder import environment
    from rich.console import Console
    from rich.progress import track
    from rich.table import Table
    from sklearn.linear_model import Ridge
    from torch import nn

    from snnk_peft import PoolerPart, SNNKConfig, bundle, fit_closed_form, get_snnk_model
    from snnk_peft.bundling.closed_form import bundled_head, head_features
    from snnk_peft.calibration.closed_form import closed_form_head
    from snnk_peft.tasks import TASKS

    # 1. The frozen encoder with a bundled random-feature head.
    task = TASKS[arguments.task]
    folder = resolve_model(arguments.model, "--model")
    check_writable(arguments.output.parent)
    data = task.load(arguments.data, max_samples={"train": arguments.max_train_samples}, seed=arguments.seed)
    tokenizer = load_tokenizer(folder)
    torch.manual_seed(arguments.seed)
    base, _ = load_pretrained(folder, task)
    check_length(base, arguments.max_length, "--max-length")
    part = PoolerPart(component=arguments.component, num_features=arguments.num_features)
    model = bundle(get_snnk_model(base, SNNKConfig(pooler=part, seed=arguments.seed)))
    train, dev = (
        Examples(data[split], tokenizer, arguments.max_length) for split in ("train", task.validation_splits[0])
    )

    # 2. Closed form: one pass over the training data.
    order = torch.randperm(len(train), generator=torch.Generator().manual_seed(arguments.seed)).tolist()
    chunks = [order[i : i + 2048] for i in range(0, len(order), 2048)]
    order = [i for chunk in chunks for i in sorted(chunk, key=lambda j: -train.lengths[j])]
    batches = [train.batch(order[i : i + 64]) for i in range(0, len(order), 64)]
    fit = fit_closed_form(model, track(batches, "closed form", console=Console(stderr=True)))
    _, head, _ = bundled_head(model)

    # 3. The same features once more, for the peers.
    def features(examples: Examples, indices: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        parts = []
        for start in range(0, len(indices), 64):
            batch = examples.batch(indices[start : start + 64])
            parts.append(
                (head_features(model, head, {k: v for k, v in batch.items() if k != "labels"}), batch["labels"])
            )
        return torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts])

    start = time.perf_counter()
    x, y = features(train, order)
    forward_seconds = time.perf_counter() - start
    x_dev, y_dev = features(dev, next(dev.by_length(len(dev))))
    regression = y.is_floating_point()
    targets = y[:, None].double() if regression else nn.functional.one_hot(y, task.num_labels).double()
    peer = Ridge(alpha=fit.ridge, solver="cholesky").fit(x.double().numpy(), targets.numpy())
    peer_weight = torch.from_numpy(peer.coef_).reshape(head.weight.shape)
    closed = task.compute(head(x_dev).detach(), y_dev)
    difference = float(((head.weight.double() - peer_weight).norm() / peer_weight.norm()).detach())

    start = time.perf_counter()
    closed_form_head([(x, targets)], ridge=fit.ridge)
    head_seconds = time.perf_counter() - start
    trained, trained_seconds = train_head(head, x, y, arguments.epochs, arguments.seed)
    with torch.no_grad():
        slow = task.compute(trained(x_dev), y_dev)

    rows = [
        {
            "head": "closed form",
            **closed,
            "seconds": fit.seconds,
            "seconds without the encoder": head_seconds,
        },
        {
            "head": f"AdamW, {arguments.epochs} epochs",
            **slow,
            "seconds": forward_seconds + trained_seconds,
            "seconds without the encoder": trained_seconds,
        },
    ]
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    figures = {
        "task": arguments.task,
        "num_features": arguments.num_features,
        "component": arguments.component,
        "fit": fit.to_dict(),
        "relative_difference_to_sklearn_ridge": difference,
        "rows": rows,
        "environment": environment(ROOT),
    }
    write_json(arguments.output, figures)
    table = Table(title=f"{arguments.task}: head on {arguments.num_features} {arguments.component} features")
    for column in rows[0]:
        table.add_column(column)
    for row in rows:
        table.add_row(*[f"{value:.4f}" if isinstance(value, float) else str(value) for value in row.values()])
    Console(width=140).print(table)
    print(f"relative difference to scikit-learn's Ridge: {difference:.1e}\nwritten: {arguments.output}")


def train_head(head: nn.Linear, x: torch.Tensor, y: torch.Tensor, epochs: int, seed: int) -> tuple[nn.Linear, float]:
    """The same head, trained with AdamW on cached features (n, m); returns it and the seconds."""
    import torch
    from rich.console import Console
    from rich.progress import track
    from torch import nn
    from transformers import get_scheduler

    start = time.perf_counter()
    trained = copy.deepcopy(head)
    nn.init.zeros_(trained.weight)
    nn.init.zeros_(trained.bias)
    optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-2, weight_decay=0.0)
    steps = epochs * -(-len(x) // 64)
    schedule = get_scheduler("linear", optimizer, num_warmup_steps=0, num_training_steps=steps)
    generator = torch.Generator().manual_seed(seed)
    for _ in track(range(epochs), "AdamW", console=Console(stderr=True)):
        for index in torch.randperm(len(x), generator=generator).split(64):
            output = trained(x[index])
            if y.is_floating_point():
                loss = nn.functional.mse_loss(output.squeeze(-1), y[index])
            else:
                loss = nn.functional.cross_entropy(output, y[index])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
    return trained, time.perf_counter() - start


if __name__ == "__main__":
    sys.exit(main())
