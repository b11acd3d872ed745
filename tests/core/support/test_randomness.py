"""Tests of seeds and streams."""

from __future__ import annotations

import math

import pytest
import torch
from scipy import stats

from knowable.core.support.randomness import (
    derive_seed,
    fast_keep,
    fast_randn,
    generator_for,
    noise_from,
    own_randomness,
    random_state,
    raw_noise,
    restore_random_state,
)

LARGE = (4, 50_000)  # above the size from which the fast generator is used


def test_derived_seeds_are_fixed_distinct_and_fit_a_generator():
    seeds = [derive_seed(seed, *path) for seed in range(20) for path in [(), ("a",), ("b",), ("a", 1), ("a", 2), (1,)]]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert derive_seed(3, "predict", 7) == derive_seed(3, "predict", 7)
    assert derive_seed(0) == 0x5FECEB66FFC86F38 >> 1  # from the SHA-256 of "0": the same on every machine


def test_generators_on_different_paths_are_independent_streams():
    # correlations of n independent pairs err by 1 / sqrt(n): 5 of those
    n = 20_000
    first, second = (torch.randn(n, generator=generator_for(1, "predict", k)) for k in (0, 1))
    assert torch.equal(first, torch.randn(n, generator=generator_for(1, "predict", 0)))
    assert abs(torch.corrcoef(torch.stack([first, second]))[0, 1]) < 5 / math.sqrt(n)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_fast_noise_is_standard_normal(seed, dtype):
    # n values: mean errs by 1 / sqrt(n), variance by sqrt(2 / n), kurtosis by sqrt(24 / n); 5 of those
    torch.manual_seed(seed)
    noise = fast_randn(*LARGE, like=torch.zeros((), dtype=dtype))
    n = noise.numel()
    assert noise.shape == LARGE
    assert noise.dtype == dtype
    assert abs(noise.mean()) < 5 / math.sqrt(n)
    assert abs(noise.var() - 1) < 5 * math.sqrt(2 / n)
    assert abs(stats.kurtosis(noise.numpy(), axis=None)) < 5 * math.sqrt(24 / n)
    assert stats.kstest(noise.flatten()[::10].numpy(), "norm").pvalue > 1e-4


def test_the_tails_of_fast_noise_are_as_heavy_as_they_should_be(seed):
    # counts beyond 4 standard deviations are Poisson; five of its standard deviations
    torch.manual_seed(seed)
    noise = fast_randn(1, 4_000_000, like=torch.zeros(()))
    for bound in (3.0, 4.0):
        expected = noise.numel() * stats.norm.sf(bound)
        for tail in (noise > bound, noise < -bound):
            assert abs(tail.sum().item() - expected) < 5 * math.sqrt(expected)
    assert noise.abs().max() < 5.5


def test_rows_and_neighbours_of_fast_noise_are_uncorrelated(seed):
    torch.manual_seed(seed)
    noise = fast_randn(*LARGE, like=torch.zeros(()))
    lagged = torch.stack([noise[0, :-8], *(noise[0, lag : noise.shape[1] - 8 + lag] for lag in range(1, 8))])
    for rows in (noise, lagged):
        correlations = rows.corrcoef() - torch.eye(len(rows))
        assert correlations.abs().max() < 5 / math.sqrt(rows.shape[1])


def test_fast_noise_depends_on_the_global_seed_alone():
    torch.manual_seed(1)
    first, then = (fast_randn(*LARGE, like=torch.zeros(())) for _ in range(2))
    torch.manual_seed(1)
    assert torch.equal(fast_randn(*LARGE, like=torch.zeros(())), first)
    assert not torch.equal(then, first)


@pytest.mark.parametrize("shape", [(1, 0), (1, 1), (3, 7), (1, 65_537), (7, 9_999)])
def test_noise_of_any_size_is_filled_to_the_last_value(shape):
    noise = fast_randn(*shape, like=torch.zeros(()))
    assert noise.shape == shape
    assert torch.isfinite(noise).all()
    assert noise.unique().numel() > 0.99 * noise.numel() - 1


def test_small_noise_is_the_global_generators_own():
    torch.manual_seed(1)
    expected = torch.randn(3, 7)
    torch.manual_seed(1)
    assert torch.equal(fast_randn(3, 7, like=torch.zeros(())), expected)


