"""A posterior that was saved and loaded is the same posterior."""

from __future__ import annotations

import copy
import tempfile
from pathlib import Path

from torch import nn

from knowable.core.artifact import load_posterior
from knowable.core.posterior import Posterior
from knowable.errors import InvalidArgument
from knowable.testing.networks import NetworkCase, network_case
from knowable.testing.subject import Subject, expect, expect_same_posterior


def check_saving_and_loading_changes_nothing(subject: Subject) -> None:
    """Networks of plain layers load by themselves."""
    for name in ("linear", "mlp", "frozen_backbone", "last_layer"):
        if name not in subject.refuses:
            case = network_case(name)
            _expect_round_trip(subject.fit(case), case, None)


def check_network_that_cannot_be_rebuilt_is_asked_for(subject: Subject) -> None:
    """Where layers are shared or have code of their own, loading rebuilds the same network or asks for it."""
    for name in ("shared", "lstm"):
        if name in subject.refuses:
            continue
        case = network_case(name)
        try:
            _expect_round_trip(subject.fit(case), case, None)
        except InvalidArgument as error:
            expect("net" in str(error), f"Loading without the network should ask for it; got {error}")


def check_loading_with_the_network_given(subject: Subject) -> None:
    """Networks with code of their own load when the network is passed, which is then not changed."""
    for name in ("residual", "lstm", "tied", "shared"):
        if name not in subject.refuses:
            case = network_case(name)
            _expect_round_trip(subject.fit(case), case, copy.deepcopy(case.net))


def _expect_round_trip(posterior: Posterior, case: NetworkCase, net: nn.Module | None) -> None:
    with tempfile.TemporaryDirectory() as folder:
        posterior.save(Path(folder) / "posterior")
        loaded = load_posterior(Path(folder) / "posterior", net)
    what = f"The {case.name} posterior after loading"
    expect(type(loaded) is type(posterior), f"{what} is a {type(loaded).__name__}.")
    expect_same_posterior(posterior, loaded, case.x, what)
    expect(loaded.diagnostics == posterior.diagnostics, f"{what} has other diagnostics.")
    expect(repr(loaded.log_evidence) == repr(posterior.log_evidence), f"{what} has another log evidence.")
    expect(repr(loaded.model) == repr(posterior.model), f"{what} has another model: {loaded.model!r}.")
