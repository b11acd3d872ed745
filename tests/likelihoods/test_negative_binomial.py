from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats

from knowable.core.model.prior import Normal
from knowable.errors import InvalidArgument, InvalidData
from knowable.likelihoods import NegativeBinomial, Poisson

WEIGHTS = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64)


def scipy_pmf(y, mean, dispersion, share=0.0):
    r = 1 / dispersion
    return share * (y == 0) + (1 - share) * stats.nbinom.pmf(y, r, r / (r + mean))


@pytest.mark.parametrize("learned", [True, False])
def test_log_prob_matches_scipy(learned: bool):
    output = torch.randn(6, 2, dtype=torch.float64)
    y = torch.randint(0, 30, (6, 2)).double()
    likelihood = NegativeBinomial(base=3.0) if learned else NegativeBinomial(0.7, base=3.0)
    params = {"log_dispersion": torch.tensor(0.7, dtype=torch.float64).log()} if learned else {}
    expected = np.log(scipy_pmf(y.numpy(), 3 * output.exp().numpy(), 0.7)).sum(1)
    np.testing.assert_allclose(likelihood.log_prob(output, y, params), expected, rtol=1e-10)


def test_extra_zeros_match_the_mixture_written_out():
    output = torch.randn(8, 2, dtype=torch.float64)
    y = torch.tensor([0, 0, 0, 1, 2, 3, 10, 0]).double()
    likelihood = NegativeBinomial(0.5, zeros=True)
    expected = np.log(scipy_pmf(y.numpy(), output[:, 0].exp().numpy(), 0.5, output[:, 1].sigmoid().numpy()))
    aligned = likelihood.check_target(y, output)
    np.testing.assert_allclose(likelihood.log_prob(output, aligned, {}), expected, rtol=1e-10)


def test_without_dispersion_it_is_a_poisson():
    output, y = torch.randn(9, 1, dtype=torch.float64), torch.arange(9.0).double().unsqueeze(1)
    torch.testing.assert_close(
        NegativeBinomial(1e-9).log_prob(output, y, {}), Poisson().log_prob(output, y, {}), rtol=1e-5, atol=1e-5
    )


def test_dispersion_is_a_parameter_with_a_prior_unless_it_is_given():
    assert NegativeBinomial().params() == {"log_dispersion": torch.tensor(0.0)}
    assert NegativeBinomial().priors() == {"log_dispersion": Normal(2.0, loc=-1.0)}
    assert NegativeBinomial(0.3).params() == NegativeBinomial(0.3).priors() == {}


def test_gradients_match_finite_differences_and_vmap_equals_the_loop():
    outputs = torch.randn(3, 4, 2, dtype=torch.float64, requires_grad=True)
    y = torch.tensor([[0.0], [1.0], [5.0], [0.0]]).double()
    own = torch.randn(3, dtype=torch.float64, requires_grad=True)
    likelihood = NegativeBinomial(zeros=True)
    score = lambda f, d: likelihood.log_prob(f, y, {"log_dispersion": d})  # noqa: E731
    assert torch.autograd.gradcheck(score, (outputs[0], own[0]))
    loop = torch.stack([score(f, d) for f, d in zip(outputs, own, strict=True)])
    torch.testing.assert_close(torch.func.vmap(score)(outputs, own), loop)


@pytest.mark.parametrize("zeros", [True, False])
def test_prediction_matches_sums_over_the_probabilities(zeros: bool, generator: torch.Generator):
    outputs = torch.randn(3, 4, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    own = torch.tensor([-1.0, -0.5, 0.0], dtype=torch.float64)
    likelihood = NegativeBinomial(zeros=zeros, base=2.0)
    prediction = likelihood.predict(outputs, {"log_dispersion": own}, WEIGHTS.log())
    mean = 2 * outputs[..., :1].exp() if zeros else 2 * outputs.exp()
    share = outputs[..., 1:].sigmoid().numpy() if zeros else 0.0
    counts = np.arange(2_000)
    pmf = np.stack([scipy_pmf(n, mean.numpy(), own.exp().view(3, 1, 1).numpy(), share) for n in counts])
    mixed = np.einsum("k,nkbo->nbo", WEIGHTS.numpy(), pmf)
    first = np.einsum("n,nbo->bo", counts, mixed)
    np.testing.assert_allclose(prediction.mean, first, rtol=1e-8)
    np.testing.assert_allclose(prediction.variance, np.einsum("n,nbo->bo", counts**2, mixed) - first**2, rtol=1e-6)
    for n in (0, 1, 7):
        at = torch.full(prediction.mean.shape, float(n), dtype=torch.float64)
        np.testing.assert_allclose(prediction.cdf(at), mixed[: n + 1].sum(0), rtol=1e-9)
    for q in (0.05, 0.5, 0.95):
        np.testing.assert_array_equal(prediction.quantile(q), (mixed.cumsum(0) >= q).argmax(0))
    drawn = prediction.draw(20_000, generator=generator)
    assert torch.equal(drawn, drawn.round()) and (drawn >= 0).all()
    assert ((drawn.mean(0) - prediction.mean).abs() < 4.5 * prediction.std / 20_000**0.5).all()
    assert torch.isneginf(prediction.log_prob(torch.full(prediction.mean.shape, 0.5, dtype=torch.float64))).all()


def test_what_is_not_a_count_and_wrong_settings_are_refused():
    with pytest.raises(InvalidData, match=r"y must be a whole number, 0 or more, got -1 in row 1"):
        NegativeBinomial().check_target(torch.tensor([0.0, -1.0]), torch.zeros(2, 1))
    with pytest.raises(InvalidData, match="last dimension is even"):
        NegativeBinomial(zeros=True).check_target(torch.zeros(2), torch.zeros(2, 3))
    with pytest.raises(InvalidArgument, match="dispersion must be"):
        NegativeBinomial(-1.0)
