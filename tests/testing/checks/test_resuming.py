from __future__ import annotations

import pytest
import torch
from torch import nn

import knowable as kn
from knowable.testing.checks import resuming
from tests.testing.faulty import faulty, sound, swallow_interrupts

CHECKS = [
    resuming.check_checkpoint_changes_nothing,
    resuming.check_interrupted_fit_resumes_exactly,
    resuming.check_killed_fit_resumes_exactly,
    resuming.check_interrupted_fit_on_a_dataset_resumes_exactly,
    resuming.check_checkpoint_of_another_fit_is_refused,
]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_sound_method_passes(check):
    check(sound())


def test_checkpoint_that_changes_the_fit_is_found():
    def fit(fit, model, data, *, checkpoint=None, seed=0, **keywords):
        return fit(model, data, seed=seed + (checkpoint is not None), **keywords)

    with pytest.raises(AssertionError, match="A fit with a checkpoint"):
        resuming.check_checkpoint_changes_nothing(faulty(fit))


def test_fit_that_begins_again_is_found():
    def fit(fit, model, data, *, checkpoint=None, **keywords):
        return fit(model, data, **keywords)

    with pytest.raises(AssertionError, match="it began again"):
        resuming.check_killed_fit_resumes_exactly(faulty(fit))


def test_fit_that_resumes_on_another_stream_is_found():
    def fit(fit, model, data, *, checkpoint=None, seed=0, **keywords):
        posterior = fit(model, data, checkpoint=checkpoint, seed=seed, **keywords)
        if checkpoint is not None:  # a little off
            posterior.stack = {name: value + 1e-6 for name, value in posterior.stack.items()}
        return posterior

    with pytest.raises(AssertionError, match="stopped and resumed"):
        resuming.check_killed_fit_resumes_exactly(faulty(fit))


def test_interruption_without_a_warning_is_found():
    with pytest.raises(AssertionError, match="should warn"):
        resuming.check_interrupted_fit_resumes_exactly(faulty(swallow_interrupts))


def test_crash_that_is_swallowed_is_found():
    def fit(fit, model, data, **keywords):
        try:
            return fit(model, data, **keywords)
        except Exception:
            return kn.Particles(model, {name: value.unsqueeze(0) for name, value in model.params().items()})

    with pytest.raises(AssertionError, match="was swallowed"):
        resuming.check_killed_fit_resumes_exactly(faulty(fit))


def test_checkpoint_of_another_fit_that_is_taken_up_is_found():
    def fit(fit, model, data, *, seed=0, **keywords):
        return fit(model, data, seed=0, **keywords)

    with pytest.raises(AssertionError, match="other seed"):
        resuming.check_checkpoint_of_another_fit_is_refused(faulty(fit))


def test_methods_without_steps_are_not_asked():
    for check in CHECKS[1:]:
        check(sound(iterates=False))  # a fuse that never counts would fail otherwise


def test_method_that_never_runs_the_network_must_say_so():
    def fit(fit, model, data, **keywords):
        return kn.ExactLinear().fit(kn.Model(nn.Linear(3, 1), kn.Gaussian(0.1)), data)

    with pytest.raises(AssertionError, match="declare iterates=False"):
        resuming.check_interrupted_fit_resumes_exactly(faulty(fit))


def test_fuse_is_shared_by_copies_and_blows_once_its_time_has_come():
    import copy

    fuse = resuming.Fuse()
    net = resuming.Stoppable(nn.Linear(2, 1), fuse)
    twin = copy.deepcopy(net)
    net(torch.zeros(1, 2))
    twin(torch.zeros(1, 2))
    with torch.no_grad():
        twin(torch.zeros(1, 2))
    assert fuse.count == 2
    fuse.blows_at = 3
    with pytest.raises(KeyboardInterrupt):
        twin(torch.zeros(1, 2))
