"""Imports of the package point downwards only, and importing it is cheap."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = "snnk_peft"

# From the bottom up; a unit imports from units below its own line. Some units are files, some folders.
LAYERS: list[set[str]] = [
    {"errors", "options", "version"},
    {"registry", "json_files", "repeats", "saved_folder", "turns", "yaml_files"},
    {"arguments", "digests"},
    {"config_size", "stamps"},
    {"model_card"},  # text from plain data
    {"functional"},
    {"low_rank"},
    {"projections"},
    {"components"},
    {"feature_map"},
    {"solvers"},  # tensors in, tensors out
    {"layers"},
    {"heads"},
    {"families"},
    {"parts"},
    {"config_parts"},
    {"attention", "config"},
    {"tuner"},
    {"calibrating"},
    {"bundling"},
    {"exporting"},
    {"family_check"},
    {"cost"},
    {"planning"},
    {"tasks"},
    {"converting"},
    {"__init__"},
]
LEVEL = {unit: level for level, units in enumerate(LAYERS) for unit in units}
# Folders whose members, files or folders, stand side by side: a member knows its folder's base and registry, never a
# sibling; the files of one member know each other.
FLAT = {"projections", "components", "parts"}


def unit_of(dotted: str) -> str:
    """ "snnk_peft.layers.slots" -> "layers"."""
    parts = dotted.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def imports(tree: ast.AST) -> list[tuple[int, str, str]]:
    """(line, module, name) of every import of the package's own modules, at any depth."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative import; the Hub code file needs absolute ones"
            if node.module and node.module.split(".")[0] == PACKAGE:
                found += [(node.lineno, node.module, alias.name) for alias in node.names]
        elif isinstance(node, ast.Import):
            found += [(node.lineno, a.name, "") for a in node.names if a.name.split(".")[0] == PACKAGE]
    return found


def faults(dotted: str, source: str) -> list[str]:
    """What is wrong with the imports of one module."""
    found = []
    unit = unit_of(dotted)
    for line, module, name in imports(ast.parse(source)):
        target = unit_of(module)
        if target == "__init__" and name:  # `from snnk_peft import layers` names the unit itself
            target = name if name in LEVEL else "__init__"
        if target not in LEVEL:
            found.append(f"{dotted}:{line} imports {module}, whose place in the order is not stated in this test")
        elif target == unit:
            member, sibling = (d.split(".")[2] if d.count(".") >= 2 else "" for d in (dotted, module))
            common = sibling in ("", member) or sibling.startswith("base")  # what members may share
            if unit in FLAT and not common and member != "" and not member.startswith("base"):
                found.append(f"{dotted}:{line} imports its sibling {module}")
        elif LEVEL[target] >= LEVEL[unit]:
            found.append(f"{dotted}:{line} ({unit}) imports {module} ({target}), which is not below it")
    return found


def modules(root: Path) -> dict[str, str]:
    """Dotted name -> source of every module of the package."""
    result = {}
    for path in sorted((root / PACKAGE).rglob("*.py")):
        parts = list(path.relative_to(root).with_suffix("").parts)
        if parts[-1] == "__init__":
            parts.pop()
        result[".".join(parts)] = path.read_text(encoding="utf-8")
    return result


def test_imports_point_downwards(root):
    found = modules(root)
    assert len(found) > 40
    unplaced = {unit_of(name) for name in found} - set(LEVEL)
    assert not unplaced, f"state the place of {sorted(unplaced)} in LAYERS"
    wrong = [fault for name, source in found.items() for fault in faults(name, source)]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("package", "names", "rooms"),
    [
        ("peft", None, {"config", "tuner", "cost"}),  # cost: of LoRA, to compare with
        ("transformers", {"AttentionInterface", "AttentionMaskInterface"}, {"parts.attention"}),
    ],
)
def test_few_rooms_know_the_doors_of_other_libraries(root, package, names, rooms):
    found = set()
    for dotted, source in modules(root).items():
        room = ".".join(dotted.split(".")[1:3]) if unit_of(dotted) == "parts" else unit_of(dotted)
        for node in ast.walk(ast.parse(source)):
            inside = isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == package
            whole = isinstance(node, ast.Import) and any(a.name.split(".")[0] == package for a in node.names)
            if (inside and (names is None or any(a.name in names for a in node.names))) or (whole and names is None):
                found.add(room)
    assert found == rooms


def circles(graph: dict[str, set[str]]) -> set[str]:
    """The nodes of a graph that stand on a circle, or between two."""
    left = dict(graph)
    while ends := [name for name, targets in left.items() if not targets & left.keys()]:
        for name in ends:
            del left[name]
    while starts := set(left) - {target for targets in left.values() for target in targets}:
        for name in starts:
            del left[name]
    return set(left)


def test_no_file_imports_itself_by_way_of_others(root):
    """Also inside functions and for types only."""
    found = modules(root)
    graph = {}
    for name, source in found.items():
        places = [(module, f"{module}.{member}") for _, module, member in imports(ast.parse(source))]
        graph[name] = {member if member in found else module for module, member in places} - {name}
    assert len(graph) > 200
    assert not circles(graph)
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b", "d"}, "d": set(), "e": {"c"}}) == {"b", "c"}


