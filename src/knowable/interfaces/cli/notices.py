"""What the library warns about while a command runs: collected, told once, and where the data is wrong, an error."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from knowable.errors import ConvergenceWarning, Interrupted, InvalidData, KnowableWarning
from knowable.interfaces.cli.exits import say
from knowable.interfaces.report.content import Notice

_KINDS = re.compile(r"kinds=\{(['\"])(.+?)\1: (['\"])(\w+)\3\}")
_TASK = re.compile(r"task=['\"](\w+)['\"]")


@contextmanager
def collected() -> Iterator[list[Notice]]:
    """Collect the library's own warnings, each once, and pass on those of others."""
    found: list[Notice] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            yield found
        finally:
            own = [each for each in caught if issubclass(each.category, KnowableWarning)]
            others = [each for each in caught if not issubclass(each.category, KnowableWarning)]
            texts = dict.fromkeys((_source(each.category), _line(str(each.message))) for each in own)
            found += [Notice(source, text) for source, text in texts]
    for each in others:
        warnings.warn_explicit(each.message, each.category, each.filename, each.lineno)


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
    return "Fit" if issubclass(category, ConvergenceWarning | Interrupted) else "Data"


def _line(text: str) -> str:
    return for_the_shell(" ".join(text.split()))
