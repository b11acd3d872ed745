"""Two runs, of numbers and of classes, made once for all tests of the commands."""

import shutil

import pytest

from tests.interfaces.cli.calling import call
from tests.interfaces.cli.tables import class_rows, number_rows, write_csv

FAST = ("--method", "laplace", "--budget", "quick", "--samples", "16")


@pytest.fixture(scope="session")
def made_runs(tmp_path_factory):
    """Fit both; exit code 3, a fit that did not converge, is no matter here."""
    folder = tmp_path_factory.mktemp("runs")
    numbers = write_csv(folder / "numbers.csv", number_rows())
    classes = write_csv(folder / "classes.csv", class_rows())
    first = call("fit", numbers, "--target", "response", "--out", folder / "numbers", *FAST)
    second = call("fit", classes, "--target", "side", "--out", folder / "classes", *FAST)
    assert {first.exit_code, second.exit_code} <= {0, 3}, (first.stderr, second.stderr)
    return folder, {"numbers": first, "classes": second}


@pytest.fixture
def runs(made_runs, tmp_path):
    """A copy of the folder with both files and both runs, to do with as one likes."""
    return shutil.copytree(made_runs[0], tmp_path / "work")
