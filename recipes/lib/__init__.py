"""What only a clone has: shared code of its programs, and the data sets that they know beside the command `snnk`."""

from snnk_cli.task_settings import TASK_PACKAGES

TASK_PACKAGES.append("data")
