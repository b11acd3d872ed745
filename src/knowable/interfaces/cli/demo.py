"""``knowable demo``: everything at once on data that comes with the package."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from knowable.interfaces.cli.exits import plain_errors
from knowable.interfaces.cli.options import Config, Quiet, Seed


def demo(
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder for report.html; nothing else is written.")] = Path(
        "knowable-demo"
    ),
    seed: Seed = 0,
    quick: Annotated[bool, typer.Option("--quick", help="A rough run of seconds, with short training.")] = False,
    quiet: Quiet = False,
    config: Config = None,
) -> None:
    """Fit several methods to real data, score them, and write a report.

    Two problems that come with the package: head acceleration in motorcycle accidents, where the noise changes with
    time, and handwritten digits. Nothing is downloaded. It takes about a minute and a half on two processor cores.
    """
    with plain_errors():
        from knowable.interfaces.demo import run_demo

        run_demo(out, seed=seed, quick=quick, quiet=quiet)
