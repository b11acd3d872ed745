from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import integrate, optimize, special, stats

from knowable.errors import InvalidArgument, InvalidData, InvalidType
from knowable.likelihoods import Gaussian
from knowable.priors import Normal

WEIGHTS = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64)


def test_noise_is_a_parameter_with_a_prior_unless_it_is_given():
    assert Gaussian().params()["log_noise"].shape == ()
    assert Gaussian(outputs=3).params()["log_noise"].tolist() == [0.0, 0.0, 0.0]
    assert Gaussian().priors() == {"log_noise": Normal(2.0, loc=-1.0)}
    assert Gaussian(0.3).params() == Gaussian(0.3).priors() == {}
    assert Gaussian([0.1, 2]).noise == (0.1, 2.0) and Gaussian([0.1, 2]).outputs == 2
    assert Gaussian((0.1,)).noise == 0.1


@pytest.mark.parametrize("learned", [True, False])
@pytest.mark.parametrize(
    ("shape", "noise"),
    [((6,), 0.3), ((6, 1), 0.3), ((6, 3), 0.3), ((6, 3), [0.3, 1.0, 2.5]), ((6, 2, 3), [0.3, 1.0, 2.5])],
)
def test_log_prob_matches_scipy(shape: tuple[int, ...], noise: float | list[float], learned: bool):
    likelihood = Gaussian(outputs=np.size(noise)) if learned else Gaussian(noise)
    params = {"log_noise": torch.tensor(noise, dtype=torch.float64).log()} if learned else {}
    output, y = torch.randn(2, *shape, dtype=torch.float64)
    expected = stats.norm.logpdf(y.numpy(), output.numpy(), noise).reshape(6, -1).sum(1)
    np.testing.assert_allclose(likelihood.log_prob(output, y, params), expected, rtol=1e-12)
    np.testing.assert_allclose(likelihood.noise_scale(params, like=output), noise, rtol=1e-12)


def test_the_density_integrates_to_one():
    def density(y: float) -> float:
        return (
            Gaussian(0.7)
            .log_prob(torch.tensor([0.4], dtype=torch.float64), torch.tensor([y], dtype=torch.float64), {})
            .exp()
            .item()
        )

    assert integrate.quad(density, -12, 12)[0] == pytest.approx(1, abs=1e-8)


def test_gradients_match_finite_differences():
    output, y = torch.randn(2, 4, 3, dtype=torch.float64)
    output.requires_grad_()
    for outputs in (1, 3):
        log_noise = torch.randn(() if outputs == 1 else (3,), dtype=torch.float64, requires_grad=True)
        score = Gaussian(outputs=outputs).log_prob
        assert torch.autograd.gradcheck(lambda f, s, score=score: score(f, y, {"log_noise": s}), (output, log_noise))


def test_vmap_over_draws_equals_the_loop():
    outputs, y, log_noise = torch.randn(5, 4, 3), torch.randn(4, 3), torch.randn(5)
    likelihood = Gaussian()
    batched = torch.func.vmap(lambda f, s: likelihood.log_prob(f, y, {"log_noise": s}))(outputs, log_noise)
    loop = [likelihood.log_prob(f, y, {"log_noise": s}) for f, s in zip(outputs, log_noise, strict=True)]
    torch.testing.assert_close(batched, torch.stack(loop))
    fixed = torch.func.vmap(lambda f: Gaussian([0.1, 0.2, 0.3]).log_prob(f, y, {}))(outputs)
    assert fixed.shape == (5, 4)


def test_a_vector_target_cannot_broadcast_against_a_column_output():
    y = Gaussian().check_target(torch.arange(4), torch.zeros(2, 1))
    assert y.shape == (4, 1) and y.dtype == torch.float32
    assert Gaussian(1.0).log_prob(torch.zeros(4, 1), y, {}).shape == (4,)


def test_wrong_arguments_and_outputs_say_what_to_do():
    with pytest.raises(InvalidArgument, match="noise must be a finite number > 0, got -1"):
        Gaussian(-1.0)
    with pytest.raises(InvalidArgument, match=r"noise\[1\] must be a finite number > 0, got 0"):
        Gaussian([1.0, 0.0])
    with pytest.raises(InvalidArgument, match="each of 3 outputs, got 2"):
        Gaussian([1.0, 2.0], outputs=3)
    with pytest.raises(InvalidType, match="noise must be a number"):
        Gaussian("small")
    with pytest.raises(InvalidData, match=r"2 outputs, but the network's output has shape \(rows, 3\). Give outputs=3"):
        Gaussian(outputs=2).check_target(torch.zeros(5, 3), torch.zeros(5, 3))
    with pytest.raises(InvalidData, match="target has missing or infinite values in row 1"):
        Gaussian().check_target(torch.tensor([0.0, math.nan]), torch.zeros(2, 1), name="target")


