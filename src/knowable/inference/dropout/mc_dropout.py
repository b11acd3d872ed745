"""Monte Carlo dropout (Gal and Ghahramani, 2016)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from knowable.core.checks import check_choice, check_count, check_number
from knowable.core.method import Method
from knowable.core.training import Training
from knowable.errors import InvalidType
from knowable.inference.dropout.dropout_objective import WAYS
from knowable.inference.dropout.fitting import fit_dropout
from knowable.inference.dropout.masked_weights import PREDICTIONS, MaskedWeights


@dataclass(frozen=True)
class Dropping:
    """What all kinds of dropout are told: how much.

    Args:
        rate: Probability of dropping an input.
    """

    rate: float | None = None


@dataclass(frozen=True, repr=False)
class MCDropout(Method, Training, Dropping):
    r"""Dropout in training and in prediction: a distribution over weights whose columns are dropped at random.

    .. math:: W = M \operatorname{diag}\Big(\frac{z}{1 - p}\Big), \quad z_j \sim \mathrm{Bernoulli}(1 - p), \qquad
        \max_M\; E_z[\log p(D \mid W)] - \frac{\|M\|^2}{2 s^2 (1 - p)} + \mathrm{const}

    for the prior N(0, s²): the evidence lower bound of a mixture of two narrow normals for every column, one of them at
    zero, on the full-data scale (Gal and Ghahramani, 2016). There is no weight decay to set, for it follows from rate,
    prior and number of rows. The bound in the diagnostics (``"elbo"``) lacks the constant of the narrow normals and so
    says nothing about the evidence; what is approximate in it: :mod:`~knowable.inference.dropout.divergence`.

    Networks need no change. Where they have dropout layers, those are used; where they have none, inputs of all layers
    but the first are dropped: features of linear layers, channels of convolutions (spatial dropout), columns of input
    and hidden weights of recurrent layers with one mask for a sequence (Gal and Ghahramani, 2016b). Prediction uses
    draws of the weights that all inputs share, as with every other method.

    Args:
        rate: Probability of dropping an input. None: the network's own dropout layers at their own rates; 0.1 where it
            has none.
        epochs: This and the other fields of :class:`~knowable.core.training.Training` say how the bound is maximised.
        way: How training draws. ``"activations"``: a mask for each example on the inputs of the layers, as ordinary
            dropout does (recurrent and attention weights, which have no such input, get one mask for each step).
            ``"weights"``: one draw of the masked weights for each step. Both estimate the same bound, the first with
            less noise. (Batch normalisation is an exception: its statistics are those of the batch, masks and all.)
        where: Names or globs of the weights whose inputs are dropped; the network's own dropout layers are then off.
            None: the network's own layers, or all but the first.
        prediction: ``"monte_carlo"``, or ``"weight_scaling"``: one pass with the mean weights (dropout off), which is
            cheap and has no epistemic uncertainty (Hinton et al., 2012).
        draws: Masks for each example, or draws of the weights, in each step.

    Example:
        >>> import torch
        >>> import knowable as kn
        >>> x = torch.linspace(-1, 1, 40).unsqueeze(1)
        >>> net = torch.nn.Sequential(torch.nn.Linear(1, 20), torch.nn.ReLU(), torch.nn.Linear(20, 1))
        >>> posterior = kn.MCDropout(0.2, epochs=100).fit(kn.Model(net, kn.Gaussian(0.1)), (x, x.abs()))
        >>> posterior.rates
        {'2.weight': 0.2}
    """

    way: str = "activations"
    where: str | tuple[str, ...] | None = None
    prediction: str = "monte_carlo"
    draws: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rate is not None:
            check_number("rate", self.rate, above=0, below=1)
        check_choice("way", self.way, WAYS)
        object.__setattr__(self, "where", check_where(self.where))
        check_choice("prediction", self.prediction, PREDICTIONS)
        check_count("draws", self.draws)

    def fit(
        self, model, data, *, validation=None, seed=0, progress=None, checkpoint=None, engine=None
    ) -> MaskedWeights:
        """Maximise the bound; see :meth:`knowable.core.method.Method.fit`."""
        return fit_dropout(
            self, model, data, training=self, rate=self.rate, where=self.where, way=self.way, draws=self.draws,
            prediction=self.prediction, validation=validation, seed=seed, progress=progress, checkpoint=checkpoint,
            engine=engine,
        )  # fmt: skip


def check_where(where: Any, argument: str = "where") -> str | tuple[str, ...] | None:
    """Return ``where`` as a name or a tuple of names, or raise; ``argument`` is what messages call it."""
    if where is None or isinstance(where, str):
        return where
    names = tuple(where) if isinstance(where, Iterable) else ()
    if not names or not all(isinstance(name, str) for name in names):
        raise InvalidType(f"{argument} must be None, a name, a glob or several of these; got {where!r}.")
    return names
