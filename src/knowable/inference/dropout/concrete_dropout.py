"""Dropout whose rates are learned (Gal, Hron and Kendall, 2017)."""

from __future__ import annotations

from dataclasses import dataclass

from knowable.core.checks import check_choice, check_count, check_number
from knowable.core.method import Method
from knowable.core.training import Training
from knowable.errors import InvalidArgument
from knowable.inference.dropout.dropout_objective import WAYS, Learning
from knowable.inference.dropout.fitting import fit_dropout
from knowable.inference.dropout.masked_weights import PREDICTIONS, MaskedWeights
from knowable.inference.dropout.mc_dropout import Dropping, check_where

ESTIMATORS = ("concrete", "score")
_SCORE_DRAWS = 2


@dataclass(frozen=True, repr=False)
class ConcreteDropout(Method, Training, Dropping):
    r"""Dropout with a rate for every layer, learned with the weights by maximising the bound.

    .. math:: \max_{M, p}\; E_z[\log p(D \mid W)] - \sum_l \Big(\frac{\|M_l\|^2}{2 s^2 (1 - p_l)} - K_l H(p_l)\Big),
        \qquad W_l = M_l \operatorname{diag}\Big(\frac{z}{1 - p_l}\Big)

    with :math:`K_l` inputs of layer l. The entropy H of the masks asks for rates near ½, the data for small ones: the
    more data, the smaller the rates. (What the bound is: :class:`~knowable.inference.dropout.mc_dropout.MCDropout`.)

    Args:
        rate: Where the rates begin; None is the rate of the network's own dropout layers, or 0.1.
        epochs: This and the other fields of :class:`~knowable.core.training.Training` say how the bound is maximised.
        estimator: How the bound is differentiated in the rates.
            ``"concrete"``: masks are relaxed to numbers between 0 and 1 (Gal, Hron and Kendall, 2017). Little noise,
            and a bias that vanishes with ``relaxation``.
            ``"score"``: hard masks and the log-derivative (REINFORCE), each draw compared with the others. No bias, and
            more noise.
        relaxation: t of the relaxed masks; 0 would be hard masks, whose gradient is zero almost everywhere.
        way: As in :class:`~knowable.inference.dropout.mc_dropout.MCDropout`.
        where: As there.
        prediction: As there.
        draws: Masks for each example, or draws of the weights, in each step; None is 1, and 2 for ``"score"``.

    Example:
        >>> import torch
        >>> import knowable as kn
        >>> x = torch.linspace(-1, 1, 40).unsqueeze(1)
        >>> net = torch.nn.Sequential(torch.nn.Linear(1, 20), torch.nn.ReLU(), torch.nn.Linear(20, 1))
        >>> posterior = kn.ConcreteDropout(epochs=100).fit(kn.Model(net, kn.Gaussian(0.1)), (x, x.abs()))
        >>> 0 < posterior.rates["2.weight"] < 1
        True
    """

    estimator: str = "concrete"
    relaxation: float = 0.1
    way: str = "activations"
    where: str | tuple[str, ...] | None = None
    prediction: str = "monte_carlo"
    draws: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rate is not None:
            check_number("rate", self.rate, above=0, below=1)
        check_choice("estimator", self.estimator, ESTIMATORS)
        check_number("relaxation", self.relaxation, above=0)
        check_choice("way", self.way, WAYS)
        object.__setattr__(self, "where", check_where(self.where))
        check_choice("prediction", self.prediction, PREDICTIONS)
        if self.draws is not None:
            check_count("draws", self.draws)
        if self.estimator == "score" and self.draws == 1:
            raise InvalidArgument("draws must be >= 2 with estimator='score': each draw is compared with the others.")

    def fit(
        self, model, data, *, validation=None, seed=0, progress=None, checkpoint=None, engine=None
    ) -> MaskedWeights:
        """Maximise the bound over weights and rates; see :meth:`knowable.core.method.Method.fit`."""
        return fit_dropout(
            self, model, data, training=self, rate=self.rate, where=self.where, way=self.way,
            draws=self.draws or (_SCORE_DRAWS if self.estimator == "score" else 1), prediction=self.prediction,
            learning=Learning(self.estimator, self.relaxation), validation=validation, seed=seed, progress=progress,
            checkpoint=checkpoint, engine=engine,
        )  # fmt: skip
