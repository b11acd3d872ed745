"""Tests of feature densities against numpy and scikit-learn."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.covariance import oas
from sklearn.neighbors import NearestNeighbors
from torch import nn

import knowable as kn
from knowable.decisions.feature_density import KINDS, shrunk_covariance


def _posterior(members: int = 1) -> kn.Posterior:
    generator = torch.Generator().manual_seed(1)
    net = nn.Sequential(nn.Conv2d(1, 3, 2), nn.Tanh(), nn.Flatten(), nn.Linear(27, 5), nn.Tanh(), nn.Linear(5, 3))
    model = kn.Model(net.double(), kn.Categorical())
    stack = {
        name: 0.5 * torch.randn((members, *value.shape), generator=generator, dtype=value.dtype)
        for name, value in model.params().items()
    }
    return kn.Particles(model, stack)


def _data(rows: int = 60, seed: int = 0, scale: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    x = scale * torch.randn((rows, 1, 4, 4), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return x, torch.arange(rows) % 3


def _features(posterior: kn.Posterior, x: torch.Tensor, member: int, depth: int) -> np.ndarray:
    """What leaves the first ``depth`` layers."""
    net = nn.Sequential(*list(posterior.model.net)[:depth])
    stack = {name: value[member] for name, value in posterior.stack.items() if int(name[0]) < depth}
    found = torch.func.functional_call(net, stack, x).detach()
    return (found.mean((2, 3)) if found.dim() > 2 else found).numpy()


def _mahalanobis(train: np.ndarray, labels: np.ndarray, new: np.ndarray) -> np.ndarray:
    means = {c: train[labels == c].mean(0) for c in np.unique(labels)}
    centred = np.stack([row - means[c] for row, c in zip(train, labels, strict=True)])
    covariance, _ = oas(centred, assume_centered=True)
    inverse = np.linalg.inv(covariance)
    return np.array([min((z - m) @ inverse @ (z - m) for m in means.values()) for z in new])


@pytest.mark.parametrize("members", [1, 2])
@pytest.mark.parametrize(("layer", "depth"), [(None, 5), ("3", 4), ("0", 1)])
def test_mahalanobis_distances_are_those_of_numpy(members: int, layer: str | None, depth: int, seed):
    posterior, (x, y), (new, _) = _posterior(members), _data(seed=seed), _data(8, seed=seed + 1)
    expected, relative = [], []
    for k in range(members):
        train, other = _features(posterior, x, k, depth), _features(posterior, new, k, depth)
        expected.append(_mahalanobis(train, y.numpy(), other))
        relative.append(expected[-1] - _mahalanobis(train, np.zeros(len(train)), other))
    for kind, values in (("mahalanobis", expected), ("relative_mahalanobis", relative)):
        density = kn.FeatureDensity(posterior, x, y, kind=kind, layer=layer)
        np.testing.assert_allclose(density(new).numpy(), np.mean(values, 0), rtol=1e-6)


def test_nearest_neighbours_are_those_of_scikit_learn(seed):
    posterior, (x, _), (new, _) = _posterior(), _data(seed=seed), _data(8, seed=seed + 1)
    train, other = (_features(posterior, each, 0, 5) for each in (x, new))
    train, other = (each / np.linalg.norm(each, axis=1, keepdims=True) for each in (train, other))
    distances, _ = NearestNeighbors(n_neighbors=4).fit(train).kneighbors(other)
    density = kn.FeatureDensity(posterior, x, kind="knn", neighbours=4)
    np.testing.assert_allclose(density(new).numpy(), distances[:, -1], atol=1e-8)


def test_the_covariance_is_that_of_scikit_learn_and_of_full_rank_without_spread(seed):
    rows = torch.randn((30, 6), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    expected, _ = oas(rows.numpy(), assume_centered=True)
    np.testing.assert_allclose(shrunk_covariance(rows).numpy(), expected, rtol=1e-7, atol=1e-8)
    for degenerate in (torch.zeros(5, 4, dtype=torch.float64), torch.ones(5, 4, dtype=torch.float64)):
        assert torch.linalg.cholesky(shrunk_covariance(degenerate)).isfinite().all()


@pytest.mark.parametrize("kind", KINDS)
def test_the_score_can_be_differentiated(kind: str):
    posterior, (x, y), (new, _) = _posterior(2), _data(), _data(4, seed=1)
    density = kn.FeatureDensity(posterior, x, y, kind=kind)
    inputs = new.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(density(inputs).sum(), inputs)
    way = torch.randn(new.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    difference = (density(new + 1e-6 * way) - density(new - 1e-6 * way)).sum() / 2e-6
    assert (gradient * way).sum().item() == pytest.approx(difference.item(), rel=1e-4)
    assert not density(new).requires_grad


def test_far_points_score_high_and_the_detection_knows_the_density(seed):
    posterior, (x, y) = _posterior(), _data(200, seed=seed)
    (inside, _), (outside, _), (validation, _) = (
        _data(80, seed + 1),
        _data(80, seed + 2, scale=8.0),
        _data(80, seed + 3),
    )
    density = kn.FeatureDensity(posterior, x, y, layer="0", kind="mahalanobis")
    found = kn.detect(inside, outside, score=density, validation=validation)
    assert found.score == "FeatureDensity" and found.auroc > 0.8
    assert found.flags(outside).double().mean().item() == found.tpr_at_fpr()


@pytest.mark.filterwarnings("ignore::knowable.KnowableWarning")
def test_variational_posteriors_use_their_mean_or_draws_and_mixtures_their_members():
    x, y = _data()
    net = nn.Sequential(nn.Flatten(), nn.Linear(16, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    model = kn.Model(net, kn.Categorical())
    posterior = kn.MeanFieldVI(epochs=2).fit(model, (x, y))
    mean = kn.FeatureDensity(posterior, x, y)
    atom = kn.Particles(model, {name: value.unsqueeze(0) for name, value in posterior.mean().items()})
    torch.testing.assert_close(mean(x), kn.FeatureDensity(atom, x, y)(x))
    assert "networks=3" in repr(kn.FeatureDensity(posterior, x, y, samples=3))
    both = kn.FeatureDensity(kn.Mixture(model, [posterior, atom]), x, y)
    torch.testing.assert_close(both(x), mean(x))


def test_wrong_calls_are_named():
    posterior, (x, y) = _posterior(), _data()
    for call, error, said in (
        (lambda: kn.FeatureDensity(posterior, x, y, kind="gda"), kn.InvalidArgument, "kind must be one of"),
        (lambda: kn.FeatureDensity(posterior, x, y, layer="7"), kn.InvalidArgument, "layer must be one of"),
        (lambda: kn.FeatureDensity(posterior, x[:3], kind="knn"), kn.InvalidArgument, "at most the 3 training rows"),
        (lambda: kn.FeatureDensity(posterior, x, y[:5]), kn.InvalidData, "same number of rows"),
        (lambda: kn.FeatureDensity(posterior, x, y)(x[:, :, :2]), kn.InvalidData, "The network cannot take"),
        (lambda: kn.FeatureDensity(3, x, y), kn.InvalidType, "posterior"),
        (
            lambda: kn.detect(posterior.predict(x), x, score=kn.FeatureDensity(posterior, x, y)),
            kn.InvalidType,
            "x must",
        ),
    ):
        with pytest.raises(error, match=said):
            call()
