"""Tests of how a method is chosen."""

from __future__ import annotations

import pytest

import knowable as kn
from knowable.tabular import choose
from knowable.tabular.auto import BUDGETS, training_length, with_budget


def test_small_data_gets_chains():
    choice = choose(300, 6, 500, "regression")
    assert isinstance(choice.method, kn.MCLMC)
    assert "300 rows, 6 inputs and 500 weights" in choice.why and "'normal'" in choice.why


def test_with_more_data_or_a_smaller_budget_it_gets_an_ensemble():
    assert isinstance(choose(1_500, 6, 1_500, "regression", "quick").method, kn.DeepEnsemble)
    assert isinstance(choose(50_000, 6, 5_000, "regression").method, kn.DeepEnsemble)
    assert "chains would need more work" in choose(50_000, 6, 5_000, "regression").why


def test_a_large_network_gets_a_laplace_approximation():
    assert isinstance(choose(50_000, 6, 1_000_000, "classification").method, kn.Laplace)


@pytest.mark.parametrize("rows", [50, 900, 3_000, 60_000])
def test_a_larger_budget_never_turns_chains_into_an_ensemble_and_never_works_less(rows: int):
    methods = [choose(rows, 8, 1_300, "regression", budget).method for budget in BUDGETS]
    chains = [isinstance(method, kn.MCLMC) for method in methods]
    assert chains == sorted(chains)
    for kind, work in ((kn.MCLMC, "warmup"), (kn.DeepEnsemble, "epochs")):
        steps = [getattr(method, work) for method in methods if isinstance(method, kind)]
        assert steps == sorted(set(steps))


def test_more_rows_and_more_inputs_mean_more_steps():
    def steps(rows: int, inputs: int) -> float:
        epochs, batch = training_length(rows, inputs, "normal")
        return epochs * rows / batch

    assert steps(2_000, 5) < steps(8_000, 5) < steps(50_000, 5)
    assert steps(900, 5) < steps(900, 500)


def test_a_named_method_has_the_steps_or_draws_of_its_budget():
    assert with_budget(kn.MAP(), 500, 5, "normal") == kn.MAP()
    assert with_budget(kn.MAP(), 500, 5, "quick").epochs == training_length(500, 5, "quick")[0]
    assert with_budget(kn.NUTS(), 500, 5, "quick").draws == BUDGETS["quick"].draws
    assert with_budget(kn.ExactLinear(), 500, 5, "quick") == kn.ExactLinear()


def test_a_posterior_that_is_to_be_updated_has_a_density():
    assert isinstance(choose(300, 6, 500, "regression", updates=True).method, kn.MeanFieldVI)


def test_a_choice_says_what_and_why():
    choice = choose(300, 6, 500, "regression")
    assert str(choice) == f"MCLMC(chains=8, max_gradients=10000, warmup=300, adjusted=False): {choice.why}"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((0, 1, 1, "regression"), "rows must be"),
        ((1, 1, 1, "ranking"), "task must be one of"),
        ((1, 1, 1, "regression", "long"), "budget must be one of"),
    ],
)
def test_wrong_arguments_are_named(arguments: tuple, words: str):
    with pytest.raises(kn.InvalidArgument, match=words):
        choose(*arguments)
