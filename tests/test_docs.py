"""The words are held to the code: every Python block runs, every name is in the reference, every link leads somewhere.

A page's blocks run in order in one namespace, in an empty folder, with warnings as errors. A page may also carry checks
that readers do not see, in comments that begin with ``check``, so that what its prose claims stays true.
"""

from __future__ import annotations

import importlib.util
import re
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch

import knowable as kn
from knowable.core.training import schedule
from knowable.registry import METHODS

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
REFERENCE = sorted((DOCS / "reference").glob("*.md"))
README = ROOT / "README.md"
PAGES = [
    README,
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    *sorted(DOCS.rglob("*.md")),
    *sorted((ROOT / "changes").glob("*.md")),
]
BLOCK = re.compile(r"^( *)```python\n(.*?)^\1```$|^<!-- check\n(.*?)^-->$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)|!\[[^\]]*\]\(([^)\s]+)\)")
DIRECTIVE = re.compile(r"^::: ([\w.]+)((?:\n    .*)*)", re.MULTILINE)


def blocks(text: str) -> list[str]:
    """The Python of a page, each block preceded by empty lines so that tracebacks name the page's own lines."""
    found = []
    for match in BLOCK.finditer(text):
        shown = match[2] is not None
        code = textwrap.dedent(match[2]) if shown else match[3]
        first = text.count("\n", 0, match.start(2 if shown else 3))
        found.append("\n" * first + code)
    return found


def run(page: Path) -> dict[str, Any]:
    """Execute a page and return its namespace."""
    namespace: dict[str, Any] = {"__name__": "__main__"}  # as at a prompt
    for code in blocks(page.read_text(encoding="utf-8")):
        exec(compile(code, str(page), "exec", dont_inherit=True), namespace)
    return namespace


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.fixture
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    import matplotlib

    matplotlib.use("Agg")
    monkeypatch.chdir(tmp_path)
    return tmp_path


NEEDS = {"docs/how_to/adapters.md": "peft", "docs/how_to/transformer.md": "transformers"}  # of the group "adapters"


LONG = {
    "explanation/underfitting", "how_to/compare_methods", "how_to/gaussian_processes", "how_to/infinite_width",
    "how_to/prior_over_functions", "how_to/sample_a_network", "how_to/segmentation", "how_to/select_models",
    "how_to/variational_families",
}  # fmt: skip
SHORT_TUTORIALS = {"first_posterior", "classification", "one_weight", "polynomials_and_evidence"}
SHORT_TUTORIALS |= {
    "from_a_network_to_a_gaussian_process"
}  # the others run in full only in make test-all and make docs
TUTORIALS = [page for page in sorted((DOCS / "tutorials").glob("*.md")) if page.stem not in {*SHORT_TUTORIALS, "index"}]
LONG |= {"reference/examples", *(f"tutorials/{page.stem}" for page in TUTORIALS)}
HEAVY = {"adversarial_digits", "four_bayesian_networks", "laplace_approximation", "stochastic_gradient_mcmc"}
FEWEST = {"chains": 2, "draws": 8, "repeats": 3, "restarts": 1, "samples": 8, "steps": 3, "warmup": 8, "epochs": 8}


def _param(page: Path):
    long = name_of(page).removeprefix("docs/").removesuffix(".md") in LONG
    return pytest.param(page, id=name_of(page), marks=[pytest.mark.slow] * long)


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # of peft, in transformers
@pytest.mark.parametrize("page", [_param(page) for page in PAGES[1:] if blocks(page.read_text(encoding="utf-8"))])
def test_every_python_block_runs(page: Path, empty_folder: Path):
    if name_of(page) in NEEDS:
        pytest.importorskip(NEEDS[name_of(page)])
    run(page)


