"""Render the README's table of measured results from the committed metrics.json files.

    python recipes/papers/table_results.py            (prints the table)
    python recipes/papers/table_results.py --write    (puts it into README.md, between its two marks)

Every number is read from recipes/benchmarks/results/ and model_cards/; a file that is absent is an error.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from papers.lib.reports import read_reports
from papers.pages.glue import NAMES, in_order, on_plateau, rank
from snnk_cli.files import guarded, read_json, write_text
from snnk_cli.tables import grid, spread
from snnk_peft.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
LONG = (("4x512", "512"), ("1x2048", "2,048"))  # shapes of convert_models.py sst2
TASKS = {"mrpc": "MRPC classifier", "stsb": "STS-B model", "imdb": "IMDb classifier"}
STEP, STEP_RESULTS = "`benchmarks/adapter_step.py`", "recipes/benchmarks/results/adapter_step"
STEPS = {
    "rows": "learned rows beside queries and values, and norms",
    "upper": "these in all layers but the first",
    "parallel": "learned rows beside the FFN",
    "snnk": "random features behind attention and FFN",
    "lora_norms": "LoRA and norms",
    "dora": "DoRA",
}
BEGIN, END = "<!-- results: begin (python recipes/papers/table_results.py) -->", "<!-- results: end -->"


def main(argv: list[str] | None = None) -> int:
    """Print or write the table; 0 done, 2 a file is missing or README.md lacks the marks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="replace the table in README.md")
    arguments = parser.parse_args(argv)

    def work() -> None:
        table = render(ROOT)
        if arguments.write:
            readme = ROOT / "README.md"
            write_text(readme, replaced(readme.read_text(encoding="utf-8"), table))
        print(table)

    return guarded(work)


def steps(report: dict[str, Any]) -> str:
    """Time and memory of every method of `benchmarks/adapter_step.py` as multiples of LoRA's."""
    found = {row["method"]: f"{row['time / LoRA']:.2f} ×, {row['memory / LoRA']:.2f} ×" for row in report["rows"]}
    return "; ".join(f"{what} {found[method]}" for method, what in STEPS.items() if method in found)


def replaced(text: str, table: str) -> str:
    """`text` with the table between the marks.

    Raises:
        ConfigError: the marks are not there.
    """
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ConfigError(f"README.md has no lines {BEGIN!r} and {END!r}; put them where the table belongs")
    return f"{before}{begin}\n{table}\n{end}{after}"


def render(root: Path) -> str:
    """The Markdown table."""

    def benchmark(name: str) -> dict[str, Any]:
        return read_json(root / f"recipes/benchmarks/results/{name}/metrics.json")

    pictures, attention = benchmark("vision_step"), benchmark("attention")
    step = {name: steps(read_json(root / STEP_RESULTS / f"{name}.json")) for name in ("metrics", "llama")}
    texts, cifar = benchmark("convert_sst2")["rows"], benchmark("convert_cifar10")["rows"]
    speed = {
        kind: {row["length"]: row["speed_up"] for row in attention[kind]} for kind in ("forward", "training", "causal")
    }
    decoding = {row["attention"]: row for row in attention["decoding"]}  # the longer prefix comes last
    kept = [decoding[name]["bytes"] / 1e6 for name in ("linear", "softmax")]
    places = {row["method"]: row["time / LoRA"] for row in pictures["rows"] if row["model"] == "vit_small"}
    vision = (
        f"{places['snnk']:.2f} × the time and {pictures['vit_small']['peak_memory_ratio']:.2f} × the memory of LoRA; "
        f"as many parameters in one place of a layer {places['snnk_pfeiffer']:.2f} × the time, and "
        f"{places['least']:.2f} × is the least that a step through the whole model takes"
    )
    conversions = [
        [
            f"{what} converted without labels ({row['model']})",
            f"accuracy {100 * row['accuracy']:.1f} (original {100 * teacher['accuracy']:.1f}) at "
            f"{row['speed-up']:.2f} × the speed{at_length(row)}, after {row['conversion seconds']:.0f} s",
            f"`benchmarks/convert_models.py {name}`",
        ]
        for what, name, (teacher, *rows) in (
            ("SST-2 classifier", "sst2", texts),
            ("small ViT for CIFAR-10 (JPEG)", "cifar10", [*cifar[:2], cifar[-1]]),
        )
        for row in rows
    ]
    faster = (
        f"{speed['forward'][4096]:.1f} × faster at 4,096 tokens, {speed['forward'][8192]:.1f} × at 8,192; with "
        f"gradients {speed['training'][4096]:.1f} × at 4,096; causal {speed['causal'][8192]:.1f} × at 8,192"
    )
    token = (
        f"{decoding['linear']['ms_per_token']:.1f} ms and a cache of {kept[0]:.1f} MB, at any length; softmax "
        f"{decoding['softmax']['ms_per_token']:.1f} ms and {kept[1]:.0f} MB"
    )
    heads = "linear attention against torch's fused softmax attention, 12 heads of 64, 64 features"
    rows = [
        ["training step beside LoRA's (time, memory), MiniLM, 32 × 128 tokens", step["metrics"], STEP],
        ["the same, a Llama of 4 layers × 512", step["llama"], STEP],
        ["SNNK adapters, ViT-S/16, 8 pictures of 224 × 224", vision, "`benchmarks/vision_step.py`"],
        ["GLUE dev average, MiniLM", glue(root), "`study.py page glue`"],
        ["the same on a GPU", glue(root, "glue_gpu"), "`study.py page glue --out model_cards/glue_gpu`"],
        [
            "heads in closed form beside LoRA, MiniLM",
            heads_beside_lora(benchmark("head_beside_lora")),
            "`benchmarks/head_beside_lora.py`",
        ],
        *conversions,
        *other_tasks(root, read_json),
        *language_model(benchmark("convert_llama"), benchmark("convert_llama_ffn")),
        peers(benchmark("convert_peers")),
        exported(benchmark("export_latency")["rows"]),
        [heads, faster, "`benchmarks/attention.py`"],
        ["a token behind 8,192 others, two-layer Llama", token, "`benchmarks/attention.py`"],
        ["Long Range Arena, test accuracy after 15 CPU minutes each", long_range(root), "`study.py page lra`"],
        *low_rank(benchmark("lowrank_init"), benchmark("lowrank_speed"), benchmark("lowrank_compress")),
    ]
    return "\n".join(grid(["what", "result", "measured by recipes/"], rows)).replace("---:", "---")


