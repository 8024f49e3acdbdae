"""STS-B: how similar are two sentences, from 0 (unrelated) to 5 (the same)? A regression (Cer et al. 2017)."""

from data import TASKS, TaskSpec, TsvLayout

STSB = TaskSpec(
    name="stsb",
    folder="STS-B",
    tsv=TsvLayout(text=("sentence1", "sentence2"), label="score", label_range=(0.0, 5.0)),
    hub_columns=("sentence1", "sentence2"),
    label_names=None,
    metrics=("pearson", "spearmanr"),
)
TASKS.register(STSB.name, STSB)
