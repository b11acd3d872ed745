"""Tests of agreement with laplace-torch, where it is installed.

It has a covariance of its own for biases; networks without them are the same to both.
"""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import knowable as kn

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    peer = pytest.importorskip("laplace", reason="laplace-torch is not installed")

pytestmark = pytest.mark.filterwarnings("ignore")
PRIOR = 0.7  # standard deviation


def network(bias: bool) -> nn.Module:
    return nn.Sequential(nn.Linear(3, 6, bias=bias), nn.Tanh(), nn.Linear(6, 4, bias=bias))


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 2, 3, bias=False), nn.Tanh(), nn.Flatten(), nn.Linear(2 * 16, 4, bias=False)
    )  # fmt: skip


def both(net: nn.Module, x: torch.Tensor, y: torch.Tensor, structure: str, **settings):
    """Theirs and ours around the same weights."""
    kind = "classification" if y.dtype == torch.long else "regression"
    theirs = peer.Laplace(
        net, kind, subset_of_weights="all", hessian_structure=structure, prior_precision=PRIOR**-2, **settings
    )
    theirs.fit(DataLoader(TensorDataset(x, y), batch_size=len(x)))
    likelihood = kn.Categorical() if kind == "classification" else kn.Gaussian(settings["sigma_noise"])
    model = kn.Model(net, likelihood, kn.Normal(PRIOR))
    return theirs, kn.Laplace(structure=structure, tune="never").fit(model, (x, y), start="network")


def assert_agreement(theirs, ours, x: torch.Tensor) -> None:
    mean, covariance = theirs._glm_predictive_distribution(x)
    outputs = ours._closed_form(x, 2, 0, None)
    torch.testing.assert_close(outputs.mean, mean.detach(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(outputs.covariance, covariance.detach(), rtol=1e-4, atol=1e-5)
    assert float(ours.log_evidence) == pytest.approx(theirs.log_marginal_likelihood().item(), rel=1e-4)


@pytest.mark.parametrize(("structure", "bias"), [("full", True), ("diag", True), ("kron", False)])
def test_classification_agrees(structure, bias):
    x, y = torch.randn(20, 3), torch.randint(0, 4, (20,))
    theirs, ours = both(network(bias), x, y, structure)
    assert_agreement(theirs, ours, x)
    torch.testing.assert_close(ours.predict(x).probs, theirs(x, link_approx="probit").detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("structure", "bias"), [("full", True), ("diag", True), ("kron", False)])
def test_regression_agrees(structure, bias):
    x, y = torch.randn(20, 3), torch.randn(20, 4)
    theirs, ours = both(network(bias), x, y, structure, sigma_noise=0.3)
    assert_agreement(theirs, ours, x)


@pytest.mark.parametrize("structure", ["full", "kron"])
def test_convolutions_agree(structure):
    x, y = torch.randn(12, 1, 6, 6), torch.randint(0, 4, (12,))
    assert_agreement(*both(convolutions(), x, y, structure), x)
