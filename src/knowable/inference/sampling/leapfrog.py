"""A step of Hamiltonian dynamics: the leapfrog, which is reversible and keeps volumes.

Once the step size is tuned, every fifth trajectory has a quarter of it: that frees chains that are stuck where the
density is narrow and every longer step is refused.
"""

from __future__ import annotations

from torch import Tensor

from knowable.core.fused_step import Gradient
from knowable.inference.sampling.metric import velocity

CAREFUL_EVERY, CAREFULLY = 5, 0.25
DIVERGED = 1000.0  # energy error in nats beyond which a trajectory has left the Hamiltonian's surface


def leapfrog(
    value_and_grad: Gradient, position: Tensor, momentum: Tensor, gradient: Tensor, step: Tensor, inverse_mass: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Half a step of the momentum, one of the position, and the other half."""
    half = momentum + 0.5 * step * gradient
    position = position + step * velocity(half, inverse_mass)
    value, gradient = value_and_grad(position)
    return position, half + 0.5 * step * gradient, gradient, value
