"""Exceptions and warnings of the package; each message says what was given, what was expected and what to do."""

from __future__ import annotations

from collections.abc import Iterable


class ConfigError(ValueError):
    """A configuration or an input file is wrong. Lists all faults at once, so that one round of corrections is enough.

    Args:
        faults: one message or several. Each says what was given, what was expected and the next step.

    Attributes:
        faults: the messages as a list.

    Example:
        >>> raise ConfigError(["num_features is 0; expected >= 1", "layers has index 12; the model has 6 layers"])
        Traceback (most recent call last):
        ...
        snnk_peft.errors.ConfigError: 2 faults:
          - num_features is 0; expected >= 1
          - layers has index 12; the model has 6 layers
    """

    def __init__(self, faults: str | Iterable[str]):
        self.faults: list[str] = [faults] if isinstance(faults, str) else list(faults)
        if len(self.faults) == 1:
            message = self.faults[0]
        else:
            message = f"{len(self.faults)} faults:\n" + "\n".join(f"  - {fault}" for fault in self.faults)
        super().__init__(message)


class UnknownOptionError(ConfigError, TypeError):
    """A constructor was given unknown options; Python and PEFT expect a TypeError in this case."""


class UnsupportedError(TypeError):
    """A model or layer cannot be patched. The message says what was expected and what was found."""


class NumericalError(ArithmeticError):
    """A tensor holds infinities or NaNs; names the tensor and the position of the first."""


class NumericalWarning(UserWarning):
    """A result is finite but cannot be trusted, for example because the predicted variance is enormous."""
