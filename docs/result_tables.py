"""Tables of results from the metrics.json files of the benchmarks."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
BENCHMARKS = ROOT / "recipes/benchmarks/results"
Row = Mapping[str, Any]
Column = tuple[str, str, Callable[[Any], str]]  # title, key in the rows, how its values are written
METHODS = {
    "teacher": "original",
    "rows": "learned rows beside queries and values, and norms",
    "upper": "the same in all layers but the first",
    "cut": "twelve rows, and norms, in the upper half; the lower half run once",
    "parallel": "learned rows beside the FFN",
    "snnk": "random features after attention and FFN",
    "snnk_pfeiffer": "as many parameters in one place of a layer",
    "lora": "LoRA",
    "lora_norms": "LoRA and norms",
    "dora": "DoRA",
    "rows6_fitted_head": "six rows from one labelled pass, and norms, with a head fitted in closed form",
    "rows8_upper_fitted_head": "eight such rows, and norms, in all layers but the first, with such a head",
    "rows6_informed_norms": "the six rows, and norms, without the fitted head",
    "rows8_upper_informed_norms": "the eight rows, and norms, without the fitted head",
    "least": "any method: through the whole model and back",
}


def read(name: str) -> dict[str, Any]:
    """A stored report below recipes/benchmarks/results/."""
    found: dict[str, Any] = json.loads((BENCHMARKS / name).read_text(encoding="utf-8"))
    return found


def fixed(digits: int, unit: float = 1) -> Callable[[float], str]:
    """A number with so many decimals, in multiples of a unit."""
    return lambda value: f"{value / unit:,.{digits}f}"


def percent(value: float | None) -> str:
    """A share of 1 in percent."""
    return "–" if value is None else f"{100 * value:.1f}"


def times(value: float) -> str:
    """A ratio."""
    return f"{value:.2f} ×"


def milliseconds(value: float) -> str:
    """A time, with two decimals if it is short."""
    return f"{value:.2f}" if value < 10 else f"{value:.1f}"


def in_words(name: str) -> str:
    """A model or method as readers know it."""
    return METHODS.get(name, name)


NAME: Column = ("model", "model", in_words)
METHOD: Column = ("method", "method", in_words)
SPEED: Column = ("speed", "speed-up", times)
SECONDS: Column = ("conversion, s", "conversion seconds", fixed(0))
TRAINED: Column = ("trained", "trainable parameters", fixed(0))
PARAMETERS: Column = ("parameters, millions", "parameters", fixed(1, 1e6))


def grid(rows: Sequence[Row], *columns: Column) -> str:
    """A Markdown table of some keys of the rows; all columns but the first are numbers."""
    lines = [[title for title, _, _ in columns], ["---", *["---:"] * (len(columns) - 1)]]
    lines += [[form(row[key]) if key in row else "" for _, key, form in columns] for row in rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def cifar10() -> str:
    """A small ViT whose FFNs became narrower."""
    rows = read("convert_cifar10/metrics.json")["rows"]
    return grid(rows, NAME, ("accuracy", "accuracy", percent), SPEED, SECONDS)


def language_model() -> str:
    """SmolLM2 with a smaller cache: perplexity, recall, bytes and speed, the mean over the draws."""
    measured = read("convert_llama/metrics.json")["rows"]
    rows = []
    for name in dict.fromkeys(row["model"] for row in measured):
        same = [row for row in measured if row["model"] == name]
        keys = [key for key in same[0] if key not in ("model", "seed")]
        mean = {key: sum(row[key] for row in same) / len(same) for key in keys}
        told = [value for key, value in mean.items() if key.startswith("passkey")]
        rows.append({"model": name, **mean, "passkey": sum(told) / len(told)})
    quality = [
        (text if where == "to 2048" else f"{text}, beyond", f"{text}, {where}", fixed(1))
        for text in ("reviews", "document")
        for where in ("to 2048", "behind 2048")
    ]
    recall = [(f"copied after {tokens:,}", f"copied after {tokens}", percent) for tokens in (640, 2048)]
    cost = [("cache, MB", "cache bytes behind 8192", fixed(0, 1e6))]
    cost += [(f"ms per token after {tokens:,}", f"ms behind {tokens}", fixed(0)) for tokens in (512, 8192)]
    last = ("conversion, s", "seconds", fixed(0))
    return grid(rows, NAME, *quality, *recall, ("passkeys found", "passkey", percent), *cost, last)


def fewer_units() -> str:
    """SmolLM2 with fewer hidden units."""
    rows = read("convert_llama_ffn/metrics.json")["rows"]
    return grid(rows, NAME, ("perplexity", "perplexity", fixed(1)), PARAMETERS, SECONDS)


def curve(task: str, *ways: str) -> str:
    """Some or all ways to make a fine-tuned model smaller, in fp32 and in int8."""
    report = read(f"convert_curve/{task}.json")
    rows = [row for row in report["rows"] if not ways or row["point"].split()[0] in ways]
    columns: list[Column] = [("way", "point", str), ("as", "as", str), ("speed", "speed-up", times)]
    columns += [(f"at {shape}", f"at {shape}", times) for shape in report["shapes"][1:]]
    columns += [("same answers", "agreement", percent), ("distance", "distance", fixed(3)), ("score", "score", percent)]
    return grid(rows, *columns, ("seconds", "seconds", fixed(0)))


def sizes() -> str:
    """What `convert` takes, by size of the model."""
    millions = (("parameters, millions", "parameters"), ("after", "converted"))
    columns: list[Column] = [(title, key, fixed(1, 1e6)) for title, key in millions]
    columns += [SPEED, ("seconds", "seconds", fixed(0)), ("memory, GB", "peak MB", fixed(1, 1000))]
    columns += [("of forward passes alone", "forward alone, MB", fixed(1, 1000))]
    return grid(read("convert_sizes/metrics.json")["rows"], NAME, *columns)


def exported() -> str:
    """A classifier and its bundle in torch, in ONNX and with int8 Linears."""
    size: tuple[Column, ...] = (("accuracy", "accuracy", percent), ("MB", "MB", fixed(0)))
    speed: Column = ("speed, 32 × 64 tokens", "speed-up 32x64", times)
    return grid(read("export_latency/metrics.json")["rows"], NAME, *size, speed, ("1 × 32", "speed-up 1x32", times))


def embeddings() -> str:
    """A sentence encoder, its conversions, and int8 of each."""
    columns: list[Column] = [("speed", "speed-up", times), ("MB", "bytes", fixed(0, 1e6))]
    columns += [("cosine", "cosine", fixed(3)), ("Spearman, STS-B", "spearman", fixed(4))]
    columns += [("neighbours kept", "recall", percent), ("duplicates found", "found", percent)]
    return grid(read("convert_embeddings/metrics.json")["rows"], NAME, *columns)


def training_step(name: str, model: str | None = None) -> str:
    """Time and memory of a training step beside LoRA's."""
    rows = [row for row in read(name)["rows"] if model is None or row["model"] == model]
    memory: Column = ("memory / LoRA", "memory / LoRA", times)
    if memory[1] not in rows[0]:
        memory = ("peak memory, MB", "peak memory MB", fixed(0))
    return grid(rows, METHOD, ("time / LoRA", "time / LoRA", times), memory, TRAINED)


