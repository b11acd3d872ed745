"""Tables and progress on the terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

from knowable.interfaces.report.content import Cell, ScoreTable

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

_PLAIN_WIDTH = 110  # columns when the output is not a terminal


class Ticker(Protocol):
    """Told of each piece of work as it begins."""

    def begin(self, what: str) -> None:
        """Say what is being done now; what was being done is finished."""
        ...


class _Silent:
    def begin(self, what: str) -> None:
        pass


def standard_output() -> Console:
    """A console on standard output, wide enough for a table when it is not a terminal."""
    from rich.console import Console

    return Console(highlight=False, width=None if sys.stdout.isatty() else _PLAIN_WIDTH)


@contextmanager
def ticking(title: str, total: int, *, show: bool) -> Iterator[Ticker]:
    """A progress bar over ``total`` pieces of work on standard error, shown on a terminal only."""
    if not (show and sys.stderr.isatty()):
        yield _Silent()
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn(title),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=Console(stderr=True), refresh_per_second=5) as progress:
        task = progress.add_task("", total=total)

        class _Rich:
            begun = 0

            def begin(self, what: str) -> None:
                progress.update(task, completed=self.begun, description=what)
                self.begun += 1

        yield _Rich()
        progress.update(task, completed=total, description="done")


def as_rich(table: ScoreTable) -> Table:
    """A table of scores for the terminal: the best of a column in bold with a star."""
    from rich.table import Table
    from rich.text import Text

    made = Table(title=Text(table.title), caption=Text(table.note), title_justify="left", caption_justify="left")
    made.add_column("method", no_wrap=True)
    for column in table.columns:
        made.add_column(column.label, justify="right")
    for method, cells in table.rows:
        made.add_row(Text(method), *(_styled(cell) for cell in cells))
    return made


def _styled(cell: Cell) -> Text:
    from rich.text import Text

    text = Text(cell.text + (" ★" if cell.mark == "best" else ""), style="bold" if cell.mark == "best" else "")
    return text.append(f"\n{cell.error_text}", style="not bold dim") if cell.error_text else text
