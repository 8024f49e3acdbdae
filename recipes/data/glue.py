"""The nine data sets of GLUE (Wang et al. 2019), as in the Hub's nyu-mll/glue and the official files."""

from __future__ import annotations

from typing import Any

from data import TASKS, TaskSpec, TsvLayout

SENTENCE, PAIR, QUESTIONS = ("sentence",), ("sentence1", "sentence2"), ("question1", "question2")
BINARY = ("0", "1")
ENTAILMENT = ("entailment", "not_entailment")
MNLI = ("entailment", "neutral", "contradiction")
ACCURACY, ACCURACY_F1 = ("accuracy",), ("accuracy", "f1")


def _glue(folder: str, tsv: TsvLayout, names: tuple[str, ...] | None, metrics: tuple[str, ...], **more: Any) -> None:
    """Register a task named after its folder; columns on the Hub are the same unless `hub_columns` is given."""
    given = {"hub_columns": tsv.text, **more}
    name = folder.replace("-", "").lower()
    TASKS.register(name, TaskSpec(name=name, folder=folder, tsv=tsv, label_names=names, metrics=metrics, **given))


# CoLA: is a sentence acceptable English? Single sentences from the linguistics literature (Warstadt et al. 2019).
_glue(
    "CoLA",
    TsvLayout(SENTENCE, "label", BINARY, header=("source", "label", "author_mark", "sentence")),
    ("unacceptable", "acceptable"),
    ("matthews_correlation", "accuracy"),
    primary=("matthews_correlation",),
)
# MNLI: does a premise entail a hypothesis? Dev sets of the training genres (matched) and of others (mismatched).
# Williams et al. 2018. The score is the mean of the two where both are present (`TaskSpec.summarize`).
_glue(
    "MNLI",
    TsvLayout(PAIR, "gold_label", MNLI),
    MNLI,
    ACCURACY,
    hub_columns=("premise", "hypothesis"),
    splits=("train", "validation_matched", "validation_mismatched"),
    files=("train", "dev_matched", "dev_mismatched"),
)
# MRPC: do two news sentences mean the same? (Dolan and Brockett 2005). Its files have a byte-order mark.
_glue(
    "MRPC",
    TsvLayout(("#1 String", "#2 String"), "Quality", BINARY),
    ("not_equivalent", "equivalent"),
    ACCURACY_F1,
    hub_columns=PAIR,
)
# QNLI: does a Wikipedia sentence answer a question? Derived from SQuAD (Rajpurkar et al. 2016).
_glue("QNLI", TsvLayout(("question", "sentence"), "label", ENTAILMENT), ENTAILMENT, ACCURACY)
# QQP: are two questions from Quora duplicates? (Iyer et al. 2017). The official train.tsv splits a few of its 364
# thousand rows in two, and has a few empty questions; such rows are left out.
_glue(
    "QQP",
    TsvLayout(QUESTIONS, "is_duplicate", BINARY, broken_row_rate=1 / 5000),
    ("not_duplicate", "duplicate"),
    ACCURACY_F1,
)
# RTE: does a text entail a hypothesis? The PASCAL challenges RTE1, 2, 3 and 5 with two classes.
_glue("RTE", TsvLayout(PAIR, "label", ENTAILMENT), ENTAILMENT, ACCURACY)
# SST-2: is a phrase of a film review positive? (Socher et al. 2013).
_glue("SST-2", TsvLayout(SENTENCE, "label", BINARY), ("negative", "positive"), ACCURACY)
# STS-B: how similar are two sentences, from 0 (unrelated) to 5 (the same)? A regression (Cer et al. 2017).
_glue("STS-B", TsvLayout(PAIR, "score", label_range=(0.0, 5.0)), None, ("pearson", "spearmanr"))
# WNLI: does a sentence with its pronoun resolved follow? From the Winograd Schema Challenge (Levesque et al. 2012). Its
# dev set repeats sentences of train with the opposite label, so most models score below the majority class.
_glue("WNLI", TsvLayout(PAIR, "label", BINARY), ("not_entailment", "entailment"), ACCURACY)
