"""A closed-form head compared with a trained one on the same features: the experiment of recipes/closed_form.py."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch
from sklearn.linear_model import Ridge

from lib.finetuning import Finetuning
from lib.head_settings import ClosedFormConfig
from lib.heads import Head, Vectors
from snnk_cli.experiment import Data, Finished
from snnk_cli.models import load_pretrained
from snnk_cli.tables import grid
from snnk_cli.terminal import bar
from snnk_peft import MeanPoolingPart, PoolerPart, SNNKConfig, bundle, fit_closed_form, get_snnk_model
from snnk_peft.bundling.closed_form import bundled_head, head_features
from snnk_peft.solvers.ridge import closed_form_head


class ClosedForm(Finetuning):
    """Experiment that trains a head with AdamW and compares it with the closed-form head in its report."""

    settings, program = ClosedFormConfig, "closed_form.py"

    @property
    def method(self) -> str:
        """Component and number of features, joined by a hyphen."""
        return f"{self.config.method.component}-{self.config.method.num_features}"

    def data(self, accelerator: Any) -> Data:
        """Compute the features of the task's rows with a frozen encoder."""

        config, texts = self.config, super().data(accelerator)
        torch.manual_seed(config.train.seed)
        base, _ = load_pretrained(self.pretrained, self.task)
        self.modality.check(base, self.reader, config.data)
        part = PoolerPart(component=config.method.component, num_features=config.method.num_features)
        means = [MeanPoolingPart()] if config.method.pooling == "mean" else []
        self.encoder = bundle(get_snnk_model(base, SNNKConfig(pooler=part, parts=means, seed=config.train.seed)))
        self.texts, (_, self.head, _) = texts.train, bundled_head(self.encoder)

        def encode(inputs: dict[str, torch.Tensor]) -> torch.Tensor:
            return head_features(self.encoder, self.head, inputs)

        splits = {name: Vectors(part, encode, f"encode {name}") for name, part in texts.splits.items()}
        return Data(Vectors(texts.train, encode, "encode train"), splits)

    def model(self, data: Data, accelerator: Any, resumed: bool) -> torch.nn.Module:
        """Return the untrained head; fit the closed-form one, on every process's share of the examples."""

        plan = [indices for step in self.texts.plan(64, self.config.train, epoch=0) for indices in step]
        mine = plan[accelerator.process_index :: accelerator.num_processes]
        self.fit = fit_closed_form(self.encoder, bar([self.texts.batch(indices) for indices in mine], "closed form"))
        return Head(self.head.in_features, self.head.out_features)

    def report(self, done: Finished) -> dict[str, Any]:
        """Report both heads, and the difference of the closed form from scikit-learn's Ridge."""

        fit = self.fit
        weight, train = self.head.weight.detach().double(), done.data.train
        splits = {name: (part.vectors, part.labels) for name, part in done.data.splits.items()}
        with torch.no_grad():
            closed = self.task.summarize({name: self.task.compute(self.head(x), y) for name, (x, y) in splits.items()})

        x, y = train.vectors, train.labels
        targets = y[:, None].double() if y.is_floating_point() else torch.eye(len(weight)).double()[y]
        ridge = Ridge(alpha=fit.ridge, solver="cholesky").fit(x.double().numpy(), targets.numpy())
        expected = torch.from_numpy(ridge.coef_).reshape(weight.shape)
        start = time.perf_counter()
        closed_form_head([(x, targets)], ridge=fit.ridge)
        head_seconds = time.perf_counter() - start
        rows = [("closed form", closed, fit.seconds, head_seconds)]
        seconds = done.state.train_seconds
        name = f"AdamW, {self.config.train.epochs} epochs"
        rows.append((name, done.best["metrics"], train.seconds + seconds, seconds))
        return {
            "fit": fit.to_dict(),
            "relative_difference_to_sklearn_ridge": ((weight - expected).norm() / expected.norm()).item(),
            "rows": [
                {"head": name, **metrics, "seconds": whole, "seconds without the encoder": alone}
                for name, metrics, whole, alone in rows
            ],
        }

    def summary(self, done: Finished, figures: Mapping[str, Any]) -> str:
        """Return both heads as a table."""
        rows = [
            [f"{value:.4f}" if isinstance(value, float) else value for value in row.values()] for row in figures["rows"]
        ]
        difference = figures["relative_difference_to_sklearn_ridge"]
        return "\n".join(
            [
                *grid(list(figures["rows"][0]), rows),
                f"relative difference to scikit-learn's Ridge: {difference:.1e}; everything is in {done.folder}",
            ]
        )
