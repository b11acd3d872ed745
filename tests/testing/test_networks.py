from __future__ import annotations

import pytest
import torch

import knowable as kn
from knowable.testing import network_case
from knowable.testing.networks import ONE_INPUT


@pytest.mark.parametrize("name", ONE_INPUT)
def test_every_case_is_a_model_whose_parameters_all_matter(name):
    case = network_case(name)
    model = case.model()
    params = {key: value.requires_grad_() for key, value in model.params().items()}
    model.log_likelihood(params, *case.data).sum().backward()
    assert case.name == name
    assert all(value.grad is not None and (value.grad != 0).any() for value in params.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", ONE_INPUT)
def test_dtype_is_that_of_network_and_numbers(name, dtype):
    case = network_case(name, dtype=dtype)
    assert case.model().dtype == dtype
    assert case.x.dtype == dtype or not case.x.is_floating_point()


@pytest.mark.parametrize("name", ONE_INPUT)
def test_seed_fixes_the_case_and_leaves_the_generator_alone(name):
    state = torch.get_rng_state()
    first, second, other = (network_case(name, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(state, torch.get_rng_state())
    pairs = list(zip(first.net.parameters(), second.net.parameters(), strict=True))
    assert all(torch.equal(a, b) for a, b in pairs) and torch.equal(first.x, second.x)
    assert not all(torch.equal(a, b) for a, b in zip(first.net.parameters(), other.net.parameters(), strict=True))


def test_cases_have_what_makes_them_difficult():
    frozen = network_case("frozen_backbone")
    assert frozen.model().frozen_names == {"0.weight", "0.bias", "1.weight", "1.bias"}
    assert (frozen.net[1].running_mean != 0).all()  # statistics that a fit would overwrite if it did not hold them
    tied = network_case("tied").net
    assert tied.embed.weight is tied.out.weight
    assert network_case("last_layer").model().random_names == ["2.weight", "2.bias"]
    assert any(isinstance(each, torch.nn.BatchNorm2d) for each in network_case("residual").net.modules())


def test_rows_may_be_chosen_and_names_are_checked():
    assert len(network_case("lstm", rows=5).x) == 5
    with pytest.raises(kn.InvalidArgument, match="name must be one of"):
        network_case("perceptron")
