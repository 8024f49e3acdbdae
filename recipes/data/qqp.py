"""QQP: are two questions from Quora duplicates? (Iyer et al. 2017).

The official train.tsv breaks a few of its 364 thousand rows in two, and has a few empty questions; such rows are left
out.
"""

from data import TASKS, TaskSpec, TsvLayout

QQP = TaskSpec(
    name="qqp",
    folder="QQP",
    tsv=TsvLayout(text=("question1", "question2"), label="is_duplicate", labels=("0", "1"), broken_row_rate=1 / 5000),
    hub_columns=("question1", "question2"),
    label_names=("not_duplicate", "duplicate"),
    metrics=("accuracy", "f1"),
)
TASKS.register(QQP.name, QQP)
