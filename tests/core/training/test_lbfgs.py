"""Tests of the search for a minimum by L-BFGS, and of the loop that calls it."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor, nn

import knowable as kn
from knowable.core.training import loop, schedule
from knowable.core.training.lbfgs import lbfgs_round
from knowable.testing import LinearGaussian
from knowable.testing.subject import expect_same_posterior

DTYPE = torch.float64


def data(seed: int, rows: int = 60) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = 4 * torch.rand((rows, 1), generator=generator, dtype=DTYPE) - 2
    return x, torch.sin(2 * x) + 0.2 * torch.randn((rows, 1), generator=generator, dtype=DTYPE)


def network(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(1, 20), nn.Tanh(), *layers, nn.Linear(20, 1)).to(DTYPE)


def test_the_minimum_of_a_quadratic_is_found(seed):
    generator = torch.Generator().manual_seed(seed)
    root = torch.randn((8, 8), generator=generator, dtype=DTYPE) + 3 * torch.eye(8, dtype=DTYPE)
    best = torch.randn(8, generator=generator, dtype=DTYPE)
    place = torch.zeros(8, dtype=DTYPE, requires_grad=True)
    found = lbfgs_round([place], lambda: (root @ (place - best)).square().sum())
    torch.testing.assert_close(place.detach(), best, rtol=1e-5, atol=1e-5)
    assert found.gain == pytest.approx((root @ best).square().sum().item(), rel=1e-8)


def test_a_round_that_leads_out_of_the_finite_numbers_is_undone():
    place = torch.ones(1, dtype=DTYPE, requires_grad=True)
    calls: list[int] = []

    def loss() -> Tensor:
        calls.append(1)
        return (place.square() if len(calls) == 1 else place * torch.nan).sum()

    assert lbfgs_round([place], loss).gain == 0.0
    assert place.item() == 1.0


def test_a_linear_model_is_at_its_mode_to_the_last_digits(seed):
    target = LinearGaussian.make(seed=seed)
    fitted = kn.MAP().fit(target.model(), target.data)
    assert fitted.diagnostics.converged
    exact = kn.ExactLinear().fit(target.model(), target.data).mean()
    for name, value in fitted.mean().items():
        torch.testing.assert_close(value, exact[name], rtol=1e-4, atol=1e-4)


def test_a_small_network_is_at_a_mode_after_few_steps(seed):
    torch.manual_seed(seed)
    model, rows = kn.Model(network(), kn.Gaussian(0.2)), data(seed)
    found = kn.MAP().fit(model, rows)
    assert found.diagnostics.converged and found.diagnostics.history[-1]["step"] < 3_000  # 3,500 is Adam's least
    around = kn.Laplace(structure="full", tune="never", start=found).fit(model, rows)
    assert around.diagnostics["distance_from_mode"] < 0.1  # nats


@pytest.mark.parametrize("why", ["dropout", "likelihood alone", "epochs", "learning rate", "mini-batches", "held out"])
def test_nothing_is_searched_where_the_loss_is_not_smooth_or_settings_were_given(why, monkeypatch):
    """Dropout makes the loss random; without a prior its minimum may be at infinity."""

    class Searched(Exception):
        pass

    def search(*_):
        raise Searched

    monkeypatch.setattr(loop, "lbfgs_round", search)
    monkeypatch.setattr(loop, "_SEARCH_FROM", 100)
    monkeypatch.setattr(schedule, "_LONGEST", 150)
    monkeypatch.setattr(schedule, "_SHORTEST_FALL", 50)
    rows = data(0, rows=40)
    given = {"epochs": 200, "learning rate": 0.02, "mini-batches": 20}
    names = {"epochs": "epochs", "learning rate": "learning_rate", "mini-batches": "batch_size"}
    settings = {names[why]: given[why]} if why in given else {}
    method = kn.MaximumLikelihood if why == "likelihood alone" else kn.MAP
    model = kn.Model(network(nn.Dropout(0.5)) if why == "dropout" else network(), kn.Gaussian(0.2))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", kn.ConvergenceWarning)  # so few steps
        method(**settings).fit(model, rows, validation=rows if why == "held out" else None)
        with pytest.raises(Searched):
            kn.MAP().fit(kn.Model(network(), kn.Gaussian(0.2)), rows)


def test_an_interrupted_search_goes_on_with_the_same_numbers(tmp_path, monkeypatch):
    torch.manual_seed(0)
    model, rows = kn.Model(network(), kn.Gaussian()), data(0)
    whole = kn.Laplace().fit(model, rows)
    rounds: list[int] = []

    def interrupted(*arguments):
        rounds.append(1)
        if len(rounds) == 2:
            raise KeyboardInterrupt
        return lbfgs_round(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "lbfgs_round", interrupted)
        with pytest.warns(kn.Interrupted):
            kn.Laplace().fit(model, rows, checkpoint=tmp_path / "fit")
    expect_same_posterior(kn.Laplace().fit(model, rows, checkpoint=tmp_path / "fit"), whole, rows[0], "resumed")