def named(source: str, folders: set[str]) -> set[str]:
    """What a file imports of some folders of the recipes, also inside functions and for types only."""
    nodes = list(ast.walk(ast.parse(source)))
    found = {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
    found |= {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    return {name for name in found if name.split(".")[0] in folders}


@pytest.mark.parametrize(
    ("folder", "forbidden", "least"),
    [
        ("snnk_cli", {"papers", "lib", "data"}, 30),
        ("recipes/lib", {"papers"}, 8),
        ("recipes/data", {"papers", "lib"}, 20),
        (PACKAGE, {"papers", "lib", "data", "snnk_cli"}, 200),
    ],
)
def test_the_shared_code_knows_no_paper_and_the_data_sets_no_recipe(root, folder, forbidden, least):
    files = sorted((root / folder).rglob("*.py"))
    assert len(files) > least
    assert not [f"{file}: {names}" for file in files if (names := named(file.read_text(encoding="utf-8"), forbidden))]
    for text in ("from papers.lib.sweep import Run", "def f():\n    from papers import claims", "import papers.lib"):
        assert named(text, forbidden)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("snnk_peft.layers.adapter", "from snnk_peft.tuner.model import SNNKModel"),
        ("snnk_peft.projections.orf", "from snnk_peft.projections.gaussian import Gaussian"),
        ("snnk_peft.layers.slots", "def f():\n    from snnk_peft.config import SNNKConfig"),
        ("snnk_peft.functional.activation_kernels", "import snnk_peft.projections.orf"),
        ("snnk_peft.tasks.table", "from snnk_peft import get_snnk_model"),
        ("snnk_peft.layers.adapter", "from snnk_peft.brandnew import x"),
    ],
)
def test_the_check_finds_what_it_should(module, source):
    assert len(faults(module, source)) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("snnk_peft.projections.orf", "from snnk_peft.projections.base import Projection"),
        ("snnk_peft.projections.orf", "from snnk_peft.projections import PROJECTIONS"),
        ("snnk_peft.projections.sorf", "from snnk_peft.projections.base_structured import Structured"),
        ("snnk_peft.layers.slots", "from snnk_peft.layers.adapter import SNNKAdapter"),
        ("snnk_peft.tuner.model", "import torch\nfrom snnk_peft.parts import PARTS"),
    ],
)
def test_the_check_lets_pass_what_it_should(module, source):
    assert faults(module, source) == []


def test_the_check_refuses_relative_imports():
    with pytest.raises(AssertionError, match="relative import"):
        faults("snnk_peft.layers.adapter", "from .slots import Slot")


# --- cost -----------------------------------------------------------------------------------------------------------


FORKS = """
import json, os, sys, time

def new_modules(code):
    \"\"\"Seconds and new modules of `code` in a fork of this process.\"\"\"
    reading, writing = os.pipe()
    if os.fork() == 0:
        before, start = set(sys.modules), time.process_time()
        exec(code, {})
        found = [time.process_time() - start, *sorted(set(sys.modules) - before)]
        with os.fdopen(writing, "w") as file:
            json.dump(found, file)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as file:
        found = json.load(file)
    os.wait()
    return found

start = time.process_time()
import peft
peft_seconds = time.process_time() - start
# Users import compiled files, whatever this machine's environment says about writing them; the first fork writes them.
sys.dont_write_bytecode, sys.pycache_prefix = False, sys.argv[1]
print(json.dumps([peft_seconds, *(new_modules(code) for code in sys.argv[2:])]))
"""
PACKAGE_ALONE = "import snnk_peft"
CONFIG_ALONE = """
import sys, types
package = types.ModuleType("snnk_peft")
package.__path__ = ["snnk_peft"]
sys.modules["snnk_peft"] = package
import snnk_peft.config
"""


@pytest.fixture(scope="module")
def fresh_imports(root, tmp_path_factory) -> list[tuple[float, list[str]]]:
    """Times and new modules over `import peft` in a fresh process: three times of the package, then of config.py.

    Times are shares of what importing peft takes, so that they mean the same on every machine.
    """
    programs = [str(tmp_path_factory.mktemp("compiled")), *[PACKAGE_ALONE] * 3, CONFIG_ALONE]
    done = subprocess.run(
        [sys.executable, "-c", FORKS, *programs], cwd=root, capture_output=True, text=True, check=True
    )
    peft_seconds, *found = json.loads(done.stdout)
    return [(seconds / peft_seconds, added) for seconds, *added in found]


def test_importing_the_package_costs_little_over_peft(fresh_imports):
    # Processor time, and the least of three: what else runs on a machine only ever adds to it.
    share = min(share for share, _ in fresh_imports[:3])
    assert share <= 0.10, f"import snnk_peft takes {share:.1%} of importing peft, and it should be 6 %"


def test_importing_the_package_loads_no_heavy_module_and_no_member(fresh_imports):
    added = fresh_imports[0][1]
    assert "snnk_peft.tuner.model" in added
    heavy = ("datasets", "evaluate", "sklearn", "scipy", "matplotlib", "accelerate", "rich", "pandas", "torchvision")
    assert not [m for m in added if m.split(".")[0] in heavy]
    assert "snnk_peft.projections.orf" not in added  # members are discovered on first use


def test_importing_config_loads_nothing_beyond_peft_and_no_member(fresh_imports):
    """Parts, components and projections are found when the first config is made."""
    added = fresh_imports[3][1]
    assert {"snnk_peft.config", "snnk_peft.parts", "snnk_peft.errors", "snnk_peft.registry"} <= set(added)
    assert not [m for m in added if m.split(".")[0] in ("torch", "transformers", "accelerate")]
    assert not {"snnk_peft.parts.replaced.ffn", "snnk_peft.projections.orf", "snnk_peft.components.relu"} & set(added)
