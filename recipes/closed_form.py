"""A classification head without backpropagation: closed form against a trained head, on the same frozen features.

    python recipes/closed_form.py recipes/configs/closed_form.yaml task=stsb data.dir=path/to/glue output.dir=runs/stsb
    python recipes/closed_form.py recipes/configs/closed_form.yaml task=mrpc data.dir=path/to/glue output.dir=runs/mrpc

The pooler becomes Φ(x)A with random features and is bundled with the classifier, so the head is one matrix W̄ that reads
Φ of the frozen encoder's [CLS] vector or, where the checkpoint was trained with it, of the mean over the tokens
(`method.pooling`). `fit_closed_form` finds it in one pass (ridge regression, one-hot targets for classes; the ridge by
generalised cross-validation). Next to it the same head is trained with AdamW on cached features, in the loop of all
recipes, and scikit-learn's Ridge is fitted to them as an independent check.

Settings are `section.key=value`; `--help` lists them. `--resume` continues a run that was stopped.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from finetune import Finetuning
from lib.config import option
from lib.experiment import Data, Finished
from lib.launch import launch
from lib.settings import FinetuneConfig, PoolingSection, RunOutput

if TYPE_CHECKING:
    import torch


@dataclass
class HeadSection(PoolingSection):
    """The features that the head reads."""

    component: str = option("cos", "component function of the features")
    num_features: int = option(512, "rows of W", low=1)


@dataclass
class ClosedFormConfig(FinetuneConfig):
    """Everything this recipe reads."""

    output: RunOutput
    method: HeadSection = field(default_factory=HeadSection)


class ClosedForm(Finetuning):
    """The AdamW head is what is trained; the report fits the one in closed form beside it."""

    settings, program = ClosedFormConfig, "closed_form.py"

    @property
    def method(self) -> str:
        """component-number of features."""
        return f"{self.config.method.component}-{self.config.method.num_features}"

    def data(self, accelerator: Any) -> Data:
        """The features of the task's rows under a frozen encoder."""
        import torch
        from lib.heads import Vectors
        from lib.models import load_pretrained

        from snnk_peft import MeanPoolingPart, PoolerPart, SNNKConfig, bundle, get_snnk_model
        from snnk_peft.bundling.closed_form import bundled_head, head_features

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
        """The same head, not yet trained; the other is fitted here, where all processes are, each on its share."""
        from lib.heads import Head
        from lib.terminal import bar

        from snnk_peft import fit_closed_form

        plan = [indices for step in self.texts.plan(64, self.config.train, epoch=0) for indices in step]
        mine = plan[accelerator.process_index :: accelerator.num_processes]
        self.fit = fit_closed_form(self.encoder, bar([self.texts.batch(indices) for indices in mine], "closed form"))
        return Head(self.head.in_features, self.head.out_features)

    def report(self, done: Finished) -> dict[str, Any]:
        """Both heads, and how far the closed form is from scikit-learn's."""
        import torch
        from sklearn.linear_model import Ridge

        from snnk_peft.solvers.closed_form import closed_form_head

        fit = self.fit
        weight, train = self.head.weight.detach().double(), done.data.train
        splits = {name: (part.vectors, part.labels) for name, part in done.data.splits.items()}
        with torch.no_grad():
            closed = self.task.summarize({name: self.task.compute(self.head(x), y) for name, (x, y) in splits.items()})

        x, y = train.vectors, train.labels
        targets = y[:, None].double() if y.is_floating_point() else torch.eye(len(weight)).double()[y]
        peer = Ridge(alpha=fit.ridge, solver="cholesky").fit(x.double().numpy(), targets.numpy())
        peer_weight = torch.from_numpy(peer.coef_).reshape(weight.shape)
        start = time.perf_counter()
        closed_form_head([(x, targets)], ridge=fit.ridge)
        head_seconds = time.perf_counter() - start
        rows = [("closed form", closed, fit.seconds, head_seconds)]
        seconds = done.state.train_seconds
        name = f"AdamW, {self.config.train.epochs} epochs"
        rows.append((name, done.best["metrics"], train.seconds + seconds, seconds))
        return {
            "fit": fit.to_dict(),
            "relative_difference_to_sklearn_ridge": ((weight - peer_weight).norm() / peer_weight.norm()).item(),
            "rows": [
                {"head": name, **metrics, "seconds": whole, "seconds without the encoder": alone}
                for name, metrics, whole, alone in rows
            ],
        }

    def summary(self, done: Finished, figures: Mapping[str, Any]) -> str:
        """Both heads as a table."""
        from lib.tables import grid

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


def main(argv: list[str] | None = None) -> int:
    """Fit as the command line says; returns the exit code (0 done, 1 diverged, 2 wrong input, 130 or 143 stopped)."""
    return launch(ClosedForm, __doc__, argv)


if __name__ == "__main__":
    sys.exit(main())
