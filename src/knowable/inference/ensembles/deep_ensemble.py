"""Deep ensembles (Lakshminarayanan, Pritzel and Blundell, 2017)."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from knowable.core.method import FitJob, Method
from knowable.core.model.data import Data
from knowable.core.posterior.particles import Particles
from knowable.core.support.checks import check_choice, check_count, check_number, check_type
from knowable.core.support.randomness import derive_seed, own_randomness
from knowable.core.training.settings import Trained
from knowable.errors import InvalidData
from knowable.inference.ensembles.members import Members


@dataclass(frozen=True, repr=False, kw_only=True)
class DeepEnsemble(Trained, Method):
    r"""Several networks, each trained to a mode of the posterior from its own random start.

    .. math:: p(y \mid x, D) \approx \frac1K \sum_k p(y \mid x, \hat\theta_k), \qquad
        \hat\theta_k = \text{a mode of } p(\theta \mid D)

    Where members disagree, the data has not decided. Networks without batch statistics and dropout are trained in one
    batched step for all members, on the same batches, which for small networks takes little longer than one; others in
    turn, each with its own order of the data. The first member begins at the network's own weights, so that an
    ensemble of one is :class:`~knowable.inference.point.point.MAP`; the others at new ones, unless ``start`` says
    otherwise. Where the noise depends on the input, as in the paper, use
    :class:`~knowable.likelihoods.heteroscedastic_gaussian.HeteroscedasticGaussian`.

    Args:
        members: How many networks.
        epochs: Passes over the data; None stops when the objective has converged.
        learning_rate: Step size; None chooses it from the number of parameters D (0.01 up to 10,000, then 1/√D down to
            0.001).
        batch_size: Rows per step; None takes all rows up to 1,024, and 128 beyond.
        training: Optimiser, gradient clipping, patience of early stopping, divergence and accumulation:
            ``kn.Training(...)``.
        adversarial: Size of adversarial perturbations (fast gradient sign), as a fraction of each input's range (0.01
            in the paper; 0 for none). Half of the likelihood is then that of the perturbed inputs.
        vectorise: Train all members in one step (True) or in turn (False). None: in turn where the network has more
            than 100,000 parameters or cannot be batched; else in one step, or in groups where a step for all would be
            mostly arithmetic. With ``Engine(mode="compiled")`` that step is compiled.
        start: ``"fresh"``: all members but the first begin at new initial weights. ``"network"``: all begin at the
            network's own (the others with a little noise, 1% of the spread of each parameter's elements), and are
            trained in turn, in other orders of the data; for networks that are already trained.

    Example:
        >>> import torch
        >>> import knowable as kn
        >>> x = torch.linspace(-1, 1, 40).unsqueeze(1)
        >>> net = torch.nn.Sequential(torch.nn.Linear(1, 10), torch.nn.Tanh(), torch.nn.Linear(10, 1))
        >>> posterior = kn.DeepEnsemble(members=3, epochs=200).fit(kn.Model(net, kn.Gaussian()), (x, x.sin()))
        >>> len(posterior)
        3
    """

    family = "ensembles"
    summary = "several networks from their own random starts, trained in one step where they are small"
    aliases = ("ensemble",)
    references = ("lakshminarayanan2017", "fort2019")
    supports_row_weights = True

    members: int = field(default=5, kw_only=False)
    adversarial: float = 0.0
    vectorise: bool | None = None
    start: str = "fresh"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("members", self.members)
        check_number("adversarial", self.adversarial, at_least=0)
        if self.vectorise is not None:
            check_type("vectorise", self.vectorise, bool, "True, False or None")
        check_choice("start", self.start, ("fresh", "network"))

    @property
    def makes_inputs(self) -> bool:
        return self.adversarial > 0

    def _divides(self, job: FitJob) -> bool:
        return True

    def _fit(self, job: FitJob) -> Particles:
        attack, notes, nearby = None, (), self.start == "network"
        if self.adversarial > 0:
            with own_randomness(derive_seed(job.seed, "range")):  # a loader may shuffle
                attack = self.adversarial * input_range(job.rows)
            notes = (
                f"adversarial={self.adversarial:g}: half of the likelihood is that of adversarial inputs; 0 is Bayes.",
            )
        vectorise = False if nearby and self.vectorise is None else self.vectorise  # in turn, the orders differ
        return Members(job, self.training_settings(), self.members, vectorise, attack, notes, nearby).fit()


def input_range(rows: Data) -> Tensor:
    """Largest less smallest value of each element of an input row, over all rows."""
    low = high = None
    for batch in rows:
        x = batch[0]
        if not x.is_floating_point():
            raise InvalidData(f"adversarial perturbs inputs, which must be floating point; x is {x.dtype}.")
        low = x.amin(0) if low is None else torch.minimum(low, x.amin(0))
        high = x.amax(0) if high is None else torch.maximum(high, x.amax(0))
    assert low is not None and high is not None
    return high - low
