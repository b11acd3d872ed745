"""Progress bars on long work: shown on a terminal, silent elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from knowable.errors import InvalidType


class Bar(Protocol):
    """What a loop tells about its progress."""

    def update(self, done: float, total: float, text: str) -> None:
        """Say how far the work is, of how much, with a few words."""
        ...


class _Silent:
    def update(self, done: float, total: float, text: str) -> None:
        pass


@contextmanager
def progress_bar(label: str, show: bool | None = None) -> Iterator[Bar]:
    """A bar on standard error.

    Args:
        label: What is being done.
        show: True, False, or None to show it only on a terminal.
    """
    if show is not None and not isinstance(show, bool):
        raise InvalidType(f"progress must be True, False or None (only on a terminal), got {show!r}.")
    if show is False or (show is None and not sys.stderr.isatty()):
        yield _Silent()
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[text]}", style="dim"),
    )
    with Progress(*columns, console=Console(stderr=True), transient=False, refresh_per_second=5) as progress:
        task = progress.add_task(label, total=1.0, text="")

        class _Rich:
            def update(self, done: float, total: float, text: str) -> None:
                progress.update(task, completed=done, total=max(total, done), text=text)

        yield _Rich()
