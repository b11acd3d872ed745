from __future__ import annotations

import pytest
import torch
from benchmarks.networks import SMALL_MLP
from benchmarks.run import run_benchmark
from benchmarks.variational_steps import cases, method_names, method_step, run_of

import knowable as kn


def test_all_variational_methods_are_looked_up_and_mean_field_comes_first():
    names = method_names()
    assert names[0] == "MeanFieldVI"
    assert {"NaturalVI", "MomentVI"} <= set(names)
    assert all(issubclass(getattr(kn, name), kn.core.method.Method) for name in names)


def test_there_is_a_table_of_methods_and_one_of_natural_steps_for_each_network():
    expected = [f"methods_{name}" for name in ("small_mlp", "mlp", "lenet")]
    expected += [f"natural_{name}" for name in ("mlp", "lenet", "resnet")]
    assert [case.name for case in cases(quick=False)] == expected
    assert {case.reference for case in cases(quick=True)} == {"MeanFieldVI", "plain"}


@pytest.mark.parametrize("name", ["MeanFieldVI", "NaturalVI", "MomentVI"])
def test_step_of_a_method_is_a_step_of_its_run(name):
    x, y = SMALL_MLP.data(8)
    model = kn.Model(SMALL_MLP.make(), kn.Categorical())
    run = run_of(getattr(kn, name)(epochs=10), model, (x, y))
    before = [value.detach().clone() for value in run.params]
    assert run._one_step([(x, y)])
    assert run.step == 1
    assert not any(torch.equal(old, new) for old, new in zip(before, run.params, strict=True))
    assert method_step(SMALL_MLP, name)() is None


def test_method_that_trains_elsewhere_is_an_error():
    with pytest.raises(TypeError, match="ExactLinear"):
        run_of(kn.ExactLinear(), kn.Model(torch.nn.Linear(2, 1), kn.Gaussian(0.1)), (torch.randn(8, 2), torch.randn(8)))


def test_quick_run_has_every_row():
    result = run_benchmark("benchmarks.variational_steps", quick=True, only="natural_*")
    for case in result["cases"]:
        for name, row in case["contenders"].items():
            installed = row["error"] is None or row["error"].startswith("ModuleNotFoundError")
            assert installed, f"{case['name']}, {name}: {row['error']}"
            assert name == "ivon-opt" or row["error"] is None
