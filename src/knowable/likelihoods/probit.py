r"""Probabilities averaged over normal logits, nearly in closed form.

The logistic function is close to a normal distribution function of scale :math:`\sqrt{8 / \pi}`, of which the average
over a normal is known (Spiegelhalter and Lauritzen, 1990; MacKay, 1992):

.. math:: E[\sigma(f)] \approx \sigma\Big(\frac{m}{\sqrt{1 + \pi s^2 / 8}}\Big), \qquad f \sim \mathcal{N}(m, s^2)
"""

from __future__ import annotations

import math

from torch import Tensor


def moderated(mean: Tensor, variance: Tensor) -> Tensor:
    """Logits that are less sure where their variance is large; for several classes each logit by itself."""
    return mean / (1.0 + (math.pi / 8.0) * variance).sqrt()
