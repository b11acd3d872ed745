"""What every family must agree in with the dense normal that it stands for."""

from __future__ import annotations

import numpy as np
import scipy.optimize
import torch
from torch import Tensor, nn

import knowable as kn
from knowable.core.network.params import Layout
from knowable.inference.variational.matrix_normal import Side
from knowable.inference.variational.structured import FamilyModule

DRAWS = 20_000


class Bag(nn.Module):
    """A network whose parameters have given shapes; it is never run."""

    def __init__(self, **shapes: tuple[int, ...]):
        super().__init__()
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape, dtype=torch.float64)))


def model_of(net: nn.Module) -> kn.Model:
    return kn.Model(net, kn.Gaussian(0.3))


def layout_of(model: kn.Model) -> Layout:
    return Layout.of(model.params())


def moved(module: FamilyModule, seed: int) -> FamilyModule:
    """The same family with all its numbers shaken, so that nothing is zero or equal by design; triangles stay so."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for value in module.parameters():
            value.add_(0.4 * torch.randn(value.shape, generator=generator, dtype=value.dtype))
        for side in module.modules():
            if isinstance(side, Side) and side.mix is not None:
                side.mix.tril_(-1)
    return module


def check_against_dense(module: FamilyModule, model: kn.Model, loc: Tensor, covariance: Tensor, seed: int) -> None:
    """Draws, entropy, moments, density and posterior of ``module`` are those of N(loc, covariance)."""
    dense = torch.distributions.MultivariateNormal(loc, covariance)
    torch.testing.assert_close(module.entropy(), dense.entropy())
    means, variances = module.moments()
    torch.testing.assert_close(means, loc)
    torch.testing.assert_close(variances, covariance.diagonal())
    _check_draws(module, loc, covariance, seed)
    _check_held_density(module, dense)
    _check_posterior(module, model, dense)


def _check_draws(module: FamilyModule, loc: Tensor, covariance: Tensor, seed: int) -> None:
    """Moments of many draws, each within 5 standard errors; all at once and in one call with the rest."""
    torch.manual_seed(seed)
    with torch.no_grad():
        both = [module.draw(DRAWS)[0], module.draw_with_terms(DRAWS).values]
    variance = covariance.diagonal()
    for values in both:
        assert values.shape == (DRAWS, len(loc))
        assert ((values.mean(0) - loc).abs() < 5 * (variance / DRAWS).sqrt()).all()
        error = ((covariance.square() + variance.outer(variance)) / DRAWS).sqrt()
        assert ((values.T.cov() - covariance).abs() < 5 * error).all()
    terms = module.draw_with_terms(1)
    assert terms.log_density is None
    torch.testing.assert_close(terms.entropy, module.entropy())
    torch.testing.assert_close(terms.moments, module.moments())


def _check_held_density(module: FamilyModule, dense: torch.distributions.MultivariateNormal) -> None:
    """Log densities up to a constant, with a gradient in the values and none in the parameters."""
    values = dense.sample((7,)).requires_grad_()
    found = module.held_log_density(values)
    expected = dense.log_prob(values.detach())
    torch.testing.assert_close(found - found[0], expected - expected[0])
    grads = torch.autograd.grad(found.sum(), [values, *module.parameters()], allow_unused=True)
    slope = torch.linalg.solve(dense.covariance_matrix, (dense.loc - values.detach()).T).T
    torch.testing.assert_close(grads[0], slope)
    assert all(grad is None for grad in grads[1:])


def _check_posterior(module: FamilyModule, model: kn.Model, dense: torch.distributions.MultivariateNormal) -> None:
    posterior = module.posterior(model, seed=3)
    values = dense.sample((5,))
    found = posterior.log_prob(module.layout.views(values))
    torch.testing.assert_close(found, dense.log_prob(values))
    assert posterior.seed == 3
    std = posterior.std()
    torch.testing.assert_close(module.layout.flatten(std), dense.covariance_matrix.diagonal().sqrt())


def check_gradient_of_terms(module: FamilyModule, seed: int) -> None:
    """What is computed together has the gradient of what is computed apart, for the same noise."""
    results = []
    for together in (True, False):
        torch.manual_seed(seed)
        if together:
            found = module.draw_with_terms(3)
            values, entropy, (means, variances) = found.values, found.entropy, found.moments
        else:
            values, entropy, (means, variances) = module.draw(3)[0], module.entropy(), module.moments()
        weights = torch.linspace(-1, 1, values.numel(), dtype=values.dtype).view_as(values)
        total = (weights * values.sin()).sum() + 0.7 * entropy + (means * variances.sqrt()).sum()
        results.append((total, torch.autograd.grad(total, list(module.parameters()))))
    torch.testing.assert_close(results[0], results[1])


def check_start(module: FamilyModule, loc: Tensor, scale: float) -> None:
    """A new distribution has these means and standard deviations."""
    means, variances = module.moments()
    torch.testing.assert_close(means, loc)
    torch.testing.assert_close(variances.sqrt(), torch.full_like(loc, scale))


def normal_divergence(loc: Tensor, covariance: Tensor, mean: Tensor, precision: Tensor) -> float:
    """KL(N(loc, covariance) ‖ N(mean, precision⁻¹)), densely and in double precision."""
    loc, covariance, mean, precision = (value.detach().double() for value in (loc, covariance, mean, precision))
    product, away = precision @ covariance, loc - mean
    return 0.5 * (product.trace() + away @ precision @ away - len(loc) - torch.logdet(product)).item()


def dense_moments(posterior: kn.Posterior, layout: Layout) -> tuple[Tensor, Tensor]:
    """Mean and covariance of a normal posterior in the order of ``layout``."""
    if isinstance(posterior, kn.DiagonalNormal | kn.MomentNormal):
        return layout.flatten(posterior.loc), layout.flatten(posterior.scale).square().diag()
    joint = posterior.as_prior().joint_normal(layout)
    assert joint is not None
    return joint[0], torch.linalg.inv(joint[1])


def best_low_rank(precision: Tensor, rank: int) -> float:
    """The least divergence from N(m, precision⁻¹) of normals with a diagonal and ``rank`` directions, by scipy.

    There are several valleys: the best of eight searches from different places.
    """
    size, generator = len(precision), torch.Generator().manual_seed(0)

    def divergence(at: np.ndarray) -> tuple[float, np.ndarray]:
        numbers = torch.tensor(at, requires_grad=True)
        factor = numbers[size:].view(size, rank)
        covariance = (2 * numbers[:size]).exp().diag() + factor @ factor.T
        product = precision @ covariance
        value = 0.5 * (product.trace() - size - torch.logdet(product))
        value.backward()
        assert numbers.grad is not None
        return value.item(), numbers.grad.numpy()

    scale = precision.diagonal().rsqrt()
    found = []
    for _ in range(8):
        factor = 0.5 * scale.unsqueeze(1) * torch.randn(size, rank, generator=generator, dtype=torch.float64)
        start = torch.cat([scale.log(), factor.flatten()]).numpy()
        found.append(scipy.optimize.minimize(divergence, start, jac=True, method="L-BFGS-B").fun)
    return float(min(found))
