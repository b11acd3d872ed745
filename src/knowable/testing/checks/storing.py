"""A posterior that was saved and loaded is the same posterior."""

from __future__ import annotations

import copy
import random
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from knowable.core.posterior.posterior import Posterior
from knowable.core.posterior.saving import load_posterior
from knowable.errors import InvalidArgument
from knowable.testing.networks import NetworkCase, network_case
from knowable.testing.subject import Subject, expect, expect_same_posterior, moments


def check_saving_and_loading_changes_nothing(subject: Subject) -> None:
    """Networks of plain layers load by themselves."""
    for name in ("linear", "mlp", "frozen_backbone", "last_layer"):
        if name not in subject.refuses:
            _expect_round_trip(*subject.fitted(name), None)


def check_network_that_cannot_be_rebuilt_is_asked_for(subject: Subject) -> None:
    """Where layers are shared or have code of their own, loading rebuilds the same network or asks for it."""
    for name in ("shared", "lstm"):
        if name in subject.refuses:
            continue
        try:
            _expect_round_trip(*subject.fitted(name), None)
        except InvalidArgument as error:
            expect("net" in str(error), f"Loading without the network should ask for it; got {error}")


def check_loading_with_the_network_given(subject: Subject) -> None:
    """Networks with code of their own load when the network is passed, which is then not changed."""
    for name in ("residual", "lstm", "tied", "shared"):
        if name not in subject.refuses:
            case, posterior = subject.fitted(name)
            _expect_round_trip(case, posterior, copy.deepcopy(case.net))


def _expect_round_trip(case: NetworkCase, posterior: Posterior, net: nn.Module | None) -> None:
    with tempfile.TemporaryDirectory() as folder:
        posterior.save(Path(folder) / "posterior")
        loaded = load_posterior(Path(folder) / "posterior", net)
    what = f"The {case.name} posterior after loading"
    expect(type(loaded) is type(posterior), f"{what} is a {type(loaded).__name__}.")
    expect_same_posterior(posterior, loaded, case.x, what)
    expect(loaded.diagnostics == posterior.diagnostics, f"{what} has other diagnostics.")
    expect(repr(loaded.log_evidence) == repr(posterior.log_evidence), f"{what} has another log evidence.")
    expect(repr(loaded.model) == repr(posterior.model), f"{what} has another model: {loaded.model!r}.")


# --- A fit changes nothing that belongs to the caller ----------------------------------------------------------------


def check_network_is_left_alone(subject: Subject) -> None:
    """Parameters, buffers, gradients and modes of the network are the same after a fit and a prediction."""
    for name in ("frozen_backbone", "batchnorm_cnn"):
        if name in subject.refuses:
            continue
        for training in (True, False):
            case = network_case(name)
            case.net.train(training)
            before = _state_of(case.net)
            subject.fit(case).predict(case.x, samples=2)
            expect(_same_state(before, _state_of(case.net)), f"The fit changed the network ({name}, train={training}).")


def check_data_is_left_alone(subject: Subject) -> None:
    """The caller's tensors have the same values and flags after a fit and a prediction."""
    case = subject.case()
    before = copy.deepcopy(case.data)
    subject.fit(case).predict(case.x, samples=2)
    for name, old, new in zip("xy", before, case.data, strict=True):
        expect(torch.equal(old, new) and not new.requires_grad, f"The fit changed {name}.")


def check_global_state_is_left_alone(subject: Subject) -> None:
    """No global generator moves, and no global setting changes, whatever the data comes in."""
    case = subject.case()
    loader = DataLoader(TensorDataset(*case.data), batch_size=8, shuffle=True)
    for kind, data in (("tensors", case.data), ("a shuffling DataLoader", loader)):
        before = _global_state()
        subject.fit(case, data=data).predict(case.x, samples=2)
        for name, value in _global_state().items():
            expect(_equal(before[name], value), f"A fit on {kind} changed the global {name}.")


def check_model_can_be_fitted_again(subject: Subject) -> None:
    """A model holds no trace of an earlier fit: fitting it a second time starts from the same place."""
    case: NetworkCase = subject.case()
    model = case.model()
    start = model.params()
    first = moments(subject.method.fit(model, case.data), case.x)
    second = moments(subject.method.fit(model, case.data), case.x)
    expect(all(torch.equal(start[k], v) for k, v in model.params().items()), "The fit changed model.params().")
    expect(all(torch.equal(first[k], second[k]) for k in first), "A second fit of the same model gave another result.")


def _state_of(net: nn.Module) -> dict[str, Any]:
    return {
        "tensors": {k: v.detach().clone() for k, v in net.state_dict(keep_vars=True).items()},
        "identity": [id(value) for value in (*net.parameters(), *net.buffers())],
        "grads": [value.grad is None for value in net.parameters()],
        "requires_grad": [value.requires_grad for value in net.parameters()],
        "training": [module.training for module in net.modules()],
    }


def _same_state(before: dict[str, Any], after: dict[str, Any]) -> bool:
    tensors = all(torch.equal(value, after["tensors"][name]) for name, value in before["tensors"].items())
    return tensors and all(before[key] == after[key] for key in before if key != "tensors")


def _global_state() -> dict[str, Any]:
    return {
        "torch generator": torch.get_rng_state(),
        "numpy generator": str(np.random.get_state()),  # noqa: NPY002 (it is the legacy state that must not move)
        "python generator": random.getstate(),
        "default dtype": torch.get_default_dtype(),
        "gradient mode": torch.is_grad_enabled(),
        "number of threads": torch.get_num_threads(),
        "determinism": torch.are_deterministic_algorithms_enabled(),
    }


def _equal(first: Any, second: Any) -> bool:
    return torch.equal(first, second) if isinstance(first, Tensor) else first == second
