"""Inputs for conformal thresholds, and what other libraries make of them."""

from __future__ import annotations

import numpy as np

ROWS, NEW, CLASSES = 57, 3, 5
ALPHAS = (0.05, 0.1, 0.3)


def uniforms(count: int, stream: int) -> np.ndarray:
    """Numbers in (0, 1) by a linear congruential generator in whole numbers: the same on every machine."""
    state, found = 12345 + 1000 * stream, []
    for _ in range(count + 10):
        state = (1103515245 * state + 12345) % 2**31
        found.append((state // 2**8 + 0.5) / 2**23)
    return np.array(found[10:])


def probabilities() -> np.ndarray:
    """Class probabilities of the held-out and the new rows."""
    raw = (-np.log(uniforms((ROWS + NEW) * CLASSES, 1)).reshape(ROWS + NEW, CLASSES)) ** 1.5
    return raw / raw.sum(1, keepdims=True)


def labels() -> np.ndarray:
    """Labels drawn from the probabilities."""
    return (probabilities().cumsum(1) < uniforms(ROWS + NEW, 2)[:, None]).sum(1)


def residuals() -> np.ndarray:
    """Residuals of the held-out rows."""
    return 3 * (uniforms(ROWS, 3) - 0.4) * scales()


def scales() -> np.ndarray:
    """Predicted standard deviations of the held-out rows."""
    return 0.5 + uniforms(ROWS, 4)


def losses() -> np.ndarray:
    """Losses between 0 and 1 that fall along a grid of 11 settings."""
    return uniforms(ROWS, 5)[:, None] * np.linspace(1, 0, 11)
