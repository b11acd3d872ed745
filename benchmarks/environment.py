"""What must be known about a machine to read a time measured on it."""

from __future__ import annotations

import datetime
import os
import platform
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path

import torch

ABSENT = "not installed"


@dataclass(frozen=True)
class Environment:
    """The machine and the software of a run.

    Attributes:
        date: When the run began (UTC).
        cpu: Model of the processor.
        cores: Logical cores that this process may use.
        threads: Threads that torch uses within an operation.
        load: Load average over the minute before the run: much above zero means that the machine was not quiet.
        python: Version of Python.
        system: Operating system and architecture.
        versions: Versions of the distributions that were compared.
    """

    date: str
    cpu: str
    cores: int
    threads: int
    load: float
    python: str
    system: str
    versions: dict[str, str]

    @classmethod
    def now(cls, packages: Iterable[str]) -> Environment:
        """Describe this process, with the versions of torch, knowable and ``packages``."""
        names = dict.fromkeys(("torch", "knowable", *packages))
        return cls(
            date=datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
            cpu=_cpu_model(),
            cores=_usable_cores(),
            threads=torch.get_num_threads(),
            load=round(os.getloadavg()[0], 2),
            python=platform.python_version(),
            system=f"{platform.system()} {platform.machine()}",
            versions={name: _version(name) for name in names},
        )

    def to_dict(self) -> dict[str, object]:
        """As plain values for JSON."""
        return asdict(self)


def _version(distribution: str) -> str:
    if distribution == "torch":
        return str(torch.__version__)
    if distribution == "knowable":
        return _knowable_version()
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ABSENT


def _knowable_version() -> str:
    """From the package itself: it may be on the path without being installed."""
    try:
        from knowable._version import __version__
    except ImportError:
        return ABSENT
    return __version__


def _usable_cores() -> int:
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # outside Linux
        return os.cpu_count() or 1


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
