"""What goes wrong around a recipe is told in a line instead of a traceback."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable

from safetensors import SafetensorError

from lib.files import file_fault
from snnk_peft.errors import ConfigError, UnsupportedError

STOPPED = 128 + signal.SIGINT
"""Exit code of a program that Ctrl-C ended."""


def guarded(work: Callable[[], int | None]) -> int:
    """Do the work of a recipe; returns its exit code.

    Faults of the input and what the system refuses (files, folders, a full disk) are told on stderr, with code 2;
    Ctrl-C gives 130. Any other exception is a bug and keeps its traceback.
    """
    try:
        return work() or 0
    except (ConfigError, UnsupportedError) as error:
        fault: str | None = str(error)
    except (OSError, SafetensorError) as error:
        fault = file_fault(error)
        if fault is None:
            raise
    except KeyboardInterrupt:
        print("stopped by Ctrl-C; nothing unfinished was left under a final name", file=sys.stderr)
        return STOPPED
    print(f"error: {fault}", file=sys.stderr)
    return 2
