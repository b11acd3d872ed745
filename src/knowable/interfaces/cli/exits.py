"""What the exit codes mean, and how an error becomes one line and a code."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

import typer

from knowable.errors import Diverged, KnowableError

GOOD = 0
FAILURE = 1
"""Something went wrong inside the program."""
BAD_INPUT = 2
"""A file, an argument or the data cannot be used; nothing was written."""
NOT_CONVERGED = 3
"""The fit ended before it had settled, or left the finite numbers."""
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
    except KeyboardInterrupt:
        stop("stopped from the keyboard", INTERRUPTED)
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
