"""The nine data sets of GLUE (Wang et al. 2019), as the Hub's nyu-mll/glue and the official files have them."""

from data import TASKS, TaskSpec, TsvLayout

GLUE = (
    # CoLA: is a sentence acceptable English? Single sentences from the linguistics literature (Warstadt et al. 2019).
    TaskSpec(
        name="cola",
        folder="CoLA",
        tsv=TsvLayout(
            text=("sentence",), label="label", labels=("0", "1"), header=("source", "label", "author_mark", "sentence")
        ),
        hub_columns=("sentence",),
        label_names=("unacceptable", "acceptable"),
        metrics=("matthews_correlation", "accuracy"),
        primary=("matthews_correlation",),
    ),
    # MNLI: does a premise entail a hypothesis? Dev sets of the training genres (matched) and of others (mismatched).
    # Williams et al. 2018. The score is the mean of the two where both are there (`TaskSpec.summarize`).
    TaskSpec(
        name="mnli",
        folder="MNLI",
        tsv=TsvLayout(
            text=("sentence1", "sentence2"), label="gold_label", labels=("entailment", "neutral", "contradiction")
        ),
        hub_columns=("premise", "hypothesis"),
        label_names=("entailment", "neutral", "contradiction"),
        metrics=("accuracy",),
        splits=("train", "validation_matched", "validation_mismatched"),
        files=("train", "dev_matched", "dev_mismatched"),
    ),
    # MRPC: do two sentences from the news say the same? (Dolan and Brockett 2005). Its files have a byte-order mark.
    TaskSpec(
        name="mrpc",
        folder="MRPC",
        tsv=TsvLayout(text=("#1 String", "#2 String"), label="Quality", labels=("0", "1")),
        hub_columns=("sentence1", "sentence2"),
        label_names=("not_equivalent", "equivalent"),
        metrics=("accuracy", "f1"),
    ),
    # QNLI: does a sentence of Wikipedia answer a question? Made from SQuAD (Rajpurkar et al. 2016).
    TaskSpec(
        name="qnli",
        folder="QNLI",
        tsv=TsvLayout(text=("question", "sentence"), label="label", labels=("entailment", "not_entailment")),
        hub_columns=("question", "sentence"),
        label_names=("entailment", "not_entailment"),
        metrics=("accuracy",),
    ),
    # QQP: are two questions from Quora duplicates? (Iyer et al. 2017). The official train.tsv breaks a few of its 364
    # thousand rows in two, and has a few empty questions; such rows are left out.
    TaskSpec(
        name="qqp",
        folder="QQP",
        tsv=TsvLayout(
            text=("question1", "question2"), label="is_duplicate", labels=("0", "1"), broken_row_rate=1 / 5000
        ),
        hub_columns=("question1", "question2"),
        label_names=("not_duplicate", "duplicate"),
        metrics=("accuracy", "f1"),
    ),
    # RTE: does a text entail a hypothesis? The PASCAL challenges RTE1, 2, 3 and 5 with two classes.
    TaskSpec(
        name="rte",
        folder="RTE",
        tsv=TsvLayout(text=("sentence1", "sentence2"), label="label", labels=("entailment", "not_entailment")),
        hub_columns=("sentence1", "sentence2"),
        label_names=("entailment", "not_entailment"),
        metrics=("accuracy",),
    ),
    # SST-2: is a phrase of a film review positive? (Socher et al. 2013).
    TaskSpec(
        name="sst2",
        folder="SST-2",
        tsv=TsvLayout(text=("sentence",), label="label", labels=("0", "1")),
        hub_columns=("sentence",),
        label_names=("negative", "positive"),
        metrics=("accuracy",),
    ),
    # STS-B: how similar are two sentences, from 0 (unrelated) to 5 (the same)? A regression (Cer et al. 2017).
    TaskSpec(
        name="stsb",
        folder="STS-B",
        tsv=TsvLayout(text=("sentence1", "sentence2"), label="score", label_range=(0.0, 5.0)),
        hub_columns=("sentence1", "sentence2"),
        label_names=None,
        metrics=("pearson", "spearmanr"),
    ),
    # WNLI: does a sentence with its pronoun resolved follow? From the Winograd Schema Challenge (Levesque et al.
    # 2012). Its dev set repeats sentences of train with the other label, so that most models score below the majority
    # class.
    TaskSpec(
        name="wnli",
        folder="WNLI",
        tsv=TsvLayout(text=("sentence1", "sentence2"), label="label", labels=("0", "1")),
        hub_columns=("sentence1", "sentence2"),
        label_names=("not_entailment", "entailment"),
        metrics=("accuracy",),
    ),
)
for _task in GLUE:
    TASKS.register(_task.name, _task)
