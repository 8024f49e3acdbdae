"""What the trainings of the papers share: the name of the method, and a schedule by what their settings count in."""

from __future__ import annotations

from snnk_cli.experiment import Config, Experiment, Schedule, of_budget, of_epochs, of_steps


class Training(Experiment[Config]):
    """An experiment whose section `method` has a `label`, which names it in titles and tables."""

    @property
    def method(self) -> str:
        return str(self.config.method.label())

    def schedule(self, per_epoch: int) -> Schedule:
        """Whole epochs; optimizer steps or processor time, whichever ends first; or optimizer steps alone."""
        train = self.config.train
        if hasattr(train, "epochs"):
            return of_epochs(train, per_epoch)
        return of_budget(train) if hasattr(train, "max_cpu_minutes") else of_steps(train)
