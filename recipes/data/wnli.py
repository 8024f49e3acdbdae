"""WNLI: does a sentence with its pronoun resolved follow? From the Winograd Schema Challenge (Levesque et al. 2012).

Its dev set repeats sentences of train with the other label, so that most models score below the majority class.
"""

from data import TASKS, TaskSpec, TsvLayout

WNLI = TaskSpec(
    name="wnli",
    folder="WNLI",
    tsv=TsvLayout(text=("sentence1", "sentence2"), label="label", labels=("0", "1")),
    hub_columns=("sentence1", "sentence2"),
    label_names=("not_entailment", "entailment"),
    metrics=("accuracy",),
)
TASKS.register(WNLI.name, WNLI)
