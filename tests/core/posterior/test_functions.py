"""A posterior over functions against the same posterior over weights: linear functions with normal weights."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import knowable as kn
from knowable.core.posterior.functions import FunctionPosterior
from knowable.core.support.cholesky import cholesky


class LinearFunctions(FunctionPosterior):
    """f = (x, 1) W with normal columns of W, which have the covariance S; of many outputs they are independent."""

    family = "linear_functions_of_a_test"

    def __init__(self, model, loc: Tensor, covariance: Tensor, **common):
        super().__init__(model, **common)
        self.loc, self.covariance = loc, covariance

    def _features(self, x: Tensor) -> Tensor:
        return torch.cat([x, torch.ones_like(x[:, :1])], 1).double()

    def _marginal(self, x: Tensor) -> tuple[Tensor, Tensor]:
        phi = self._features(x)
        variance = torch.einsum("nd,de,ne->n", phi, self.covariance, phi)
        return phi @ self.loc, variance[:, None].expand(-1, self.loc.shape[1]).diag_embed()

    def _joint(self, x: Tensor) -> tuple[Tensor, Tensor]:
        phi = self._features(x)
        return phi @ self.loc, (phi @ self.covariance @ phi.mT).expand(self.loc.shape[1], -1, -1)

    def _tensors(self) -> dict[str, Tensor]:
        return {"loc": self.loc, "covariance": self.covariance}

    @classmethod
    def _from_tensors(cls, model, tensors, **common):
        return cls(model, tensors["loc"], tensors["covariance"], **common)


@pytest.fixture
def pair(seed):
    """The exact posterior of a linear layer, and the same as one over functions; inputs."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(20, 3, generator=generator, dtype=torch.float64)
    y = x.sum(1, keepdim=True) + 0.3 * torch.randn(20, 1, generator=generator, dtype=torch.float64)
    weights = kn.ExactLinear().fit(kn.Model(nn.Linear(3, 1).double(), kn.Gaussian(0.3)), (x, y))
    loc = torch.cat([weights.mean()["weight"].T, weights.mean()["bias"][None]])
    functions = LinearFunctions(weights.model, loc, weights.normal.covariance_matrix(), seed=seed)
    return weights, functions, torch.randn(6, 3, generator=generator, dtype=torch.float64)


def test_prediction_is_that_of_the_same_posterior_over_weights(pair):
    weights, functions, x = pair
    expected, found = weights.predict(x), functions.predict(x, samples=500)
    for name in ("mean", "variance", "aleatoric", "epistemic"):
        torch.testing.assert_close(getattr(found, name), getattr(expected, name))
    y = torch.zeros(6, 1, dtype=torch.float64)
    torch.testing.assert_close(found.log_prob(y), expected.log_prob(y))
    spread = expected.epistemic.sqrt()
    assert ((found.samples.mean(0) - expected.mean).abs() < 5 * spread / math.sqrt(500)).all()
    assert ((found.samples.var(0) / spread.square() - 1).abs() < 5 * math.sqrt(2 / 499)).all()


def test_functions_have_the_joint_covariance_and_a_joint_prediction_is_made_of_them(pair):
    _, functions, x = pair
    draws = functions.sample_functions(x, 20_000, torch.Generator().manual_seed(1)).squeeze(-1)
    mean, (covariance,) = functions._joint(x)
    scale = covariance.diagonal().sqrt()
    assert ((draws.mean(0) - mean.squeeze(-1)).abs() < 5 * scale / math.sqrt(20_000)).all()
    # the standard error of an estimated covariance of normal variables is at most sqrt(2 / n) of the product of scales
    assert ((draws.T.cov() - covariance).abs() < 5 * math.sqrt(2 / 20_000) * scale * scale[:, None]).all()
    joint = functions.predict_jointly(x, samples=7)
    torch.testing.assert_close(joint.samples, functions.sample_functions(x, 7, None))
    torch.testing.assert_close(joint.aleatoric, torch.full_like(joint.aleatoric, 0.09))


def test_outputs_that_depend_on_each_other_are_drawn_together(seed):
    """One block for all values: perfectly correlated outputs have equal draws."""

    class Twins(LinearFunctions):
        family = "twins_of_a_test"

        def _marginal(self, x):
            mean, covariance = super()._marginal(x)
            return mean, covariance[:, :1, :1].expand_as(covariance)

        def _joint(self, x):
            mean, covariance = super()._joint(x)
            return mean, covariance[:1].repeat(1, 2, 2)

    model = kn.Model(nn.Linear(2, 2), kn.Categorical())
    twins = Twins(model, torch.zeros(3, 2, dtype=torch.float64), torch.eye(3, dtype=torch.float64), seed=seed)
    x = torch.randn(4, 2)
    draws = twins.sample_functions(x, 50)
    assert draws.shape == (50, 4, 2) and draws.dtype == torch.float32
    torch.testing.assert_close(draws[..., 0], draws[..., 1], atol=1e-3, rtol=1e-3)  # by a factor of a singular matrix
    assert draws[..., 0].std(0).min() > 0
    torch.testing.assert_close(twins.predict(x).samples.mean(0), torch.full((4, 2), 0.5))


def test_what_is_about_weights_is_refused_in_words(pair):
    _, functions, x = pair
    for action in (functions.mean, functions.std, lambda: functions.sample(3), lambda: functions.log_prob({}),
                   functions.to_arviz, functions.signal_to_noise):  # fmt: skip
        with pytest.raises(kn.Unsupported, match=r"LinearFunctions is a distribution over functions.*predict\(x\)"):
            action()
    with pytest.raises(kn.Unsupported, match="cannot be a prior"):
        functions.update((x, x[:, :1]), method=kn.ExactLinear())


def test_it_is_saved_streamed_and_recalibrated_like_any_other(pair, tmp_path):
    _, functions, x = pair
    functions.save(tmp_path / "functions")
    loaded = kn.load(tmp_path / "functions")
    assert torch.equal(loaded.predict(x).samples, functions.predict(x).samples)
    assert repr(loaded) == repr(functions) == "LinearFunctions(functions of Gaussian outcomes)"
    parts = list(functions.predict_stream(x, samples=8, max_memory=400))
    assert len(parts) > 1
    torch.testing.assert_close(torch.cat([part.mean for part in parts]), functions.predict(x).mean)
    held_out = torch.randn(60, 3, dtype=torch.float64)
    recalibrated = functions.recalibrated((held_out, held_out.sum(1, keepdim=True)))
    assert recalibrated.predict(x).std.isfinite().all()


def test_a_covariance_without_a_factor_gets_the_jitter_it_needs_or_an_error_that_says_what_to_do():
    unit = torch.eye(3, dtype=torch.float64)
    assert cholesky(unit)[1] == 0.0
    factor, share = cholesky(torch.ones(3, 3, dtype=torch.float64))
    assert 0 < share <= 1e-8 and factor.isfinite().all()
    with pytest.raises(kn.InvalidData, match="Remove rows of x that are nearly the same"):
        cholesky(unit - 0.5)
    with pytest.raises(kn.InvalidData, match="not finite"):
        cholesky(unit * torch.nan)
