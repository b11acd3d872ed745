"""The model behind the service: a run, a posterior or a certificate from disk, which answers many requests at once.

It lives in a worker process. Requests of one call are encoded together and predicted together; a request that cannot
be answered does not spoil the others: where a call fails, it is taken apart, and each request is tried by itself.
"""

from __future__ import annotations

import importlib
import logging
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from knowable.core.model.data import as_input
from knowable.core.model.model import Model
from knowable.core.posterior.particles import Particles
from knowable.core.posterior.posterior import Posterior
from knowable.core.prediction.prediction import Prediction
from knowable.core.storage.files import Files
from knowable.core.storage.folder import kind_of, manifest_hash
from knowable.core.support.tensors import few_threads
from knowable.decisions.certificate import Certificate, CertifiedPrediction
from knowable.decisions.certificate_saving import certified_hash
from knowable.decisions.compress.saving import KIND as COMPRESSED
from knowable.decisions.compress.saving import load_compressed
from knowable.decisions.distill import Distilled
from knowable.decisions.student_likelihoods import DirichletStudent
from knowable.errors import InvalidArgument, KnowableError, Unsupported
from knowable.interfaces.cli.run_folder import CERTIFICATE, RunFolder, is_run
from knowable.interfaces.serve.answers import all_finite, describe, labels_in, plain
from knowable.interfaces.serve.explain import explain, remarks, usual_row
from knowable.interfaces.serve.openapi import example_rows
from knowable.interfaces.serve.rows import Ask, Description, Refused, columns_of
from knowable.interfaces.serve.settled import Draws, in_blocks
from knowable.likelihoods import Bernoulli, Categorical
from knowable.loading import load
from knowable.registry import find_method
from knowable.tabular.fit_report import class_names
from knowable.tabular.saving import DESCRIPTION, POSTERIOR
from knowable.tabular.schema import Schema
from knowable.tabular.table import Table, as_table
from knowable.tabular.targets import NumberTargets

_LOG = logging.getLogger(__name__)
_ROWS_AT_ONCE = 4096  # of one prediction, so that its memory has a bound
_BLOCK = 32  # rows of vectors are computed in multiples of so many, see Draws
_FAILED = "The model failed on this request. The log of the service has the cause under this request's id."


@dataclass(frozen=True)
class Source:
    """What to load, in every worker alike.

    Attributes:
        folder: A run, a saved estimator, posterior or certificate.
        student: A distilled or compressed network for quick answers, or None.
        network: ``"module:name"`` of the network of a posterior that is not made of plain layers, or None.
        draws: Posterior draws that a prediction takes at most; None: those that the run was made with, or 64.
        threads: Threads of a worker.
    """

    folder: Path
    student: Path | None = None
    network: str | None = None
    draws: int | None = None
    threads: int = 1


