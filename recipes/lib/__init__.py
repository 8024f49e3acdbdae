"""Code shared by the programs of a clone, and the data sets that they know besides those of the command `snnk`."""

from snnk_cli.task_settings import TASK_PACKAGES

TASK_PACKAGES.append("data")