def glue_means() -> str:
    """Mean score over the tasks of every adapter and baseline, on a CPU and on a GPU, from the pages of the studies."""
    means: dict[str, dict[str, str]] = {}
    for study in ("glue", "glue_gpu"):
        page = (ROOT / f"model_cards/{study}/README.md").read_text(encoding="utf-8")
        words = {**dict(re.findall(r"^- (\w+): (.*)$", page, re.MULTILINE)), **METHODS}
        header, *lines = page[page.index("| method") :].partition("\n\n")[0].splitlines()
        column = header.split(" | ").index("average")
        for cells in (line.strip("| ").split(" | ") for line in lines):
            if column < len(cells) and re.fullmatch(r"\d+\.\d", cells[column]):
                known = means.setdefault(cells[0], {"method": cells[0], "words": words[cells[0]]})
                known[study] = cells[column]
    rows = sorted(means.values(), key=lambda row: -float(row["glue"]))
    scores: Sequence[Column] = (("CPU, 3 seeds", "glue", str), ("GPU, 8 seeds", "glue_gpu", str))
    return grid(rows, ("trained", "words", str), *scores, ("setting", "method", "`{}`".format))


def heads() -> str:
    """Heads in closed form from shares of the examples, the mean over tasks, beside LoRA."""
    rows = [row for row in read("head_beside_lora/metrics.json")["rows"] if row["seed"] is None]
    of_lora: Sequence[Column] = [(f"% of LoRA's {what}", f"{what} / LoRA's", percent) for what in ("score", "seconds")]
    share: Column = ("% of the examples", "share of examples", percent)
    return grid(rows, share, ("score", "score", percent), ("LoRA", "LoRA's score", percent), *of_lora)