def at_length(row: dict[str, Any]) -> str:
    """Of conversions that were timed on long inputs too, the speed-up there; the first one is at 64 tokens."""
    told = [f"{row[f'at {shape}, padded']:.2f} × at {tokens}" for shape, tokens in LONG if f"at {shape}, padded" in row]
    return f" at 64 tokens, {', '.join(told)}" if told else ""


def other_tasks(root: Path, read: Callable[[Path], Any]) -> list[list[str]]:
    """What `TASKS` became, each in one row."""
    found = []
    for task, what in TASKS.items():
        teacher, *rows = read(root / f"recipes/benchmarks/results/convert_task/{task}.json")["rows"]
        told = [f"{100 * row['score']:.1f} at {row['speed-up']:.2f} × ({row['model']})" for row in rows]
        result = f"score {100 * teacher['score']:.1f}; {', '.join(told)}"
        found.append([f"{what} converted without labels", result, "`benchmarks/convert_models.py task`"])
    return found


def language_model(attention: dict[str, Any], ffn: dict[str, Any]) -> list[list[str]]:
    """A Llama whose far attention became linear, and one with fewer hidden units."""
    original, near, *_, converted = attention["rows"]
    told = [
        f"at {length} tokens {converted[key]:.1f} (original {original[key]:.1f}, without far keys {near[key]:.1f})"
        for length, key in (("512", "perplexity at 512"), ("2,048", "perplexity at 2048"))
    ]
    behind = {(row["model"], row["tokens"]): row for row in attention["decoding"]}
    ours, softmax = behind["converted", 8192], behind["original", 8192]
    times = f"{ours['ms per token']:.0f} ms (original {softmax['ms per token']:.0f})"
    told.append(
        f"a token behind 8,192 others takes {times} and a cache of {ours['cache bytes'] / 1e6:.0f} MB (original "
        f"{softmax['cache bytes'] / 1e6:.0f})"
    )
    kept, narrow = ffn["rows"][0], ffn["rows"][-1]
    smaller = (
        f"perplexity {narrow['perplexity']:.1f} (original {kept['perplexity']:.1f}) with "
        f"{narrow['parameters'] / 1e6:.0f} of {kept['parameters'] / 1e6:.0f} million parameters, after "
        f"{narrow['conversion seconds']:.0f} s"
    )
    name = "SmolLM2-135M-Instruct without labels"
    return [
        [
            f"{name}, {converted['model']}",
            f"perplexity {'; '.join(told)}; after {converted['seconds of conversion']:.0f} s",
            "`benchmarks/convert_models.py llama`",
        ],
        [f"{name}, {narrow['model']}", smaller, "`benchmarks/convert_models.py llama_ffn`"],
    ]


def peers(found: dict[str, Any]) -> list[str]:
    """Every method at the latencies of the first one."""
    told = []
    for line in found["at_equal_latency"]:
        scores = ((name, value) for name, value in line.items() if name not in ("speed-up", "ms"))
        given = [f"{name} {'-' if value is None else f'{100 * value:.1f}'}" for name, value in scores]
        told.append(f"{line['speed-up']:.2f} ×: {', '.join(given)}")
    what = "SST-2 accuracy at equal latency, ways to make the classifier smaller (original "
    return [f"{what}{100 * found['rows'][0]['accuracy']:.1f})", "; ".join(told), "`benchmarks/convert_models.py peers`"]


