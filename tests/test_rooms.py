"""Tests of the plan of the house: who may import whom, and what every module owes its reader."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

import knowable

SOURCE = Path(knowable.__file__).parent
MODULES = {
    ".".join(("knowable", *file.relative_to(SOURCE).with_suffix("").parts)).removesuffix(".__init__"): file
    for file in sorted(SOURCE.rglob("*.py"))
}
ROOT = "the front door"  # knowable itself and the modules beside __init__: registry, references, loading

# What each room may import besides itself. Everyone may import errors and the version.
MAY_IMPORT = {
    "errors": set(),
    "core": set(),
    "likelihoods": {"core", "priors"},  # the Student-t likelihood shares its density with the prior of that name
    "priors": {"core"},
    "inference": {"core", "likelihoods", "priors"},  # and each family only itself: see below
    "evaluation": {"core"},
    "comparison": {"core", "evaluation", "datasets", ROOT},  # methods by their names in the registry
    "decisions": {"core", "evaluation", "inference"},
    "datasets": {"core"},
    "tabular": {"core", "likelihoods", "priors", "inference", "evaluation", ROOT},
    "testing": {"core", "datasets", ROOT},
    "interfaces": None,  # anything
    ROOT: None,
}
EVERYONE = {"errors", "_version"}
ENTRY = "knowable.__main__"  # python -m knowable: the one way in that is not imported by anything


def _room(module: str) -> str:
    """``core`` for ``knowable.core.model.model``; families of inference are rooms of their own."""
    parts = module.split(".")[1:]
    if not parts or (len(parts) == 1 and parts[0] not in MAY_IMPORT and parts[0] not in EVERYONE):
        return ROOT
    return "/".join(parts[:2]) if parts[0] == "inference" and len(parts) > 1 else parts[0]


def _imports(source: str, module: str, *, package: bool = False) -> set[str]:
    """Every module of knowable that ``source`` imports, also inside functions, but not for type checkers alone."""
    found: set[str] = set()
    pending: list[ast.AST] = [ast.parse(source)]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            pending += node.orelse
            continue
        pending += ast.iter_child_nodes(node)
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = _absolute(node, module, package)
            found |= {f"{base}.{a.name}" if f"{base}.{a.name}" in MODULES else base for a in node.names}
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module") and node.args:
            named = node.args[0]
            found |= {named.value} if isinstance(named, ast.Constant) else set()
    return {name for name in found if name == "knowable" or name.startswith("knowable.")}


def _absolute(node: ast.ImportFrom, module: str, package: bool) -> str:
    if node.level == 0:
        return node.module or ""
    base = module.split(".")[: len(module.split(".")) - node.level + package]
    return ".".join([*base, *([node.module] if node.module else [])])


def _forbidden(module: str, imported: str) -> bool:
    room, other = _room(module), _room(imported)
    if other == "interfaces":
        return room != "interfaces" and module != ENTRY
    if other == room or other in EVERYONE:
        return False
    if room.startswith("inference/") and other == "inference":
        return False  # the folder that holds the families
    allowed = MAY_IMPORT[room.split("/")[0]]
    return allowed is not None and other.split("/")[0] not in allowed


@pytest.mark.parametrize("module", MODULES)
def test_every_module_imports_only_what_its_room_may(module):
    file = MODULES[module]
    imported = _imports(file.read_text(), module, package=file.name == "__init__.py")
    wrong = sorted(name for name in imported if _forbidden(module, name))
    assert not wrong, f"{module} ({_room(module)}) imports {', '.join(wrong)}"


def test_every_folder_is_a_room_with_a_rule():
    folders = {folder.name for folder in SOURCE.iterdir() if folder.is_dir() and folder.name != "__pycache__"}
    assert folders <= MAY_IMPORT.keys()


@pytest.mark.parametrize(
    ("module", "source", "wrong"),
    [
        ("knowable.core.a", "import knowable.likelihoods", True),
        ("knowable.core.a", "from knowable.errors import InvalidType", False),
        ("knowable.core.a", "from knowable import errors", False),
        ("knowable.core.a", "def f():\n    from knowable.priors.flat import Flat", True),
        ("knowable.core.a", "from ..likelihoods import gaussian", True),
        ("knowable.core.a", "from . import model", False),
        ("knowable.core.a", "import importlib\nimportlib.import_module('knowable.evaluation')", True),
        ("knowable.core.a", "import knowable", True),
        ("knowable.core.a", "if TYPE_CHECKING:\n    from knowable.priors import Flat", False),
        ("knowable.core.a", "if TYPE_CHECKING:\n    pass\nelse:\n    from knowable.priors import Flat", True),
        ("knowable.likelihoods.a", "from knowable.priors.student_t import student_t_log_prob", False),
        ("knowable.priors.a", "from knowable.likelihoods import Gaussian", True),
        ("knowable.inference.exact.a", "from knowable.inference.exact.linear import Design", False),
        ("knowable.inference.exact.a", "from knowable.inference.point import MAP", True),
        ("knowable.inference.exact.a", "from knowable.evaluation.scores import nll", True),
        ("knowable.inference.exact.a", "from knowable.loading import load", True),
        ("knowable.evaluation.a", "from knowable.inference.point import MAP", True),
        ("knowable.comparison.a", "from knowable.inference.point import MAP", True),
        ("knowable.comparison.a", "from knowable.registry import find_method", False),
        ("knowable.comparison.a", "from knowable.report import render", True),
        ("knowable.evaluation.a", "from knowable.comparison import compare", True),
        ("knowable.testing.a", "import knowable as kn", False),
        ("knowable.testing.a", "from knowable.inference.point import MAP", True),
        ("knowable.interfaces.a", "from knowable.inference.point import MAP", False),
        ("knowable.registry", "from knowable.interfaces.cli import main", True),
        ("knowable.__main__", "from knowable.interfaces.cli import main", False),
        ("knowable.registry", "from knowable.inference.point import MAP", False),
        ("knowable.datasets.a", "import numpy\nfrom torch import nn", False),
    ],
)
def test_the_watchman_sees_what_is_wrong_and_only_that(module, source, wrong):
    assert any(_forbidden(module, name) for name in _imports(source, module)) is wrong


# --- what every module owes its reader ------------------------------------------------------------------------------


@pytest.mark.parametrize("module", MODULES)
def test_every_module_says_what_it_is(module):
    assert (ast.get_docstring(ast.parse(MODULES[module].read_text())) or "").strip()


def test_no_module_is_an_attic():
    assert [module for module in MODULES if "util" in module or module.split(".")[-1] in ("helpers", "misc")] == []


def test_no_file_is_longer_than_five_hundred_lines():
    lengths = {module: len(file.read_text().splitlines()) for module, file in MODULES.items()}
    assert {module: length for module, length in lengths.items() if length > 500} == {}


# --- the front door -------------------------------------------------------------------------------------------------

HEAVY = ("sklearn", "matplotlib", "pandas", "scipy.stats", "rich", "typer", "jinja2")


@pytest.fixture(scope="module")
def fresh_import() -> subprocess.CompletedProcess[str]:
    """``import knowable`` in a process of its own, with every warning an error."""
    code = "import json, sys, knowable; print(json.dumps(sorted(sys.modules)))"
    return subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=120)


def test_importing_the_library_is_clean(fresh_import):
    assert fresh_import.returncode == 0, fresh_import.stderr
    assert fresh_import.stderr == ""


@pytest.mark.parametrize("name", HEAVY)
def test_importing_the_library_does_not_import_what_is_heavy(name, fresh_import):
    assert name not in json.loads(fresh_import.stdout)


def test_importing_the_library_imports_neither_interfaces_nor_data(fresh_import):
    loaded = [name for name in json.loads(fresh_import.stdout) if name.startswith("knowable.")]
    assert not [name for name in loaded if name.split(".")[1] in ("interfaces", "datasets", "testing")]


@pytest.mark.parametrize("name", knowable.__all__)
def test_every_public_name_is_there(name):
    assert getattr(knowable, name) is not None


def test_public_names_are_listed_once_and_others_are_refused():
    assert len(set(knowable.__all__)) == len(knowable.__all__)
    with pytest.raises(AttributeError, match="module 'knowable' has no attribute 'MCMC'"):
        _ = knowable.MCMC


def test_every_public_class_and_function_has_a_docstring():
    bare = [
        name for name in knowable.__all__ if callable(getattr(knowable, name)) and not getattr(knowable, name).__doc__
    ]
    assert bare == []
