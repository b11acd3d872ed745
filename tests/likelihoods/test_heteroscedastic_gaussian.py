from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import integrate, special, stats

from knowable.errors import InvalidData
from knowable.likelihoods import HeteroscedasticGaussian

LIKELIHOOD = HeteroscedasticGaussian()


@pytest.mark.parametrize("shape", [(6, 2), (6, 6), (6, 3, 4)])
def test_log_prob_matches_scipy(shape: tuple[int, ...]):
    output = torch.randn(shape, dtype=torch.float64)
    y = LIKELIHOOD.check_target(torch.randn(*shape[:-1], shape[-1] // 2, dtype=torch.float64), output)
    mean, log_scale = np.split(output.numpy(), 2, axis=-1)
    expected = stats.norm.logpdf(y.numpy(), mean, np.exp(log_scale)).reshape(6, -1).sum(1)
    np.testing.assert_allclose(LIKELIHOOD.log_prob(output, y, {}), expected, rtol=1e-12)


def test_the_density_integrates_to_one():
    def density(y: float) -> float:
        output = torch.tensor([[0.4, -0.5]], dtype=torch.float64)
        return LIKELIHOOD.log_prob(output, torch.tensor([[y]], dtype=torch.float64), {}).exp().item()

    assert integrate.quad(density, -12, 12)[0] == pytest.approx(1, abs=1e-8)


def test_gradients_match_finite_differences_and_vmap_equals_the_loop():
    outputs = torch.randn(3, 4, 2, dtype=torch.float64, requires_grad=True)
    y = torch.randn(4, 1, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda f: LIKELIHOOD.log_prob(f, y, {}), outputs[0])
    batched = torch.func.vmap(lambda f: LIKELIHOOD.log_prob(f, y, {}))(outputs)
    torch.testing.assert_close(batched, torch.stack([LIKELIHOOD.log_prob(f, y, {}) for f in outputs]))


def test_odd_outputs_are_refused():
    with pytest.raises(InvalidData, match=r"last dimension is even.*\(rows, 3\).*2 \* d"):
        LIKELIHOOD.check_target(torch.zeros(4), torch.zeros(4, 3))
    with pytest.raises(InvalidData, match=r"shape \(rows,\)"):
        LIKELIHOOD.check_target(torch.zeros(4), torch.zeros(4))


def test_a_vector_target_is_shaped_like_the_mean():
    assert LIKELIHOOD.check_target(torch.zeros(4), torch.zeros(2, 2)).shape == (4, 1)


def test_the_prediction_mixes_means_and_noises_of_all_draws():
    outputs = torch.randn(3, 5, 4, dtype=torch.float64)
    weights = torch.tensor([0.1, 0.6, 0.3], dtype=torch.float64)
    prediction = LIKELIHOOD.predict(outputs, {}, weights.log())
    mean, scale = outputs[..., :2].numpy(), outputs[..., 2:].exp().numpy()
    w = weights.view(3, 1, 1).numpy()
    expected_mean = (w * mean).sum(0)
    np.testing.assert_allclose(prediction.mean, expected_mean, rtol=1e-12)
    np.testing.assert_allclose(prediction.aleatoric, (w * scale**2).sum(0), rtol=1e-12)
    np.testing.assert_allclose(prediction.variance, (w * (mean**2 + scale**2)).sum(0) - expected_mean**2, rtol=1e-9)
    y = torch.randn(5, 2, dtype=torch.float64)
    joint = stats.norm.logpdf(y.numpy(), mean, scale).sum(-1)
    expected = special.logsumexp(joint, axis=0, b=weights.numpy()[:, None])
    np.testing.assert_allclose(prediction.log_prob(y), expected, rtol=1e-12)


def test_aligned_targets_have_the_shape_and_dtype_of_the_mean():
    aligned = LIKELIHOOD.align(torch.arange(4), torch.zeros(4, 2))
    assert aligned.shape == (4, 1) and aligned.dtype == torch.float32
    with pytest.raises(InvalidData, match="shape"):
        LIKELIHOOD.align(torch.zeros(4, 2), torch.zeros(4, 2))
