"""The conformance suite: what every method must do, ours or yours.

With pytest::

    from knowable.testing import Subject, parametrize_with_checks

    @parametrize_with_checks([Subject(MyMethod(epochs=2, batch_size=8))])
    def test_my_method_conforms(subject, check):
        check(subject)

or in one call: ``check_method(MyMethod(epochs=2, batch_size=8))``. Whether a method's answer is *right* is not checked
here: hold it against :class:`knowable.testing.LinearGaussian` or the densities of :mod:`knowable.testing.densities`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from knowable.core.method import Method
from knowable.testing.checks import inputs, networks, predicting, resuming, storing
from knowable.testing.networks import NETWORKS
from knowable.testing.subject import Subject

if TYPE_CHECKING:
    import pytest


@dataclass(frozen=True)
class Check:
    """One thing that every method must do: call it with a subject; it raises ``AssertionError`` if it is not so.

    Attributes:
        name: A sentence, with underscores.
        run: The function.
    """

    name: str
    run: Callable[[Subject], None]

    def __call__(self, subject: Subject) -> None:
        """Check ``subject``."""
        self.run(subject)


def _named(*functions: Callable[[Subject], None]) -> list[Check]:
    return [Check(function.__name__.removeprefix("check_"), function) for function in functions]


CHECKS: tuple[Check, ...] = (
    *_named(
        predicting.check_same_seed_gives_the_same_bits,
        predicting.check_seed_matters_if_and_only_if_declared,
        storing.check_network_is_left_alone,
        storing.check_data_is_left_alone,
        storing.check_global_state_is_left_alone,
        storing.check_model_can_be_fitted_again,
        predicting.check_dtype_is_kept,
    ),
    *(Check(f"{name}_is_fitted_or_refused", partial(networks.check_network, name=name)) for name in NETWORKS),
    *_named(
        networks.check_last_batch_of_one_row_is_no_trouble,
        networks.check_frozen_parameters_stay,
        networks.check_point_parameters_do_not_vary,
        inputs.check_arrays_and_tensor_datasets_are_tensors,
        inputs.check_datasets_and_loaders_are_read,
        inputs.check_row_weights_count,
        inputs.check_unusable_data_is_refused,
        inputs.check_labels_out_of_range_are_refused,
        inputs.check_wrong_types_are_refused,
        inputs.check_bad_settings_are_refused,
        inputs.check_settings_are_shown_and_fixed,
        predicting.check_prediction_repeats_itself,
        predicting.check_draws_are_new_where_there_is_spread,
        predicting.check_memory_cap_changes_nothing,
        predicting.check_streamed_prediction_is_the_prediction,
        predicting.check_inputs_of_a_prediction,
        predicting.check_density_is_that_of_the_draws,
        storing.check_saving_and_loading_changes_nothing,
        storing.check_network_that_cannot_be_rebuilt_is_asked_for,
        storing.check_loading_with_the_network_given,
        resuming.check_checkpoint_changes_nothing,
        resuming.check_checkpoint_of_another_fit_is_refused,
        resuming.check_interrupted_fit_resumes_exactly,
        resuming.check_killed_fit_resumes_exactly,
        resuming.check_interrupted_fit_on_a_dataset_resumes_exactly,
    ),
)
"""Every check, in order."""


def check_method(
    method: Method,
    *,
    refuses: Iterable[str] = (),
    seeded: bool = True,
    iterates: bool = True,
    trains: bool = True,
    longer: Method | None = None,
    any_value: Iterable[str] = (),
) -> None:
    """Run all checks on a method; the arguments are the fields of :class:`~knowable.testing.Subject`.

    Raises:
        AssertionError: Naming every check that failed and why.
    """
    subject = Subject(method, frozenset(refuses), seeded, iterates, trains, longer, frozenset(any_value))
    failures = []
    for check in CHECKS:
        try:
            check(subject)
        except Exception as error:
            failures.append(f"{check.name}: {type(error).__name__}: {error}")
    if failures:
        raise AssertionError(f"{subject.name} fails {len(failures)} of {len(CHECKS)} checks.\n" + "\n".join(failures))


def parametrize_with_checks(subjects: Iterable[Subject]) -> pytest.MarkDecorator:
    """A pytest decorator that runs a test ``(subject, check)`` for every subject and every check."""
    import pytest

    pairs = [(subject, check) for subject in subjects for check in CHECKS]
    return pytest.mark.parametrize(
        ("subject", "check"), [pytest.param(s, check, id=f"{s.name}-{check.name}") for s, check in pairs]
    )
