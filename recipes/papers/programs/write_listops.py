"""Write ListOps files of any length: expressions shorter than the benchmark's can be learned in minutes on a CPU.

    python recipes/papers/programs/write_listops.py --output runs/listops_short --min-length 50 --max-length 250
    python recipes/papers/programs/train_lra.py \\
        recipes/papers/configs/lra/listops.yaml data.dir=runs/listops_short data.max_length=250

The files have the official format (basic_{train,val,test}.tsv), and are the same for the same arguments. Without
options they are the published task: 96,000 training expressions of more than 500 and fewer than 2,000 tokens.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from data.listops import write_listops

from papers.lib.measured_page import too_small
from snnk_cli.files import check_writable, guarded, write_folder
from snnk_cli.lock import alone
from snnk_peft.errors import ConfigError


def main(argv: list[str] | None = None) -> int:
    """Write the files; return 0 if done, 2 for wrong input."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="a new folder")
    parser.add_argument("--train", type=int, default=96000, help="training expressions (96000)")
    parser.add_argument("--validation", type=int, default=2000, help="validation expressions (2000)")
    parser.add_argument("--test", type=int, default=2000, help="test expressions (2000)")
    parser.add_argument("--min-length", type=int, default=501, help="fewest tokens (501)")
    parser.add_argument("--max-length", type=int, default=1999, help="most tokens (1999)")
    parser.add_argument("--max-depth", type=int, default=10, help="nodes from the root to a digit (10)")
    parser.add_argument("--max-args", type=int, default=10, help="most arguments of an operator (10)")
    parser.add_argument("--seed", type=int, default=0, help="of the generator (0)")
    given = parser.parse_args(argv)

    def work() -> None:
        check_writable(given.output)
        sizes = {"train": given.train, "validation": given.validation, "test": given.test}
        if faults := too_small(given, **dict.fromkeys(sizes, 1)):
            raise ConfigError(faults)
        bounds = {name: getattr(given, name) for name in ("min_length", "max_length", "max_depth", "max_args")}
        with alone(given.output):
            if given.output.exists():
                raise ConfigError(f"{given.output} exists; choose another --output or delete it")
            write_folder(given.output, lambda folder: write_listops(folder, sizes, given.seed, **bounds))
        print(f"wrote {', '.join(f'{size} {name}' for name, size in sizes.items())} expressions to {given.output}")

    return guarded(work)


if __name__ == "__main__":
    sys.exit(main())