class Served:
    """A model that answers requests.

    Attributes:
        about: What clients may know of it.
    """

    def __init__(
        self,
        posterior: Posterior,
        *,
        name: str,
        draws: int,
        schema: Schema | None = None,
        certificate: Certificate | None = None,
        student: Posterior | None = None,
        classes: Sequence[str] = (),
        ignored: Sequence[str] = (),
        method: str | None = None,
    ):
        shape = None if schema is not None else _row_shape(posterior.model.net)
        self._block = 1 if schema is None and shape is None else _BLOCK
        self._posterior, self._draws = posterior, Draws(posterior, draws, block=self._block)
        self._student = None if student is None else Draws(student, draws, block=self._block)
        self._schema, self._certificate = schema, certificate
        self._classes = list(classes)
        self._weights = sum(value.numel() for value in posterior.model.params().values())
        if certificate is not None and certificate.groups == "given":
            raise Unsupported("A certificate with groups of rows cannot be served. Make one without groups.")
        kept = None if certificate is None else {each.name: each for each in certificate.guarantees}
        targets = () if schema is None else schema.target
        self.about = Description(
            name=name,
            method=method or type(posterior).__name__,
            task=_task_of(posterior, schema),
            columns=None if schema is None else schema.columns,
            ignored=tuple(dict.fromkeys((*({} if schema is None else schema.dropped), *targets, *ignored))),
            targets=tuple(targets),
            classes=tuple(classes),
            shape=shape,
            draws=draws,
            fast=student is not None,
            promises=() if kept is None else tuple(each.statement for each in kept.values()),
            abstain_bound=kept["rejection"].bound if kept and "rejection" in kept else None,
            novelty=() if certificate is None else tuple(certificate.novelty_scores.tolist()),
            delta=0.01 if certificate is None else certificate.delta,
        )

    @classmethod
    def load(cls, source: Source) -> Served:
        """Load what is to be served.

        Raises:
            KnowableError: If it is not there, is damaged, or cannot be served.
        """
        net = None if source.network is None else _network(source.network)
        student = None
        if Files.at(source.folder).has(DESCRIPTION):
            made = cls._of_estimator(source, net)
        else:
            found = load(source.folder, net)
            certificate = found if isinstance(found, Certificate) else None
            posterior = found if certificate is None else certificate.posterior
            made = {"posterior": posterior, "certificate": certificate, "draws": 64}
        if source.student is not None:
            student = _student(source.student, made["posterior"])
        if made["certificate"] is not None:
            made["draws"] = made["certificate"].samples
        elif source.draws is not None:
            made["draws"] = source.draws
        return cls(**made, student=student, name=source.folder.resolve().name)

    @staticmethod
    def _of_estimator(source: Source, net: nn.Module | None) -> dict[str, Any]:
        folder, files = source.folder, Files.at(source.folder)
        estimator = load(folder, net)
        certificate = None
        if files.has(CERTIFICATE):
            own = files.folder(CERTIFICATE)
            certificate = Certificate.load(own, lambda _: estimator.posterior_)
            if manifest_hash(files.folder(POSTERIOR)) != certified_hash(own):
                raise InvalidArgument(f"The certificate in {folder} is about another posterior. Certify the run again.")
        run = RunFolder.open(folder) if is_run(folder) else None
        options = {} if run is None else run.options
        return {
            "posterior": estimator.posterior_,
            "schema": estimator.schema_,
            "certificate": certificate,
            "classes": class_names(estimator),
            "ignored": (*options.get("id", ()), *(each for each in [options.get("target")] if each)),
            "draws": estimator.samples,
            "method": find_method(run.made["method"]).cls_name if run is not None else None,
        }

    def warm(self) -> None:
        """Answer once, so that the first client does not wait for what is imported and drawn at first use."""
        rows = example_rows(self.about)
        if self.about.columns is None:
            if self.about.shape is None:
                return
            given: Any = np.array(rows)
        else:
            given = columns_of(rows, self.about)
        for fast in {False, self.about.fast}:
            (answer,) = self.answer([Ask("predict", given, len(rows), draws=self.about.draws, fast=fast)])
            if isinstance(answer, Refused):
                raise InvalidArgument(f"The model cannot predict an example: {answer.message}")

    # --- answers -----------------------------------------------------------------------------------------------------

    def answer(self, asks: Sequence[Ask]) -> list[dict[str, Any] | Refused]:
        """An answer to each request, or why there is none."""
        with few_threads(self._weights), torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what they would say stands in the remarks of each row
            found: list[dict[str, Any] | Refused | None] = [None] * len(asks)
            groups: dict[Any, list[int]] = {}
            for place, ask in enumerate(asks):
                groups.setdefault(_group_of(ask, place), []).append(place)
            for places in groups.values():
                for place, answer in zip(places, self._together([asks[each] for each in places]), strict=True):
                    found[place] = answer
        return [Refused(500, _FAILED) if each is None else each for each in found]

    def _together(self, asks: list[Ask]) -> list[dict[str, Any] | Refused]:
        """Requests of one kind; taken apart where something is wrong with one of them."""
        try:
            return self._answers(asks)
        except Exception as error:
            if len(asks) == 1:
                return [self._why(asks[0], error)]
        return [self._together([ask])[0] for ask in asks]

    def _why(self, ask: Ask, error: Exception) -> Refused:
        """What was wrong with a request."""
        if isinstance(error, Refused):
            return error
        if isinstance(ask.rows, np.ndarray):
            if isinstance(error, KnowableError):
                return Refused(422, str(error), "rows")
        else:
            table = _table_of([ask])
            for column in self._schema.columns if self._schema is not None else ():
                try:
                    column.check(table)
                    column.encode(table)
                except (KnowableError, ValueError, TypeError, OverflowError, ArithmeticError) as wrong:
                    text = (
                        str(wrong)
                        if isinstance(wrong, KnowableError)
                        else f"{column.name!r} has a value that cannot be read."
                    )
                    return Refused(422, text, column.name)
        _LOG.error("a request failed", exc_info=error)
        return Refused(500, _FAILED)

    def _answers(self, asks: list[Ask]) -> list[dict[str, Any] | Refused]:
        rows = _Encoded.of(asks, self._schema, self._posterior.model)
        ask = asks[0]
        if ask.kind == "explain":
            return [self._explained(ask, rows)]
        answers = self._predicted(ask, rows)
        if self._schema is not None:
            for answer, remark in zip(answers, remarks(self._schema, rows.table), strict=True):
                answer["notes"] = remark
        return _shared_out(asks, answers, rows, ask, self._schema)

    def _predicted(self, ask: Ask, rows: _Encoded) -> list[dict[str, Any]]:
        """The answer to each row."""
        found: list[dict[str, Any]] = [{}] * len(rows.x)
        for places, prediction, draws, certified in self._pieces(ask, rows):
            answers = describe(prediction, ask.level, self._classes)
            for place, answer in zip(places.tolist(), answers, strict=True):
                found[place] = {**answer, "draws": draws}
            if certified is not None:
                self._add_promises([found[place] for place in places.tolist()], certified)
        return found

    def _pieces(self, ask: Ask, rows: _Encoded):
        """Predictions of some rows each, in the user's units: places, prediction, draws, what a certificate says."""
        for first in range(0, len(rows.x), _ROWS_AT_ONCE):
            place = torch.arange(first, min(first + _ROWS_AT_ONCE, len(rows.x)))
            known = in_blocks(place[~rows.new[place]], self._block)
            if len(known):
                yield from self._of_known(ask, rows.x[known], known)
            new = in_blocks(place[rows.new[place]], self._block)
            if len(new):  # a new category: the mean over known ones in its place
                parts = [self._chosen(ask).posterior.predict(each[new], samples=ask.draws) for each in rows.guesses]
                equal = torch.zeros(len(parts), dtype=parts[0].log_weights.dtype).log_softmax(0)
                draws = len(parts[0].log_weights)
                yield new, self._restored(type(parts[0]).joined(parts, equal)), draws, None

    def _of_known(self, ask: Ask, x: Tensor, places: Tensor):
        if self._certificate is not None and not ask.fast:
            certified = self._certificate.predict(x)
            prediction = certified.prediction
            yield places, self._restored(prediction), len(prediction.log_weights), certified
            return
        for piece in self._chosen(ask).predict(x, most=ask.draws, epsilon=ask.epsilon, level=ask.level):
            yield places[piece.rows], self._restored(piece.prediction), piece.draws, None

    def _chosen(self, ask: Ask) -> Draws:
        return self._student if ask.fast and self._student is not None else self._draws

    def _restored(self, prediction: Prediction) -> Prediction:
        targets = None if self._schema is None else self._schema.targets
        return prediction if targets is None else targets.restore(prediction)

    def _add_promises(self, answers: list[dict[str, Any]], certified: CertifiedPrediction) -> None:
        """What the certificate says of each row."""
        if certified.set is not None:
            inside = certified.set.tolist()
            named = [labels_in(each, self._classes) if certified.set.dim() == 2 else each for each in inside]
            for answer, labels in zip(answers, named, strict=True):
                answer["set"] = labels
        else:
            assert certified.interval is not None
            low, high = (self._in_units(end) for end in certified.interval)
            for answer, ends in zip(answers, zip(plain(low), plain(high), strict=True), strict=True):
                answer["certified_interval"] = list(ends)
        for name, values in (("abstain", ~certified.accept), ("p_value", certified.p_value)):
            for answer, value in zip(answers, plain(values), strict=True):
                answer[name] = value
        for answer, value in zip(answers, certified.novelty.tolist(), strict=True):
            answer["novelty"] = value

    def _in_units(self, values: Tensor) -> Tensor:
        targets = None if self._schema is None else self._schema.targets
        return targets.restore_values(values) if isinstance(targets, NumberTargets) else values

    def _explained(self, ask: Ask, rows: _Encoded) -> dict[str, Any] | Refused:
        whole = replace(ask, epsilon=0.0)
        answers = self._predicted(whole, rows)
        without: dict[str, list[dict[str, Any]]] = {}
        if self._schema is not None:
            usual = torch.from_numpy(usual_row(self._schema)).to(rows.x.dtype)
            for name, part in self._schema.groups.items():
                changed = rows.x.clone()
                changed[:, part] = usual[part]
                without[name] = self._predicted(whole, replace(rows, x=changed, new=torch.zeros(len(changed)).bool()))
        said = remarks(self._schema, rows.table) if self._schema is not None else [[] for _ in answers]
        made = [
            {**answer, **explain(answer, {name: each[place] for name, each in without.items()}, said[place], ask.level)}
            for place, answer in enumerate(answers)
        ]
        return _shared_out([ask], made, rows, ask, self._schema)[0]


