"""SST-2: is a phrase of a film review positive? (Socher et al. 2013)."""

from data import TASKS, TaskSpec, TsvLayout

SST2 = TaskSpec(
    name="sst2",
    folder="SST-2",
    tsv=TsvLayout(text=("sentence",), label="label", labels=("0", "1")),
    hub_columns=("sentence",),
    label_names=("negative", "positive"),
    metrics=("accuracy",),
)
TASKS.register(SST2.name, SST2)
