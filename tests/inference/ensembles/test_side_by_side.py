"""Tests of networks trained side by side: each member's loss, gradient and step are those it would have alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import knowable as kn
from knowable.core.chains import target as targets
from knowable.core.model.data import Data, as_data
from knowable.core.network.params import Layout, Params
from knowable.core.training.loop import train
from knowable.inference.ensembles.side_by_side import EnsembleObjective
from knowable.inference.point.point import PointObjective
from tests.core.cases import DTYPE, linear_data, mlp
from tests.core.training_cases import settings_of

MEMBERS = 3
HALF = slice(0, 10)  # a batch of 10 of 20 rows


class Last(nn.Module):
    """A recurrent network read out at its last step, which vmap does not take."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.GRU(2, 1, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x.unsqueeze(1))[0][:, -1]


NETWORKS = {"mlp": mlp, "recurrent": Last}
PRIORS = {"normal": kn.Normal(0.7, loc=0.2), "without a closed form": kn.LaplacePrior(1.0), "flat": kn.Flat()}


def model_of(network: str = "mlp", prior: str = "normal", **settings) -> kn.Model:
    return kn.Model(NETWORKS[network]().to(DTYPE), kn.Gaussian(), PRIORS[prior], **settings)


def positions_of(model: kn.Model, members: int = MEMBERS) -> Tensor:
    size = sum(model.params()[name].numel() for name in model.random_names)
    return 0.5 * torch.randn(members, size, dtype=model.dtype)


def layout_of(model: kn.Model) -> Layout:
    return Layout.of({name: model.params()[name] for name in model.random_names})


def alone(model: kn.Model, params: Params, batch, **settings) -> tuple[Tensor, Tensor]:
    """Loss and flat gradient of one network, by the objective of a point estimate."""
    objective = PointObjective(model.starting_at(params), 20, use_prior=True, **settings)
    loss, _ = objective(*batch)
    gradients = torch.autograd.grad(loss, list(objective.values))
    wanted = dict(zip(objective.names, gradients, strict=True))
    return loss.detach(), layout_of(model).flatten(wanted)


@pytest.mark.parametrize("attack", [None, torch.tensor([0.1, 0.3], dtype=DTYPE)], ids=["plain", "attacked"])
@pytest.mark.parametrize("weighted", ["no weights", "one for each row", "each member its own"])
@pytest.mark.parametrize("prior", PRIORS)
@pytest.mark.parametrize("network", NETWORKS)
def test_losses_and_gradients_are_those_of_each_member_alone(network, prior, weighted, attack):
    model, (x, y) = model_of(network, prior), linear_data()
    positions = positions_of(model)
    weights = {
        "no weights": None,
        "one for each row": torch.rand(10, dtype=DTYPE),
        "each member its own": torch.rand(10, MEMBERS, dtype=DTYPE),
    }[weighted]
    batch = (x[HALF], y[HALF]) if weights is None else (x[HALF], y[HALF], weights)
    objective = EnsembleObjective(model, 20, positions.clone(), attack=attack)
    loss, _ = objective(*batch)
    (gradient,) = torch.autograd.grad(3 * loss, objective.positions)
    losses = []
    for k in range(MEMBERS):
        own = batch if weights is None or weights.dim() == 1 else (*batch[:2], weights[:, k])
        found, slope = alone(model, layout_of(model).views(positions[k]), own, attack=attack)
        losses.append(found)
        torch.testing.assert_close(gradient[k], 3 * slope)
    torch.testing.assert_close(loss, torch.stack(losses).mean())


@pytest.mark.parametrize("mode", ["eager", "traced"])
@pytest.mark.parametrize("prior", PRIORS)
def test_terms_are_the_means_of_the_members_on_the_scale_of_all_rows(mode, prior):
    model, (x, y) = model_of(prior=prior), linear_data()
    positions = positions_of(model)
    _, terms = EnsembleObjective(model, 20, positions, mode=mode)(x[HALF], y[HALF])
    views = [layout_of(model).views(each) for each in positions]
    likelihoods = [2 * model.log_likelihood(each, x[HALF], y[HALF]).sum() for each in views]
    torch.testing.assert_close(terms["log_likelihood"], torch.stack(likelihoods).mean())
    torch.testing.assert_close(terms["log_prior"], torch.stack([model.log_prior(each) for each in views]).mean())


@pytest.mark.parametrize("network", NETWORKS)
def test_held_out_rows_are_scored_under_the_mixture(network):
    model, (x, y) = model_of(network), linear_data()
    positions = positions_of(model)
    each = [model.log_likelihood(layout_of(model).views(flat), x, y) for flat in positions]
    mixture = torch.stack(each).exp().mean(0).log()
    torch.testing.assert_close(EnsembleObjective(model, 20, positions).predictive_log_likelihood(x, y), mixture)


