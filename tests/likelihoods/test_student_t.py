from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import integrate, optimize, special, stats

from knowable.errors import InvalidArgument
from knowable.likelihoods import StudentT
from knowable.priors import Normal

WEIGHTS = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64)


def test_scale_is_a_parameter_with_a_prior_unless_it_is_given():
    assert StudentT().params() == {"log_scale": torch.tensor(0.0)}
    assert StudentT().priors() == {"log_scale": Normal(2.0, loc=-1.0)}
    assert StudentT(scale=0.3).params() == StudentT(scale=0.3).priors() == {}


@pytest.mark.parametrize("df", [0.7, 2.0, 4.0, 60.0])
@pytest.mark.parametrize("shape", [(6,), (6, 1), (6, 2, 3)])
def test_log_prob_matches_scipy(df: float, shape: tuple[int, ...]):
    output, y = torch.randn(2, *shape, dtype=torch.float64)
    y = y + 20 * (torch.rand(shape) < 0.2)
    expected = stats.t.logpdf(y.numpy(), df, output.numpy(), 0.3).reshape(6, -1).sum(1)
    learned = StudentT(df).log_prob(output, y, {"log_scale": torch.tensor(np.log(0.3))})
    np.testing.assert_allclose(learned, expected, rtol=1e-12)
    np.testing.assert_allclose(StudentT(df, 0.3).log_prob(output, y, {}), expected, rtol=1e-12)


def test_the_density_integrates_to_one():
    def density(y: float) -> float:
        return (
            StudentT(4.0, 0.7)
            .log_prob(torch.tensor([0.4], dtype=torch.float64), torch.tensor([y], dtype=torch.float64), {})
            .exp()
            .item()
        )

    assert integrate.quad(density, -np.inf, np.inf)[0] == pytest.approx(1, abs=1e-7)


def test_gradients_match_finite_differences_and_vmap_equals_the_loop():
    outputs = torch.randn(3, 4, 2, dtype=torch.float64, requires_grad=True)
    log_scale = torch.randn(3, dtype=torch.float64, requires_grad=True)
    y = torch.randn(4, 2, dtype=torch.float64)

    def score(f: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
        return StudentT(3.0).log_prob(f, y, {"log_scale": s})

    assert torch.autograd.gradcheck(score, (outputs[0], log_scale[0]))
    loop = [score(f, s) for f, s in zip(outputs, log_scale, strict=True)]
    torch.testing.assert_close(torch.func.vmap(score)(outputs, log_scale), torch.stack(loop))


def test_the_noise_variance_is_that_of_the_distribution_and_infinite_without_one():
    outputs = torch.zeros(3, 2, dtype=torch.float64)
    prediction = StudentT(5.0).predict(outputs, {"log_scale": torch.zeros(3, dtype=torch.float64)}, WEIGHTS.log())
    np.testing.assert_allclose(prediction.aleatoric, stats.t.var(5.0), rtol=1e-12)
    heavy = StudentT(1.5, 1.0).predict(outputs, {}, WEIGHTS.log())
    assert torch.isinf(heavy.variance).all() and torch.isfinite(heavy.quantile(0.99)).all()


def test_density_and_quantiles_of_the_mixture_match_brute_force():
    outputs, log_scale = torch.randn(3, 4, dtype=torch.float64), torch.randn(3, dtype=torch.float64)
    prediction = StudentT(2.5).predict(outputs, {"log_scale": log_scale}, WEIGHTS.log())
    scale = log_scale.exp().numpy()
    y = torch.randn(4, dtype=torch.float64)
    each = stats.t.logpdf(y.numpy(), 2.5, outputs.numpy(), scale[:, None])
    expected = special.logsumexp(each, axis=0, b=WEIGHTS.numpy()[:, None])
    np.testing.assert_allclose(prediction.log_prob(y), expected, rtol=1e-12)
    assert torch.equal(prediction.total, prediction.aleatoric + prediction.epistemic)
    for q in (0.02, 0.5, 0.9):
        found = prediction.quantile(q)
        for row in range(4):
            mixture = stats.t(2.5, outputs[:, row].numpy(), scale)
            root = optimize.brentq(lambda y, m=mixture, q=q: WEIGHTS.numpy() @ m.cdf(y) - q, -1e4, 1e4, xtol=1e-12)
            assert found[row].item() == pytest.approx(root, abs=1e-8)


def test_draws_have_the_mixtures_quantiles(generator: torch.Generator):
    outputs = torch.tensor([[[0.0]], [[3.0]], [[-8.0]]], dtype=torch.float64)
    prediction = StudentT(2.5, 0.5).predict(outputs, {}, WEIGHTS.log())
    n = 20_000
    drawn = prediction.draw(n, generator=generator)
    for q in (0.01, 0.3, 0.5, 0.99):
        below = (drawn <= prediction.quantile(q)).double().mean().item()
        assert abs(below - q) < 4 * (q * (1 - q) / n) ** 0.5


def test_wrong_arguments_are_refused():
    with pytest.raises(InvalidArgument, match="df must be a finite number > 0, got 0"):
        StudentT(0.0)
    with pytest.raises(InvalidArgument, match="scale must be a finite number > 0, got -2"):
        StudentT(scale=-2.0)