# --- rows as numbers -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Encoded:
    """Rows of several requests as tensors."""

    x: Tensor
    new: Tensor  # which have a category that was not in training, (rows,)
    guesses: tuple[Tensor, ...]  # all rows, with known categories in the place of new ones
    table: Table

    @classmethod
    def of(cls, asks: list[Ask], schema: Schema | None, model: Model) -> _Encoded:
        if schema is None:
            given = np.concatenate([ask.rows for ask in asks if isinstance(ask.rows, np.ndarray)])
            x = as_input(torch.from_numpy(given), model)
            return cls(x, torch.zeros(len(x), dtype=torch.bool), (), as_table(_frame({"row": range(len(x))})))
        table = _table_of(asks)
        with np.errstate(over="ignore", invalid="ignore"):
            encodings = schema.encodings(table)
        for each in encodings:
            _refuse_infinite(each, schema, asks)
        tensors = [as_input(torch.from_numpy(each), model) for each in encodings]
        new = torch.stack([(each != tensors[0]).any(1) for each in tensors]).any(0)
        return cls(tensors[0], new, tuple(tensors) if len(tensors) > 1 else (), table)


def _table_of(asks: list[Ask]) -> Table:
    if isinstance(asks[0].rows, Table):
        return asks[0].rows
    columns: dict[str, list[Any]] = {}
    for ask in asks:
        assert isinstance(ask.rows, dict)
        for name, values in ask.rows.items():
            columns.setdefault(name, []).extend(values)
    return as_table(_frame(columns))


