"""The Python that the page gives runs, and fits what the page shows."""

import warnings

import pytest

from knowable.interfaces.lab.fitting import Fit, fit_of
from knowable.interfaces.lab.methods import OFFERS
from knowable.interfaces.lab.picture import grid_of, rounded
from knowable.interfaces.lab.script import script
from tests.interfaces.lab.cases import labels, numbers

QUICK = ["exact_linear", "infinite_width", "laplace"]


def run(text, folder, monkeypatch):
    """What a program leaves behind, run in a folder of its own."""
    pytest.importorskip("matplotlib").use("Agg")
    monkeypatch.chdir(folder)
    space = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exec(compile(text, "lab.py", "exec"), space)
    assert (folder / "lab.png").stat().st_size > 1000
    return space["posteriors"]


@pytest.mark.parametrize(
    "changes",
    [{}, {"noise": None, "by_width": True, "depth": 2, "activation": "erf", "seed": 3}],
    ids=["plain", "other"],
)
def test_the_program_fits_what_the_page_shows(changes, tmp_path, monkeypatch, capsys):
    problem = numbers(**changes)
    made = run(script(problem, QUICK), tmp_path, monkeypatch)
    for name in QUICK:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            shown = fit_of(Fit(problem, name)).predict(grid_of(problem), samples=200)
        again = made[OFFERS[name].label].predict(grid_of(problem), samples=200)
        assert rounded(again.mean.flatten()) == rounded(shown.mean.flatten())
        assert rounded(again.epistemic.flatten()) == rounded(shown.epistemic.flatten())


def test_a_program_for_classes_runs(tmp_path, monkeypatch, capsys):
    problem = labels(20, classes=3, activation="relu")
    made = run(script(problem, ["map", "laplace"]), tmp_path, monkeypatch)
    assert made["Laplace"].predict(grid_of(problem)).probs.shape[1] == 3


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in OFFERS if name not in QUICK])
def test_the_program_of_every_method_runs(name, tmp_path, monkeypatch, capsys):
    run(script(numbers(width=2), [name]), tmp_path, monkeypatch)
