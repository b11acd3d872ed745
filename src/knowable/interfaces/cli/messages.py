"""Exit codes, errors as one line, warnings as notices, and tables on the terminal."""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, NoReturn

import typer

from knowable.errors import ConvergenceWarning, Diverged, Interrupted, InvalidData, KnowableError, UnseenCategory
from knowable.report.report import Notice
from knowable.report.scores import Cell, ScoreTable
from knowable.report.warned import Warned, collect_warnings

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text


GOOD = 0
FAILURE = 1
"""Something went wrong inside the program."""
BAD_INPUT = 2
"""A file, an argument or the data cannot be used; nothing was written."""
NOT_CONVERGED = 3
"""The fit did not converge, or the loss became NaN or infinite."""
INTERRUPTED = 130
"""Stopped from the keyboard."""

TRACEBACK = "KNOWABLE_TRACEBACK"
"""Set this variable to see where an unexpected error came from."""

_FILES = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError, FileExistsError)


@contextmanager
def plain_errors() -> Iterator[None]:
    """Turn whatever goes wrong into one line on standard error and an exit code."""
    try:
        yield
    except (typer.Exit, typer.Abort, BrokenPipeError):
        raise
    except KeyboardInterrupt as error:
        stop(str(error) or "stopped from the keyboard", INTERRUPTED)
    except Diverged as error:
        stop(str(error), NOT_CONVERGED)
    except KnowableError as error:
        stop(str(error), BAD_INPUT)
    except OSError as error:
        where = f": {error.filename}" if error.filename else ""
        stop(f"{error.strerror or error}{where}", BAD_INPUT if isinstance(error, _FILES) else FAILURE)
    except Exception as error:
        if os.environ.get(TRACEBACK):
            raise
        what = f"{type(error).__name__}: {error}"
        stop(f"this should not have happened. {what} (set {TRACEBACK}=1 to see where)", FAILURE)


def stop(message: str, code: int) -> NoReturn:
    """Say why on one line, and end with the code."""
    say(message)
    raise typer.Exit(code)


def say(message: str) -> None:
    """One line on standard error."""
    typer.echo(f"knowable: {' '.join(message.split())}", err=True)


# --- What the library warns about while a command runs: collected, told once, and where the data is wrong, an error --

_KINDS = re.compile(r"kinds=\{(['\"])(.+?)\1: (['\"])(\w+)\3\}")
_TASK = re.compile(r"task=['\"](\w+)['\"]")


@contextmanager
def collected() -> Iterator[list[Notice]]:
    """Collect the library's own warnings as notices, each once."""
    found: list[Notice] = []
    warned: list[Warned] = []
    try:
        with collect_warnings(warned):
            yield found
    finally:
        texts = dict.fromkeys((_source(category), _line(text)) for category, text in warned)
        found += [Notice(source, text) for source, text in texts]


def refuse_doubtful(found: Sequence[Notice], *, lenient: bool) -> None:
    """Data that looks wrong ends a command, unless the user has said to go on.

    Raises:
        InvalidData: With the first thing that looks wrong and the way out.
    """
    doubts = [notice.text for notice in found if notice.source == "Data"]
    if doubts and not lenient:
        more = f" (and {len(doubts) - 1} more)" if len(doubts) > 1 else ""
        raise InvalidData(f"{doubts[0]}{more} Correct the file, or pass --lenient to go on with it as it is.")


def tell(found: Sequence[Notice], *, quiet: bool) -> None:
    """Each warning on a line of standard error."""
    if not quiet:
        for notice in found:
            say(f"warning: {notice.text}")


@contextmanager
def told(*, quiet: bool) -> Iterator[None]:
    """Say when a fit begins and ends, where there is no terminal for a progress bar."""
    logger, before = logging.getLogger("knowable"), logging.getLogger("knowable").level
    handler = logging.Handler()
    handler.emit = lambda record: say(record.getMessage())
    if quiet or sys.stderr.isatty():
        yield
        return
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)


@contextmanager
def spoken_for_the_shell() -> Iterator[None]:
    """Let errors about the data speak of flags where they speak of arguments."""
    try:
        yield
    except InvalidData as error:
        raise InvalidData(for_the_shell(str(error))) from None


def for_the_shell(message: str) -> str:
    """``kinds={'zip': 'categorical'}`` is ``--kind zip=categorical`` on the command line.

    >>> for_the_shell("Correct it, or say kinds={'zip': 'categorical'}.")
    'Correct it, or pass --kind zip=categorical.'
    >>> for_the_shell("Leave out the widest: kinds={'name': 'ignore'}.")
    'Leave out the widest: --drop name.'
    """
    spoken = _KINDS.sub(lambda found: _flag(found[2], found[4]), message)
    spoken = _TASK.sub(r"--task \1", spoken)
    return spoken.replace("say --", "pass --")


def _flag(name: str, kind: str) -> str:
    shown = f"'{name}'" if " " in name else name
    return f"--drop {shown}" if kind == "ignore" else f"--kind {shown}={kind}"


def _source(category: type[Warning]) -> str:
    if issubclass(category, UnseenCategory):
        return "New category"  # which widens predictions, and is no reason to refuse a file
    return "Fit" if issubclass(category, ConvergenceWarning | Interrupted) else "Data"


def _line(text: str) -> str:
    return for_the_shell(" ".join(text.split()))


_PLAIN_WIDTH = 110  # columns when the output is not a terminal


def standard_output() -> Console:
    """A console on standard output, wide enough for a table when it is not a terminal."""
    from rich.console import Console

    return Console(highlight=False, width=None if sys.stdout.isatty() else _PLAIN_WIDTH)


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
