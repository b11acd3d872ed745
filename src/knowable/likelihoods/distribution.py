"""A likelihood from any class of ``torch.distributions``: say which distribution an output stands for, that is all."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.distributions import Categorical, Distribution, Independent
from torch.distributions.constraints import Constraint
from torch.func import vmap

from knowable.core.compiling.recorder import unchecked_distributions
from knowable.core.model.likelihood import DenseInformation, Likelihood
from knowable.core.network.batched import batched
from knowable.core.network.params import Params, expand_params, index_params
from knowable.core.prediction.prediction import (
    Components,
    RegressionPrediction,
    align_target,
    as_numbers,
    refuse_where,
    sum_over_event,
)
from knowable.core.support.randomness import derive_seed, own_randomness
from knowable.errors import InvalidArgument, InvalidType, Unsupported

_DRAWS = 4096  # outcomes of each row, over all components, that stand for a distribution function
_MOST_OUTPUTS = 32  # of a row, beyond which its matrix of information is not formed
_SCORES = 2**20  # gradients in the outputs that information() draws, as far as that makes 64 to 1,024 of each row


@dataclass(frozen=True)
class DistributionLikelihood(Likelihood):
    r"""A likelihood from a class of ``torch.distributions``. A subclass writes :meth:`distribution`; the rest follows.

    .. math:: p(y \mid f) = \mathrm{distribution}(f).\mathrm{prob}(y)

    Targets are checked against the distribution's support. Predictions mix the distributions of all draws: mean,
    variance (aleatoric and epistemic), density, quantiles and outcomes. They are predictions of numbers; for labels
    there are ``Bernoulli()`` and ``Categorical()``.

    - ``mean`` and ``variance`` are the distribution's own, which it must have.
    - Quantiles and intervals follow from its ``cdf``. Where it has none (``Beta``, ``StudentT``, counts), 4,096
      outcomes of each row stand for it: a standard error of at most 0.008 in probability, the same at every call.
    - :meth:`information`, for ``Laplace``, is averaged over outcomes drawn from the distribution.

    Settings are fields of a frozen dataclass, so that posteriors can be saved; ``knowable.load(path, classes=[...])``
    reads them. A subclass without settings needs no decorator.

    Example:
        >>> import torch, knowable as kn
        >>> class Gamma(kn.DistributionLikelihood):
        ...     "Positive numbers with mean exp(output)."
        ...     def params(self):
        ...         return {"log_shape": torch.tensor(0.0)}
        ...     def priors(self):
        ...         return {"log_shape": kn.Normal(2.0)}
        ...     def distribution(self, output, params):
        ...         shape = params["log_shape"].exp()
        ...         return torch.distributions.Gamma(shape, shape * torch.exp(-output))
        >>> Gamma().log_prob(torch.zeros(2, 1), torch.ones(2, 1), Gamma().params())
        tensor([-1., -1.])
    """

    @abstractmethod
    def distribution(self, output: Tensor, params: Params) -> Distribution:
        """The distribution of the targets, each row's from its own output alone.

        Args:
            output: The network's output, ``(batch, ...)``, any real numbers: map it into the range of the
                distribution's parameters (``exp``, ``softplus``, ``sigmoid``).
            params: Values of the own parameters (see :meth:`params`) for one draw, by short name.

        Returns:
            A distribution whose batch shape begins with the batch. What follows, and the event shape, is the shape of
            one target.
        """

    def align(self, y: Tensor, output: Tensor) -> Tensor:
        """Whole numbers in the output's dtype; :meth:`log_prob`, which knows the distribution, gives the shape."""
        return y if y.is_floating_point() else y.to(output.dtype)

    def check_target(self, y: Tensor, output: Tensor, *, name: str = "y") -> Tensor:
        output = output.detach()[:1].requires_grad_()
        own = {key: value.to(output).requires_grad_() for key, value in self.params().items()}
        checks = Distribution._validate_args
        Distribution.set_default_validate_args(True)  # torch.compile switches it off for the whole process
        try:
            with torch.enable_grad():
                made = self._made(output, own)
        except ValueError as error:
            if not str(error).startswith("Expected parameter"):
                raise
            raise InvalidArgument(
                f"{type(self).__name__}.distribution() cannot be made at the network's first output: {error}\n"
                f"An output may be any number: map it into the parameter's range with exp, softplus or sigmoid."
            ) from None
        finally:
            Distribution.set_default_validate_args(checks)
        if isinstance(made, Categorical):
            raise Unsupported("A Categorical distribution is of labels, which have no mean: use kn.Categorical().")
        y = as_numbers(y, output, _target_shape(made), name=name)
        support = _support(made)
        if support is None or _moves(support):  # with the parameters: where it ends the density is zero
            return y
        bad = ~support.check(y)
        bad = bad.reshape(*bad.shape, *(1,) * (y.dim() - bad.dim())).expand_as(y)
        kind, expected = type(made).__name__, f"in the support of {type(made).__name__}, {support!r}"
        refuse_where(bad, y, name=name, expected=expected, advice=f"Drop these rows, or choose another than {kind}.")
        return y

    def log_prob(self, output: Tensor, y: Tensor, params: Params) -> Tensor:
        with unchecked_distributions():
            made = self._made(output, params)
            return sum_over_event(_log_prob(made, align_target(y, _target_shape(made))))

    def predict(self, outputs: Tensor, params: Params, log_weights: Tensor) -> RegressionPrediction:
        start = self.params()
        single = {name: value for name, value in params.items() if value.dim() == start[name].dim()}  # not random
        stack = {**params, **expand_params(single, len(outputs))}
        return RegressionPrediction(DistributionComponents(self, outputs, stack), log_weights)

    def information(self, output: Tensor, params: Params) -> DenseInformation:
        r"""The Fisher information of each row, averaged over outcomes: :math:`\frac1M \sum_m s_m s_m^\top`.

        :math:`s_m` is the gradient in the outputs of the log density of an outcome drawn from the distribution; 64 to
        1,024 of each row, the more the fewer rows there are, and all outcomes with their probabilities where one
        target of finite support makes a row. The estimate is unbiased, and the same at every call; summed up over N
        rows its relative standard error is some :math:`\sqrt{2 / (M N)}`.
        """
        size = output[0].numel()
        if size > _MOST_OUTPUTS:
            raise Unsupported(
                f"{type(self).__name__}.information() makes a matrix of each row's {size} outputs, of which there may "
                f"be {_MOST_OUTPUTS}. Use curvature='empirical_fisher', or define information()."
            )
        output = output.detach()
        total, blocks = output.new_zeros((len(output), size, size)), 0
        with own_randomness(derive_seed(0, str(output.double().sum().item()))), torch.enable_grad():
            for y, weights in self._outcomes(output, params):
                f = output.expand(len(y), *output.shape).clone().requires_grad_()
                log_prob = self.log_prob(f.flatten(0, 1), y.flatten(0, 1), params)  # outcomes are rows of their own
                (score,) = torch.autograd.grad(log_prob.sum(), f)
                score = score.reshape(*score.shape[:2], size)
                total += torch.einsum("mb,mbi,mbj->bij", weights, score, score)
                blocks += 1
        return DenseInformation(total / blocks, output.shape)

    def _outcomes(self, output: Tensor, params: Params) -> list[tuple[Tensor, Tensor]]:
        """Blocks of outcomes ``(M, batch, ...)`` with weights ``(M, batch)`` that sum up to 1 in every block."""
        most = _SCORES // output.numel()
        draws = min(max(64, most), 1024)
        block = max(1, min(draws, most))
        with unchecked_distributions(), torch.no_grad():
            made = self._made(output, params)
            if made.has_enumerate_support and _target_shape(made).numel() == 1:
                every = made.enumerate_support()
                return [(every, sum_over_event(made.log_prob(every), batch_dims=2).exp())]
            weights = output.new_full((block, len(output)), 1.0 / block)
            return [(made.sample(torch.Size([block])), weights) for _ in range(math.ceil(draws / block))]

    def _made(self, output: Tensor, params: Params) -> Distribution:
        """The distribution, without :class:`Independent` around it: all of a row is summed up anyhow."""
        made = self.distribution(output, params)
        if not isinstance(made, Distribution):
            raise InvalidType(
                f"{type(self).__name__}.distribution() must return a torch.distributions.Distribution, got "
                f"{type(made).__name__}."
            )
        while isinstance(made, Independent):
            made = made.base_dist
        if made.batch_shape[:1] != output.shape[:1]:
            raise InvalidArgument(
                f"{type(self).__name__}.distribution() must have a batch shape that begins with the number of rows, "
                f"here {len(output)}; for an output of shape {tuple(output.shape)} it is {tuple(made.batch_shape)}."
            )
        return made


