from __future__ import annotations

import pytest
import torch

import knowable as kn
from knowable.inference.sampling.hmc import HMC
from knowable.testing import Subject
from knowable.testing.subject import expect, expect_error, expect_same_params


def test_subject_names_its_method_and_finds_a_problem_it_can_do():
    assert Subject(kn.MAP()).name == "MAP"
    assert Subject(kn.MAP()).case().name == "mlp"
    assert Subject(kn.ExactLinear(), refuses={"mlp"}).case().name == "linear"
    assert Subject(kn.MonteCarloBatchNorm(), refuses={"mlp", "linear"}).case().name == "batchnorm_mlp"
    with pytest.raises(AssertionError, match="one of mlp"):
        Subject(kn.MAP(), refuses={"mlp", "linear", "batchnorm_mlp"}).case()


def test_longer_settings_are_those_given_or_more_epochs():
    assert Subject(kn.MAP(epochs=2, training=kn.Training(clip=1.0))).longer_method(epochs=7) == kn.MAP(
        epochs=7, training=kn.Training(clip=1.0)
    )
    assert Subject(kn.MAP(), longer=kn.MAP(epochs=99)).longer_method().epochs == 99


def test_longer_settings_of_a_method_that_runs_chains_are_more_draws():
    longer = Subject(HMC(chains=4, draws=3, warmup=2, steps=2)).longer_method(epochs=7)
    assert longer == HMC(chains=2, draws=90, warmup=90, steps=2)


def test_networks_that_do_not_exist_cannot_be_refused():
    with pytest.raises(ValueError, match="refuses must name networks"):
        Subject(kn.MAP(), refuses={"perceptron"})


def test_expectations_fail_in_words():
    expect(torch.tensor(True), "never")
    with pytest.raises(AssertionError, match="because"):
        expect(torch.tensor(False), "because")


def test_expected_errors_must_come():
    def refuse():
        raise kn.InvalidArgument("epochs must be at least one")

    assert expect_error(ValueError, refuse, "this") == "epochs must be at least one"
    with pytest.raises(AssertionError, match="this should raise KeyError, got InvalidArgument"):
        expect_error(KeyError, refuse, "this")
    with pytest.raises(AssertionError, match="was accepted"):
        expect_error((KeyError, ValueError), lambda: None, "this")


@pytest.mark.parametrize(
    "other",
    [{"b": torch.zeros(2)}, {"a": torch.zeros(2).double()}, {"a": torch.full((2,), 1e-9)}, {"a": torch.zeros(3)}],
    ids=["names", "dtype", "a bit", "shape"],
)
def test_parameters_are_the_same_to_the_last_bit_or_not(other):
    expect_same_params({"a": torch.zeros(2)}, {"a": torch.zeros(2)}, "same")
    with pytest.raises(AssertionError):
        expect_same_params({"a": torch.zeros(2)}, other, "not")
