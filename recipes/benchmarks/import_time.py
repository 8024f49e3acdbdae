"""Seconds that `import snnk_peft` adds to `import peft`, in fresh processes taken in turn.

python recipes/benchmarks/import_time.py
"""

from __future__ import annotations

import statistics
import subprocess
import sys

from _bench import alternate, parser, report


def start(statement: str):
    """Return a function that runs `statement` in a fresh interpreter."""
    return lambda: subprocess.run([sys.executable, "-c", statement], check=True, capture_output=True)


def main() -> None:
    """Run the benchmark and write its results."""
    arguments = parser(__doc__, "import_time").parse_args()
    seconds = alternate(
        {"import peft": start("import peft"), "import snnk_peft": start("import snnk_peft")}, arguments.repetitions
    )
    added = statistics.median(b - a for a, b in zip(seconds["import peft"], seconds["import snnk_peft"], strict=True))
    rows = [{"statement": name, "seconds": statistics.median(values)} for name, values in seconds.items()]
    report({"added_seconds": added, "seconds": seconds}, rows, arguments.output, "Import time")
    print(f"import snnk_peft adds {added:.3f} s")


if __name__ == "__main__":
    main()