def faster_attention() -> str:
    """Linear attention against fused softmax attention, times as fast."""
    report, kinds = read("attention/metrics.json"), ("forward", "training", "causal")
    speeds: dict[int, dict[str, Any]] = {}
    for kind in kinds:
        for row in report[kind]:
            speeds.setdefault(row["length"], {"length": row["length"]})[kind] = row["speed_up"]
    return grid(list(speeds.values()), ("tokens", "length", fixed(0)), *((kind, kind, times) for kind in kinds))


def one_token() -> str:
    """Time and cache of a token behind others."""
    where: tuple[Column, ...] = (("attention", "attention", str), ("tokens before", "prefix", fixed(0)))
    cost: tuple[Column, ...] = (("ms a token", "ms_per_token", fixed(1)), ("cache, MB", "bytes", fixed(1, 1e6)))
    return grid(read("attention/metrics.json")["decoding"], *where, *cost)


def attention_on_gpu() -> str:
    """Milliseconds of a layer, of its kernels alone and of flash attention, batch 1."""
    kinds = ("forward", "causal", "training", "training, causal")
    lengths: dict[int, dict[str, Any]] = {}
    for row in read("gpu/attention_on_gpu/metrics.json")["rows"]:
        if row["batch"] == 1 and row["kind"] in kinds:
            layer, card_alone, flash = (milliseconds(row[key]) for key in ("layer_ms", "layer_device_ms", "flash_ms"))
            told = f"{layer} ({card_alone}) / {flash}"
            lengths.setdefault(row["length"], {"length": row["length"]})[row["kind"]] = told
    return grid(list(lengths.values()), ("tokens", "length", fixed(0)), *((kind, kind, str) for kind in kinds))


def low_rank_starts() -> str:
    """Relative risk of a layer of 384 × 1,536 with ReLU at its start, by rank and init."""
    wanted = {"weights": "he_normal", "inputs": 384, "outputs": 1536, "activation": "relu"}
    found = [row for row in read("lowrank_init/metrics.json")["rows"] if wanted.items() <= row.items()]
    rows = [{"rank": row["rank"], **row["relative_risk"]} for row in found]
    return grid(rows, ("rank", "rank", str), *((name, name, fixed(3)) for name in rows[0] if name != "rank"))


def low_rank_speed() -> str:
    """A thin layer against the dense one, forward and backward."""
    rows = read("lowrank_speed/metrics.json")["rows"]
    return grid(rows, ("width", "width", fixed(0)), ("rank", "rank", str), SPEED)


def compressed() -> str:
    """Models of low rank without training, a table for each study."""
    tables = []
    for study in read("lowrank_compress/metrics.json")["studies"].values():
        score: Column = (study["score"], study["score"], percent)
        columns = (("size", "size", str), ("init", "init", str), score, PARAMETERS, SPEED, SECONDS)
        tables += [f"**{study['title']}**", grid(study["rows"], *columns)]
    return "\n\n".join(tables)


TABLES: dict[str, Callable[[], str]] = {
    "sst2": lambda: curve("sst2", "original", "plan"),
    "sst2_avx2": lambda: curve("sst2_avx2"),
    "mrpc": lambda: curve("mrpc"),
    "stsb": lambda: curve("stsb"),
    "imdb": lambda: curve("imdb"),
    "cifar10": cifar10,
    "language_model": language_model,
    "fewer_units": fewer_units,
    "curve": lambda: curve("sst2"),
    "sizes": sizes,
    "exported": exported,
    "embeddings": embeddings,
    "step_minilm": lambda: training_step("adapter_step/metrics.json"),
    "step_cut": lambda: training_step("adapter_step/cut.json"),
    "step_llama": lambda: training_step("adapter_step/llama.json"),
    "step_vit": lambda: training_step("vision_step/metrics.json", "vit_small"),
    "heads": heads,
    "glue_means": glue_means,
    "faster_attention": faster_attention,
    "one_token": one_token,
    "attention_on_gpu": attention_on_gpu,
    "low_rank_starts": low_rank_starts,
    "low_rank_speed": low_rank_speed,
    "compressed": compressed,
}
