"""QNLI: does a sentence of Wikipedia answer a question? Made from SQuAD (Rajpurkar et al. 2016)."""

from data import TASKS, TaskSpec, TsvLayout

QNLI = TaskSpec(
    name="qnli",
    folder="QNLI",
    tsv=TsvLayout(text=("question", "sentence"), label="label", labels=("entailment", "not_entailment")),
    hub_columns=("question", "sentence"),
    label_names=("entailment", "not_entailment"),
    metrics=("accuracy",),
)
TASKS.register(QNLI.name, QNLI)
