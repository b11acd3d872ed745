"""The deep variational information bottleneck (Alemi et al., 2017)."""

from __future__ import annotations

from dataclasses import dataclass

from knowable.core.checks import check_choice, check_count, check_number
from knowable.core.deadline import share_of_time
from knowable.core.method import Method, admit, identity_of
from knowable.core.model import Model
from knowable.core.point_estimate import refuse_learned_prior, training_diagnostics
from knowable.core.randomness import derive_seed, own_randomness
from knowable.core.training import Training, train
from knowable.errors import InvalidType
from knowable.inference.variational.bottleneck_code import MARGINALS, SCALES, CodePlace, code_shape, tapped
from knowable.inference.variational.bottleneck_objective import BottleneckObjective
from knowable.inference.variational.bottleneck_posterior import RandomCode

_NOTE = "Weights are point estimates: predictions differ from draw to draw by the code alone."


@dataclass(frozen=True, repr=False)
class InformationBottleneck(Method, Training):
    r"""A random code in the middle of the network that keeps of the input only what helps to predict.

    .. math:: \min\; D + \beta R, \qquad D = E\big[-\log p(y \mid z)\big], \quad
        R = E\big[\mathrm{KL}(p(z \mid x) \,\|\, r(z))\big], \quad
        z \mid x \sim \mathcal{N}\big(\mu(x), \operatorname{diag}\sigma^2(x)\big)

    averaged over the data, with - log p(θ) / N for the weights' prior (``Flat()`` leaves it out, as the paper does).
    The distortion D and the rate R are reported in nats per example, as ``diagnostics["distortion"]`` and ``["rate"]``.
    They bound what the code knows: I(z; x) ≤ R, and I(z; y) ≥ H(y) - D. **It is no posterior over weights**, which are
    point estimates: predictions average over draws of the code, their disagreement is that of the codes, and there is
    no evidence. As ``beta`` goes to 0 the noise vanishes and with it the difference to ordinary training.

    The network needs no change. The output of the chosen layer becomes the mean of the code; its log variance comes
    from a linear layer that is added beside it, or from half of the layer's own features. Features are the channels of
    images (dimension 1 of four or more), the last dimension otherwise; every position has its own code.

    Args:
        layer: The layer whose output is the code's mean, by its path in the network (``"encoder.3"``). None: what the
            last layer with parameters takes in.
        beta: β, the price of a nat of rate in nats of distortion; 0 charges nothing.
        epochs: This and the other fields of :class:`~knowable.core.training.Training` say how it is minimised.
        scale: ``"head"``: the log variance is a learned linear function of the layer's output. ``"split"``: the first
            half of the layer's features is the mean, the second half the log variance; what follows the layer then
            takes half as many features as the layer gives.
        marginal: r(z): ``"standard"`` normal, or ``"learned"``: normal with a mean and a standard deviation for every
            entry of the code.
        draws: Codes for each example in each step.
        initial_scale: Standard deviation of the code at the start, with a head.

    Example:
        >>> import torch
        >>> import knowable as kn
        >>> x = torch.linspace(-1, 1, 40).unsqueeze(1)
        >>> net = torch.nn.Sequential(torch.nn.Linear(1, 20), torch.nn.Tanh(), torch.nn.Linear(20, 1))
        >>> method = kn.InformationBottleneck(layer="1", beta=0.01, epochs=100)
        >>> posterior = method.fit(kn.Model(net, kn.Gaussian(0.1)), (x, x.abs()))
        >>> posterior.diagnostics["rate"] > 0
        True
    """

    layer: str | None = None
    beta: float = 1e-3
    scale: str = "head"
    marginal: str = "standard"
    draws: int = 1
    initial_scale: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.layer is not None and not isinstance(self.layer, str):
            raise InvalidType(f"layer must be the path of a layer such as 'encoder.3', or None; got {self.layer!r}.")
        check_number("beta", self.beta, at_least=0)
        check_choice("scale", self.scale, SCALES)
        check_choice("marginal", self.marginal, MARGINALS)
        check_count("draws", self.draws)
        check_number("initial_scale", self.initial_scale, above=0)

    def fit(self, model, data, *, validation=None, seed=0, progress=None, checkpoint=None, engine=None) -> RandomCode:
        """Minimise distortion and rate; see :meth:`knowable.core.method.Method.fit`."""
        place = tap = None
        if isinstance(model, Model):  # what is not is refused by the next line
            refuse_learned_prior(self, model)
            place = CodePlace.of(model, self.layer, self.scale)
            model, tap = tapped(model, place)
        rows, held_out, seed = admit(model, data, validation, seed, batch_size=self.batch_size)
        assert place is not None and tap is not None
        with own_randomness(derive_seed(seed, "start")):
            shape = code_shape(model, tap, next(iter(rows))[0])
        objective = BottleneckObjective(
            model, tap, shape, rows.size, beta=self.beta, marginal=self.marginal, draws=self.draws,
            initial_scale=self.initial_scale,
        )  # fmt: skip
        with share_of_time(0.9):  # the rest is for the distortion
            result = train(
                objective, rows, self, validation=held_out, seed=seed, progress=progress, checkpoint=checkpoint,
                engine=engine, label=type(self).__name__, identity=identity_of(self, model, rows, held_out),
            )  # fmt: skip
        params = {name: value.detach() for name, value in objective.params().items()}
        terms = objective.final_terms(rows, seed)
        return RandomCode(
            model, params, objective.code_tensors(), place=place, shape=shape, seed=seed, buffers=objective.net_buffers,
            points={name: params[name] for name in model.point_names},
            diagnostics=training_diagnostics(self, model, result, params, terms, (_NOTE,)),
        )  # fmt: skip
