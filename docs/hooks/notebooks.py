"""Makes Jupyter notebooks of the tutorials: ``python docs/hooks/notebooks.py FOLDER``.

The pages are Markdown whose ``python`` blocks run in order, which is what a notebook is. (jupytext reads them too.)
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

TUTORIALS = Path(__file__).parents[1] / "tutorials"
BLOCK = re.compile(r"^```python\n(.*?)^```\n", re.MULTILINE | re.DOTALL)
HIDDEN = re.compile(r"^<!-- check\n.*?^-->\n|^!\[[^\]]*\]\([^)]*\)\n", re.MULTILINE | re.DOTALL)


def cells(page: str) -> list[dict]:
    """Text and code in turns; pictures are left out, because the code draws them."""
    pieces = BLOCK.split(HIDDEN.sub("", page))
    kinds = ("markdown", "code")
    return [_cell(kinds[place % 2], text.strip()) for place, text in enumerate(pieces) if text.strip()]


def _cell(kind: str, text: str) -> dict:
    cell = {"cell_type": kind, "metadata": {}, "source": text.splitlines(keepends=True)}
    return cell | ({"outputs": [], "execution_count": None} if kind == "code" else {})


def notebook(page: str) -> dict:
    """A notebook of format 4 without outputs."""
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    return {"cells": cells(page), "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 4}


def main(folder: Path) -> None:
    """Write one for every tutorial."""
    folder.mkdir(parents=True, exist_ok=True)
    for page in sorted(TUTORIALS.glob("*.md")):
        if BLOCK.search(text := page.read_text(encoding="utf-8")):
            (folder / f"{page.stem}.ipynb").write_text(json.dumps(notebook(text), indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