def _frame(columns: dict[str, Any]) -> Any:
    import pandas as pd

    return pd.DataFrame({name: _series(list(values)) for name, values in columns.items()})


def _series(values: list[Any]) -> Any:
    """Numbers and gaps as an array of numbers, anything else as it is."""
    import pandas as pd

    if set(map(type, values)) <= {int, float, type(None)}:
        return np.array(values, dtype=float)
    return pd.Series(values, dtype=object)


def _refuse_infinite(x: np.ndarray, schema: Schema, asks: list[Ask]) -> None:
    bad = ~np.isfinite(x)
    if bad.any():
        if len(asks) > 1:
            raise ValueError("one of them has a number that is too large")
        row, place = np.argwhere(bad)[0].tolist()
        name = next(name for name, part in schema.groups.items() if part.start <= place < part.stop)
        raise Refused(
            422, f"Row {row}, column {name!r} is too far outside the training rows to compute anything with it.", name,
            row,
        )  # fmt: skip


def _group_of(ask: Ask, place: int) -> Any:
    """Requests with the same are answered together."""
    options = (ask.kind, ask.level, ask.epsilon, ask.draws, ask.fast)
    if ask.kind == "explain" or isinstance(ask.rows, Table):  # how texts are read depends on all rows of a request
        return (*options, place)
    return (*options, (ask.rows.shape[1:], ask.rows.dtype.str) if isinstance(ask.rows, np.ndarray) else None)


