"""Tutorials are run while the site is built: what a block prints is shown below it."""

from __future__ import annotations

import contextlib
import io
import re
import tempfile
from typing import Any

BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FOLDER = "tutorials/"


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """The page with the output of each of its Python blocks."""
    if not page.file.src_uri.startswith(FOLDER) or not BLOCK.search(markdown):
        return markdown
    import matplotlib

    matplotlib.use("Agg")
    namespace: dict[str, Any] = {"__name__": "__main__"}
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        return BLOCK.sub(lambda match: match[0] + _output(match[1], page.file.src_uri, namespace), markdown)


def _output(code: str, name: str, namespace: dict[str, Any]) -> str:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, name, "exec", dont_inherit=True), namespace)
    text = printed.getvalue().rstrip()
    return f"\n\n```{{.text .output}}\n{text}\n```" if text else ""