class DistributionComponents(Components):
    """One distribution for each posterior draw, row and target: those of ``likelihood``.

    Args:
        likelihood: What makes the distributions.
        outputs: The network's outputs, ``(K, batch, ...)``.
        params: The likelihood's own parameters, each with a leading dimension K.
    """

    def __init__(self, likelihood: DistributionLikelihood, outputs: Tensor, params: Params):
        self.likelihood, self.outputs, self.params = likelihood, outputs, params
        with unchecked_distributions():
            support = _support(self._component(0))
        self.discrete = bool(support is not None and support.is_discrete)

    @cached_property
    def mean(self) -> Tensor:  # type: ignore[override]
        return self._moment("mean")

    @property
    def variance(self) -> Tensor:
        return self._moment("variance")

    def log_prob(self, y: Tensor) -> Tensor:
        return self._each(lambda made: _log_prob(made, y))

    def cdf(self, y: Tensor) -> Tensor:
        if "_outcomes" not in vars(self):
            try:
                return self._each(lambda made: _cdf(made, y))
            except NotImplementedError:
                pass
        place = y.expand(len(self.outputs), *y.shape).unsqueeze(-1).contiguous()
        return torch.searchsorted(self._outcomes, place, right=True).squeeze(-1).to(y) / self._outcomes.shape[-1]

    @cached_property
    def _outcomes(self) -> Tensor:
        """Outcomes of every component in order, ``(K, batch, ..., draws)``, which stand for its distribution."""
        count = max(64, math.ceil(_DRAWS / len(self.outputs)))
        with own_randomness(0), unchecked_distributions():
            drawn = [self._component(k).sample(torch.Size([count])) for k in range(len(self.outputs))]
        return torch.stack(drawn).movedim(1, -1).sort(-1).values.to(self.outputs.dtype).contiguous()

    def sample(self, index: Tensor, *, generator: torch.Generator | None = None) -> Tensor:
        """One outcome for each entry of ``index`` ``(n, batch, ...)``; all targets of a row are drawn together."""
        if generator is None:
            return self._sampled(index)
        with own_randomness(int(torch.randint(2**62, (), generator=generator, device=generator.device))):
            return self._sampled(index)

    def _sampled(self, index: Tensor) -> Tensor:
        rows = index.shape[1]
        component = index.flatten(2)[..., 0] if index.dim() > 2 else index  # (n, batch)
        key, order = (component * rows + torch.arange(rows, device=index.device)).flatten().sort(stable=True)
        number = torch.arange(len(key), device=key.device) - torch.searchsorted(key, key)  # of its component and row
        counts = torch.bincount(component.flatten(), minlength=len(self.outputs)).tolist()
        drawn = self.mean.new_empty((len(key), *index.shape[2:]))
        with unchecked_distributions():
            for k, (place, which, at) in enumerate(zip(*(v.split(counts) for v in (order, number, key)), strict=True)):
                if len(place):
                    values = self._component(k).sample(torch.Size([int(which.max()) + 1])).to(drawn)
                    drawn[place] = values[which, at % rows]
        return drawn.view(index.shape)

    def _component(self, k: int) -> Distribution:
        return self.likelihood._made(self.outputs[k], index_params(self.params, k))

    def _each(self, function: Callable[[Distribution], Tensor]) -> Tensor:
        """``function`` of every component, ``(K, batch, ...)``."""

        def one(output: Tensor, own: Params) -> Tensor:
            return function(self.likelihood._made(output, own))

        def in_turn(outputs: Tensor, params: Params) -> Tensor:
            return torch.stack([one(outputs[k], index_params(params, k)) for k in range(len(outputs))])

        with unchecked_distributions():
            return batched(vmap(one), in_turn)(self.outputs, self.params)

    def _moment(self, name: str) -> Tensor:
        try:
            return self._each(lambda made: getattr(made, name).expand(made.batch_shape + made.event_shape))
        except NotImplementedError:
            with unchecked_distributions():
                kind = type(self._component(0)).__name__
            raise Unsupported(
                f"{kind} has no {name}, which predictions need. Return a subclass of {kind} that defines {name}."
            ) from None