def _prediction(shape: tuple[int, ...] = (3, 5, 2)):
    outputs, log_noise = torch.randn(shape, dtype=torch.float64), torch.randn(3, dtype=torch.float64)
    return outputs, log_noise.exp(), Gaussian().predict(outputs, {"log_noise": log_noise}, WEIGHTS.log())


def test_moments_of_a_prediction_follow_the_law_of_total_variance():
    outputs, noise, prediction = _prediction()
    weights, draws = WEIGHTS.view(3, 1, 1), outputs
    mean = (weights * draws).sum(0)
    second = (weights * (draws**2 + noise.view(3, 1, 1) ** 2)).sum(0)
    torch.testing.assert_close(prediction.mean, mean)
    torch.testing.assert_close(prediction.variance, second - mean**2)
    torch.testing.assert_close(prediction.aleatoric, (WEIGHTS * noise**2).sum().expand(5, 2))
    assert torch.equal(prediction.total, prediction.aleatoric + prediction.epistemic)


def test_the_predictive_density_of_a_row_is_joint_and_matches_brute_force():
    outputs, noise, prediction = _prediction()
    y = torch.randn(5, 2, dtype=torch.float64)
    each = stats.norm.logpdf(y.numpy(), outputs.numpy(), noise.view(3, 1, 1).numpy()).sum(-1)  # (K, batch)
    expected = special.logsumexp(each, axis=0, b=WEIGHTS.numpy()[:, None])
    np.testing.assert_allclose(prediction.log_prob(y), expected, rtol=1e-12)


def test_quantiles_of_the_mixture_match_root_finding():
    outputs, noise, prediction = _prediction((3, 4))
    for q in (0.05, 0.5, 0.99):
        found = prediction.quantile(q)
        for row in range(4):
            mixture = stats.norm(outputs[:, row].numpy(), noise.numpy())
            expected = optimize.brentq(lambda y, m=mixture, q=q: WEIGHTS.numpy() @ m.cdf(y) - q, -100, 100, xtol=1e-13)
            assert found[row].item() == pytest.approx(expected, abs=1e-9)
    low, high = prediction.interval(0.8)
    torch.testing.assert_close(prediction.cdf(high) - prediction.cdf(low), torch.full((4,), 0.8, dtype=torch.float64))


def test_one_noise_for_each_output_reaches_the_prediction():
    outputs = torch.zeros(2, 4, 3)
    log_noise = torch.tensor([[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]])
    learned = Gaussian(outputs=3).predict(outputs, {"log_noise": log_noise}, torch.tensor([0.5, 0.5]).log())
    torch.testing.assert_close(learned.components.variance, (2 * log_noise).exp()[:, None].expand(2, 4, 3))
    fixed = Gaussian([1.0, 2.0, 3.0]).predict(outputs, {}, torch.tensor([0.5, 0.5]).log())
    torch.testing.assert_close(fixed.std, torch.tensor([1.0, 2.0, 3.0]).expand(4, 3))
    shared = Gaussian(outputs=3).predict(outputs, {"log_noise": log_noise[0]}, torch.tensor([0.5, 0.5]).log())
    torch.testing.assert_close(shared.std, log_noise[0].exp().expand(4, 3))


def test_draws_have_the_mixtures_distribution_and_share_a_component_within_a_row(generator: torch.Generator):
    outputs = torch.tensor([[[0.0, 0.0]], [[50.0, 50.0]]], dtype=torch.float64)
    prediction = Gaussian(1.0).predict(outputs, {}, torch.tensor([0.3, 0.7], dtype=torch.float64).log())
    n = 20_000
    drawn = prediction.draw(n, generator=generator)[:, 0]  # (n, 2)
    assert torch.equal(drawn[:, 0] > 25, drawn[:, 1] > 25)
    assert abs((drawn[:, 0] > 25).double().mean() - 0.7) < 4 * (0.3 * 0.7 / n) ** 0.5
    below = (drawn <= prediction.quantile(0.9)).double().mean(0)
    assert (below - 0.9).abs().max() < 4 * (0.9 * 0.1 / n) ** 0.5
