"""Data may come as tensors, arrays, a Dataset or a DataLoader; what cannot be used is refused at the door."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from knowable.core.method import Method
from knowable.core.model.data import Data
from knowable.core.prediction.prediction import RegressionPrediction
from knowable.errors import InvalidArgument, InvalidData, InvalidType, KnowableError, Unsupported
from knowable.testing.networks import NetworkCase, network_case
from knowable.testing.subject import Subject, expect, expect_error, expect_same_posterior, moments


def check_arrays_and_tensor_datasets_are_tensors(subject: Subject) -> None:
    """In-memory data gives the same bits whatever holds it."""
    case, expected = subject.fitted()
    flat = subject.fit(case, data=(case.x, case.y.squeeze(1)))
    predicted = flat.predict(case.x)
    if isinstance(predicted, RegressionPrediction):
        expect(predicted.mean.dim() == 1, "A fit on targets (N,) should predict means (N,).")
    flat.target_shape = expected.target_shape
    expect_same_posterior(expected, flat, case.x, "A fit on targets without a column dimension")
    kinds = {
        "numpy arrays": (case.x.numpy(), case.y.numpy()),
        "lists": (case.x.tolist(), case.y.tolist()),
        "a TensorDataset": TensorDataset(*case.data),
        "Data": Data(case.data, len(case.x)),
    }
    for kind, data in kinds.items():
        expect_same_posterior(expected, subject.fit(case, data=data), case.x, f"A fit on {kind}")


def check_datasets_and_loaders_are_read(subject: Subject) -> None:
    """Data that is loaded batch by batch is fitted; without randomness the answer is that of the tensors."""
    case, posterior = subject.fitted()
    rows = RowByRow(case)
    loader, stream = DataLoader(rows, batch_size=8, shuffle=True), DataLoader(Stream(case), batch_size=8)
    kinds = {
        "a Dataset": rows,
        "a DataLoader": loader,
        "Data(DataLoader, size)": Data(loader, len(rows)),
        "Data(a stream of rows, size)": Data(stream, len(rows)),
    }
    expected = moments(posterior, case.x)
    for kind, data in kinds.items():
        mean = moments(subject.fit(case, data=data), case.x)
        expect(all(torch.isfinite(value).all() for value in mean.values()), f"A fit on {kind} is not finite.")
        if not subject.seeded:
            same = all(torch.allclose(mean[name], expected[name], atol=1e-5) for name in mean)
            expect(same, f"A fit on {kind} differs from one on the same data as tensors.")


def check_row_weights_count(subject: Subject) -> None:
    """Rows of weight 0 have no say, and other weights give another fit; a method that ignored weights fails this."""
    case = subject.case()
    x, y = case.data
    weights = torch.ones(len(x), dtype=x.dtype)
    weights[::3] = 0.0
    other = y.clone()
    other[::3] += 1.0
    data = Data(case.data, weights=weights)
    if not subject.method.supports_row_weights:
        expect_error(Unsupported, lambda: subject.fit(case, data=data), "A fit on rows with weights")
        return
    fitted = subject.fit(case, data=data)
    same = subject.fit(case, data=Data((x, other), weights=weights))
    expect_same_posterior(fitted, same, x, "A fit in which rows of weight 0 have other targets")
    heavy = subject.fit(case, data=Data(case.data, weights=20.0 * weights))
    light, heavier = moments(fitted, x), moments(heavy, x)
    moved = any(not torch.equal(value, heavier[name]) for name, value in light.items())
    expect(moved, "Weights twenty times as large should give another fit.")


def check_unusable_data_is_refused(subject: Subject) -> None:
    """Missing values, missing rows, shapes that do not fit: an InvalidData error before any work is done."""
    case = subject.case()
    x, y = case.data
    unusable = {
        "x with a missing value": (_with(x, float("nan")), y),
        "x with an infinite value": (_with(x, float("inf")), y),
        "y with a missing value": (x, _with(y, float("nan"))),
        "x and y of different lengths": (x, y[:-1]),
        "data without rows": (x[:0], y[:0]),
        "x with too many columns": (torch.cat([x, x], 1), y),
        "y with too many columns": (x, torch.cat([y, y], 1)),
    }
    for what, data in unusable.items():
        expect_error(InvalidData, lambda data=data: subject.fit(case, data=data), f"A fit on {what}")
    expect_error(
        InvalidData, lambda: subject.method.fit(case.model(), case.data, validation=(x, y[:-1])), "Bad validation data"
    )


def check_labels_out_of_range_are_refused(subject: Subject) -> None:
    """A class that the network has no output for is an InvalidData error."""
    if "batchnorm_cnn" in subject.refuses:
        return
    case = network_case("batchnorm_cnn")
    for label in (-1, 3):
        labels = case.y.clone()
        labels[5] = label
        expect_error(InvalidData, lambda labels=labels: subject.fit(case, data=(case.x, labels)), f"Label {label}")


def check_wrong_types_are_refused(subject: Subject) -> None:
    """What is no model, no data, no seed, no engine or no checkpoint is refused by name."""
    case = subject.case()
    model, fit = case.model(), subject.method.fit
    wrong: dict[str, Any] = {
        "model": lambda: fit(case.net, case.data),  # type: ignore[arg-type]
        "data": lambda: fit(model, case.x),
        "seed": lambda: fit(model, case.data, seed=-1),
        "validation": lambda: fit(model, case.data, validation=case.x),
        "engine": lambda: fit(model, case.data, engine="fast"),  # type: ignore[arg-type]
        "checkpoint": lambda: fit(model, case.data, checkpoint=3),  # type: ignore[arg-type]
    }
    for name, action in wrong.items():
        message = expect_error((InvalidType, InvalidArgument), action, f"A wrong {name}")
        expect(name in message, f"The error for a wrong {name} does not name it: {message!r}")


def check_bad_settings_are_refused(subject: Subject) -> None:
    """Every field refuses values that make no sense when the method is made, naming the field."""
    for each in dataclasses.fields(subject.method):  # type: ignore[arg-type]
        bad: list[Any] = [object()]
        if {"int", "float"} & set(str(each.type).replace("|", " ").split()) and each.name not in subject.any_value:
            bad += [float("nan"), -1, "many"]
        for value in bad:
            message = expect_error(KnowableError, lambda v=value: _changed(subject.method, each.name, v), each.name)  # noqa: B023
            expect(each.name in message, f"The error for {each.name}={value!r} does not name it: {message!r}")


def check_settings_are_shown_and_fixed(subject: Subject) -> None:
    """A method is a frozen dataclass whose text names what differs from the defaults."""
    method = subject.method
    for each in dataclasses.fields(method):  # type: ignore[arg-type]
        value = getattr(method, each.name)
        if each.repr and value != each.default:
            expect(f"{each.name}={value!r}" in repr(method), f"repr() does not show {each.name}={value!r}: {method!r}")
        try:
            setattr(method, each.name, value)
        except dataclasses.FrozenInstanceError:
            continue
        raise AssertionError(f"{each.name} can be changed after the method was made: it should be a frozen dataclass.")


class RowByRow(Dataset[tuple[Tensor, Tensor]]):
    """A Dataset that is no TensorDataset: rows are loaded one by one."""

    def __init__(self, case: NetworkCase):
        self.case = case

    def __len__(self) -> int:
        return len(self.case.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.case.x[index], self.case.y[index]


class Stream(IterableDataset[tuple[Tensor, Tensor]]):
    """Rows that come one after the other, without saying how many."""

    def __init__(self, case: NetworkCase):
        self.case = case

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return iter(zip(*self.case.data, strict=True))


def _with(values: Tensor, bad: float) -> Tensor:
    changed = values.clone()
    changed[3] = bad
    return changed


def _changed(method: Method, name: str, value: Any) -> Method:
    return dataclasses.replace(method, **{name: value})  # type: ignore[type-var]
