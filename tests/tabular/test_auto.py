"""Tests of how a method is chosen."""

from __future__ import annotations

import pytest

import knowable as kn
from knowable.tabular import choose


def test_small_data_gets_chains():
    choice = choose(300, 6, 500, "regression", 60)
    assert isinstance(choice.method, kn.MCLMC)
    assert "300 rows, 6 inputs and 500 weights" in choice.why and "60 s" in choice.why


def test_with_less_time_or_more_data_it_gets_an_ensemble():
    assert isinstance(choose(300, 6, 500, "regression", 1).method, kn.DeepEnsemble)
    assert isinstance(choose(50_000, 6, 5_000, "regression", 60).method, kn.DeepEnsemble)
    assert "chains would need some" in choose(50_000, 6, 5_000, "regression", 60).why


def test_a_large_network_gets_a_laplace_approximation():
    assert isinstance(choose(50_000, 6, 1_000_000, "classification", 60).method, kn.Laplace)


def test_a_classifier_of_few_rows_gets_chains_if_there_is_time_and_a_laplace_approximation_if_not():
    assert isinstance(choose(450, 35, 1_500, "classification", 20).method, kn.Laplace)
    assert isinstance(choose(450, 35, 1_500, "classification", 120).method, kn.MCLMC)
    assert isinstance(choose(20_000, 35, 1_500, "classification", 20).method, kn.DeepEnsemble)


def test_more_time_never_turns_chains_into_an_ensemble():
    chains = [isinstance(choose(900, 8, 1_300, "regression", budget).method, kn.MCLMC) for budget in (1, 10, 100, 1000)]
    assert chains == sorted(chains)
    assert chains[0] is False and chains[-1] is True


def test_without_a_budget_it_is_chosen_as_for_twenty_seconds():
    for rows in (100, 1_000, 10_000):
        assert choose(rows, 8, 1_300, "regression").method == choose(rows, 8, 1_300, "regression", 20).method
    assert "20 s" in choose(100, 8, 300, "regression").why


def test_a_posterior_that_is_to_be_updated_has_a_density():
    assert isinstance(choose(300, 6, 500, "regression", 60, updates=True).method, kn.MeanFieldVI)


def test_weights_that_are_not_whole_go_to_networks_that_are_trained():
    assert isinstance(choose(300, 6, 500, "regression", 60, weighted=True).method, kn.DeepEnsemble)


def test_a_choice_says_what_and_why():
    choice = choose(300, 6, 500, "regression", 60)
    assert str(choice) == f"MCLMC(chains=8, adjusted=False): {choice.why}"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((0, 1, 1, "regression"), "rows must be"),
        ((1, 1, 1, "ranking"), "task must be one of"),
        ((1, 1, 1, "regression", -1.0), "budget must be"),
    ],
)
def test_wrong_arguments_are_named(arguments: tuple, words: str):
    with pytest.raises(kn.InvalidArgument, match=words):
        choose(*arguments)
