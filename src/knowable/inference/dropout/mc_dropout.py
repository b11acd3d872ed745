"""Monte Carlo dropout (Gal and Ghahramani, 2016)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from knowable.core.method import FitJob, Method
from knowable.core.support.checks import check_choice, check_count, check_number
from knowable.core.support.randomness import derive_seed, own_randomness
from knowable.core.training.loop import train
from knowable.core.training.settings import Trained, TrainingSettings
from knowable.errors import InvalidArgument, InvalidType
from knowable.inference.dropout.divergence import check_priors
from knowable.inference.dropout.dropout_objective import WAYS, DropoutObjective, Learning
from knowable.inference.dropout.masked_weights import PREDICTIONS, MaskedWeights
from knowable.inference.dropout.placement import Placement, place_dropout
from knowable.inference.point.point import training_diagnostics


@dataclass(frozen=True, repr=False, kw_only=True)
class MCDropout(Trained, Method):
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
        epochs: This and the other fields of :class:`~knowable.core.training.settings.Trained` say how the bound is
            maximised.
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

    family = "dropout"
    summary = "dropout in training and prediction: weights whose columns are dropped at random"
    aliases = ("dropout", "mcdropout")
    references = ("gal2016", "ghahramani2016", "hinton2012", "tompson2015")

    rate: float | None = field(default=None, kw_only=False)
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

    def _fit(self, job: FitJob) -> MaskedWeights:
        return fit_dropout(job, self.training_settings(), self, draws=self.draws)


def check_where(where: Any, argument: str = "where") -> str | tuple[str, ...] | None:
    """Return ``where`` as a name or a tuple of names, or raise; ``argument`` is what messages call it."""
    if where is None or isinstance(where, str):
        return where
    names = tuple(where) if isinstance(where, Iterable) else ()
    if not names or not all(isinstance(name, str) for name in names):
        raise InvalidType(f"{argument} must be None, a name, a glob or several of these; got {where!r}.")
    return names


# --- Fitting masked weights: shared by dropout with set and with learned rates ---------------------------------------


def fit_dropout(
    job: FitJob,
    settings: TrainingSettings,
    method: MCDropout | ConcreteDropout,
    *,
    draws: int,
    learning: Learning | None = None,
) -> MaskedWeights:
    """Decide where dropout acts, maximise its bound, and return the distribution over weights."""
    model, rows, seed = job.model, job.rows, job.seed
    with own_randomness(derive_seed(seed, "start")):
        first = next(iter(rows))[0]
        placement = place_dropout(model, first, rate=method.rate, where=method.where, learned=learning is not None)
    check_priors(model, placement.sites)
    objective = DropoutObjective(model, rows.size, placement, way=method.way, draws=draws, learning=learning)
    result = train(objective, rows, settings, **job.options)
    params = {name: value.detach() for name, value in objective.params().items()}
    found = _with_rates(placement, objective.rates())
    terms = objective.final_bound(rows, seed) | {f"rate.{site.name}": site.rate for site in found.sites}
    return MaskedWeights(
        model, params, found, prediction=method.prediction, points={name: params[name] for name in model.point_names},
        buffers=objective.net_buffers, seed=seed,
        diagnostics=training_diagnostics(method, model, result, params, terms, _notes(placement)),
    )  # fmt: skip


def _with_rates(placement: Placement, rates: list[float]) -> Placement:
    sites = tuple(replace(site, rate=rate) for site, rate in zip(placement.sites, rates, strict=True))
    return replace(placement, sites=sites)


def _notes(placement: Placement) -> tuple[str, ...]:
    if not placement.noisy:
        return ()
    left = [path for path, rate in placement.own_rates.items() if rate > 0]
    which = f"of {', '.join(left[:5])}{', ...' if len(left) > 5 else ''}" if left else "in the network's own code"
    return (f"Dropout {which} is no distribution over weights: it is random in predictions, but not in sample().",)


# --- Dropout whose rates are learned (Gal, Hron and Kendall, 2017) ---------------------------------------------------

ESTIMATORS = ("concrete", "score")
_SCORE_DRAWS = 2


@dataclass(frozen=True, repr=False, kw_only=True)
class ConcreteDropout(Trained, Method):
    r"""Dropout with a rate for every layer, learned with the weights by maximising the bound.

    .. math:: \max_{M, p}\; E_z[\log p(D \mid W)] - \sum_l \Big(\frac{\|M_l\|^2}{2 s^2 (1 - p_l)} - K_l H(p_l)\Big),
        \qquad W_l = M_l \operatorname{diag}\Big(\frac{z}{1 - p_l}\Big)

    with :math:`K_l` inputs of layer l. The entropy H of the masks asks for rates near ½, the data for small ones: the
    more data, the smaller the rates. (What the bound is: :class:`~knowable.inference.dropout.mc_dropout.MCDropout`.)

    Args:
        rate: Where the rates begin; None is the rate of the network's own dropout layers, or 0.1.
        epochs: This and the other fields of :class:`~knowable.core.training.settings.Trained` say how the bound is
            maximised.
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

    family = "dropout"
    summary = "dropout with a rate for every layer, learned with the weights"
    references = ("gal2017", "maddison2017", "williams1992")

    rate: float | None = field(default=None, kw_only=False)
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

    def _fit(self, job: FitJob) -> MaskedWeights:
        draws = self.draws or (_SCORE_DRAWS if self.estimator == "score" else 1)
        learning = Learning(self.estimator, self.relaxation)
        return fit_dropout(job, self.training_settings(), self, draws=draws, learning=learning)
