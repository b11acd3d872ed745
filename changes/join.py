"""Joins the fragments of this folder into CHANGELOG.md, under the package's version: ``python changes/join.py``.

Run again before the release is tagged, it adds the fragments that came since to the same section. Files that were joined
are deleted; ``--keep`` leaves them.
"""

from __future__ import annotations

import argparse
import datetime
import re
from pathlib import Path

HERE = Path(__file__).resolve().parent
ORDER = ("Added", "Changed", "Fixed", "Removed")
INTRO = "# Changelog\n\nNewest first. Versions follow semantic versioning: while the first number is 0, the second one rises with a\nchange that breaks code.\n"


def parts(text: str) -> dict[str, str]:
    """The lists of a fragment or of a version's section, by heading; a list without one is what was fixed."""
    pieces = re.split(r"^### (.+)$", text, flags=re.MULTILINE)
    found = {"Fixed": pieces[0].strip()} if pieces[0].strip() else {}
    for heading, body in zip(pieces[1::2], pieces[2::2], strict=True):
        if heading.strip() not in ORDER:
            raise ValueError(f"heading {heading!r} is none of {', '.join(ORDER)}")
        found[heading.strip()] = body.strip()
    return found


def joined(version: str, date: str, old: str, fragments: list[str]) -> str:
    """The changelog with the fragments in the section of that version, which is made if it is not there."""
    sections = re.split(r"^(?=## )", old, flags=re.MULTILINE)[1:]
    same = [each for each in sections if each.startswith(f"## {version} ")]
    others = [each for each in sections if each not in same]
    lists: dict[str, list[str]] = {heading: [] for heading in ORDER}
    for text in [each.partition("\n")[2] for each in same] + [each.replace("](../", "](") for each in fragments]:
        for heading, body in parts(text).items():
            lists[heading].append(body)
    body = "".join(f"\n### {heading}\n\n" + "\n".join(each) + "\n" for heading, each in lists.items() if each)
    return INTRO + "\n" + f"## {version} ({date})\n{body}" + "".join(f"\n{each.strip()}\n" for each in others)


def main() -> None:
    """Write the file and take the fragments away."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keep", action="store_true", help="leave the fragments where they are")
    options = parser.parse_args()
    version = re.search(r'__version__ = "(.+)"', (HERE.parent / "src/knowable/_version.py").read_text())[1]
    target = HERE.parent / "CHANGELOG.md"
    files = sorted(HERE.glob("[0-9]*.md"))
    old = target.read_text(encoding="utf-8") if target.exists() else ""
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    target.write_text(joined(version, date, old, [each.read_text(encoding="utf-8") for each in files]), encoding="utf-8")
    for each in [] if options.keep else files:
        each.unlink()
    print(f"{target.name}: {len(files)} fragments under {version}")


if __name__ == "__main__":
    main()
