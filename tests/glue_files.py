"""Small stand-ins for the official GLUE files, in the official layouts, with labels that a model can learn.

The label is given away by cue words; everything else is filler. For pairs the cue stands in the second sentence.
"""

from __future__ import annotations

import random
from pathlib import Path

FOLDERS = {
    "cola": "CoLA",
    "sst2": "SST-2",
    "mrpc": "MRPC",
    "qqp": "QQP",
    "stsb": "STS-B",
    "mnli": "MNLI",
    "qnli": "QNLI",
    "rte": "RTE",
    "wnli": "WNLI",
}
# Cells of the label column, in the order of the Hub's class ids.
LABEL_CELLS = {
    "mnli": ["entailment", "neutral", "contradiction"],
    "qnli": ["entailment", "not_entailment"],
    "rte": ["entailment", "not_entailment"],
}
HEADERS = {
    "cola": None,
    "sst2": ["sentence", "label"],
    "mrpc": ["Quality", "#1 ID", "#2 ID", "#1 String", "#2 String"],
    "qqp": ["id", "qid1", "qid2", "question1", "question2", "is_duplicate"],
    "stsb": [
        "index",
        "genre",
        "filename",
        "year",
        "old_index",
        "source1",
        "source2",
        "sentence1",
        "sentence2",
        "score",
    ],
    "mnli": [
        *("index", "promptID", "pairID", "genre", "sentence1_binary_parse", "sentence2_binary_parse"),
        *("sentence1_parse", "sentence2_parse", "sentence1", "sentence2", "label1", "gold_label"),
    ],
    "qnli": ["index", "question", "sentence", "label"],
    "rte": ["index", "sentence1", "sentence2", "label"],
    "wnli": ["index", "sentence1", "sentence2", "label"],
}
CUES = [
    ["terrible", "awful", "boring", "dreadful"],
    ["wonderful", "brilliant", "charming", "delightful"],
    ["ordinary", "usual", "common", "plain"],
]
SUBJECTS = ["the film", "this story", "the old man", "our train", "a small dog", "the report", "her letter"]
VERBS = ["seems", "remained", "was", "has become", "looks"]
PLACES = ["in the city", "near the river", "after the war", "on Monday", "for many people", 'at the "old" market']


def write_task(folder: Path, task: str, n_train: int = 32, n_dev: int = 16, seed: int = 0) -> Path:
    """Write `<folder>/<official folder>/{train,dev}.tsv` (MNLI: dev_matched, dev_mismatched); returns that folder."""
    target = Path(folder) / FOLDERS[task]
    target.mkdir(parents=True, exist_ok=True)
    dev = ["dev_matched", "dev_mismatched"] if task == "mnli" else ["dev"]
    rng = random.Random(f"{seed} {task}")
    for name, count in [("train", n_train), *((name, n_dev) for name in dev)]:
        lines = ["\t".join(HEADERS[task])] if HEADERS[task] else []
        lines += ["\t".join(_row(task, index, rng)) for index in range(count)]
        text = "\n".join(lines) + "\n"
        (target / f"{name}.tsv").write_text(text, encoding="utf-8-sig" if task == "mrpc" else "utf-8", newline="\n")
    return target


def sentences() -> list[str]:
    """Every sentence without a cue, each once."""
    return [f"{subject} {verb} quiet {place} ." for place in PLACES for verb in VERBS for subject in SUBJECTS]


def _sentence(cue: str, rng: random.Random) -> str:
    return f"{rng.choice(SUBJECTS)} {rng.choice(VERBS)} {cue} {rng.choice(PLACES)} ."


def _row(task: str, index: int, rng: random.Random) -> list[str]:
    cells = LABEL_CELLS.get(task, ["0", "1"])
    label = rng.randrange(len(cells)) if index >= len(cells) else index  # every class occurs
    first, second = _sentence("quiet", rng), _sentence(rng.choice(CUES[label]), rng)
    if task == "cola":
        return ["gj04", cells[label], "" if label else "*", second]
    if task == "sst2":
        return [second, cells[label]]
    if task == "mrpc":
        return [cells[label], str(100 + index), str(900 + index), first, second]
    if task == "qqp":
        return [str(index), str(2 * index), str(2 * index + 1), first, second, cells[label]]
    if task == "stsb":
        low, high = (0.0, 2.0) if label == 0 else (3.0, 5.0)
        score = f"{rng.uniform(low, high):.3f}"
        return [str(index), "main-news", "headlines", "2013", f"{index:04d}", "none", "none", first, second, score]
    if task == "mnli":
        return [str(index), "", "", "fiction", "", "", "", "", first, second, cells[label], cells[label]]
    return [str(index), first, second, cells[label]]
