"""RTE: does a text entail a hypothesis? The PASCAL challenges RTE1, 2, 3 and 5 with two classes."""

from data import TASKS, TaskSpec, TsvLayout

RTE = TaskSpec(
    name="rte",
    folder="RTE",
    tsv=TsvLayout(text=("sentence1", "sentence2"), label="label", labels=("entailment", "not_entailment")),
    hub_columns=("sentence1", "sentence2"),
    label_names=("entailment", "not_entailment"),
    metrics=("accuracy",),
)
TASKS.register(RTE.name, RTE)
