from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from knowable.testing.checks import storing as untouched
from tests.testing.faulty import faulty, sound


def test_sound_method_passes():
    untouched.check_network_is_left_alone(sound())
    untouched.check_data_is_left_alone(sound())
    untouched.check_global_state_is_left_alone(sound())
    untouched.check_model_can_be_fitted_again(sound())


def change_a_weight(net):
    with torch.no_grad():
        next(net.parameters()).add_(1.0)


def change_statistics(net):
    next(net.buffers()).add_(1.0)


def leave_a_gradient(net):
    next(net.parameters()).grad = torch.zeros_like(next(net.parameters()))


def freeze(net):
    net.requires_grad_(False)


def change_mode(net):
    net.eval()


@pytest.mark.parametrize("change", [change_a_weight, change_statistics, leave_a_gradient, freeze, change_mode])
def test_change_of_the_network_is_found(change):
    def fit(fit, model, data, **keywords):
        posterior = fit(model, data, **keywords)
        change(model.net)
        return posterior

    with pytest.raises(AssertionError, match="changed the network"):
        untouched.check_network_is_left_alone(faulty(fit))


@pytest.mark.parametrize("which", [0, 1])
def test_change_of_the_data_is_found(which):
    def fit(fit, model, data, **keywords):
        posterior = fit(model, data, **keywords)
        data[which].mul_(2.0)
        return posterior

    with pytest.raises(AssertionError, match=f"changed {'xy'[which]}"):
        untouched.check_data_is_left_alone(faulty(fit))


@pytest.mark.parametrize(
    ("draw", "words"),
    [
        (lambda: torch.rand(1), "torch generator"),
        (lambda: np.random.rand(), "numpy generator"),  # noqa: NPY002
        (lambda: random.random(), "python generator"),
    ],
    ids=["torch", "numpy", "python"],
)
def test_draw_from_a_global_generator_is_found(draw, words):
    def fit(fit, model, data, **keywords):
        draw()
        return fit(model, data, **keywords)

    with pytest.raises(AssertionError, match=words):
        untouched.check_global_state_is_left_alone(faulty(fit))


def test_model_that_remembers_is_found():
    def fit(fit, model, data, **keywords):
        posterior = fit(model, data, **keywords)
        model._start = posterior.mean()
        return posterior

    with pytest.raises(AssertionError, match=r"model.params|another result"):
        untouched.check_model_can_be_fitted_again(faulty(fit))
