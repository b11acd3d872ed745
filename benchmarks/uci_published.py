"""Published test log likelihoods and RMSEs of the methods of ``uci_methods``, with standard errors and sources.

There is a row of the same method for dropout and for deep ensembles, on the standard splits. For the point estimate,
Laplace and SWAG no such row is known to us on these five data sets; beside them stands the nearest relative, on 20
random splits of its authors: a network trained to a mean and a variance for the point estimate and for SWAG, and a
Bayesian last layer (the neural linear model) for Laplace. (In that source, energy is predicted much worse by every
method than elsewhere: it may be another target.)
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Published:
    """A published row: means with standard errors, over 20 splits."""

    log_likelihood: tuple[float, float]
    rmse: tuple[float, float]


@dataclass(frozen=True)
class Source:
    """Where rows are from.

    Attributes:
        label: Short name, for the table.
        text: The whole of it.
        same_method: Whether it is the same method, on the same splits, or only the nearest relative.
    """

    label: str
    text: str
    same_method: bool


GAL = Source(
    "grid search",
    "Gal and Ghahramani (2016), MC dropout, one layer of 50, as repeated by the authors in 2018 with rates and noise "
    "from a grid search on validation rows; computed from their results for each split (the results of 2016, whose "
    "settings had been chosen with test rows in sight, are not used)",
    True,
)
LAKSHMINARAYANAN = Source(
    "2017",
    "Lakshminarayanan, Pritzel and Blundell (2017), table 1, 5 networks with one layer of 50, 40 epochs; the paper "
    "prints what by its size is a standard deviation over the splits, here divided by √20",
    True,
)
PNN = Source(
    "PNN",
    "nearest relative: one network that gives mean and variance (PNN, nnuncert), on other random splits",
    False,
)
NLM = Source(
    "NLM",
    "nearest relative: neural linear model, a Bayesian last layer (NLM, nnuncert), on other random splits",
    False,
)

SOURCES = {"MAP": PNN, "Laplace": NLM, "MCDropout": GAL, "DeepEnsemble": LAKSHMINARAYANAN, "SWAG": PNN}
"""The source of each method's rows."""

_PNN = {
    "bostonHousing": Published((-2.811, 0.113), (3.938, 0.208)),
    "concrete": Published((-3.153, 0.046), (6.096, 0.155)),
    "energy": Published((-1.772, 0.085), (2.967, 0.333)),
    "wine-quality-red": Published((-1.122, 0.039), (0.658, 0.011)),
    "yacht": Published((-1.645, 0.097), (1.652, 0.143)),
}

PUBLISHED: dict[str, dict[str, Published]] = {
    "MAP": _PNN,
    "SWAG": _PNN,
    "Laplace": {
        "bostonHousing": Published((-2.699, 0.100), (3.882, 0.197)),
        "concrete": Published((-3.067, 0.049), (5.795, 0.197)),
        "energy": Published((-1.539, 0.049), (3.029, 0.266)),
        "wine-quality-red": Published((-1.063, 0.038), (0.634, 0.008)),
        "yacht": Published((-1.372, 0.091), (1.348, 0.144)),
    },
    "MCDropout": {
        "bostonHousing": Published((-2.402, 0.042), (2.904, 0.177)),
        "concrete": Published((-2.937, 0.025), (4.826, 0.161)),
        "energy": Published((-1.212, 0.005), (0.539, 0.014)),
        "wine-quality-red": Published((-0.928, 0.013), (0.622, 0.008)),
        "yacht": Published((-1.250, 0.015), (0.666, 0.049)),
    },
    "DeepEnsemble": {
        "bostonHousing": Published((-2.41, 0.056), (3.28, 0.224)),
        "concrete": Published((-3.06, 0.040), (6.03, 0.130)),
        "energy": Published((-1.38, 0.049), (2.09, 0.065)),
        "wine-quality-red": Published((-0.94, 0.027), (0.64, 0.009)),
        "yacht": Published((-1.18, 0.047), (1.58, 0.107)),
    },
}
"""By method and data set."""
