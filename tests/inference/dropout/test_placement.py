from __future__ import annotations

import json

import pytest
import torch
from torch import nn

import knowable as kn
from knowable.inference.dropout.placement import Placement, place_dropout
from knowable.testing import network_case
from tests.inference.dropout.networks import (
    Attention,
    Branches,
    CellLoop,
    Functional,
    Recurrent,
    Residual,
    images,
    perceptron,
)


def placed(
    net: nn.Module,
    *shape: int,
    rate: float | None = None,
    where: str | tuple[str, ...] | None = None,
    learned: bool = False,
    **settings: object,
) -> Placement:
    model = kn.Model(net, kn.Gaussian(0.1), **settings)  # type: ignore[arg-type]
    return place_dropout(model, torch.randn(5, *shape), rate=rate, where=where, learned=learned)


def rates(placement: Placement) -> dict[str, float]:
    return {site.name: site.rate for site in placement.sites}


# --- networks without dropout ----------------------------------------------------------------------------------------


def test_all_layers_but_the_first_are_dropped():
    placement = placed(perceptron(None), 3)
    assert rates(placement) == {"2.weight": 0.1, "4.weight": 0.1}
    assert [site.units for site in placement.sites] == [6, 6] and not placement.noisy
    assert rates(placed(perceptron(None), 3, rate=0.4)) == {"2.weight": 0.4, "4.weight": 0.4}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("linear", {"weight"}),  # the first is the only one
        ("batchnorm_cnn", {"4.weight", "8.weight", "10.weight"}),
        ("lstm", {"lstm.weight_hh_l0", "head.weight"}),
        ("frozen_backbone", {"3.weight"}),
        ("last_layer", {"2.weight"}),
        ("tied", {"mix.weight", "embed.weight"}),  # the embedding is the first layer
        ("shared", {"2.weight", "6.weight"}),
    ],
)
def test_default_places(name, expected):
    case = network_case(name)
    placement = place_dropout(case.model(), case.x, rate=None, where=None)
    assert {place.name for site in placement.sites for place in site.places} == expected


def test_a_first_layer_that_alone_is_random_is_dropped():
    assert set(rates(placed(perceptron(None), 3, random="0.*"))) == {"0.weight"}


def test_cells_and_attention_have_their_weights_dropped():
    assert set(rates(placed(CellLoop(), 5, 2))) == {"cell.weight_hh", "head.weight"}
    assert set(rates(placed(Attention(0.0), 6, 4))) == {"attention.out_proj.weight", "head.weight"}


def test_a_network_without_layers_is_refused():
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3, 1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ self.weight

    with pytest.raises(kn.Unsupported, match="nothing to drop"):
        placed(Bare(), 3)


# --- by name ---------------------------------------------------------------------------------------------------------


def test_where_names_weights_or_globs():
    assert set(rates(placed(perceptron(None), 3, where="0.weight"))) == {"0.weight"}
    assert set(rates(placed(perceptron(None), 3, where="*"))) == {"0.weight", "2.weight", "4.weight"}
    assert set(rates(placed(perceptron(None), 3, where=("0.*", "4.*")))) == {"0.weight", "4.weight"}
    assert set(rates(placed(perceptron(None), 3, where="last_layer"))) == {"4.weight"}
    assert set(rates(placed(Recurrent(), 5, 2, where="lstm.weight_hh*"))) == {"lstm.weight_hh_l0", "lstm.weight_hh_l1"}


def test_where_turns_the_networks_own_dropout_off():
    placement = placed(perceptron(0.2), 3, where="6.weight", rate=0.3)
    assert rates(placement) == {"6.weight": 0.3} and placement.own_rates == {"2": 0.0, "5": 0.0}


@pytest.mark.parametrize("where", ["*.bias", "9.weight"])
def test_what_is_no_weight_of_a_layer_is_refused(where):
    with pytest.raises(kn.InvalidArgument, match=r"where=.*0\.weight, 2\.weight, 4\.weight"):
        placed(perceptron(None), 3, where=where)


# --- the network's own dropout ---------------------------------------------------------------------------------------


def test_dropout_layers_become_sites_at_their_own_rates():
    placement = placed(perceptron(0.2), 3)
    assert rates(placement) == {"3.weight": 0.2, "6.weight": 0.2}
    assert placement.own_rates == {"2": 0.0, "5": 0.0} and not placement.noisy
    assert rates(placed(perceptron(0.2), 3, rate=0.4)) == {"3.weight": 0.4, "6.weight": 0.4}


def test_layers_at_rate_zero_are_none():
    assert rates(placed(perceptron(0.0), 3)) == {"3.weight": 0.1, "6.weight": 0.1}