@pytest.mark.filterwarnings("ignore::knowable.errors.KnowableWarning")  # nothing converges in so few steps
@pytest.mark.parametrize(
    "page", [pytest.param(p, id=p.stem, marks=[pytest.mark.slow] * (p.stem in HEAVY)) for p in TUTORIALS]
)
def test_every_tutorial_runs_with_few_steps(page: Path, empty_folder: Path):
    text = re.sub(r"^<!-- check\n.*?^-->$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for code in blocks(text):
        exec(compile(small(code), str(page), "exec", dont_inherit=True), namespace)


def small(code: str) -> str:
    """The same code with few steps, draws and chains."""
    settings = re.compile(rf"\b({'|'.join(FEWEST)})(=|\": )(\d[\d_]*)")
    return settings.sub(lambda found: f"{found[1]}{found[2]}{min(int(found[3]), FEWEST[found[1]])}", code)


def test_fewer_steps_change_only_numbers_that_are_larger():
    assert small('kn.MAP(epochs=1_000, width=40); {"epochs": 25}; f(draws=4)') == (
        'kn.MAP(epochs=8, width=40); {"epochs": 8}; f(draws=4)'
    )


def test_code_of_other_libraries_is_python():
    pages = [page for page in PAGES if "\n```py\n" in page.read_text(encoding="utf-8")]
    assert len(pages) >= 4  # the pages for those who come from elsewhere
    for page in pages:
        for code in re.findall(r"^```py\n(.*?)^```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL):
            compile(code, str(page), "exec")


def test_tutorials_become_notebooks(tmp_path: Path):
    spec = importlib.util.spec_from_file_location("notebooks", DOCS / "hooks" / "notebooks.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    page = DOCS / "tutorials" / "one_weight.md"
    found = module.notebook(page.read_text(encoding="utf-8"))
    code = ["".join(cell["source"]) + "\n" for cell in found["cells"] if cell["cell_type"] == "code"]
    assert code == [textwrap.dedent(m[2]) for m in BLOCK.finditer(page.read_text(encoding="utf-8")) if m[2] is not None]
    assert not any("<!-- check" in "".join(cell["source"]) for cell in found["cells"])


def test_every_public_name_has_an_example_that_runs():
    page = (DOCS / "reference" / "examples.md").read_text(encoding="utf-8")
    code = "\n".join(blocks(page))
    shown = {name for name in kn.__all__ if re.search(rf"\bkn\.{name}\b", code)}
    missing = [name for name in kn.__all__ if name not in shown and ">>>" not in (getattr(kn, name).__doc__ or "")]
    assert not missing, f"give each an example in its docstring or in docs/reference/examples.md: {missing}"


def test_the_readme_runs_and_its_example_doubts_the_gap_more_than_the_data(empty_folder: Path):
    # over six initialisations the ratio of the two epistemic variances was 8 to 14; 2 leaves room for any platform
    prediction = run(README)["prediction"]
    in_the_data, in_the_gap = prediction.epistemic.flatten().tolist()
    assert in_the_gap > 2 * in_the_data
    assert torch.allclose(prediction.variance, prediction.aleatoric + prediction.epistemic)


def test_blocks_keep_their_line_numbers():
    text = "# Title\n\n```python\nx = 1\n```\n\n<!-- check\nassert x == 2\n-->\n\n```text\nnot run\n```\n"
    first, second = blocks(text)
    assert first == "\n\n\nx = 1\n"
    assert second == "\n" * 7 + "assert x == 2\n"


def test_every_public_name_is_in_the_reference():
    index = (DOCS / "reference" / "index.md").read_text(encoding="utf-8")
    missing = [name for name in kn.__all__ if f"`{name}`" not in index]
    assert not missing, f"add to docs/reference/index.md: {missing}"


def test_every_public_module_is_in_the_reference():
    given = [match.groups() for page in REFERENCE for match in DIRECTIVE.finditer(page.read_text(encoding="utf-8"))]
    single = {module for module, _ in given}
    whole = tuple(f"{module}." for module, options in given if "show_submodules: true" in options)
    missing = [module for module in public_modules() if module not in single and not module.startswith(whole)]
    assert not missing, f"add '::: module' to a page in docs/reference: {missing}"


def public_modules() -> list[str]:
    """Dotted names of the package's files, packages themselves and private parts left out."""
    source = ROOT / "src"
    paths = [path.relative_to(source).with_suffix("").parts for path in (source / "knowable").rglob("*.py")]
    return sorted(".".join(parts) for parts in paths if not any(part.startswith("_") for part in parts))


@pytest.mark.parametrize("page", ["README.md", "docs/how_to/choose_a_method.md"])
def test_every_method_has_its_row(page: str):
    text = (ROOT / page).read_text(encoding="utf-8")
    missing = [entry.cls_name for entry in METHODS.values() if not re.search(rf"^\| \[?`{entry.cls_name}`", text, re.M)]
    assert not missing, f"add a row to the table in {page}: {missing}"


@pytest.mark.parametrize("module", [kn.likelihoods, kn.priors], ids=["likelihoods", "priors"])
def test_the_readme_names_every_likelihood_and_prior(module: Any):
    text = README.read_text(encoding="utf-8")
    assert [name for name in module.__all__ if f"`{name}" not in text] == []


def test_the_page_on_stopping_states_the_numbers_of_the_code():
    text = (DOCS / "explanation" / "stopping.md").read_text(encoding="utf-8")
    numbers = [schedule.WINDOW, schedule._LONGEST, schedule._SHORTEST_FALL]
    assert [number for number in numbers if f"{number:,} steps" not in text] == []


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_link_leads_to_a_file(page: Path):
    targets = [first or second for first, second in LINK.findall(page.read_text(encoding="utf-8"))]
    local = [target.partition("#")[0] for target in targets if "://" not in target and not target.startswith("#")]
    assert [target for target in local if not (page.parent / target).exists()] == []
