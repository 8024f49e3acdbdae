"""Render the measured results in README.md: its table and its plot.

    python recipes/papers/table_results.py            (prints the table)
    python recipes/papers/table_results.py --write    (puts it into README.md, and draws the picture)

Every number is read from recipes/benchmarks/results/ and model_cards/; a file that is absent is an error. All results:
`make docs`, the pages of results.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from papers.lib.reports import read_reports
from snnk_cli.files import guarded, read_json, write_text
from snnk_cli.tables import grid, spread
from snnk_peft.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
BEGIN, END = "<!-- results: begin (python recipes/papers/table_results.py --write) -->", "<!-- results: end -->"
PICTURE = "recipes/benchmarks/results/agreement_over_speed.png"
# The curves of `convert_models.py curve` to plot: method and precision -> name, colour, marker.
WAYS = {
    ("plan", "fp32"): ("ours: plan", "tab:blue", "o"),
    ("ffn", "fp32"): ("ours: FFN features", "tab:green", "o"),
    ("plan", "int8"): ("ours: plan, then int8", "tab:blue", "*"),
    ("original", "int8"): ("original in int8", "black", "*"),
    ("fisher", "fp32"): ("Fisher pruning", "tab:red", "s"),
    ("svd", "fp32"): ("activation-aware SVD", "tab:orange", "^"),
    ("modegpt", "fp32"): ("MoDeGPT", "tab:brown", "v"),
    ("distilled", "fp32"): ("distillation, as long", "tab:gray", "x"),
}
CLASSIFIERS = (
    ("sst2", "original", "int8", "SST-2 classifier, int8 of the original"),
    ("sst2", "plan 2x", "fp32", "SST-2 classifier, converted for 2 ×"),
    ("sst2", "plan 3x", "int8", "SST-2 classifier, converted for 3 ×, then int8"),
    ("imdb", "plan 2x", "fp32", "IMDb classifier, 512 tokens, converted for 2 ×"),
)
LEAST = 85  # lower limit of the axis, in percent
Points = list[tuple[float, float]]


def main(argv: list[str] | None = None) -> int:
    """Print or write; returns 0 if done, 2 if a file is missing or README.md lacks the markers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write README.md's table and picture")
    arguments = parser.parse_args(argv)

    def work() -> None:
        if not arguments.write:
            print(render(ROOT))
            return
        readme = ROOT / "README.md"
        text = replaced(readme.read_text(encoding="utf-8"), render(ROOT))
        draw(curves(ROOT), ROOT / PICTURE)
        write_text(readme, text)
        print(f"written: {readme}, {ROOT / PICTURE}")

    return guarded(work)


def replaced(text: str, rows: str) -> str:
    """Return `text` with the table between the markers.

    Raises:
        ConfigError: the markers are missing.
    """
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ConfigError(f"README.md has no lines {BEGIN!r} and {END!r}; put them where the table belongs")
    return f"{before}{begin}\n{rows}\n{end}{after}"


def render(root: Path) -> str:
    """Return README.md's table, of results that help to choose."""
    rows = [
        *(classifier(benchmark(root, f"convert_curve/{task}"), *point) for task, *point in CLASSIFIERS),
        encoder(benchmark(root, "convert_embeddings/metrics")),
        language_model(benchmark(root, "convert_llama/metrics")),
        attention(benchmark(root, "attention/metrics")),
        adapters(root),
        head(benchmark(root, "head_beside_lora/metrics")),
    ]
    return "\n".join(grid(["task", "before", "after", "cost"], rows)).replace("---:", "---")


def benchmark(root: Path, name: str) -> Any:
    """Return the stored figures of a program of recipes/benchmarks."""
    return read_json(root / f"recipes/benchmarks/results/{name}.json")


def classifier(figures: Mapping[str, Any], point: str, kind: str, what: str) -> list[str]:
    """Return the row of a point of the curve in fp32 or int8."""
    rows = {(row["point"], row["as"]): row for row in figures["rows"]}
    before, after = rows["original", "fp32"], rows[point, kind]
    return [
        what,
        f"accuracy {100 * before['score']:.1f}",
        f"{100 * after['score']:.1f} at {after['speed-up']:.1f} × the speed, "
        f"{100 * after['agreement']:.1f} % the same answers",
        f"{after['seconds']:.0f} s, no labels" if point != "original" else "export",
    ]


