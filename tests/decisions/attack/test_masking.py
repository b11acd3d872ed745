"""Tests of the checks for masked gradients: an honest model passes, masked ones do not."""

from __future__ import annotations

import torch
from torch import nn

import knowable as kn

from .cases import linear_regression, small_ensemble

SETTING = {"steps": 8, "queries": 60}


class _Staircase(torch.autograd.Function):
    """A value in steps with a gradient that says nothing."""

    @staticmethod
    def forward(ctx, x):
        return (4 * x).round() / 4

    @staticmethod
    def backward(ctx, gradient):
        return torch.zeros_like(gradient)


class _Wrong(torch.autograd.Function):
    """The same value, with a gradient in the wrong direction."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return -gradient


class _Masked(nn.Module):
    def __init__(self, net: nn.Module, mask: type[torch.autograd.Function]):
        super().__init__()
        self.net, self.mask = net, mask

    def forward(self, x):
        return self.net(self.mask.apply(x))


def _masked(posterior: kn.Posterior, mask: type[torch.autograd.Function]) -> kn.Posterior:
    model = kn.Model(_Masked(posterior.model.net, mask), kn.Categorical())
    return kn.Particles(model, {f"net.{name}": value for name, value in posterior.stack.items()})


def test_an_honest_model_passes_and_the_report_says_what_was_found():
    posterior, x, y = small_ensemble()
    surrogate, _, _ = small_ensemble(seed=1)
    report = kn.attack.check_masking(posterior, x, y, 0.3, surrogate=surrogate, **SETTING)
    assert report.passed, report
    assert [check.name for check in report.checks] == [
        "epsilon", "steps", "random search", "transfer from the surrogate", "no bound", "gradients",
    ]  # fmt: skip
    text = repr(report)
    assert "no sign of masked gradients" in text and "every label falls" in text and "does not beat PGD" in text


def test_gradients_of_zero_are_found():
    posterior, x, y = small_ensemble()
    report = kn.attack.check_masking(_masked(posterior, _Staircase), x, y, 1.0, **SETTING)
    failed = {check.name for check in report.checks if not check.passed}
    assert "gradients" in failed and "may be masked" in repr(report)


def test_gradients_that_mislead_lose_to_random_search():
    posterior, x, y = small_ensemble()
    report = kn.attack.check_masking(_masked(posterior, _Wrong), x, y, 0.5, norm=2, **SETTING)
    failed = {check.name for check in report.checks if not check.passed}
    assert {"random search", "no bound"} <= failed


def test_numbers_are_checked_without_labels():
    weights = torch.randn((2, 3), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x = torch.randn((10, 3), generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    y = (x @ weights.mean(0) + 1.0).unsqueeze(1)
    report = kn.attack.check_masking(linear_regression(weights), x, y, 0.2, **SETTING)
    assert report.passed, report
    assert "squared error" in repr(report)
