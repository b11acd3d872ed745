"""The posterior of an infinitely wide network against formulas of Gaussian processes written out."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import MultivariateNormal

import knowable as kn
from knowable.errors import InvalidArgument, Unsupported
from knowable.inference.functional.normal_functions import (
    Factors,
    Information,
    laplace_evidence,
    left_out,
    most_probable_functions,
)

NOISE = 0.1


def network(outputs: int = 1, width: int = 40) -> nn.Module:
    return nn.Sequential(nn.Linear(2, width), nn.ReLU(), nn.Linear(width, width), kn.Erf(), nn.Linear(width, outputs))


def rows(seed: int, n: int = 20) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs, targets, and inputs to predict at, in double precision."""
    generator = torch.Generator().manual_seed(seed)
    x, new = (torch.randn(k, 2, generator=generator, dtype=torch.float64) for k in (n, 7))
    y = torch.sin(2 * x.sum(1, keepdim=True)) + NOISE * torch.randn(n, 1, generator=generator, dtype=torch.float64)
    return x, y, new


@pytest.mark.parametrize("kind", ["nngp", "ntk"])
def test_regression_is_the_gaussian_process_with_that_kernel(kind, seed):
    x, y, new = rows(seed)
    y = torch.cat([y, y.cos()], 1)
    model = kn.Model(network(2).double(), kn.Gaussian(NOISE), kn.Normal(0.3))
    posterior = kn.InfiniteWidth(kind=kind).fit(model, (x, y), seed=seed)
    k, cross, own = (kn.infinite_width_kernel(model, a, b, kind=kind) for a, b in ((x, None), (x, new), (new, None)))
    noisy = k + NOISE**2 * torch.eye(len(x), dtype=torch.float64)
    covariance = own - cross.T @ torch.linalg.solve(noisy, cross)
    found = posterior.predict(new)
    torch.testing.assert_close(found.mean, cross.T @ torch.linalg.solve(noisy, y), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(found.epistemic, covariance.diagonal()[:, None].expand(-1, 2), rtol=1e-6, atol=1e-6)
    evidence = MultivariateNormal(torch.zeros_like(y[:, 0]), noisy).log_prob(y.T).sum()
    assert posterior.log_evidence.kind == "exact"
    assert float(posterior.log_evidence) == pytest.approx(float(evidence), rel=1e-8)
    draws = posterior.sample_functions(new, 2_000, torch.Generator().manual_seed(seed)) - found.mean
    empirical = torch.einsum("kio,kjo->ij", draws, draws) / 4_000
    error = (covariance.square() + covariance.diagonal().outer(covariance.diagonal())).sqrt() / math.sqrt(4_000)
    assert ((empirical - covariance).abs() < 5 * error).all()


def test_a_linear_network_has_its_exact_posterior(seed):
    """Without hidden layers the width is not in it: the same as ExactLinear, with its noise."""
    x, y, new = rows(seed)
    model = kn.Model(nn.Linear(2, 1).double(), kn.Gaussian(), kn.Normal(0.7))
    limit, exact = (method.fit(model, (x, y)) for method in (kn.InfiniteWidth(), kn.ExactLinear()))
    torch.testing.assert_close(limit.predict(new).mean, exact.predict(new).mean, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(limit.predict(new).std, exact.predict(new).std, rtol=1e-3, atol=1e-4)
    assert limit.diagnostics["likelihood.log_noise"] == pytest.approx(
        exact.diagnostics["likelihood.log_noise"], abs=1e-3
    )


def test_a_row_of_weight_two_is_two_rows(seed):
    x, y, new = rows(seed)
    model = kn.Model(network().double(), kn.Gaussian(NOISE), kn.Normal(0.3))
    weights = torch.ones(len(x))
    weights[:5] = 2.0
    weighted = kn.InfiniteWidth().fit(model, kn.Data((x, y), weights=weights))
    twice = kn.InfiniteWidth().fit(model, (torch.cat([x, x[:5]]), torch.cat([y, y[:5]])))
    torch.testing.assert_close(weighted.predict(new).mean, twice.predict(new).mean)
    torch.testing.assert_close(weighted.predict(new).std, twice.predict(new).std)
    assert float(weighted.log_evidence) == pytest.approx(float(twice.log_evidence), rel=1e-8)


def test_scales_are_where_the_evidence_is_largest():
    """Its slope in each hyperparameter, by differences of the evidence at fixed scales, is 0; and it has risen."""
    x, y, _ = rows(0, 12)
    net = nn.Sequential(nn.Linear(2, 30), kn.Erf(), nn.Linear(30, 1)).double()
    posterior = kn.InfiniteWidth().fit(kn.Model(net, kn.Gaussian(NOISE)), (x, y))
    start = {"0.weight": 2**-0.5, "2.weight": 30**-0.5, "0.bias": 0.5, "2.bias": 0.5}
    assert set(posterior.points) == {f"prior.{name}.log_scale" for name in start}
    best = {name: float(posterior.points[f"prior.{name}.log_scale"]) for name in start}

    def objective(logs: dict[str, float]) -> float:
        prior = {name: kn.Normal(math.exp(value)) for name, value in logs.items()}
        evidence = kn.InfiniteWidth().fit(kn.Model(net, kn.Gaussian(NOISE), prior), (x, y)).log_evidence
        return float(evidence) - 0.5 * sum((value - math.log(start[name])) ** 2 for name, value in logs.items())

    for name, value in best.items():
        slope = (objective({**best, name: value + 0.01}) - objective({**best, name: value - 0.01})) / 0.02
        assert abs(slope) < 0.02
    assert objective(best) > objective({name: math.log(scale) for name, scale in start.items()})
    assert "learned by the evidence" in str(posterior.diagnostics)


# --- labels ----------------------------------------------------------------------------------------------------------


def _labels(seed: int, n: int, classes: int) -> tuple[Tensor, Tensor, Tensor]:
    x, _, new = rows(seed, n)
    return x, (x.sum(1) * 1.5).round().long().clamp(0, classes - 1), new


@pytest.mark.parametrize("classes", [1, 3], ids=["bernoulli", "categorical"])
def test_laplace_for_labels_is_the_plain_algorithm(classes, seed):
    """Newton's method and determinants on the (outputs N) matrix, without any of the structure that is used."""
    x, labels, new = _labels(seed, 12, max(classes, 2))
    likelihood = kn.Categorical() if classes > 1 else kn.Bernoulli()
    model = kn.Model(network(classes).double(), likelihood, kn.Normal(0.4))
    posterior = kn.InfiniteWidth().fit(model, (x, labels if classes > 1 else labels.double()))
    n, outputs = len(x), classes
    k = torch.block_diag(*[kn.infinite_width_kernel(model, x)] * outputs)

    def log_likelihood(flat: Tensor) -> Tensor:
        f = flat.reshape(outputs, n).T
        if classes > 1:
            return f.log_softmax(1).gather(1, labels[:, None]).sum()
        return -nn.functional.binary_cross_entropy_with_logits(f[:, 0], labels.double(), reduction="sum")

    f = torch.zeros(outputs * n, dtype=torch.float64)
    for _ in range(30):
        w = -torch.autograd.functional.hessian(log_likelihood, f)
        slope = torch.autograd.functional.jacobian(log_likelihood, f)
        f = torch.linalg.solve(torch.eye(len(f), dtype=f.dtype) + k @ w, k @ (w @ f + slope))
    w = -torch.autograd.functional.hessian(log_likelihood, f)
    inner = torch.eye(len(f), dtype=f.dtype) + k @ w
    evidence = log_likelihood(f) - 0.5 * f @ torch.linalg.solve(k, f) - 0.5 * torch.logdet(inner)
    assert float(posterior.log_evidence) == pytest.approx(float(evidence), rel=1e-7)
    cross = torch.block_diag(*[kn.infinite_width_kernel(model, x, new)] * outputs)
    own = torch.block_diag(*[kn.infinite_width_kernel(model, new)] * outputs)
    covariance = own - cross.T @ w @ torch.linalg.solve(inner, cross)
    mean, found = posterior._joint(new)
    blocks = found[0] if classes > 1 else torch.block_diag(*found)
    torch.testing.assert_close(mean.T.flatten(), cross.T @ torch.linalg.solve(k, f), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(blocks, covariance, rtol=1e-6, atol=1e-6)
    _, rowwise = posterior._marginal(new)
    by_row = covariance.reshape(outputs, len(new), outputs, len(new)).diagonal(dim1=1, dim2=3).permute(2, 0, 1)
    torch.testing.assert_close(rowwise, by_row, rtol=1e-6, atol=1e-6)


def test_the_laplace_evidence_has_the_slope_of_its_values(seed):
    """Through the mode too, in a scale of the kernel, and with weights of the rows."""
    x, labels, _ = _labels(seed, 10, 3)
    kernel = kn.infinite_width_kernel(kn.Model(network(3).double(), kn.Categorical(), kn.Normal(0.4)), x)
    weights = torch.linspace(0.5, 2.0, len(x), dtype=torch.float64)

    def score(f: Tensor) -> Tensor:
        return (weights * f.T.log_softmax(1).gather(1, labels[:, None])[:, 0]).sum()

    def curvature(f: Tensor) -> Information:
        return Information(weights * f.softmax(0), labels=True)

    def evidence(scale: Tensor) -> Tensor:
        found = most_probable_functions(scale * kernel, score, curvature, torch.zeros(3, len(x), dtype=torch.float64))
        return laplace_evidence(scale * kernel, score, curvature, found.values)

    at = torch.tensor(1.3, dtype=torch.float64, requires_grad=True)
    slope = torch.autograd.grad(evidence(at), at)[0]
    difference = (evidence(at.detach() + 1e-4) - evidence(at.detach() - 1e-4)) / 2e-4
    assert float(slope) == pytest.approx(float(difference), rel=1e-5)


def test_rows_left_out_are_predicted_by_the_others(seed):
    x, y, _ = rows(seed, 8)
    kernel = kn.infinite_width_kernel(kn.Model(network().double(), kn.Gaussian(NOISE), kn.Normal(0.4)), x)
    noise = torch.full((1, 1), 0.04, dtype=torch.float64)
    mean, variance = left_out(kernel, y.T, noise, torch.ones(8, dtype=torch.float64))
    for n in range(8):
        rest = [k for k in range(8) if k != n]
        inner = kernel[rest][:, rest] + 0.04 * torch.eye(7, dtype=torch.float64)
        gain = torch.linalg.solve(inner, kernel[rest, n])
        torch.testing.assert_close(mean[0, n], gain @ y[rest, 0])
        torch.testing.assert_close(variance[0, n], kernel[n, n] - gain @ kernel[rest, n])


def test_scores_of_labels_as_numbers_are_calibrated(seed):
    """On data from the model, probabilities are worth about as much as those of Laplace's approximation."""
    x, labels, _ = _labels(seed, 150, 3)
    model = kn.Model(network(3).double(), kn.Categorical(), kn.Normal(0.4))
    numbers, laplace = (
        kn.InfiniteWidth(labels=kind).fit(model, (x[:100], labels[:100])) for kind in ("regression", "laplace")
    )
    scores = [kn.evaluate(each.predict(x[100:]), labels[100:]) for each in (numbers, laplace)]
    assert scores[0]["nll"] < scores[1]["nll"] + 0.2
    assert numbers.log_evidence is None and not numbers.diagnostics.bayes and laplace.diagnostics.bayes


def test_labels_as_numbers_are_saved_with_their_scale(tmp_path):
    x, labels, new = _labels(0, 30, 2)
    model = kn.Model(network().double(), kn.Bernoulli())
    posterior = kn.InfiniteWidth(labels="regression").fit(model, (x, labels.double()))
    loaded = kn.load(posterior.save(tmp_path / "posterior"))
    assert torch.equal(loaded.predict(new).probs, posterior.predict(new).probs)
    assert (posterior.predict(x).labels.flatten() == labels).float().mean() > 0.9


def test_a_poor_approximation_of_logits_is_said():
    """Under a very wide prior averages over the logits give other labels than the most probable logits do."""
    x, labels, _ = _labels(0, 40, 5)
    wide = kn.Model(network(5).double(), kn.Categorical(), {"4.weight": kn.Normal(40.0), "*": kn.Normal(0.4)})
    with pytest.warns(kn.ModelWarning, match="Laplace's approximation is poor here"):
        kn.InfiniteWidth().fit(wide, (x, labels))


@pytest.mark.filterwarnings("ignore::knowable.errors.ModelWarning")  # the targets are far from standardised
def test_scales_that_go_as_far_as_they_may_are_said():
    x, _, _ = rows(0, 15)
    model = kn.Model(nn.Linear(2, 1).double(), kn.Gaussian())
    y = x.sum(1, keepdim=True)
    with pytest.warns(kn.ConvergenceWarning, match=r"evidence would rise further: .*likelihood\.log_noise"):
        posterior = kn.InfiniteWidth().fit(model, (x, 1e6 * torch.randn(15, 1, dtype=torch.float64)))
    assert posterior.diagnostics.converged is False
    exact = kn.InfiniteWidth().fit(model, (x, y))  # without any noise, which is no reason to doubt
    assert exact.diagnostics.converged
    torch.testing.assert_close(exact.predict(x).mean, y, atol=1e-2, rtol=0.0)


# --- what is refused -------------------------------------------------------------------------------------------------


def test_what_cannot_be_done_is_refused():
    x, y, _ = rows(0)
    with pytest.raises(Unsupported, match="InfiniteWidth is for Gaussian"):
        kn.InfiniteWidth().fit(kn.Model(network().double(), kn.StudentT()), (x, y))
    model = kn.Model(network().double(), kn.Gaussian(NOISE), kn.Normal(0.3))
    with pytest.raises(InvalidArgument, match="a 20 x 20 kernel; max_rows is 10"):
        kn.InfiniteWidth(max_rows=10).fit(model, (x, y))
    with pytest.raises(InvalidArgument, match="kind"):
        kn.InfiniteWidth(kind="ntgp")
    same, noiseless = x[:1].expand(20, -1), kn.Model(network().double(), kn.Gaussian(1e-12), kn.Normal(0.3))
    crowded = kn.InfiniteWidth().fit(noiseless, (same, y))
    assert "below the rounding errors of the kernel" in str(crowded.diagnostics)
    torch.testing.assert_close(crowded.predict(x[:1]).mean, y.mean(0, keepdim=True), atol=1e-3, rtol=1e-3)
    with pytest.raises(InvalidArgument, match="no Cholesky factor"):
        Factors(torch.full((3, 3), math.nan, dtype=torch.float64), Information(torch.ones(1, 3, dtype=torch.float64)))