def _target_shape(made: Distribution) -> torch.Size:
    """The shape of one row's target."""
    return made.batch_shape[1:] + made.event_shape


def _support(made: Distribution) -> Constraint | None:
    try:
        return made.support
    except NotImplementedError:
        return None


def _moves(support: Constraint) -> bool:
    """Whether the support depends on outputs or parameters, which require a gradient here."""
    parts = vars(support).values()
    return any(
        (isinstance(part, Tensor) and part.requires_grad) or (isinstance(part, Constraint) and _moves(part))
        for part in parts
    )


def _log_prob(made: Distribution, y: Tensor) -> Tensor:
    """Log density of each target, -inf outside the support."""
    support = _support(made)
    found = made.log_prob(y)
    return found if support is None else found.masked_fill(~support.check(y), -torch.inf)


def _cdf(made: Distribution, y: Tensor) -> Tensor:
    """Distribution function: 0 below the support and 1 above, where formulas have no meaning."""
    support = _support(made)
    low, high = (torch.as_tensor(getattr(support, f"{end}_bound", limit)).to(y)
                 for end, limit in (("lower", -torch.inf), ("upper", torch.inf)))  # fmt: skip
    found = made.cdf(torch.minimum(torch.maximum(y, low), high))
    return torch.where(y < low, 0.0, torch.where(y >= high, 1.0, found))
