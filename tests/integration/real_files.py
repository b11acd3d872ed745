"""Three real tables as files, two of them with what real files have: strings, dates and gaps."""

from __future__ import annotations

import random
from datetime import date, timedelta
from pathlib import Path

import pandas


def write_motorcycle(folder: Path) -> tuple[Path, str]:
    """The series that ships with the package."""
    import knowable.datasets

    content = (Path(knowable.datasets.__file__).parent / "mcycle.csv").read_text(encoding="utf-8")
    lines = [line for line in content.splitlines() if not line.startswith("#")]
    path = folder / "motorcycle.csv"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path, lines[0].split(",")[-1].strip('"')


def write_diabetes(folder: Path) -> tuple[Path, str]:
    """Progress of diabetes: sex as a word, a date of the visit, one blood value in twenty not measured."""
    from sklearn.datasets import load_diabetes

    frame = load_diabetes(as_frame=True, scaled=False).frame
    frame["sex"] = frame["sex"].map({1.0: "woman", 2.0: "man"})
    _spoil(frame, ["s3", "s5", "bp"], seed=0)
    path = folder / "diabetes.csv"
    frame.to_csv(path, index=False)
    return path, "target"


def write_breast_cancer(folder: Path) -> tuple[Path, str]:
    """Tumours: the diagnosis as a word, the size as a class of sizes, dates, gaps; semicolons between the fields."""
    from sklearn.datasets import load_breast_cancer

    found = load_breast_cancer(as_frame=True)
    frame = found.data.copy()
    frame["diagnosis"] = [str(found.target_names[code]) for code in found.target]
    frame["size class"] = pandas.cut(frame.pop("mean area"), 4, labels=["small", "medium", "large", "huge"])
    _spoil(frame, ["mean texture", "worst concavity", "size class"], seed=1)
    path = folder / "breast_cancer.csv"
    frame.to_csv(path, index=False, sep=";")
    return path, "diagnosis"


def _spoil(frame: pandas.DataFrame, columns: list[str], *, seed: int) -> None:
    """Leave cells empty, one in twenty, and add the day of the visit."""
    draw = random.Random(seed)
    days = [date(2019, 1, 1) + timedelta(days=draw.randrange(900)) for _ in range(len(frame))]
    frame.insert(0, "visit", [day.isoformat() for day in days])
    for column in columns:
        gaps = [draw.random() < 0.05 for _ in range(len(frame))]
        frame[column] = frame[column].astype(object).where([not gap for gap in gaps], None)
