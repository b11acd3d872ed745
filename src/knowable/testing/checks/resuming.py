"""A fit that is stopped and taken up again ends where it would have ended.

To stop a fit in its middle, the network itself counts how often it is run for a gradient and raises at a chosen
count, as a keyboard or a failing machine would. Samplers are told to run the network itself at every step and not a
recording of it.
"""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from knowable.core.compiling.engine import Engine
from knowable.core.posterior.posterior import Posterior
from knowable.core.storage.folder import Checkpoint
from knowable.errors import Interrupted, InvalidArgument
from knowable.testing.checks.inputs import RowByRow
from knowable.testing.networks import NetworkCase
from knowable.testing.subject import LONGER_EPOCHS, Subject, expect, expect_error, expect_same_posterior, moments

_SHARE = 0.7  # of a fit, after which it is interrupted


class Fuse:
    """Counts, and raises at a given count; copies of a network share it."""

    def __init__(self) -> None:
        self.count = 0
        self.blows_at: int | None = None
        self.error: type[BaseException] = KeyboardInterrupt

    def __deepcopy__(self, memo: dict[int, Any]) -> Fuse:
        return self

    def tick(self) -> None:
        """Count one."""
        self.count += 1
        if self.blows_at is not None and self.count >= self.blows_at:
            raise self.error("stopped on purpose")


class Stoppable(nn.Module):
    """A network that can be stopped from inside."""

    def __init__(self, net: nn.Module, fuse: Fuse):
        super().__init__()
        self.net, self.fuse = net, fuse

    def forward(self, x: Tensor) -> Tensor:
        """The network's own output, if the fuse holds."""
        if torch.is_grad_enabled():
            self.fuse.tick()
        return self.net(x)


class _Stopped(Exception):
    """Stands for a crash."""


def check_checkpoint_changes_nothing(subject: Subject) -> None:
    """A fit that writes checkpoints gives the same bits as one that does not, and so does finding it finished."""
    case, expected = subject.fitted()
    with tempfile.TemporaryDirectory() as folder:
        for what in ("A fit with a checkpoint", "A fit that finds itself finished"):
            found = subject.fit(case, checkpoint=Checkpoint(Path(folder) / "state", seconds=0))
            expect_same_posterior(expected, found, case.x, what)


def check_interrupted_fit_resumes_exactly(subject: Subject) -> None:
    """Stopped from the keyboard: what was learned is returned with a warning, and a second call goes on from there."""
    if subject.iterates:
        _check_resuming(subject, KeyboardInterrupt, lambda case: case.data)


def check_killed_fit_resumes_exactly(subject: Subject) -> None:
    """Stopped by a crash: the next call goes on from the last checkpoint."""
    if subject.iterates:
        _check_resuming(subject, _Stopped, lambda case: case.data)


def check_interrupted_fit_on_a_dataset_resumes_exactly(subject: Subject) -> None:
    """The same where rows are loaded and shuffled by a DataLoader."""
    if subject.iterates:
        _check_resuming(subject, KeyboardInterrupt, RowByRow, epochs=8)  # between any two of which it can resume


def check_checkpoint_of_another_fit_is_refused(subject: Subject) -> None:
    """A checkpoint is taken up only by the fit that wrote it."""
    if not subject.iterates:
        return
    case = subject.case()
    with tempfile.TemporaryDirectory() as folder:
        subject.fit(case, seed=0, checkpoint=folder)
        other = (case.x, case.y + 1)
        expect_error(InvalidArgument, lambda: subject.fit(case, seed=1, checkpoint=folder), "A checkpoint, other seed")
        expect_error(InvalidArgument, lambda: subject.fit(case, data=other, checkpoint=folder), "... other data")


def _check_resuming(
    subject: Subject, error: type[BaseException], as_data: Callable[[NetworkCase], Any], *, epochs: int = LONGER_EPOCHS
) -> None:
    fuse = Fuse()
    case = subject.case()
    case = replace(case, net=Stoppable(case.net, fuse))
    method, data = subject.longer_method(epochs=epochs), as_data(case)

    def fit(checkpoint: Checkpoint | None = None) -> Posterior:
        fuse.count = 0
        return method.fit(case.model(), data, seed=4, checkpoint=checkpoint, engine=Engine(mode="eager"))

    whole = fit()
    steps = fuse.count
    expect(steps > 0, "The fit never ran the network with gradients: declare iterates=False.")
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = Checkpoint(Path(folder) / "state", seconds=0)
        fuse.blows_at, fuse.error = int(_SHARE * steps), error
        _stop(fit, checkpoint, error, case.x)
        fuse.blows_at = None
        resumed = fit(checkpoint)
    expect(fuse.count < steps, f"The resumed fit took {fuse.count} of {steps} steps: it began again.")
    expect_same_posterior(whole, resumed, case.x, "A fit stopped and resumed")


def _stop(
    fit: Callable[[Checkpoint], Posterior], checkpoint: Checkpoint, error: type[BaseException], x: torch.Tensor
) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            partial = fit(checkpoint)
        except _Stopped:
            return
    expect(error is KeyboardInterrupt, "An error raised by the network was swallowed.")
    expect(any(issubclass(each.category, Interrupted) for each in caught), "An interrupted fit should warn.")
    finite = all(torch.isfinite(value).all() for value in moments(partial, x).values())
    expect(finite, "An interrupted fit returned no numbers.")