def encoder(figures: Mapping[str, Any]) -> list[str]:
    """Return the row of a sentence encoder, with int8 of the original."""
    rows = {row["model"]: row for row in figures["rows"]}
    small, int8 = rows["2x"], rows["original int8"]
    seconds = statistics.mean(sum(each["seconds"].values()) for each in figures["conversions"] if each["model"] == "2x")
    return [
        "all-MiniLM sentence vectors, converted for 2 ×",
        f"Spearman on STS-B {100 * rows['original']['spearman']:.1f}",
        f"{100 * small['spearman']:.1f} at {small['speed-up']:.1f} × the speed, cosine {small['cosine']:.3f}; "
        f"the original's int8 {100 * int8['spearman']:.1f} at {int8['speed-up']:.1f} ×, {int8['cosine']:.3f}",
        f"{seconds / 60:.0f} min, no labels",
    ]


def language_model(figures: Mapping[str, Any]) -> list[str]:
    """Return the row of SmolLM2 with a smaller cache."""
    rows = {row["model"]: row for row in reversed(figures["rows"])}  # the first draw
    told = [
        f"{row['cache bytes behind 8192'] / 1e6:.0f} MB; {row['reviews, to 2048']:.1f}; "
        f"{100 * row['copied after 640']:.0f} %"
        for row in (rows["original"], rows["converted, 0.1"])
    ]
    seconds = f"{rows['converted, 0.1']['seconds']:.0f} s, no labels"
    return ["SmolLM2-135M: cache after 8,192 tokens; perplexity at 2,048; passages copied", *told, seconds]


def attention(figures: Mapping[str, Any]) -> list[str]:
    """Return the row of a layer of linear attention compared with softmax."""
    row = next(row for row in figures["forward"] if row["length"] == 8192)
    cost = "training, or calibration on long texts"
    return [
        "attention of 12 heads of 64, 8,192 tokens",
        f"{row['softmax_ms']:,.0f} ms",
        f"{row['linear_ms']:.0f} ms",
        cost,
    ]


def adapters(root: Path) -> list[str]:
    """Return the row of the default adapters compared with LoRA."""
    scores = read_reports(root / "model_cards/glue_gpu", "glue")

    def mean(method: str) -> float:
        return 100 * statistics.mean(spread(row[method], "score")[0] for row in scores.values())

    seeds = min(len(reports) for row in scores.values() for reports in row.values())
    step = next(row for row in benchmark(root, "adapter_step/metrics")["rows"] if row["method"] == "rows")
    return [
        f"adapters, mean of {len(scores)} GLUE tasks and {seeds} seeds",
        f"LoRA {mean('lora_r8'):.1f}",
        f"learned rows {mean('rows6_fitted_head'):.1f}, all weights {mean('full'):.1f}",
        f"a step: {step['time / LoRA']:.2f} × LoRA's time, {step['memory / LoRA']:.2f} × its memory",
    ]


def head(figures: Mapping[str, Any]) -> list[str]:
    """Return the row of a closed-form head compared with LoRA."""
    row = next(row for row in figures["rows"] if row["task"] == "mean" and row["share of examples"] == 1)
    score, time = row["LoRA's score"], row["seconds / LoRA's"]
    tasks = ", ".join(figures["tasks"])
    return [
        f"a head in closed form, mean of {tasks}",
        f"LoRA {100 * score:.1f}",
        f"{100 * row['score']:.1f}",
        f"{100 * time:.0f} % of LoRA's seconds",
    ]


def curves(root: Path) -> dict[tuple[str, str], Points]:
    """Return (speed-up, agreement with the original in percent) by size, for each method and precision.

    In fp32 the original comes first.
    """
    rows = benchmark(root, "convert_curve/sst2")["rows"]
    found = {}
    for way, kind in WAYS:
        same = [row for row in rows if (row["point"].split()[0], row["as"]) == (way, kind)]
        points = sorted((row["speed-up"], 100 * row["agreement"]) for row in same)
        found[way, kind] = [(1.0, 100.0), *points] if kind == "fp32" else points
    return found


def draw(lines: Mapping[tuple[str, str], Points], file: Path) -> None:
    """Plot the curves for a phone: few words, in large letters."""
    from snnk_cli.plots import make_axes, store  # matplotlib is not needed for the table

    figure, axes = make_axes(size=(6, 6))
    for key, (name, colour, marker) in WAYS.items():
        style = {"markersize": 14} if marker == "*" else {}
        line = "-" if key[0] in ("plan", "ffn") else "--"
        axes.plot(*zip(*lines[key], strict=True), line, label=name, color=colour, marker=marker, linewidth=2, **style)
    axes.set_ylim(LEAST, 100.5)
    axes.tick_params(labelsize=13)
    axes.set_xlabel("times as fast as the original", fontsize=14)
    axes.set_ylabel("same answer as the original, %", fontsize=14)
    figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=12)
    store(figure, file)


if __name__ == "__main__":
    sys.exit(main())
