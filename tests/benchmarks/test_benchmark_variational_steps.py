from __future__ import annotations

import pytest
import torch
from benchmarks.networks import SMALL_MLP
from benchmarks.run import run_benchmark
from benchmarks.variational_steps import method_step, run_of

import knowable as kn

# eight rows cannot have all ten classes
pytestmark = pytest.mark.filterwarnings("ignore:y has no row of class:knowable.errors.ModelWarning")


@pytest.mark.parametrize("name", ["MeanFieldVI", "NaturalVI", "MomentVI"])
def test_step_of_a_method_is_a_step_of_its_run(name):
    x, y = SMALL_MLP.data(8)
    model = kn.Model(SMALL_MLP.make(), kn.Categorical())
    run = run_of(getattr(kn, name)(epochs=10), model, (x, y))
    before = [value.detach().clone() for value in run.params]
    assert run._one_step([((x, y), len(x))])
    assert run.step == 1
    assert not any(torch.equal(old, new) for old, new in zip(before, run.params, strict=True))
    assert method_step(SMALL_MLP, name)() is None


@pytest.mark.slow
def test_quick_run_has_every_row():
    result = run_benchmark("benchmarks.variational_steps", quick=True, only="natural_*")
    for case in result["cases"]:
        for name, row in case["contenders"].items():
            installed = row["error"] is None or row["error"].startswith("ModuleNotFoundError")
            assert installed, f"{case['name']}, {name}: {row['error']}"
            assert name == "ivon-opt" or row["error"] is None
