from __future__ import annotations

import pytest
import torch

import knowable as kn
from knowable.testing import Subject
from knowable.testing.checks import predicting
from tests.testing.faulty import Restless, faulty, sound

CHECKS = [
    predicting.check_prediction_repeats_itself,
    predicting.check_draws_are_new_where_there_is_spread,
    predicting.check_memory_cap_changes_nothing,
    predicting.check_streamed_prediction_is_the_prediction,
    predicting.check_inputs_of_a_prediction,
    predicting.check_density_is_that_of_the_draws,
]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_sound_methods_pass(check):
    check(sound())
    check(Subject(kn.MeanFieldVI(epochs=2, batch_size=8)))


def with_posterior(kind: type[kn.Posterior], *parts: str) -> Subject:
    """A method whose posterior is of another kind."""

    def fit(fit, model, data, **keywords):
        source = kn.MeanFieldVI(epochs=2, batch_size=8).fit(model, data, **keywords)
        return kind(model, *(getattr(source, part) for part in parts), points=source.points, buffers=source.buffers)

    return faulty(fit)


class Frozen(kn.DiagonalNormal):
    """Draws that do not follow the generator."""

    family = "frozen_draws"

    def _sample_random(self, n, generator):
        return super()._sample_random(n, torch.Generator().manual_seed(0))

    def draw_block(self, start, stop, samples, seed):
        return super().draw_block(start, stop, samples, 0)


class Greedy(kn.DiagonalNormal):
    """Draws that depend on how many are made at once, and a stream of another seed."""

    family = "greedy_draws"

    def draw_block(self, start, stop, samples, seed):
        return super().draw_block(0, stop - start, samples, seed + start)


class Upside(kn.DiagonalNormal):
    """A density with the wrong sign."""

    family = "upside_down"

    def log_prob(self, params):
        return -super().log_prob(params)


def test_prediction_that_never_repeats_is_found():
    def fit(fit, model, data, **keywords):
        source = fit(model, data, **keywords)
        return Restless(model, source.stack, points=source.points, buffers=source.buffers)

    with pytest.raises(AssertionError, match="Two predictions differ"):
        predicting.check_prediction_repeats_itself(faulty(fit))


def test_generator_that_is_ignored_is_found():
    subject = with_posterior(Frozen, "loc", "scale")
    with pytest.raises(AssertionError, match="does not make the prediction's draws new"):
        predicting.check_prediction_repeats_itself(subject)
    with pytest.raises(AssertionError, match="ignores its generator"):
        predicting.check_draws_are_new_where_there_is_spread(subject)


def test_prediction_that_depends_on_the_memory_is_found():
    with pytest.raises(AssertionError, match="changes the prediction"):
        predicting.check_memory_cap_changes_nothing(with_posterior(Greedy, "loc", "scale"))


def test_stream_of_other_draws_is_found():
    class Streaming(kn.DiagonalNormal):
        family = "streaming"

        def predict_stream(self, x, samples=64, generator=None, max_memory="1GB"):
            return super().predict_stream(x, samples, torch.Generator().manual_seed(9), max_memory)

    with pytest.raises(AssertionError, match="predict_stream"):
        predicting.check_streamed_prediction_is_the_prediction(with_posterior(Streaming, "loc", "scale"))


def test_missing_values_that_are_predicted_at_are_found():
    class Trusting(kn.DiagonalNormal):
        family = "trusting"

        def predict(self, x, samples=64, generator=None, max_memory=None):
            return super().predict(torch.as_tensor(x).nan_to_num(), samples, generator, max_memory)

    with pytest.raises(AssertionError, match="missing value"):
        predicting.check_inputs_of_a_prediction(with_posterior(Trusting, "loc", "scale"))


def test_density_with_the_wrong_sign_is_found():
    with pytest.raises(AssertionError, match="prefers values far away"):
        predicting.check_density_is_that_of_the_draws(with_posterior(Upside, "loc", "scale"))
