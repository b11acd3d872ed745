"""Small tables as files, and runs made from them once for all tests."""

import csv
import math
import random
from datetime import date, timedelta


def number_rows(count=80, seed=0):
    """Numbers, a category, a date, gaps; the outcome is a line in two of them with noise."""
    draw = random.Random(seed)
    rows = []
    for place in range(count):
        dose, site = draw.uniform(0, 10), draw.choice(["north", "south", "west"])
        day = date(2021, 1, 4) + timedelta(days=draw.randrange(700))
        noise = draw.gauss(0, 0.3)
        rows.append(
            {
                "dose": "" if place % 13 == 5 else f"{dose:.3f}",
                "site": site,
                "day": day.isoformat(),
                "treated": draw.choice(["yes", "no"]),
                "response": f"{20 + 1.5 * dose + 2.0 * (site == 'west') + noise:.4f}",
            }
        )
    return rows


def class_rows(count=90, seed=0):
    """Two numbers and the side of a curve they are on, with some labels wrong."""
    draw = random.Random(seed)
    rows = []
    for _ in range(count):
        x, z = draw.uniform(-2, 2), draw.uniform(-2, 2)
        side = "above" if z > math.sin(x) else "below"
        if draw.random() < 0.05:
            side = "above" if side == "below" else "below"
        rows.append({"x": f"{x:.4f}", "z": f"{z:.4f}", "side": side})
    return rows


def write_csv(path, rows):
    """Write rows with a header, and return the path."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    return path


def read_csv(path):
    """The rows of a file as mappings."""
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))
