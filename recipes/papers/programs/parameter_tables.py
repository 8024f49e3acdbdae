"""Parameters and MACs of "Scalable Neural Network Kernels", counted: Tables 5, 6 and 8 without any weights.

    python recipes/papers/programs/parameter_tables.py
    python recipes/papers/programs/parameter_tables.py --render

Models are built from their configs on the meta device by `snnk_peft.cost`, which counts parameters by tensor and
multiply-adds by operation:

- Table 6, BERT-base and ViT-base with the expansions of the top k FFN layers as 8 features: parameters in training
  (without those of replaced layers), bundled, size in fp32, and multiply-adds of a forward pass as trained and as
  bundled. One expansion of d·4d + 4d parameters becomes a readout of 4d·m + 4d; the bundle keeps d·m + d of the pair,
  and W (m·d) next to it, which is not a parameter.
- Table 8 (and 1, 4), adapters of 16 features in BERT-base, their form and this package's default; the classifier is not
  counted, as there.
- Table 5 (and 1, 3), the pooler as 1024 features: trained parameters, and those of pooler and classifier in a bundle.

Beside each figure is the printed one. Writes metrics.json and README.md, which `--render` makes again from metrics.json
alone. About half a minute on one core.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from transformers import BertConfig, PretrainedConfig, ViTConfig

from papers.lib.measured_page import measured_page, page_options, too_small
from snnk_cli.files import guarded
from snnk_cli.tables import grid
from snnk_cli.terminal import bar, show_table
from snnk_peft import AdapterPart, FFNPart, PoolerPart, SNNKConfig
from snnk_peft.cost import estimate_cost
from snnk_peft.cost.build import Builder
from snnk_peft.cost.estimate import short
from snnk_peft.errors import ConfigError

RESULTS = Path(__file__).resolve().parent / "results" / "parameter_tables"
BERT, VIT = "BERT-base", "ViT-base"
# Config, task, and the batch of Table 6: 64 texts of 128 tokens, 32 images of 224 × 224.
MODELS: dict[str, tuple[Callable[[], PretrainedConfig], str, dict[str, int]]] = {
    BERT: (lambda: BertConfig(num_labels=2), "sequence-classification", {"batch_size": 64, "length": 128}),
    VIT: (lambda: ViTConfig(num_labels=10), "image-classification", {"batch_size": 32}),
}
HEAD = ("pooler", "classifier")
# As printed for k = 0, 1, ..., 6: millions of parameters, billions of "flops".
PRINTED: dict[str, dict[str, list[int]]] = {
    BERT: {
        "training": [110, 107, 100, 93, 86, 79, 72],
        "bundled": [110, 104, 97, 90, 83, 76, 69],
        "training_macs": [716, 697, 678, 659, 640, 620, 601],
        "bundled_macs": [716, 677, 639, 600, 561, 523, 484],
    },
    VIT: {
        "training": [86, 84, 77, 70, 63, 55, 48],
        "bundled": [86, 81, 74, 67, 60, 53, 46],
        "training_macs": [563, 548, 533, 519, 504, 489, 475],
        "bundled_macs": [563, 533, 503, 474, 444, 414, 384],
    },
}
PRINTED_MB = {(BERT, 0): 440.0, (BERT, 6): 226.71, (VIT, 0): 346.0, (VIT, 6): 176.42}


def options() -> argparse.ArgumentParser:
    """Create the parser of the options."""
    made = page_options(__doc__, RESULTS)
    made.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS, help="of Table 6 (default both)")
    counts = [0, 1, 2, 3, 4, 5, 6, 12]
    made.add_argument("--layers", type=int, nargs="+", default=counts, help=f"numbers k (default {counts})")
    made.add_argument("--features", type=int, default=8, help="of an FFN layer (default 8)")
    return made


def main(argv: list[str] | None = None) -> int:
    """Count and write; return 0 if done, 2 for wrong input."""
    arguments = options().parse_args(argv)
    return guarded(lambda: work(arguments))


def work(arguments: argparse.Namespace) -> None:
    """Count, unless only the page is wanted, and write."""
    figures = measured_page(arguments.output, arguments.render, lambda: counted(arguments), render)
    for title, header, lines in tables(figures):
        show_table(title, header, lines, text=header[:1])
    print(f"written: {arguments.output}")


def counted(arguments: argparse.Namespace) -> dict[str, Any]:
    """Check the options and count all figures."""
    depth = 12
    faults = [f"--layers has {k}; expected 0 to {depth}" for k in arguments.layers if not 0 <= k <= depth]
    if faults := faults + too_small(arguments, features=1):
        raise ConfigError(faults)
    return count(arguments.models, arguments.layers, arguments.features)


def count(models: list[str], layers: list[int], features: int) -> dict[str, Any]:
    """Count all figures."""
    jobs = [(model, k) for model in models for k in layers]
    rows = [uptrained(model, k, features) for model, k in bar(jobs, "models")]
    return {
        "settings": {"models": models, "layers": layers, "features": features},
        "uptraining": rows,
        "adapters": [adapters("paper"), adapters("default")],
        "poolers": poolers(1024),
    }


def uptrained(model: str, k: int, features: int) -> dict[str, Any]:
    """Count a column of Table 6: the expansions of the top k FFN layers replaced, everything else trained."""
    make, task, inputs = MODELS[model]
    own = {"model": model, "k": k, "printed": printed(model, k, features)}
    builder = Builder(make(), task, torch.float32)
    if k == 0:
        # A config with parts is required; their costs are in rows that are not read here.
        full = estimate_cost(make(), SNNKConfig(ffn=FFNPart(num_features=features)), task=task, **inputs).row("full")
        counted = {"training": full.parameters, "bundled": full.parameters}
        macs = {"training_macs": full.macs, "bundled_macs": full.macs}
        return {**own, **counted, **macs, "bundled_bytes": full.weight_bytes}
    config = SNNKConfig(ffn=FFNPart(num_features=features, layers=f"top-{k}"))
    report = estimate_cost(make(), config, task=task, **inputs)
    trained, bundled = report.row("snnk"), report.row("bundle")
    return {
        **own,
        "training": without_replaced(builder.patched(config)),
        "bundled": bundled.parameters,
        "training_macs": trained.macs,
        "bundled_macs": bundled.macs,
        "bundled_bytes": bundled.weight_bytes,
    }


def without_replaced(model: Any) -> int:
    """Count the parameters of a patched model, without the originals of replaced or copied modules."""
    unused = (".base_layer.", ".original_module.")  # of parts, and of heads that PEFT copies for training
    kept = (parameter for name, parameter in model.named_parameters() if not any(word in name for word in unused))
    return sum(parameter.numel() for parameter in kept)


def printed(model: str, k: int, features: int) -> dict[str, float]:
    """Return the figures printed in Table 6 and the text, which are for 8 features."""
    columns = PRINTED[model]
    if features != 8 or k >= len(columns["training"]):
        return {}
    size = {"bundled_mb": PRINTED_MB[model, k]} if (model, k) in PRINTED_MB else {}
    return {**{name: values[k] for name, values in columns.items()}, **size}


def adapters(init: str) -> dict[str, Any]:
    """Count the trained parameters of adapters of 16 features in BERT-base, without the classifier."""
    make, task, inputs = MODELS[BERT]
    config = SNNKConfig(adapter=AdapterPart(num_features=16, init=init))
    report = estimate_cost(make(), config, task=task, **inputs)
    trained, full = report.row("snnk"), report.row("full")
    classifier = parameters_of(Builder(make(), task, torch.float32).full(), ("classifier",))
    assert trained.trained is not None
    own = trained.trained - classifier
    return {"form": init, "trained": own, "share": own / full.parameters, "macs": trained.macs, "full_macs": full.macs}


def poolers(features: int) -> list[dict[str, Any]]:
    """Count pooler and classifier of BERT-base, which are all that is trained in Tables 1, 3 and 5."""
    make, task, inputs = MODELS[BERT]
    report = estimate_cost(make(), SNNKConfig(pooler=PoolerPart(num_features=features)), task=task, **inputs)
    full, trained, bundled = (report.row(name) for name in ("full", "snnk", "bundle"))
    original = Builder(make(), task, torch.float32).full()
    head = parameters_of(original, HEAD)
    return [
        {"what": "pooler and classifier", "numbers": head, "printed": "∼59k"},
        {"what": "classifier alone", "numbers": parameters_of(original, ("classifier",)), "printed": "∼1k"},
        {"what": f"pooler as {features} features, and classifier", "numbers": trained.trained, "printed": None},
        {"what": "the same, bundled", "numbers": bundled.parameters - (full.parameters - head), "printed": "∼2k"},
    ]


def parameters_of(model: Any, names: tuple[str, ...]) -> int:
    """Count the parameters in modules of these names."""
    found = [
        parameter.numel() for path, parameter in model.named_parameters() if set(path.split(".")).intersection(names)
    ]
    return sum(found)


def tables(figures: dict[str, Any]) -> list[tuple[str, list[str], list[list[str]]]]:
    """Return title, header and lines of every table, with printed figures in brackets."""
    found = []
    for model in figures["settings"]["models"]:
        header = ["top k layers", "M in training", "M bundled", "MB bundled", "G MACs in training", "G MACs bundled"]
        lines = [_uptrained(row) for row in figures["uptraining"] if row["model"] == model]
        title = f"Table 6: {model}, {figures['settings']['features']} features per FFN layer (printed)"
        found.append((title, header, lines))
    lines = [
        [
            row["form"],
            f"{row['trained']:,} (0.3 M)",
            f"{row['share']:.2%}",
            f"{row['macs'] / row['full_macs'] - 1:+.2%}",
        ]
        for row in figures["adapters"]
    ]
    header = ["form", "trained numbers (printed)", "of the model's", "MACs of a forward pass"]
    found.append((f"Tables 1, 4, 8: adapters of 16 features in {BERT}", header, lines))
    lines = [[row["what"], f"{row['numbers']:,}", row["printed"] or ""] for row in figures["poolers"]]
    found.append((f"Tables 1, 3, 5: the pooler of {BERT}", ["what", "numbers", "printed"], lines))
    return found


def _uptrained(row: dict[str, Any]) -> list[str]:
    def beside(value: float, name: str, digits: int = 1) -> str:
        given = row["printed"].get(name)
        return f"{value:,.{digits}f}" + ("" if given is None else f" ({given:g})")

    return [
        str(row["k"]),
        beside(row["training"] / 1e6, "training"),
        beside(row["bundled"] / 1e6, "bundled"),
        beside(row["bundled_bytes"] / 1e6, "bundled_mb"),
        beside(row["training_macs"] / 1e9, "training_macs"),
        beside(row["bundled_macs"] / 1e9, "bundled_macs"),
    ]


def render(figures: dict[str, Any]) -> str:
    """Render the Markdown page."""
    lines = [
        "# Parameters and products, counted",
        "",
        "Rendered by `papers/programs/parameter_tables.py` from metrics.json beside this page; its docstring says",
        "what is counted. In brackets what the paper prints; M is a million numbers, a MAC one multiplication with its",
        "addition, MB is decimal, in fp32, with all buffers.",
        "",
    ]
    for title, header, body in tables(figures):
        lines += [f"## {title}", "", *grid(header, body), ""]
        if title.startswith("Table 6"):
            lines += [*_differences(figures, title), ""]
    head, _, _, bundled = (row["numbers"] for row in figures["poolers"])
    lines += [
        "The paper's formula for an adapter is (d + 1)·m; its form, with a gate v, has d·(m + 1), and the default",
        f"here, without one, d·m. Pooler and classifier of {BERT} have d² + d + 2d + 2 numbers, ten times the",
        f"printed ones, so the bundle of the last layers trains 1/{head / bundled:.0f} of them; the paper says 1/30.",
        "",
    ]
    return "\n".join(lines)


def _differences(figures: dict[str, Any], title: str) -> list[str]:
    """Describe the differences between printed and counted figures, for rows that have both."""
    rows = [row for row in figures["uptraining"] if f": {row['model']}," in title and row["k"] and row["printed"]]
    if not rows:
        return []
    macs = max(
        abs(row[name] / row["printed"][name] / 1e9 - 1) for row in rows for name in ("training_macs", "bundled_macs")
    )
    numbers = max(rows, key=lambda row: row["training"] / row["printed"]["training"])
    missing = short(round(numbers["training"] - 1e6 * numbers["printed"]["training"]))
    return [
        f"The printed “flops” are the counted multiply-adds, within {macs:.1%}. The printed numbers of parameters are",
        f"not: at k = {numbers['k']} {missing} are missing in training, since the public code puts one layer object",
        "into all k places and counts it once.",
    ]


if __name__ == "__main__":
    sys.exit(main())
