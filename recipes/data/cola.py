"""CoLA: is a sentence acceptable English? Single sentences from the linguistics literature (Warstadt et al. 2019)."""

from data import TASKS, TaskSpec, TsvLayout

COLA = TaskSpec(
    name="cola",
    folder="CoLA",
    tsv=TsvLayout(
        text=("sentence",), label="label", labels=("0", "1"), header=("source", "label", "author_mark", "sentence")
    ),
    hub_columns=("sentence",),
    label_names=("unacceptable", "acceptable"),
    metrics=("matthews_correlation", "accuracy"),
    primary=("matthews_correlation",),
)
TASKS.register(COLA.name, COLA)
