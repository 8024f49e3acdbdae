"""The command `snnk`, and what it shares with the programs of a clone (recipes/).

Importing snnk_peft imports torch, which takes seconds. The command line imports only the modules it needs, under their
own names, so that `--help` answers at once; a later import of snnk_peft gets the same ones.
"""

import importlib.util
import sys
from pathlib import Path


def _import_alone(name: str) -> None:
    package = importlib.util.find_spec("snnk_peft")
    assert package is not None
    assert package.origin is not None
    spec = importlib.util.spec_from_file_location(f"snnk_peft.{name}", Path(package.origin).parent / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[spec.name])


for _name in ("errors", "options", "registry", "saved_folder", "yaml_files"):  # each imports only those before it
    if f"snnk_peft.{_name}" not in sys.modules:
        _import_alone(_name)
