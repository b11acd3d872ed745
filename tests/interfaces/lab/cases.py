"""Problems of the lab for tests, and one that quick methods fit in no time."""

import torch

from knowable.interfaces.lab.problem import Problem

POINTS = [[-2.0, -0.8], [-1.0, -0.9], [0.0, 0.1], [1.0, 0.8], [2.0, 0.9], [2.5, 0.4]]


def numbers(**changes):
    """A problem of numbers."""
    return Problem.read({"points": POINTS, "width": 4, "view": [-3, 3, -2, 2], **changes})


def labels(rows=24, classes=2, **changes):
    """A problem of classes."""
    x = torch.randn(rows, 2, generator=torch.Generator().manual_seed(0))
    y = (x[:, 0] > 0).long()
    if classes == 3:
        y[x[:, 1] > 0.5] = 2
    points = [[*map(float, row), int(label)] for row, label in zip(x, y, strict=True)]
    return Problem.read({"task": "classes", "points": points, "width": 4, "view": [-3, 3, -3, 3], **changes})


class Silent:
    """A connection on which nothing comes, and that keeps what is sent."""

    def __init__(self):
        self.sent = []

    def poll(self):
        return False

    def send(self, message):
        self.sent.append(message)
