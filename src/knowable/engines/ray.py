"""Independent work on Ray: as many tasks at a time as there are workers, on this machine or on a cluster."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from knowable.core.compiling.workers import Counts, Done, Pool, Report, Surroundings, Workers, perform
from knowable.core.support.checks import check_count, check_number
from knowable.errors import (
    CannotConnect,
    InvalidArgument,
    InvalidType,
    KnowableError,
    KnowableWarning,
    MissingExtra,
    Unsupported,
    WorkerLost,
)

_REACHED_WITHIN = 10.0  # seconds for an address to answer
_ROOM_WITHIN = 60.0  # seconds for a machine with room to come back, where none is left
_LOOK_AGAIN = 5.0  # seconds between two looks at the machines
_AMOUNTS = {"CPU": "num_cpus", "GPU": "num_gpus", "memory": "memory"}


@dataclass(frozen=True)
class Ray(Workers, name="ray"):
    """Independent work as Ray tasks: members, groups of chains, methods and folds of a comparison.

    ``fit(..., engine=kn.engines.Ray())`` or ``engine="ray"``. Data and model go into Ray's object store once; a worker
    trains as many members together as go well in one batched step. What a piece of work computes is fixed by the seed
    and by the problem, so that any number of workers, and none, give the same bits: on processors of the same kind, and
    with the same number of threads, which workers take over from this process (``torch.set_num_threads``). A method
    whose work does not divide, such as :class:`~knowable.MAP`, is one piece.

    Work that is lost with a worker or a machine is done again on another, up to three times; what had finished is kept.
    Ctrl-C stops all workers.

    Args:
        address: Of a cluster that this machine is a part of: ``"host:6379"``, or ``"auto"``. None: the one this process
            is connected to already, or ``$RAY_ADDRESS``, or else one that is started here.
        num_workers: How many pieces are worked on at a time. None: as many as the processors have room for.
        resources: What each piece needs of Ray, such as ``{"CPU": 2, "memory": 8e9, "GPU": 1}``. CPU is otherwise the
            number of threads, at most those of the largest machine.

    Attributes:
        counts: How many pieces were started, done and lost since the engine was made.

    Example:
        >>> import knowable as kn
        >>> kn.engines.Ray(num_workers=4).num_workers
        4
    """

    address: str | None = None
    num_workers: int | None = None
    resources: Mapping[str, float] | None = None
    counts: Counts = field(default_factory=Counts, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.address is not None and not isinstance(self.address, str):
            raise InvalidType(f"address must be such as 'host:6379', or None, got {type(self.address).__name__}.")
        if self.address is not None and self.address.startswith("ray://"):
            raise InvalidArgument(
                f"address {self.address!r} is one of Ray's client protocol. Run this on a machine of the cluster, with "
                f"its 'host:6379' or 'auto'."
            )
        if self.num_workers is not None:
            check_count("num_workers", self.num_workers)
        if self.resources is not None:
            if not isinstance(self.resources, Mapping):
                raise InvalidType(f"resources must be such as {{'CPU': 2}}, got {type(self.resources).__name__}.")
            for name, amount in self.resources.items():
                check_number(f"resources[{name!r}]", amount, at_least=0)

    @contextmanager
    def pool(self, work: Callable[[Any, Any], Any], shared: Any, *, told: bool) -> Iterator[RayPool]:
        ray = connected(self.address)
        pool = RayPool(ray, self, work, shared, told=told)
        try:
            yield pool
        finally:
            pool.close()


class RayPool(Pool):
    """One work on a Ray cluster."""

    def __init__(self, ray: Any, settings: Ray, work: Callable[[Any, Any], Any], shared: Any, *, told: bool):
        self.ray = ray
        self.claim = self._claim(settings.resources)
        room = self._room()
        if room == 0:
            raise CannotConnect(
                f"No machine of the Ray cluster has room for a piece of work, which needs {self.claim}: there are "
                f"{_plain(ray.cluster_resources())}. Ask for less in resources=."
            )
        self.at_once = settings.num_workers or room
        if self.at_once > room and settings.resources is None:
            warnings.warn(
                f"num_workers={self.at_once}, each of {torch.get_num_threads()} threads, but there are processors for "
                f"{room} at a time: the others wait. Call torch.set_num_threads(1) for more workers of one thread.",
                KnowableWarning, stacklevel=6,
            )  # fmt: skip
        try:
            self.shared = [ray.put(ray.cloudpickle.dumps((work, shared)))]
        except Exception as error:
            if isinstance(error, ray.exceptions.RayError):
                raise
            raise Unsupported(
                f"The work cannot be sent to workers: {error}. Model and data must be picklable; leave engine= out to "
                f"fit in this process."
            ) from error
        amounts: dict[str, Any] = {_AMOUNTS[name]: n for name, n in self.claim.items() if name in _AMOUNTS}
        others = {name: n for name, n in self.claim.items() if name not in _AMOUNTS}
        self.perform = ray.remote(_perform).options(**amounts, resources=others, max_retries=0)
        self.inbox = None
        if told:
            node = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(
                ray.get_runtime_context().get_node_id(), soft=True
            )
            self.inbox = ray.remote(_Inbox).options(num_cpus=0, scheduling_strategy=node).remote()
        self._looked, self._no_room_since = (
            0.0,
            0.0,
        )  # when there was last a look at the machines; since when none has room

    def start(self, task: Any, around: Surroundings) -> Any:
        return self.perform.remote(self.shared, self.ray.cloudpickle.dumps(task), around, self.inbox)

    def wait(self, running: list[Any], seconds: float) -> list[Any]:
        ended, waiting = self.ray.wait(running, num_returns=1, timeout=seconds)
        if ended and waiting:
            ended += self.ray.wait(waiting, num_returns=len(waiting), timeout=0)[0]
        if not ended:
            self._check_room()
        return ended

    def result(self, ended: Any) -> Done:
        errors = self.ray.exceptions
        try:
            return self.ray.cloudpickle.loads(self.ray.get(ended))
        except errors.OutOfMemoryError:
            raise WorkerLost(
                "It ran out of memory. Use fewer num_workers, or ask for memory: resources={'memory': 8e9}."
            ) from None
        except errors.RayTaskError as error:
            if isinstance(error.cause, Exception):
                raise error.cause from None
            raise KnowableError(f"A worker could not do its work: {error}") from None
        except errors.RayError as error:  # the worker, its machine or the result is gone
            raise WorkerLost(f"Ray says: {' '.join(str(error).split())[:300]}") from None

    def cancel(self, running: list[Any]) -> None:
        for each in running:
            with contextlib.suppress(Exception):  # it ended, or its machine is gone
                self.ray.cancel(each, force=True)

    def reports(self) -> list[Report]:
        if self.inbox is None:
            return []
        try:
            return self.ray.get(self.inbox.taken.remote(), timeout=5)
        except self.ray.exceptions.RayError:  # progress is not worth an error
            return []

    def close(self) -> None:
        """Give back what the work holds of the cluster."""
        if self.inbox is not None:
            with contextlib.suppress(Exception):
                self.ray.kill(self.inbox)
        self.shared = []

    def _claim(self, resources: Mapping[str, float] | None) -> dict[str, float]:
        given = dict(resources or {})
        largest = max((node.get("CPU", 0.0) for node in self._machines()), default=0.0)
        return {"CPU": max(1.0, min(float(torch.get_num_threads()), largest)), **given}

    def _machines(self) -> list[dict[str, float]]:
        return [node["Resources"] for node in self.ray.nodes() if node["Alive"]]

    def _room(self) -> int:
        """How many pieces the machines have room for, all together."""
        wanted = {name: amount for name, amount in self.claim.items() if amount > 0}
        if not wanted:
            return max(1, os.cpu_count() or 1)
        return sum(int(min(node.get(name, 0.0) // n for name, n in wanted.items())) for node in self._machines())

    def _check_room(self) -> None:
        """An error where no machine with room is left, and none comes back."""
        now = time.monotonic()
        if now - self._looked < _LOOK_AGAIN:
            return
        self._looked = now
        self._no_room_since = 0.0 if self._room() else self._no_room_since or now
        if not self._no_room_since:
            return
        if now - self._no_room_since > _ROOM_WITHIN:
            raise CannotConnect(
                f"For {_ROOM_WITHIN:.0f} s no machine of the Ray cluster has had room for a piece of work, which needs "
                f"{self.claim}. Start others and fit again; with checkpoint= it goes on where it was."
            )


def _plain(resources: Mapping[str, float]) -> dict[str, float]:
    return {name: amount for name, amount in resources.items() if not name.startswith(("node:", "object_store"))}


# --- on a worker -----------------------------------------------------------------------------------------------------

_SHARED: tuple[Any, Any] = (None, None)  # the last work that this worker did, and what stands for it


def _perform(holder: list[Any], task: bytes, around: Surroundings, inbox: Any) -> bytes:
    """A Ray task. What all tasks share is read once by each worker.

    Everything is pickled here and not by Ray, whose arrays could not be written to.
    """
    global _SHARED
    import ray
    from ray import cloudpickle

    if _SHARED[0] != holder[0]:
        _SHARED = (None, None)
        _SHARED = (holder[0], cloudpickle.loads(ray.get(holder[0])))
    work, shared = _SHARED[1]

    def tell(report: Report) -> None:
        if inbox is not None:
            inbox.told.remote(report)

    return cloudpickle.dumps(perform(work, shared, cloudpickle.loads(task), around, tell))  # type: ignore[reportPrivateImportUsage]


class _Inbox:
    """Reports of all workers, until they are taken."""

    def __init__(self) -> None:
        self._reports: list[Report] = []

    def told(self, report: Report) -> None:
        """Keep a report."""
        self._reports.append(report)

    def taken(self) -> list[Report]:
        """All that have come in since the last time."""
        found, self._reports = self._reports, []
        return found


# --- the connection --------------------------------------------------------------------------------------------------


def connected(address: str | None) -> Any:
    """The module ``ray``, connected.

    Raises:
        MissingExtra: If it is not installed.
        CannotConnect: If the address does not answer as a Ray cluster does, within ten seconds or so.
    """
    try:
        import ray
        import ray.util.scheduling_strategies
    except ImportError:
        raise MissingExtra("engine='ray' needs ray: pip install 'knowable[dist]'.") from None
    if ray.is_initialized():
        here = ray.get_runtime_context().gcs_address
        if address not in (None, "auto", "local", here):
            raise InvalidArgument(
                f"address is {address!r}, but this process is connected to the Ray cluster at {here!r}. Call "
                f"ray.shutdown() first."
            )
        return ray
    wanted = address or os.environ.get("RAY_ADDRESS") or None
    if wanted not in (None, "auto", "local"):
        check_answers(str(wanted))
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # a fit tells nobody
    options: dict[str, Any] = {} if wanted not in (None, "local") else {"include_dashboard": False}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ray.init(address=wanted, log_to_driver=False, logging_level=logging.ERROR, **options)
    except (Exception, SystemExit) as error:
        raise CannotConnect(
            f"address {wanted!r} is no Ray cluster that this process can join: {' '.join(str(error).split())[:300]}"
        ) from None
    return ray


_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])  # of HTTP/2, which gRPC speaks
_SETTINGS = 4  # the kind of frame with which a server answers


def check_answers(address: str) -> None:
    """Refuse an address at which no gRPC server answers: Ray itself would try for minutes, and end the process."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise InvalidArgument(f"address must be such as 'host:6379', got {address!r}.")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=_REACHED_WITHIN) as line:
            line.settimeout(_REACHED_WITHIN)
            line.sendall(_HELLO)
            answer = line.recv(9)
    except OSError as error:
        raise CannotConnect(
            f"address {address!r} cannot be reached ({error}). Start Ray there ('ray start --head'), or leave address "
            f"out to work on this machine."
        ) from None
    if len(answer) < 9 or answer[3] != _SETTINGS:
        raise CannotConnect(f"address {address!r} answers, but not as a Ray cluster does. Check host and port.")
