"""MNLI: does a premise entail a hypothesis? Dev sets of the training genres (matched) and of others (mismatched).

Williams et al. 2018. The score is the mean of the two where both are there (`TaskSpec.summarize`).
"""

from data import TASKS, TaskSpec, TsvLayout

MNLI = TaskSpec(
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
)
TASKS.register(MNLI.name, MNLI)
