"""Base class of the papers' trainings: the name of the method, and a schedule in the units of their settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from snnk_cli.data import ExampleSet
from snnk_cli.experiment import Config, Experiment, Schedule, of_budget, of_epochs, of_steps

# Of `Experiment.score`: the examples by split, whether the run was asked to stop, and the metrics unless it was.
Splits = Mapping[str, ExampleSet]
Stopped = Callable[[], bool]
Metrics = dict[str, float] | None


class Training(Experiment[Config]):
    """An experiment whose section `method` has a `label`, its name in titles and tables."""

    @property
    def method(self) -> str:
        return str(self.config.method.label())

    def schedule(self, per_epoch: int) -> Schedule:
        """Return a schedule of epochs, of optimizer steps or CPU time (whichever ends first), or of steps alone."""
        train = self.config.train
        if hasattr(train, "epochs"):
            return of_epochs(train, per_epoch)
        return of_budget(train) if hasattr(train, "max_cpu_minutes") else of_steps(train)