def exported(rows: list[dict[str, Any]]) -> list[str]:
    """A bundle in torch, in ONNX and with int8 Linears."""
    told = [
        f"{row['model']}: accuracy {100 * row['accuracy']:.1f}, {row['MB']:.0f} MB, {row['ms per 32x64']:.0f} ms"
        for row in rows
    ]
    return ["SST-2 classifier as a file, 32 × 64 tokens", "; ".join(told), "`benchmarks/export_latency.py`"]


def glue(root: Path, page: str = "glue") -> str:
    """The average of every method that ran all tasks, and how many of its runs found nothing."""
    table = in_order(read_reports(root / "model_cards" / page, "glue"))
    methods = sorted({method for row in table.values() for method in row}, key=rank)
    common = list(table)
    parts = []
    for method in methods:
        if any(method not in row for row in table.values()):
            continue
        mean = statistics.mean(spread(table[task][method], "score")[0] for task in common)
        runs = [on_plateau(task, report["score"], table[task]) for task in common for report in table[task][method]]
        stuck = f" ({sum(runs)} of {len(runs)} runs on a plateau)" if any(runs) else ""
        parts.append(f"{NAMES.get(method, method)} {100 * mean:.1f}{stuck}")
    counts = sorted({len(table[task][method]) for task in common for method in methods if method in table[task]})
    seeds = f"{counts[0]}" + (f" to {counts[-1]}" if len(counts) > 1 else "")
    return f"{len(common)} tasks ({', '.join(common)}; seeds: {seeds}): {', '.join(parts)}"


def heads_beside_lora(figures: dict[str, Any]) -> str:
    """From a half and from all examples: mean scores, what heads have of LoRA's, and in which part of its time."""
    rows = {(row["task"], row["seed"], row["share of examples"]): row for row in figures["rows"]}
    parts = []
    for share, what in ((0.5, "from half of the examples"), (1.0, "from all")):
        mean = rows["mean", None, share]
        tasks = [
            f"{task} {100 * row['score']:.1f}"
            for (task, seed, of), row in rows.items()
            if of == share and seed == figures["seeds"][0]
        ]
        lora = mean["LoRA's score"]
        part, time = mean["score / LoRA's"], mean["seconds / LoRA's"]
        parts.append(f"{what} {100 * mean['score']:.1f} ({', '.join(tasks)}), {part:.1%} in {time:.0%} of the time")
    return "; ".join(parts) + f"; LoRA {100 * lora:.1f}"


def long_range(root: Path) -> str:
    """Softmax and the best linear attention of each task."""
    parts = []
    for task, row in sorted(read_reports(root / "model_cards/lra", "lra").items()):
        scores = {name: 100 * spread(cell, "accuracy")[0] for name, cell in row.items()}
        if not scores.keys() > {"softmax"}:
            continue
        softmax = scores.pop("softmax")
        best = max(scores, key=lambda name: scores[name])
        parts.append(f"{task}: softmax {softmax:.1f}, best of {len(scores)} linear ones ({best}) {scores[best]:.1f}")
    if not parts:
        raise ConfigError(
            "model_cards/lra has no task with softmax and a linear attention; python recipes/papers/study.py run lra"
        )
    return "; ".join(parts)


def low_rank(init: dict[str, Any], speed: dict[str, Any], compress: dict[str, Any]) -> list[list[str]]:
    """Rows of the three benchmarks of low rank: a start, a layer, and each study of compression at its middle size."""
    wanted = {"weights": "he_normal", "inputs": 384, "outputs": 1536, "activation": "relu", "rank_scale": 0.05}
    risks = next(row["relative_risk"] for row in init["rows"] if wanted.items() <= row.items())
    starts = ", ".join(f"{name} {risks[name]:.3f}" for name in ("function", "spectral_gnorm", "spectral", "ws_nkp"))
    thin = {row["width"]: row["speed-up"] for row in speed["rows"] if row["rank scale"] == 0.1}
    rows = [
        ["relative risk of a layer at its start, 384 × 1,536, ReLU, rank 19", starts, "`benchmarks/lowrank_init.py`"],
        [
            "low-rank layer at a tenth of full rank, forward and backward",
            ", ".join(f"{thin[width]:.1f} × faster at {width:,}" for width in (min(thin), max(thin))),
            "`benchmarks/lowrank_speed.py`",
        ],
    ]
    for study in compress["studies"].values():
        first, *others = study["rows"]
        sizes = list(dict.fromkeys(row["size"] for row in others))
        size = sizes[len(sizes) // 2]
        scores = {row["init"]: row for row in others if row["size"] == size}
        each = ", ".join(f"{name} {100 * row[study['score']]:.1f}" for name, row in scores.items())
        share = next(iter(scores.values()))["parameters"] / first["parameters"]
        rows.append(
            [
                f"compressed without training: {study['title']}, {size}",
                f"{study['score']} {each} (original {100 * first[study['score']]:.1f}) with {share:.2f} × the numbers",
                "`benchmarks/lowrank_compress.py`",
            ]
        )
    return rows


if __name__ == "__main__":
    sys.exit(main())
