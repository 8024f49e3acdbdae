"""The self-contained code file of a saved bundle, assembled from this package's own sources.

No formula is duplicated: the file is the concatenation of `bundling/modules.py`, of the projections and components that
the bundle uses, and of everything these import from this package, followed by the config and model class. It needs
torch and transformers only.
"""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Iterable, Mapping
from typing import Any

import transformers

from snnk_peft.components import COMPONENTS
from snnk_peft.errors import ConfigError
from snnk_peft.projections import PROJECTIONS
from snnk_peft.version import __version__

FILE_NAME = "modeling_snnk_bundle.py"
PACKAGE = "snnk_peft"
# Kinds of specs that need a module of their own.
SPECIAL = {
    **dict.fromkeys(("attention", "joint_attention"), "snnk_peft.bundling.attention"),
    "pooled_head": "snnk_peft.bundling.pooled_head",
}

Import = tuple[str, str | None]

HEADER = '''"""Code of a bundled model: a transformers model with folded SNNK layers, made by snnk_peft {version}.

This file is generated, one part per source module of snnk_peft. It is what `trust_remote_code=True` runs; with
`import snnk_peft` the model loads without it. It needs torch and transformers (made with {transformers}).

Licence: Apache-2.0 (https://www.apache.org/licenses/LICENSE-2.0), like snnk_peft.
"""'''

CLASSES = """
class {config}(BundledConfig, {base_config}):
    model_type = "{model_type}"


class {model}({mixin}, {base}):
    config_class = {config}
"""
FORWARD = "    forward = forward_like({base})\n"


def code_file(base: type[Any], config: type[Any], model_name: str, modules: Mapping[str, Any]) -> str:
    """Return the text of the code file.

    Raises:
        ConfigError: two source modules define the same name.
    """
    stages = list(stage_specs(modules.values()))
    used = [COMPONENTS[stage["component"]] for stage in stages] + [PROJECTIONS[stage["projection"]] for stage in stages]
    kinds = {spec.get("kind") for spec in modules.values()}
    special = sorted({module for kind, module in SPECIAL.items() if kind in kinds})
    names = ["snnk_peft.bundling.modules", *special, *sorted({cls.__module__ for cls in used})]
    pooled = "pooled_head" in kinds
    base_config = base.config_class
    imports, body = assemble(names)
    home = "transformers" if hasattr(transformers, base.__name__) else base.__module__
    imports |= {("transformers", base_config.__name__), (home, base.__name__)}
    lines = [
        HEADER.format(version=__version__, transformers=transformers.__version__),
        "from __future__ import annotations\n",
        _import_lines(imports),
        body,
        "# Everything the registries need is in this file.\nCOMPONENTS._discovered = PROJECTIONS._discovered = True\n",
        CLASSES.format(
            config=config.__name__,
            base_config=base_config.__name__,
            model_type=config.model_type,
            model=model_name,
            mixin="PooledHeadModel" if pooled else "BundledModel",
            base=base.__name__,
        )
        + (FORWARD.format(base=base.__name__) if pooled else ""),
    ]
    return "\n".join(lines)


def stage_specs(specs: Iterable[Any]) -> Iterable[dict[str, Any]]:
    """Yield every feature stage inside a plan's specs."""
    for spec in specs:
        if isinstance(spec, Mapping):
            if spec.get("stage") is not None:
                yield spec["stage"]
            for term in spec.get("terms", []):
                yield from [*term["stages"], *(term["key_stages"] or [])]
            yield from stage_specs([spec.get("module"), *spec.get("modules", [])])


def _import_lines(imports: set[Import]) -> str:
    plain = sorted(module for module, name in imports if name is None)
    members: dict[str, list[str]] = {}
    for module, name in sorted((module, name) for module, name in imports if name is not None):
        members.setdefault(module, []).append(name)
    lines = [f"import {module}" for module in plain]
    return (
        "\n".join([*lines, *(f"from {module} import {', '.join(names)}" for module, names in members.items())]) + "\n\n"
    )


def assemble(names: Iterable[str]) -> tuple[set[Import], str]:
    """Concatenate source modules and what they import from this package, dependencies first.

    Returns:
        What is imported from other packages, as (module, name) or (module, None), and the text.

    Raises:
        ConfigError: two modules define the same name differently.
    """
    order: list[str] = []
    for name in names:
        _visit(name, order)
    imports: set[Import] = set()
    defined: dict[str, str] = {}
    parts: list[str] = []
    for name in order:
        imported, text, own = _strip(name)
        imports |= imported
        for symbol in own:
            if symbol in defined:
                raise ConfigError(
                    f"{name} and {defined[symbol]} both define {symbol!r}; the code file of a bundle joins them, "
                    "rename one"
                )
            defined[symbol] = name
        if text:
            parts.append(f"# {'-' * 10} {name}\n\n\n{text}\n\n")
    return imports, "\n".join(parts)


def _tree(name: str) -> tuple[str, ast.Module]:
    source = inspect.getsource(importlib.import_module(name))
    return source, ast.parse(source)


def _is_own(node: ast.stmt) -> bool:
    return isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == PACKAGE


def _visit(name: str, order: list[str]) -> None:
    if name in order:
        return
    for node in _tree(name)[1].body:
        if isinstance(node, ast.ImportFrom) and _is_own(node) and node.module not in (None, name):
            _visit(str(node.module), order)
    if name not in order:
        order.append(name)


def _imported(node: ast.Import | ast.ImportFrom) -> set[Import]:
    spelled = [alias.name if alias.asname is None else f"{alias.name} as {alias.asname}" for alias in node.names]
    if isinstance(node, ast.Import):
        return {(name, None) for name in spelled}
    return set() if node.module == "__future__" else {(str(node.module), name) for name in spelled}


def _strip(name: str) -> tuple[set[Import], str, list[str]]:
    """Return the external imports of a module, its text without any import, and the names it defines."""
    source, tree = _tree(name)
    lines = source.splitlines()
    imports: set[Import] = set()
    own: list[str] = []
    drop: set[int] = set()
    for position, node in enumerate(tree.body):
        gone = False
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            gone = True
            if not _is_own(node):
                imports |= _imported(node)
        elif position == 0 and isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            gone = True
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            own.append(node.name)
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            named = [target.id for target in targets if isinstance(target, ast.Name)]
            gone = named == ["__all__"]
            own += [] if gone else named
        if gone:
            drop |= set(range(node.lineno - 1, node.end_lineno or node.lineno))
    text = "\n".join(line for number, line in enumerate(lines) if number not in drop).strip("\n")
    docstring = ast.get_docstring(tree)
    comment = "\n".join(f"# {line}".rstrip() for line in docstring.splitlines()) if docstring else ""
    return imports, f"{comment}\n\n\n{text}" if text.strip() else "", own