def test_parameters_that_are_not_random_stay_at_the_values_given():
    model, (x, y) = model_of(random="2.*"), linear_data()
    points = {name: torch.randn_like(model.params()[name]) for name in model.point_names}
    positions = positions_of(model)
    objective = EnsembleObjective(model, 20, positions, points=points)
    expected = [
        -model.log_likelihood({**points, **layout_of(model).views(each)}, x, y).mean()
        - sum(model.prior.prior_of(name).log_prob(value).sum() for name, value in layout_of(model).views(each).items())
        / 20
        for each in positions
    ]
    torch.testing.assert_close(objective(x, y)[0], torch.stack(expected).mean())
    assert objective.dimension == layout_of(model).size


def test_many_members_go_through_in_blocks_with_the_same_result(monkeypatch):
    model, (x, y) = model_of(), linear_data()
    positions, weights = positions_of(model, 40), torch.rand(20, 40, dtype=DTYPE)
    whole = EnsembleObjective(model, 20, positions).losses_and_gradient(positions, x, y, weights)
    monkeypatch.setattr(targets, "_CACHE_BYTES", 1)  # then sixteen go together, at the most
    objective = EnsembleObjective(model, 20, positions)
    assert objective._block_size(x) == 14  # 40 in three blocks
    for left, right in zip(objective.losses_and_gradient(positions, x, y, weights), whole, strict=True):
        torch.testing.assert_close(left, right)


def test_each_members_gradient_is_clipped_by_itself():
    model, (x, y) = model_of(), linear_data()
    objective = EnsembleObjective(model, 20, positions_of(model) * torch.tensor([[0.1], [1.0], [5.0]]))
    objective(x, y)[0].backward()
    before = objective.positions.grad.clone()
    norms = before.norm(dim=1)
    most = norms.median().item()
    objective.clip_gradient(most)
    torch.testing.assert_close(
        objective.positions.grad.norm(dim=1), norms.clamp_max(most), rtol=1e-5, atol=0.0
    )  # clip_grad_norm_ divides by the norm plus 1e-6, and so does this
    assert torch.equal(objective.positions.grad[norms.argmin()], before[norms.argmin()])


@pytest.mark.parametrize("optimiser", ["adam", "sgd"])
def test_members_trained_side_by_side_end_where_each_ends_alone(optimiser):
    model, (x, y) = model_of(), linear_data()
    positions = positions_of(model)
    training = settings_of(epochs=60, batch_size=8, optimiser=optimiser, learning_rate=0.01, clip=2.0)
    data = as_data((x, y), model)
    together = EnsembleObjective(model, 20, positions.clone())
    train(together, data, training, seed=3)
    for k in range(MEMBERS):
        single = PointObjective(model.starting_at(layout_of(model).views(positions[k])), 20, use_prior=True)
        train(single, data, training, seed=3)
        expected = layout_of(model).flatten(single.params())
        torch.testing.assert_close(together.positions[k], expected, rtol=1e-8, atol=1e-8)


def test_a_network_that_vmap_refuses_is_known_beforehand():
    x, y = linear_data()
    for network, expected in (("mlp", True), ("recurrent", False)):
        model = model_of(network)
        assert EnsembleObjective(model, 20, positions_of(model)).vectorises(x, y) is expected


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the compiler's own modules
@pytest.mark.parametrize("weighted", [False, True])
def test_the_compiled_step_is_the_step_of_adam(weighted):
    # float64: the two differ by the order of operations alone, over 40 steps
    model, (x, y) = model_of(), linear_data()
    positions = positions_of(model)
    data = Data((x, y), 20, torch.rand(20, MEMBERS, dtype=DTYPE) if weighted else None)
    ends, losses = [], []
    for mode in ("traced", "compiled"):
        objective = EnsembleObjective(model, 20, positions.clone(), mode=mode)
        result = train(objective, data, settings_of(epochs=20, batch_size=10), seed=1)
        ends.append(objective.positions.detach())
        losses.append(result.history[-1]["loss"])
    torch.testing.assert_close(ends[1], ends[0], rtol=1e-7, atol=1e-9)
    assert losses[1] == pytest.approx(losses[0], rel=1e-9)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_compiled_run_that_is_taken_up_again_ends_with_the_same_bits(tmp_path):
    model, (x, y) = model_of(), linear_data()
    data, positions = as_data((x, y), model), positions_of(model)
    ends = []
    for checkpoint, stop in ((None, None), (tmp_path, 150), (tmp_path, None)):
        objective = EnsembleObjective(model, 20, positions.clone(), mode="compiled")
        if stop is not None:
            whole, calls = objective.whole_step, []

            def stopping(*arguments, whole=whole, calls=calls):
                calls.append(1)
                if len(calls) > 150:
                    raise RuntimeError("stopped")
                return whole(*arguments)

            objective.whole_step = stopping
            with pytest.raises(RuntimeError, match="stopped"):
                train(objective, data, settings_of(epochs=250), checkpoint=kn.Checkpoint(checkpoint, seconds=0))
            continue
        saver = None if checkpoint is None else kn.Checkpoint(checkpoint, seconds=0)
        train(objective, data, settings_of(epochs=250), checkpoint=saver)
        ends.append(objective.positions.detach().clone())
    assert torch.equal(*ends)
