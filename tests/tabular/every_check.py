"""All of scikit-learn's checks of one estimator, as a program: one of them needs SciPy imported with array support.

``python -m tests.tabular.every_check BayesianRegressor map`` prints what became of each check as JSON.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def outcomes_of(cls_name: str, method: str) -> dict[str, str]:
    """What became of each check, in a process of its own."""
    path = os.pathsep.join([str(ROOT), *(each for each in sys.path if each)])
    done = subprocess.run(
        [sys.executable, "-m", "tests.tabular.every_check", cls_name, method],
        capture_output=True, text=True, check=False, cwd=ROOT,
        env={**os.environ, "SCIPY_ARRAY_API": "1", "PYTHONPATH": path},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def main(cls_name: str, method: str) -> None:
    """Run the checks and print what became of them."""
    from sklearn.utils.estimator_checks import check_estimator

    import knowable as kn
    from tests.tabular.cases import QUICK, small_network

    warnings.simplefilter("ignore", kn.KnowableWarning)  # of chains that are too short, on purpose
    cls = {"BayesianRegressor": kn.BayesianRegressor, "BayesianClassifier": kn.BayesianClassifier}[cls_name]
    own = method == "own network"  # the one that an estimator makes for itself
    estimator = cls(QUICK["map"]) if own else cls(QUICK[method], network=small_network, samples=16)
    found: dict[str, str] = {}
    for each in check_estimator(estimator, on_fail=None, on_skip=None):
        if found.get(each["check_name"], "passed") == "passed":
            found[each["check_name"]] = each["status"] if each["status"] == "passed" else f"{each['exception']!r}"
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
