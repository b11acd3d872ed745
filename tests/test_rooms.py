"""Tests of the plan of the house: who may import whom, and what every module owes its reader."""

from __future__ import annotations

import ast
import importlib
import json
import subprocess
import sys
from functools import cache, cached_property
from pathlib import Path
from types import FunctionType

import pytest

import knowable

SOURCE = Path(knowable.__file__).parent
MODULES = {
    ".".join(("knowable", *file.relative_to(SOURCE).with_suffix("").parts)).removesuffix(".__init__"): file
    for file in sorted(SOURCE.rglob("*.py"))
}

# Rooms of core from left to right: each may import those before it.
CORE = [
    "support",
    "network",
    "prediction",
    "model",
    "storage",
    "compiling",
    "posterior",
    "method",
    "training",
    "chains",
]
# Families of inference and the families to their left that they may import; all may import inference.start.
FAMILIES = {
    "point": set(),
    "exact": {"point"},
    "ensembles": {"point"},
    "laplace": {"point"},
    "variational": {"point"},
    "functional": {"point", "exact", "variational"},
    "sampling": {"point", "ensembles", "laplace", "variational"},
    "dropout": {"point", "ensembles", "laplace", "variational"},
}
# What each of the other rooms may import besides itself; everyone may import errors and the version.
ROOT = "the front door"  # knowable itself and the modules beside __init__: registry, loading
ROOMS = {
    "core": set(),
    "engines": {"core"},
    "priors": {"core"},
    "likelihoods": {"core", "priors"},  # the Student-t likelihood shares its density with the prior of that name
    "inference": {"core", "likelihoods", "priors"},
    "evaluation": {"core"},
    "report": {"core", "evaluation", "likelihoods"},  # a prediction of labels has tables of its own
    "datasets": {"core"},
    "comparison": {"core", "evaluation", "report", "datasets", ROOT},  # methods by their names in the registry
    "decisions": {"core", "evaluation", "inference", "likelihoods", "priors"},
    "tabular": {"core", "likelihoods", "priors", "inference", "evaluation", "report", ROOT},
    "testing": {"core", "inference", "evaluation", "datasets", ROOT},
    "interfaces": None,  # anything
    ROOT: None,
}
ENTRY = "knowable.__main__"  # python -m knowable: the one module that may import interfaces


@cache
def imports(module: str) -> set[str]:
    """Every module of knowable that ``module`` imports, also inside functions, but not for type checkers alone."""
    found: set[str] = set()
    pending: list[ast.AST] = [ast.parse(MODULES[module].read_text())]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            pending += node.orelse
            continue
        pending += ast.iter_child_nodes(node)
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} has a relative import"
            found |= {
                f"{node.module}.{a.name}" if f"{node.module}.{a.name}" in MODULES else node.module for a in node.names
            }  # type: ignore[misc]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module") and node.args:
            found |= {node.args[0].value} if isinstance(node.args[0], ast.Constant) else set()
    return {name for name in found if name in MODULES}


def room(module: str) -> str:
    """``core`` for ``knowable.core.model.model``, the front door for ``knowable.registry``."""
    parts = module.split(".")[1:]
    return parts[0] if parts and parts[0] in ROOMS else ROOT


def allowed(module: str, imported: str) -> bool:
    """Whether ``module`` may import ``imported``."""
    if imported in ("knowable.errors", "knowable._version"):
        return True
    here, there = room(module), room(imported)
    own, other = module.split("."), imported.split(".")
    if there == "interfaces":
        return here == "interfaces" or module == ENTRY
    if here != there:
        rule = ROOMS[here]
        return rule is None or there in rule
    if here == "core" and len(own) > 2 and len(other) > 2:
        return CORE.index(other[2]) <= CORE.index(own[2])
    if here == "inference" and len(own) > 2 and len(other) > 2 and other[2] in FAMILIES:
        return own[2] == other[2] or other[2] in FAMILIES.get(own[2], set())
    return True


def test_every_module_imports_only_what_its_room_may():
    folders = {folder.name for folder in SOURCE.iterdir() if folder.is_dir() and folder.name != "__pycache__"}
    assert folders <= ROOMS.keys()
    wrong = [f"{module} imports {each}" for module in MODULES for each in imports(module) if not allowed(module, each)]
    assert wrong == [], "\n".join(wrong)


def test_no_import_runs_in_a_circle():
    """Modules that import none of those left, or that none of those left imports, are taken away until none is."""
    left = {module: imports(module) - {module} for module in MODULES if MODULES[module].name != "__init__.py"}
    while left:
        used = set().union(*left.values())
        kept = {module: names & left.keys() for module, names in left.items() if module in used and names & left.keys()}
        if len(kept) == len(left):
            break
        left = kept
    assert sorted(left) == []


def test_every_module_has_a_docstring_and_a_readable_length_and_is_no_attic():
    for module, file in MODULES.items():
        text = file.read_text()
        assert (ast.get_docstring(ast.parse(text)) or "").strip(), f"{module} has no docstring"
        assert len(text.splitlines()) <= 500, f"{module} has more than 500 lines"
        assert "util" not in module and module.split(".")[-1] not in ("helpers", "misc"), module


# --- the front door -------------------------------------------------------------------------------------------------


def test_importing_the_library_is_clean_and_light():
    """In a process of its own, with every warning an error: nothing heavy, neither interfaces nor data."""
    code = "import json, sys, knowable; print(json.dumps(sorted(sys.modules)))"
    run = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0 and run.stderr == "", run.stderr
    loaded = json.loads(run.stdout)
    heavy = ("sklearn", "matplotlib", "pandas", "scipy.stats", "rich", "typer", "jinja2", "botorch", "gpytorch")
    rooms = ("knowable.interfaces", "knowable.datasets", "knowable.testing")
    assert [name for name in loaded if name in heavy or name.startswith(rooms)] == []


def test_every_public_name_is_there_once_with_a_docstring_and_others_are_refused():
    assert len(set(knowable.__all__)) == len(knowable.__all__)
    for name in knowable.__all__:
        value = getattr(knowable, name)
        assert value is not None and (not callable(value) or value.__doc__), name
    with pytest.raises(AttributeError, match="module 'knowable' has no attribute 'MCMC'"):
        _ = knowable.MCMC


def test_every_public_method_has_a_docstring_of_its_own_or_of_the_class_it_overrides():
    """``help()`` shows the inherited one."""
    bare = []
    for name in [each for each in MODULES if not each.endswith("__main__")]:
        here = [each for each in vars(importlib.import_module(name)).values() if isinstance(each, type)]
        for cls in [each for each in here if each.__module__ == name and not each.__name__.startswith("_")]:
            for key, value in vars(cls).items():
                written = isinstance(value, FunctionType | property | classmethod | staticmethod | cached_property)
                documented = any(getattr(vars(base).get(key), "__doc__", None) for base in cls.__mro__)
                if written and not key.startswith("_") and not documented:
                    bare.append(f"{name}.{cls.__name__}.{key}")
    assert bare == []