def test_noise_from_bytes_has_five_moments_of_the_normal_exactly():
    values = noise_from(torch.arange(-128, 128, dtype=torch.int32)).double()  # every byte once
    assert values.unique().numel() == 256
    # coefficients of eight digits, values in single precision
    for power, moment in ((1, 0.0), (2, 1.0), (3, 0.0), (4, 3.0), (5, 0.0)):
        assert abs(values.pow(power).mean() - moment) < 1e-6


def test_noise_from_bytes_is_independent_and_takes_all_values_alike(seed):
    torch.manual_seed(seed)
    raw = raw_noise(*LARGE, like=torch.zeros(()))
    assert raw.shape == LARGE and raw.dtype == torch.int32
    # 255 degrees of freedom; 1e-5 from either side
    low, high = stats.chi2.ppf([1e-5, 1 - 1e-5], 255)
    counts, expected = (raw.flatten() + 128).bincount(minlength=256).double(), raw.numel() / 256
    assert low < ((counts - expected) ** 2 / expected).sum() < high
    noise = noise_from(raw)
    lagged = torch.stack([noise[0, :-8], *(noise[0, lag : noise.shape[1] - 8 + lag] for lag in range(1, 8))])
    for rows in (noise, lagged):
        assert (rows.corrcoef() - torch.eye(len(rows))).abs().max() < 5 / math.sqrt(rows.shape[1])


def test_noise_from_bytes_depends_on_the_global_seed_alone():
    torch.manual_seed(1)
    first, then = (raw_noise(*LARGE, like=torch.zeros(())) for _ in range(2))
    torch.manual_seed(1)
    assert torch.equal(raw_noise(*LARGE, like=torch.zeros(())), first)
    assert not torch.equal(then, first)


@pytest.mark.parametrize(("shape", "dtype"), [((3, 7), torch.float32), (LARGE, torch.float64)])
def test_noise_that_bytes_do_not_make_quicker_is_normal(shape, dtype):
    torch.manual_seed(1)
    expected = torch.randn(shape, dtype=dtype)
    torch.manual_seed(1)
    assert torch.equal(noise_from(raw_noise(*shape, like=torch.zeros((), dtype=dtype))), expected)


def test_own_randomness_leaves_the_global_state_alone_even_when_something_goes_wrong():
    state = torch.get_rng_state()
    with own_randomness(3):
        first = torch.rand(2)
    with pytest.raises(RuntimeError, match="must match"), own_randomness(4):
        torch.rand(3) + torch.rand(2)
    assert torch.equal(torch.get_rng_state(), state)
    torch.rand(1)
    with own_randomness(3):
        assert torch.equal(torch.rand(2), first)


def test_a_restored_state_repeats_what_followed():
    torch.rand(3)
    state = random_state()
    expected = torch.rand(5)
    torch.rand(7)
    restore_random_state(state)
    assert torch.equal(torch.rand(5), expected)


@pytest.mark.parametrize("shape", [(4, 10), LARGE], ids=["small", "large"])
@pytest.mark.parametrize("rate", [1e-3, 0.3, 0.9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_masks_are_zero_at_their_rate(seed, shape, rate, dtype):
    masks = torch.cat([fast_keep(*shape, rate, like=torch.zeros((), dtype=dtype)) for _ in range(3)])
    assert masks.dtype == dtype and masks.shape == (3 * shape[0], shape[1])
    assert ((masks == 0) | (masks == 1)).all()
    assert abs((masks == 0).double().mean() - rate) < 5 * math.sqrt(rate * (1 - rate) / masks.numel())


def test_masks_are_independent_of_each_other_and_follow_the_global_generator(seed):
    like, n = torch.zeros(()), 200_000
    first, second = (fast_keep(1, n, 0.4, like=like)[0] for _ in range(2))
    for one, other in ((first, second), (first[1:], first[:-1])):
        assert abs(torch.corrcoef(torch.stack([one, other]))[0, 1]) < 5 / math.sqrt(n)
    torch.manual_seed(seed)
    again = fast_keep(1, n, 0.4, like=like)
    torch.manual_seed(seed)
    assert torch.equal(again, fast_keep(1, n, 0.4, like=like))


def test_masks_at_the_ends_of_the_scale_are_all_ones_or_all_zeros():
    for rows in (1, 100):
        assert fast_keep(rows, 1000, 0.0, like=torch.zeros(())).all()
        assert not fast_keep(rows, 1000, 1.0 - 1e-12, like=torch.zeros(())).any()
