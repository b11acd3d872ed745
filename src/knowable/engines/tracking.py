"""Figures of a fit while it runs, in TensorBoard or MLflow: ``fit(..., progress=kn.TensorBoard("figures"))``.

Every network, or group of chains, that is fitted is a run of its own, also where it is fitted on a worker: the terms of
the objective, the learning rate and the score on held-out rows at every record of the training; acceptance, step size
and mean log density at every block of transitions, and at the end R-hat and effective sample sizes.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from knowable.core.support.progress import Bar, Tracker
from knowable.errors import MissingExtra


@dataclass(frozen=True)
class TensorBoard(Tracker):
    """Figures as files that ``tensorboard --logdir FOLDER`` shows.

    Args:
        folder: Where they are written, a folder in it for each run.
    """

    folder: str | os.PathLike[str]

    @contextmanager
    def opened(self, label: str) -> Iterator[Bar]:
        try:
            from torch.utils.tensorboard.writer import SummaryWriter
        except ImportError:
            raise MissingExtra("TensorBoard needs tensorboard: pip install 'knowable[track]'.") from None
        writer = SummaryWriter(str(Path(self.folder) / label))
        try:
            yield _Scalars(writer)
        finally:
            writer.close()


class _Scalars(Bar):
    def __init__(self, writer: Any):
        self.writer = writer

    def update(self, done, total, text, terms=None, make=None):
        for name, value in _finite(terms or {}).items():
            self.writer.add_scalar(name, value, int(done))


@dataclass(frozen=True)
class MLflow(Tracker):
    """Figures as metrics of MLflow runs.

    Args:
        uri: Of the tracking server, or of a folder or database; None is MLflow's own choice (``MLFLOW_TRACKING_URI``).
        experiment: The experiment that the runs are in; it is made where it does not exist.
    """

    uri: str | None = None
    experiment: str = "knowable"

    @contextmanager
    def opened(self, label: str) -> Iterator[Bar]:
        try:
            from mlflow.tracking import MlflowClient
        except ImportError:
            raise MissingExtra("MLflow needs mlflow-skinny (or mlflow): pip install 'knowable[track]'.") from None
        client = MlflowClient(tracking_uri=self.uri)
        known = client.get_experiment_by_name(self.experiment)
        number = client.create_experiment(self.experiment) if known is None else known.experiment_id
        run = client.create_run(number, run_name=label).info.run_id
        ended = "FAILED"
        try:
            yield _Metrics(client, run)
            ended = "FINISHED"
        except KeyboardInterrupt:
            ended = "KILLED"
            raise
        finally:
            client.set_terminated(run, ended)


class _Metrics(Bar):
    def __init__(self, client: Any, run: str):
        self.client, self.run = client, run

    def update(self, done, total, text, terms=None, make=None):
        from mlflow.entities import Metric

        now, found = round(1000 * time.time()), _finite(terms or {})
        if found:
            self.client.log_batch(self.run, [Metric(name, value, now, int(done)) for name, value in found.items()])


def _finite(figures: Mapping[str, float]) -> dict[str, float]:
    return {name: float(value) for name, value in figures.items() if math.isfinite(value)}
