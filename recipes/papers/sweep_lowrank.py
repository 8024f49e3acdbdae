"""Train low-rank networks by every initialisation, with and without Frobenius decay, one run after another.

    python recipes/papers/sweep_lowrank.py data.dir=path/to/cifar10 --seeds 0 1 2
    python recipes/papers/sweep_lowrank.py data.dir=path/to/cifar10 train.epochs=4 train.batch_size=50 \\
        data.max_train_samples=2000 data.max_eval_samples=2000 --seeds 0 1 2                (an hour or less on a core)

Rank scales .05 and .1; `baseline` draws the factors, the other starts come from a dense network of random weights. Runs
of one seed start from the same dense network and see the same pictures in the same order. Without Frobenius decay the
factors have weight decay: 1e-4 in SGD with momentum .9 shrinks a singular value of 1 as fast as a decoupled 1e-3, which
is the strength of the Frobenius decay here.

Each run goes to OUT/<task>/<method>/seed<k>. Finished runs (metrics.json) are skipped, interrupted ones resumed: start
it again to continue. table_lowrank.py makes a page of them.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from papers.lib import sweep

INITS = ("baseline", "spectral", "function", "ws_nkp")
SCALES = (0.05, 0.1)
DECAYS = {"": 0.0, "_frobenius": 1e-3}
METHODS = {
    f"{init}_{scale:g}{name}": [
        f"method.low_rank.init={init}",
        f"method.low_rank.rank_scale={scale:g}",
        f"method.low_rank.frobenius_decay={decay:g}",
    ]
    for scale in SCALES
    for name, decay in DECAYS.items()
    for init in INITS
}
METHODS["dense"] = ["method.low_rank=null"]


def main(argv: list[str] | None = None) -> int:
    """Run what is missing; 0 all finished, 1 something failed, 130 or 143 stopped, 3 both."""
    return sweep.main(__doc__, "train_lowrank.py", "{task}_resnet20.yaml", "lowrank", ("cifar10",), METHODS, argv)


if __name__ == "__main__":
    sys.exit(main())
