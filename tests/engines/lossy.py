"""Workers for tests: they take pieces in another order, in pickled form, and lose some of them."""

from __future__ import annotations

import pickle
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from knowable.core.compiling.workers import Counts, Done, Pool, Report, Surroundings, Workers, perform
from knowable.errors import WorkerLost


@dataclass(frozen=True)
class Lossy(Workers):
    """``num_workers`` pieces are under way; the ones started as number ``lost`` are lost, after they were done."""

    num_workers: int = 3
    lost: tuple[int, ...] = ()
    seed: int = 0
    counts: Counts = field(default_factory=Counts)

    @contextmanager
    def pool(self, work: Any, shared: Any, *, told: bool) -> Iterator[LossyPool]:
        yield LossyPool(self, pickle.dumps((work, shared)))


class LossyPool(Pool):
    def __init__(self, settings: Lossy, work: bytes):
        self.settings, self.at_once, self.work = settings, settings.num_workers, work
        self.order, self.started = random.Random(settings.seed), 0
        self.under_way: dict[int, tuple[bytes, Surroundings]] = {}
        self.cancelled: list[int] = []
        self.told: list[Report] = []

    def start(self, task: Any, around: Surroundings) -> int:
        self.under_way[self.started] = pickle.dumps(task), around
        self.started += 1
        return self.started - 1

    def wait(self, running: list[int], seconds: float) -> list[int]:
        return [self.order.choice(running)]

    def result(self, ended: int) -> Done:
        task, around = self.under_way.pop(ended)
        work, shared = pickle.loads(self.work)
        done = perform(work, shared, pickle.loads(task), around, self.told.append)
        if ended in self.settings.lost:
            raise WorkerLost("The worker is gone.")
        return pickle.loads(pickle.dumps(done))

    def cancel(self, running: list[int]) -> None:
        self.cancelled += running

    def reports(self) -> list[Report]:
        found, self.told = self.told, []
        return found