def _shared_out(
    asks: list[Ask], answers: list[dict[str, Any]], rows: _Encoded, ask: Ask, schema: Schema | None
) -> list[dict[str, Any] | Refused]:
    """Each request's part of the answers."""
    found: list[dict[str, Any] | Refused] = []
    first = 0
    for each in asks:
        own = answers[first : first + each.count]
        bad = next((number for number, answer in enumerate(own) if not all_finite(answer)), None)
        if bad is None:
            novelty = [answer.pop("novelty") for answer in own if "novelty" in answer]
            found.append({"predictions": own, "level": ask.level, "epsilon": ask.epsilon, "novelty": novelty})
        else:
            found.append(_too_far(bad, rows.x[first + bad], schema))
        first += each.count
    return found


def _too_far(row: int, x: Tensor, schema: Schema | None) -> Refused:
    field = "rows"
    if schema is not None:
        field = max(schema.groups, key=lambda name: float(x[schema.groups[name]].abs().max()))
    where = f"Row {row}" if schema is None else f"Row {row}, column {field!r}"
    return Refused(422, f"{where} is so far outside the training rows that its prediction is not finite.", field, row)


# --- what is loaded --------------------------------------------------------------------------------------------------


def _network(name: str) -> nn.Module:
    """The network that ``module:name`` is, or makes when it is called."""
    module, colon, attribute = name.partition(":")
    if not colon:
        raise InvalidArgument(f"--network must be MODULE:NAME, such as mine.networks:make, got {name!r}.")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise InvalidArgument(f"--network {name}: {error}.") from None
    made = found if isinstance(found, nn.Module) else found()
    if not isinstance(made, nn.Module):
        raise InvalidArgument(f"--network {name} is a {type(made).__name__}, not a torch.nn.Module.")
    return made


def _student(folder: Path, teacher: Posterior) -> Posterior:
    """A network for quick answers: distilled, or a compressed one with the likelihood of the posterior."""
    if kind_of(folder) != COMPRESSED:
        found = load(folder)
        if not isinstance(found, Distilled):
            raise InvalidArgument(f"--student {folder} must be a distilled or compressed network, got {found!r}.")
        return found
    net = load_compressed(folder).requires_grad_(True)  # a model of frozen parameters alone is refused
    model = Model(net, teacher.model.likelihood)
    noise = teacher.model.likelihood_params(teacher.mean())
    params = {**model.params(), **{f"likelihood.{name}": value for name, value in noise.items()}}
    made = Particles(model, {name: value.unsqueeze(0) for name, value in params.items()}, seed=teacher.seed)
    made.target_shape = teacher.target_shape
    return made


def _task_of(posterior: Posterior, schema: Schema | None) -> str:
    if schema is not None and schema.task is not None:
        return schema.task
    labels = isinstance(posterior.model.likelihood, Categorical | Bernoulli | DirichletStudent)
    return "classification" if labels else "regression"


def _row_shape(net: nn.Module) -> tuple[int, ...] | None:
    """Shape of a row where the first layer tells: its number of inputs."""
    first = next((each for each in net.modules() if not list(each.children())), None)
    return (first.in_features,) if isinstance(first, nn.Linear) else None
