"""The seed fixes everything, and nothing else does."""

from __future__ import annotations

import torch

from knowable.core.posterior import Posterior
from knowable.testing.subject import Subject, expect, expect_same_posterior


def check_same_seed_gives_the_same_bits(subject: Subject) -> None:
    """Two fits with one seed agree exactly, whatever was drawn from the global generator in between."""
    case = subject.case()
    with torch.random.fork_rng():
        torch.manual_seed(1)
        first = subject.fit(case, seed=3)
        torch.manual_seed(2)
        second = subject.fit(case, seed=3)
    expect_same_posterior(first, second, case.x, "Two fits with the same seed")


def check_seed_matters_if_and_only_if_declared(subject: Subject) -> None:
    """Fits with two seeds differ, or agree exactly where the method says that it uses no randomness."""
    case = subject.case()
    first, second = subject.fit(case, seed=0), subject.fit(case, seed=1)
    if subject.seeded:
        expect(_differ(first, second), "Fits with different seeds gave the same posterior: is the seed used?")
    else:
        expect(not _differ(first, second), "The method is declared without randomness, but the seed changes its fit.")


def _differ(first: Posterior, second: Posterior) -> bool:
    pairs = [(first.mean(), second.mean()), (first.std(), second.std())]
    return any(not torch.equal(a[name], b[name]) for a, b in pairs for name in a)
