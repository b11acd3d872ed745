"""The command line: ``knowable demo | fit | predict | evaluate | compare | report | methods | cite``.

One file a command, registered in :mod:`.app`. Heavy things are imported inside the commands, so that
``knowable --help`` and completion are quick.
"""

from knowable.interfaces.cli.app import app, main

__all__ = ["app", "main"]
