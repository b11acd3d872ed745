"""The posteriors that samplers are compared on, as arrays: every library gets the same numbers.

A fully connected tanh network, a standard normal prior on all weights and biases, and Gaussian noise of known size:

    log p(y, w | x) = -|y - f(x, w)|² / (2 noise²) - |w|² / 2 + constant

Nothing but NumPy is imported here, so that a process can choose its threads before a library starts them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class Regression:
    """A network and its data.

    Attributes:
        title: What the table says.
        widths: Units of every layer, inputs and output included.
        noise: Standard deviation of the noise.
        x: Inputs ``(N, d)``.
        y: Targets ``(N,)``.
        at: Inputs ``(M, d)`` at which function values are compared: some of the rows of ``x``.
    """

    title: str
    widths: tuple[int, ...]
    noise: float
    x: Array
    y: Array
    at: Array

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """Of the flat position's pieces: the weight ``(out, in)`` of each layer, then its bias ``(out,)``."""
        pairs = zip(self.widths[:-1], self.widths[1:], strict=True)
        return [shape for inputs, outputs in pairs for shape in ((outputs, inputs), (outputs,))]

    @property
    def dimension(self) -> int:
        """Weights and biases together."""
        return sum(int(np.prod(shape)) for shape in self.shapes)

    def starts(self, chains: int, seed: int) -> Array:
        """Where the chains of everybody begin: draws from the prior, ``(chains, D)``."""
        return np.random.default_rng([seed, 1]).standard_normal((chains, self.dimension)).astype(np.float32)

    def pieces(self, flat):
        """A flat position ``(..., D)`` of any array library cut into weights and biases ``(..., *shape)``."""
        found, first = [], 0
        for shape in self.shapes:
            last = first + int(np.prod(shape))
            found.append(flat[..., first:last].reshape(*flat.shape[:-1], *shape))
            first = last
        return found

    def functions(self, positions: Array, *, block: int = 2000) -> Array:
        """The network's outputs at ``at`` for positions ``(chains, draws, D)``: ``(chains, draws, M)``."""
        flat = positions.reshape(-1, positions.shape[-1])
        parts = [self._outputs(flat[first : first + block]) for first in range(0, len(flat), block)]
        return np.concatenate(parts).reshape(*positions.shape[:2], -1)

    def _outputs(self, flat: Array) -> Array:
        hidden = np.broadcast_to(self.at, (len(flat), *self.at.shape))
        pieces = self.pieces(flat)
        for number in range(0, len(pieces), 2):
            hidden = hidden @ pieces[number].swapaxes(-1, -2) + pieces[number + 1][:, None, :]
            hidden = np.tanh(hidden) if number < len(pieces) - 2 else hidden
        return hidden[..., 0].astype(np.float32)


def diabetes() -> Regression:
    """The diabetes data of scikit-learn (442 x 10), inputs and target standardised, in a 10-16-16-1 network."""
    from sklearn.datasets import load_diabetes

    x, y = load_diabetes(return_X_y=True)
    x, y = _standardised(np.asarray(x)), _standardised(np.asarray(y))
    title = "Diabetes (442 x 10), 10-16-16-1 tanh, noise 0.7"
    return Regression(title, (10, 16, 16, 1), 0.7, x, y, x[:: len(x) // 40][:40])


def toy() -> Regression:
    """A sine with a gap in the middle (60 points), in a 1-20-1 network."""
    generator = np.random.default_rng(0)
    x = np.concatenate([generator.uniform(-2.0, -0.5, 30), generator.uniform(0.5, 2.0, 30)]).astype(np.float32)
    y = (np.sin(2.0 * x) + 0.3 * generator.standard_normal(60)).astype(np.float32)
    title = "A sine with a gap (60 x 1), 1-20-1 tanh, noise 0.3"
    return Regression(title, (1, 20, 1), 0.3, x[:, None], y, x[::2, None])


TARGETS: dict[str, Callable[[], Regression]] = {"diabetes": diabetes, "toy": toy}


def smaller(target: Regression, *, rows: int = 12, units: int = 3) -> Regression:
    """A small and easy version of the same, for quick runs."""
    widths = (target.widths[0], *(units for _ in target.widths[1:-1]), 1)
    return replace(target, widths=widths, noise=1.0, x=target.x[:rows], y=target.y[:rows], at=target.x[:4])


def _standardised(values: NDArray[np.float64]) -> Array:
    return ((values - values.mean(0)) / values.std(0)).astype(np.float32)
