"""MRPC: do two sentences from the news say the same? (Dolan and Brockett 2005). Its files have a byte-order mark."""

from data import TASKS, TaskSpec, TsvLayout

MRPC = TaskSpec(
    name="mrpc",
    folder="MRPC",
    tsv=TsvLayout(text=("#1 String", "#2 String"), label="Quality", labels=("0", "1")),
    hub_columns=("sentence1", "sentence2"),
    label_names=("not_equivalent", "equivalent"),
    metrics=("accuracy", "f1"),
)
TASKS.register(MRPC.name, MRPC)