def test_channels_are_dropped_together_also_once_they_are_flattened():
    model = kn.Model(images(groups=2), kn.Categorical())
    first, second = place_dropout(model, torch.randn(5, 1, 8, 8), rate=None, where=None).sites
    assert (first.name, first.units, first.repeat, first.rate) == ("4.weight", 4, 1, 0.3)
    assert (second.name, second.units, second.repeat, second.rate) == ("8.weight", 4, 4, 0.2)


def test_elements_dropped_before_a_convolution_become_channels():
    net = nn.Sequential(nn.Conv1d(2, 3, 2), nn.Dropout(0.2), nn.Conv1d(3, 1, 2), nn.Flatten())
    (site,) = placed(net, 2, 6).sites
    assert (site.name, site.units) == ("2.weight", 3)


def test_layers_that_share_an_input_share_a_site():
    (site,) = placed(Branches(), 3).sites
    assert [place.name for place in site.places] == ["left.weight", "right.weight"] and site.by_example


def test_recurrent_dropout_is_on_the_columns_of_input_weights():
    placement = placed(Recurrent(), 5, 2)
    assert rates(placement) == {"lstm.weight_ih_l0": 0.1, "lstm.weight_ih_l1": 0.2, "head.weight": 0.3}
    assert not placement.noisy and placement.own_rates == {"before": 0.0, "lstm": 0.0, "after": 0.0}


def test_what_no_weights_can_do_stays_as_noise():
    placement = placed(Residual(0.4), 3)
    assert not placement.sites and placement.noisy and placement.own_rates == {"drop": 0.4}
    assert placed(Residual(0.4), 3, rate=0.2).own_rates == {"drop": 0.2}
    functional = placed(Functional(), 3)
    assert functional.noisy and not functional.sites
    attention = placed(Attention(0.3), 6, 4)
    assert attention.noisy and attention.own_rates == {"attention": 0.3}


def test_rates_are_learned_before_layers_where_the_network_has_only_noise():
    placement = placed(Residual(0.4), 3, learned=True)
    assert rates(placement) == {"second.weight": 0.1}
    assert placement.own_rates == {"drop": 0.0} and not placement.noisy
    functional = placed(Functional(), 3, learned=True)  # whose own dropout nobody can turn off
    assert rates(functional) == {"second.weight": 0.1} and functional.noisy


def test_dropout_before_weights_that_are_not_random_is_off():
    placement = placed(perceptron(0.2), 3, random="last_layer")
    assert rates(placement) == {"6.weight": 0.2} and placement.own_rates == {"2": 0.0, "5": 0.0}


def test_a_layer_used_at_two_places_is_moved_only_if_both_can_be():
    drop = nn.Dropout(0.2)
    both = nn.Sequential(nn.Linear(3, 4), drop, nn.Linear(4, 4), drop, nn.Linear(4, 1))
    assert rates(placed(both, 3)) == {"2.weight": 0.2, "4.weight": 0.2}
    one = nn.Sequential(nn.Linear(3, 4), drop, nn.Linear(4, 4), drop, nn.Tanh(), nn.Linear(4, 1))
    placement = placed(one, 3)
    assert not placement.sites and placement.noisy


def test_dropping_everything_is_refused():
    with pytest.raises(kn.InvalidArgument, match="drops everything"):
        placed(perceptron(1.0), 3)


# --- what comes of it ------------------------------------------------------------------------------------------------


def test_the_network_has_its_layers_at_their_rates_and_the_users_has_not_changed():
    net = perceptron(0.2)
    model = kn.Model(net, kn.Gaussian(0.1))
    placement = place_dropout(model, torch.randn(5, 3), rate=None, where=None)
    network, x = placement.network(model), torch.randn(5, 3)
    params = model.params()
    assert torch.equal(network(params, x, training=True), network(params, x))  # its own dropout is off
    assert [module.p for module in net if isinstance(module, nn.Dropout)] == [0.2, 0.2]
    assert not torch.equal(model.forward(params, x, training=True), model.forward(params, x))


def test_noise_is_on_in_evaluation_where_it_is_asked_for():
    model = kn.Model(Residual(), kn.Gaussian(0.1))
    placement = place_dropout(model, torch.randn(5, 3), rate=None, where=None)
    x, params = torch.randn(50, 3), model.params()
    still, noisy = placement.network(model), placement.network(model, noise=True)
    assert torch.equal(still(params, x), still(params, x))
    assert not torch.equal(noisy(params, x), noisy(params, x))


def test_a_placement_survives_json():
    placement = placed(Recurrent(), 5, 2)
    assert Placement.from_json(json.loads(json.dumps(placement.to_json()))) == placement
