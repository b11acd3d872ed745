from __future__ import annotations

import pytest
import torch

from knowable.testing import NETWORKS
from knowable.testing.checks import networks
from tests.testing.faulty import faulty, rebuilt, sound


@pytest.mark.parametrize("name", ["mlp", "lstm", "tied"])
def test_sound_method_passes(name):
    networks.check_network(sound(), name)


def test_sound_method_keeps_frozen_and_point_parameters():
    networks.check_frozen_parameters_stay(sound())
    networks.check_point_parameters_do_not_vary(sound())


def test_declared_refusal_must_come_and_be_in_words():
    def refuse(error):
        def fit(fit, model, data, **keywords):
            raise error

        return faulty(fit, refuses={"mlp"})

    import knowable as kn

    networks.check_network(refuse(kn.Unsupported("This needs a linear network.")), "mlp")
    with pytest.raises(AssertionError, match="was accepted"):
        networks.check_network(sound(refuses={"mlp"}), "mlp")
    with pytest.raises(AssertionError, match="got RuntimeError"):
        networks.check_network(refuse(RuntimeError("no")), "mlp")
    with pytest.raises(AssertionError, match="should say what to do"):
        networks.check_network(refuse(kn.Unsupported("no")), "mlp")


def test_undeclared_refusal_is_an_error():
    def fit(fit, model, data, **keywords):
        raise NotImplementedError("no recurrent networks")

    with pytest.raises(NotImplementedError):
        networks.check_network(faulty(fit), "lstm")


def test_parameter_left_out_of_the_fit_is_found():
    def fit(fit, model, data, **keywords):
        posterior = fit(model, data, **keywords)
        return rebuilt(posterior, stack={**posterior.stack, "0.bias": model.params()["0.bias"].unsqueeze(0)})

    with pytest.raises(AssertionError, match=r"left 0.bias"):
        networks.check_network(faulty(fit), "mlp")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_numbers_that_are_not_finite_are_found(value):
    def fit(fit, model, data, **keywords):
        posterior = fit(model, data, **keywords)
        return rebuilt(
            posterior, stack={**posterior.stack, "0.bias": torch.full_like(posterior.stack["0.bias"], value)}
        )

    with pytest.raises(AssertionError, match="not finite"):
        networks.check_network(faulty(fit), "mlp")


def test_statistics_of_a_frozen_layer_that_move_are_found():
    def fit(fit, model, data, **keywords):
        posterior = fit(model, data, **keywords)
        return rebuilt(posterior, buffers={name: value + 1 for name, value in posterior.buffers.items()})

    with pytest.raises(AssertionError, match="of a frozen layer changed"):
        networks.check_frozen_parameters_stay(faulty(fit))


def test_point_estimate_that_varies_is_found():
    def fit(fit, model, data, **keywords):
        posterior = fit(model, data, **keywords)
        original = posterior.sample

        def sample(n, generator=None):
            return {k: v + torch.rand(n).view(n, *(1,) * (v.dim() - 1)) for k, v in original(n, generator).items()}

        posterior.sample = sample
        return posterior

    with pytest.raises(AssertionError, match="differs from draw to draw"):
        networks.check_point_parameters_do_not_vary(faulty(fit))


def test_every_network_has_its_check():
    from knowable.testing import CHECKS

    names = {check.name for check in CHECKS}
    assert {f"{name}_is_fitted_or_refused" for name in NETWORKS} <= names
