from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats

from knowable.errors import InvalidArgument
from knowable.priors import StudentTPrior
from knowable.priors.student_t import standard_student_t


@pytest.mark.parametrize("df", [0.5, 3.0, 1e4])
def test_log_prob_matches_scipy(df: float):
    w = 10 * torch.randn(50, dtype=torch.float64)
    expected = stats.t.logpdf(w.numpy(), df, 0, 0.4)
    np.testing.assert_allclose(StudentTPrior(df, 0.4).log_prob(w), expected, rtol=1e-9)


@pytest.mark.parametrize("df", [0.5, 3.0, 1e4])
def test_samples_have_the_priors_quantiles(df: float, generator: torch.Generator):
    n = 40_000
    drawn = StudentTPrior(df, 2.0).sample((n,), generator=generator, like=torch.zeros(1))
    assert torch.isfinite(drawn).all()
    for q in (0.01, 0.3, 0.5, 0.9, 0.999):
        below = (drawn <= stats.t.ppf(q, df, scale=2.0)).double().mean().item()
        assert abs(below - q) < 4 * (q * (1 - q) / n) ** 0.5


def test_standard_draws_have_the_dtype_shape_and_variance_asked_for(generator: torch.Generator):
    n, df = 40_000, 12.0
    drawn = standard_student_t(df, (n // 2, 2), generator=generator, like=torch.zeros(1, dtype=torch.float64))
    assert drawn.dtype == torch.float64 and drawn.shape == (n // 2, 2)
    variance, excess = stats.t.var(df), float(stats.t.stats(df, moments="k"))
    assert abs(drawn.var().item() / variance - 1) < 4 * ((2 + excess) / n) ** 0.5


def test_gradients_match_finite_differences_also_in_a_learned_scale():
    w = torch.randn(4, dtype=torch.float64, requires_grad=True)
    learned = torch.tensor(0.8, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda v, s: StudentTPrior(3.0, s).log_prob(v), (w, learned))


def test_vmap_over_values_equals_the_whole():
    w = torch.randn(3, 5)
    torch.testing.assert_close(torch.func.vmap(StudentTPrior().log_prob)(w), StudentTPrior().log_prob(w))


def test_it_has_no_closed_forms_and_refuses_bad_arguments():
    assert StudentTPrior().normal_moments() is None
    assert StudentTPrior().kl_from_normal(torch.zeros(1), torch.ones(1)) is None
    with pytest.raises(InvalidArgument, match="df must be a finite number > 0, got 0"):
        StudentTPrior(0.0)
    with pytest.raises(InvalidArgument, match="scale must be a finite number > 0"):
        StudentTPrior(3.0, 0.0)
