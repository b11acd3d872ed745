"""Model = network + likelihood + prior. It owns one thing: the log joint, on the full-data scale."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from knowable.core.model.data import as_input
from knowable.core.model.likelihood import LIKELIHOOD_PREFIX, Likelihood, no_likelihood
from knowable.core.model.posterior_prior import PosteriorPrior
from knowable.core.model.prior import BecomesPrior, JointPrior, Normal, Prior, PriorByName
from knowable.core.network.batched import no_hidden_loops
from knowable.core.network.inputs import as_rows
from knowable.core.network.network import DRAWS_AT_ONCE, Network, check_module, full_dtype
from knowable.core.network.outputs import Output, as_said
from knowable.core.network.params import Buffers, Params, expand_params, index_params, select_names, stack_params
from knowable.core.prediction.joint import JointPrediction
from knowable.core.prediction.prediction import Prediction
from knowable.core.support.checks import check_count, check_generator, readable
from knowable.core.support.tensors import check_rows
from knowable.errors import InvalidArgument, InvalidData, InvalidType, Unsupported

_VECTORISE_BELOW = 20_000  # random parameters; beyond it a batched call is no faster than a loop
_ROWS_AT_ONCE = 65_536


class Model:
    r"""A Bayesian model: an unmodified network, a likelihood for its output, and a prior over its weights.

    .. math:: \log p(D, \theta) = \frac{N}{M} \sum_{m=1}^M \log p(y_m \mid x_m, \theta) + \log p(\theta)

    Everything is on the full-data scale: a mini-batch of M rows stands for N. There is no weight of the KL term to set.

    Args:
        net: Any ``nn.Module``, of any floating-point dtypes. Its inputs may be one tensor, several in a tuple, or a
            dict by the names of its ``forward``'s arguments. It is never changed.
        likelihood: What the output means: ``Gaussian()``, ``Categorical()``, ...
        prior: One prior for all parameters, a mapping of globs (first match wins), or a fitted posterior. None is
            ``Normal(1.0)``; methods that begin at weights that were trained elsewhere then choose its scale.
        random: Names or globs of the parameters that get a posterior, or ``"last_layer"``. The others are point
            estimates under their prior.
        frozen: Names or globs of the parameters that stay as they are in ``net``. Parameters with
            ``requires_grad=False`` are frozen too, unless ``random`` has their full name (a glob does not count).
        output: Which tensor the likelihood takes, where the network returns several: a name (a key or an attribute, as
            ``"logits"``), a place in a tuple, or a function of what the network returns. With ``Joint``: a dict of
            these by head; None takes each head by its name.
        autocast: ``torch.bfloat16`` runs the network under ``torch.autocast`` of that dtype, in training and in
            predictions; weights, likelihood and all linear algebra stay in the network's own. It is saved with the
            posterior.

    >>> import knowable as kn
    >>> model = kn.Model(torch.nn.Linear(3, 1), kn.Gaussian(noise=0.1), kn.Normal(1.0))
    >>> sorted(model.params())
    ['bias', 'weight']
    """

    def __init__(
        self,
        net: nn.Module,
        likelihood: Likelihood = None,  # type: ignore[assignment]  # refused with a list of them
        prior: Prior | Mapping[str, Prior] | JointPrior | BecomesPrior | None = None,
        *,
        random: str | Iterable[str] = "*",
        frozen: str | Iterable[str] = (),
        output: Output | Mapping[str, Output] | None = None,
        autocast: torch.dtype | None = None,
    ):
        if not isinstance(likelihood, Likelihood):
            raise InvalidType(no_likelihood(likelihood))
        own = likelihood.params()
        check_module(net)
        names = [name for name, _ in net.named_parameters()] + [LIKELIHOOD_PREFIX + name for name in own]
        if len(set(names)) < len(names):
            raise InvalidArgument("net has a parameter whose name begins with 'likelihood.'; rename that submodule.")
        self.net = net
        self.likelihood, output = likelihood.for_network(output)
        self.held_names = _without_gradient(net, random)
        self.frozen_names = select_names("frozen", frozen, names, net) | set(self.held_names)
        self._like = _trained_like(net, self.frozen_names)  # dtype and device of everything
        self._own = {LIKELIHOOD_PREFIX + name: value.to(self._like) for name, value in own.items()}
        self.prior_given = prior is not None  # or the default
        self._choose_prior(prior)
        self.network = Network(net, self.frozen_names, self._frozen_values, output, autocast)
        random_names = select_names("random", random, names, net) - self.frozen_names
        self.random_names = [name for name in self._start if name in random_names and name not in self._hyperparams]
        if not self.random_names:
            raise InvalidArgument(f"random={random!r} leaves no parameter random once the frozen are excluded.")
        points = [name for name in self.point_names if name not in self._hyperparams]
        stuck = [name for name in self.binary_names if name in points]
        if stuck:
            raise Unsupported(
                f"{stuck[0]!r} has a discrete (0/1) prior and cannot be trained by gradient as a point estimate. "
                f"Make it random or freeze it."
            )
        if points and self.prior.prior_of(points[0]) is None:
            raise Unsupported(
                f"prior is a posterior with correlations between its parameters, so {points[0]!r} cannot be a point "
                f"estimate apart from the others. Make all of them random, or freeze it."
            )

    def _choose_prior(self, prior: Prior | Mapping[str, Prior] | JointPrior | BecomesPrior | None) -> None:
        values = {**{name: value.detach() for name, value in self.net.named_parameters()}, **self._own}
        start = {n: value.to(self._like, copy=True) for n, value in values.items() if n not in self.frozen_names}
        self._frozen_values: Params = {}  # frozen at other values than the network's own
        self._buffers = {name: value.detach().clone() for name, value in self.net.named_buffers()}
        prior = _as_prior(prior)
        if isinstance(prior, PosteriorPrior):
            means = prior.start(start)
            self._frozen_values = {name: means[name] for name in start if name in prior.fixed}
            prior = prior.condition({name: values[name] for name in self.frozen_names})
            self.frozen_names = self.frozen_names | self._frozen_values.keys()
            self._buffers |= {name: value.to(self.device) for name, value in prior.buffers.items()}
            start = {name: value for name, value in means.items() if name not in self.frozen_names}
        if isinstance(prior, JointPrior):
            self.prior: JointPrior = prior
        else:
            own = {LIKELIHOOD_PREFIX + name: each for name, each in self.likelihood.priors().items()}
            self.prior = PriorByName(prior, start, own={name: each for name, each in own.items() if name in start})
        self._hyperparams = self.prior.hyperparams()
        self._start = {**start, **self._hyperparams}

    @property
    def dtype(self) -> torch.dtype:
        """Floating-point type of all parameters that are not frozen, and of inputs and targets.

        It is that of the network, and single precision where the network has less: a network in bfloat16 is trained in
        single precision and sees weights rounded to its own.
        """
        return self._like.dtype

    @property
    def device(self) -> torch.device:
        """Where the network's parameters live."""
        return self._like.device

    @property
    def names(self) -> list[str]:
        """All parameters that are not frozen, in the order of :meth:`params`."""
        return list(self._start)

    @property
    def point_names(self) -> list[str]:
        """Parameters that are estimated as points: neither random nor frozen, and the prior's hyperparameters."""
        return [name for name in self._start if name not in set(self.random_names)]

    @property
    def hyper_names(self) -> list[str]:
        """The prior's hyperparameters."""
        return list(self._hyperparams)

    @property
    def binary_names(self) -> list[str]:
        """Parameters whose prior is over 0 and 1 alone."""
        priors = {name: self.prior.prior_of(name) for name in self._start if name not in self._hyperparams}
        return [name for name, prior in priors.items() if prior is not None and prior.binary]

    def buffers(self) -> Buffers:
        """Start values of the network's buffers."""
        return {name: value.clone() for name, value in self._buffers.items()}

    def params(self) -> Params:
        """Start values of all parameters that are not frozen: the network's own, the likelihood's, the prior's."""
        return {name: value.clone() for name, value in self._start.items()}

    def starting_at(self, params: Params, buffers: Buffers | None = None) -> Model:
        """The same model with other start values: of the parameters in ``params``, and of the ``buffers``."""
        moved = copy.copy(self)
        moved._start = {name: params.get(name, v).detach().to(v, copy=True) for name, v in self._start.items()}
        moved._buffers = {**self._buffers, **{k: v.detach().clone() for k, v in (buffers or {}).items()}}
        return moved

    def with_fixed(self, points: Params, buffers: Buffers | None = None) -> Model:
        """The same model with some of its parameters frozen at the values in ``points``.

        With it the random parameters are fitted several times around the same point estimates.
        """
        if not points and buffers is None:
            return self
        known = self.starting_at({}, buffers)
        known._frozen_values = {**self._frozen_values, **{k: v.detach().clone() for k, v in points.items()}}
        known.frozen_names = self.frozen_names | points.keys()
        known._start = {name: value for name, value in known._start.items() if name not in points}
        known.random_names = [name for name in self.random_names if name not in points]
        known.network = self.network.holding(known.frozen_names, known._frozen_values)
        return known

    def with_priors(self, priors: Mapping[str, Prior], *, random: Iterable[str]) -> Model:
        """The same model with other priors on some parameters, and with fewer of its parameters random.

        Args:
            priors: New priors by parameter name (or ``"*"``); all other parameters keep theirs.
            random: Names of the parameters that stay random. All others that are not frozen become point estimates.
        """
        if not isinstance(self.prior, PriorByName):
            raise Unsupported(
                f"prior is a posterior ({self.prior!r}), which another prior cannot replace for some parameters alone."
            )
        other = copy.copy(self)
        start = {name: value for name, value in self._start.items() if name not in self._hyperparams}
        own = {LIKELIHOOD_PREFIX + name: each for name, each in self.likelihood.priors().items()}
        new = {_literally(name) if name in start else name: each for name, each in priors.items()}
        globs = new | {glob: each for glob, each in self.prior.globs.items() if glob not in new}
        other.prior = PriorByName(globs, start, own={name: each for name, each in own.items() if name in start})
        other._hyperparams = other.prior.hyperparams()
        other._start = {**start, **other._hyperparams}
        chosen = set(random)
        other.random_names = [name for name in self.random_names if name in chosen]
        return other

    def with_prior(self, prior: JointPrior | BecomesPrior) -> Model:
        """The same network and likelihood under another prior: a posterior of this model, for the next data."""
        other = Model(
            self.net, self.likelihood, prior, random=[_literally(name) for name in self.random_names],
            frozen=[_literally(name) for name in self.frozen_names], output=as_said(self.network.output),
            autocast=self.network.autocast,
        )  # fmt: skip
        other.held_names = self.held_names
        return other.with_fixed({**other._frozen_values, **self._frozen_values})

    def with_output(self, output: Output | Mapping[str, Output]) -> Model:
        """The same model of another output of the network, such as the head of another task."""
        other = copy.copy(self)
        other.likelihood, picked = self.likelihood.for_network(output)
        other.network = self.network.returning(picked)
        return other

    def forward(self, params: Params, x: Tensor, *, buffers: Buffers | None = None, training: bool = False) -> Tensor:
        """The network's output for one draw of parameters."""
        return self.network(self.network_params(params), x, buffers=buffers, training=training)

    def probe(self, x: Tensor) -> Tensor:
        """The network's output for the first rows of ``x``, or a clear error if it cannot take them."""
        return self.network.probe(x, self.network_params(self._start), self._buffers)

    def network_params(self, params: Params) -> Params:
        """The part of ``params`` that belongs to the network."""
        extra = self._own.keys() | self._hyperparams.keys()
        return {name: value for name, value in params.items() if name not in extra}

    def frozen_params(self) -> Params:
        """The network's frozen parameters, at the values they are held at, in its own memory."""
        return self.network.own_params(self.frozen_names)

    def likelihood_params(self, params: Params) -> Params:
        """The part of ``params`` that belongs to the likelihood, by short names."""
        cut = len(LIKELIHOOD_PREFIX)
        return {
            name[cut:]: params[name] if name in params else self._frozen_values.get(name, self._own[name])
            for name in self._own
        }

    def log_likelihood(self, params: Params, x: Tensor, y: Tensor, *, buffers: Buffers | None = None) -> Tensor:
        """The log likelihood per example, ``(batch,)``, for one draw of parameters, in evaluation mode."""
        self.check_params(params)
        x = (x if isinstance(x, Tensor) else as_rows(x)).to(self.device)
        y = self.likelihood.rows_of(y).to(self.device)
        x = x.to(self.dtype) if x.is_floating_point() else x
        try:
            output = self.forward(params, x, buffers=buffers or self._buffers)
        except RuntimeError:
            self.probe(check_rows(x, "x"))  # says what is wrong with x, if it is that
            raise
        return self.score(output, y, params)

    def check_params(self, params: Params) -> None:
        """Refuse ``params`` with missing names, unknown names or wrong shapes."""
        lacking = [name for name in self._start if name not in params]
        strange = [name for name in params if name not in self._start]
        if lacking or strange:
            what = [f"lacks {', '.join(lacking[:5])}"] * bool(lacking) + [
                f"has no place for {', '.join(strange[:5])}"
            ] * bool(strange)
            raise InvalidArgument(f"params {' and '.join(what)}. Start from model.params().")
        for name, value in params.items():
            if value.shape != self._start[name].shape:
                raise InvalidArgument(
                    f"params[{name!r}] has shape {tuple(value.shape)}, the model's {tuple(self._start[name].shape)}."
                )

    def doubts(self, x: Tensor, y: Tensor) -> list[str]:
        """What is probably not meant: parameters without effect on the likelihood, outputs or targets of another kind.

        Args:
            x: Some rows of the data, enough to run the network.
            y: All targets.
        """
        params = {name: value.requires_grad_() for name, value in self.params().items()}
        asked = {name: value for name, value in params.items() if name not in self._hyperparams}
        with torch.enable_grad():
            output = self.forward(params, x, buffers=self.buffers())
            y_of_x = self.align(y[: len(x)], output)
            total = self.likelihood.log_prob(output, y_of_x, self.likelihood_params(params)).sum()
        found = [None] * len(asked)
        if total.requires_grad:
            found = torch.autograd.grad(total, list(asked.values()), allow_unused=True)
        unused = [name for name, slope in zip(asked, found, strict=True) if slope is None]
        said = self.likelihood.doubts(y, output, last_operation(output))
        if self.likelihood.noise_name is not None:
            said += _far_targets(y_of_x, output)
        if unused:
            them = "it" if len(unused) == 1 else "them"
            said.append(
                f"No gradient of the likelihood reaches {', '.join(unused[:8])}{', ...' if len(unused) > 8 else ''}: "
                f"the network does not use {them}, or detaches the result. What is learned about {them} is the prior. "
                f"Freeze what should not be learned: Model(..., frozen=[...])."
            )
        return said

    def score(self, output: Tensor, y: Tensor, params: Params, weights: Tensor | None = None) -> Tensor:
        """The log likelihood per example (times the row's weight), for an output already computed.

        Every objective and every sampler scores here, so that targets ``(batch,)`` never broadcast against outputs
        ``(batch, 1)``, and weights count in one way.
        """
        scores = self.likelihood.log_prob(output, self.align(y, output), self.likelihood_params(params))
        return scores if weights is None else weights * scores

    def scores(self, outputs: Tensor, y: Tensor, stack: Params, weights: Tensor | None = None) -> Tensor:
        """What :meth:`score` gives for each of K draws, ``(K, batch)``, of outputs ``(K, batch, ...)``."""
        own = {name: value for name, value in stack.items() if name in self._own}
        try:
            with no_hidden_loops():
                return torch.func.vmap(lambda output, params: self.score(output, y, params, weights))(outputs, own)
        except RuntimeError:  # a likelihood that cannot be batched
            each = [self.score(output, y, index_params(own, k), weights) for k, output in enumerate(outputs)]
            return torch.stack(each)

    def align(self, y: Tensor, output: Tensor) -> Tensor:
        """Targets with the shape and dtype in which they are scored against ``output``."""
        y = y if isinstance(y, Tensor) else self.likelihood.rows_of(y)
        if not y.shape or len(y) != len(output):
            raise InvalidData(f"y must have {len(output)} rows, as many as x; got shape {tuple(y.shape)}.")
        return self.likelihood.align(y.to(self.dtype) if y.is_floating_point() else y, output)

    def log_prior(self, params: Params) -> Tensor:
        """The log prior density log p(θ) of one draw of parameters."""
        return self.prior.log_prob(params)

    def log_joint(self, params: Params, x: Tensor, y: Tensor, size: int, *, weights: Tensor | None = None) -> Tensor:
        """(size / batch) Σ log p(y | x, θ) + log p(θ): an unbiased estimate on the full-data scale from one batch.

        ``weights`` are the rows', ``(batch,)``; None counts each once.
        """
        check_count("size", size)
        log_likelihood = self.log_likelihood(params, x, y)
        log_likelihood = log_likelihood if weights is None else log_likelihood * weights
        return log_likelihood.sum() * (size / log_likelihood.shape[0]) + self.log_prior(params)

    def prior_predict(self, x: Tensor, *, samples: int = 64, generator: torch.Generator | None = None) -> Prediction:
        """The predictive distribution before any data: the network run with weights drawn from the prior.

        Args:
            x: Inputs, one row each.
            samples: Number of draws from the prior. Parameters that are not random keep their start values.
            generator: Makes the draws repeatable.

        Returns:
            The prediction; its ``plot()`` shows functions drawn from the prior.
        """
        check_count("samples", samples)
        check_generator(generator)
        x, stack = as_input(x, self), self.prior_draws(samples, generator=generator)
        network = self.network_params(stack)
        small = sum(self._start[name].numel() for name in self.random_names) <= _VECTORISE_BELOW
        with torch.no_grad():
            blocks = [
                self.network.over_draws(network, rows, buffers=self._buffers, vectorise=small, at_once=DRAWS_AT_ONCE)
                for rows in x.split(_ROWS_AT_ONCE)
            ]
            weights = torch.zeros(samples, dtype=self.dtype, device=self.device).log_softmax(0)
            found = self.likelihood.predict(torch.cat(blocks, dim=1), self.likelihood_params(stack), weights)
        for part in found.heads.values() if isinstance(found, JointPrediction) else [found]:
            part.prior_inputs = x  # for its plot
        return found

    def prior_draws(self, samples: int, *, generator: torch.Generator | None = None) -> Params:
        """A stack of ``samples`` draws of the random parameters from the prior; the others at their start values."""
        drawn = {name: self._start[name] for name in [*self.random_names, *self._hyperparams]}
        draws = [self.prior.sample(drawn, generator=generator) for _ in range(samples)]
        stack = stack_params([{name: draw[name] for name in self.random_names} for draw in draws])
        return {**expand_params(self.params(), samples), **stack}

    def __repr__(self) -> str:
        total = sum(value.numel() for value in self._start.values())
        chosen = sum(self._start[name].numel() for name in self.random_names)
        which = f"{total:,} parameters" + (f", {chosen:,} random" if chosen < total else "")
        if self.held_names:
            held = sum(value.numel() for name, value in self.net.named_parameters() if name in self.held_names)
            which += f"; {held:,} more frozen by requires_grad=False"
        output = as_said(self.network.output)
        picks = "" if output is None else f", output={getattr(output, '__qualname__', repr(output))}"
        picks += "" if self.network.autocast is None else f", autocast={self.network.autocast}"
        return f"Model({type(self.net).__name__}, {self.likelihood!r}, prior={self.prior!r}{picks}: {which})"


def last_operation(output: Tensor) -> str:
    """The operation that made ``output``, without views of its result: ``"Softmax"``, ``"Addmm"``, ...

    >>> last_operation(torch.ones(2, 3, requires_grad=True).softmax(1).squeeze())
    'Softmax'
    """
    node = output.grad_fn
    while node is not None:
        name = type(node).__name__.removesuffix("0").removesuffix("Backward")
        if name not in ("Squeeze", "Unsqueeze", "View", "UnsafeView", "ReshapeAlias", "Alias", "Clone", "ToCopy"):
            return name
        node = node.next_functions[0][0] if node.next_functions else None
    return ""


_FAR = 100.0  # root mean square of the residuals of untrained networks, whose targets should be about 1


def _far_targets(y: Tensor, output: Tensor) -> list[str]:
    """A sentence where targets are far from the outputs, and further than a constant would be from them."""
    away = (y - output.detach()).double()
    size = away[away.isfinite()].square().mean().sqrt().item()
    if (
        not _FAR < size < math.inf or size < 0.5 * y[y.isfinite()].double().std(correction=0).item()
    ):  # a trained network
        return []
    return [
        f"The targets are {size:.3g} from the network's first outputs (root mean square). Priors and learning rates "
        f"are for standardised numbers: the weights may never reach these targets, and predictions are then wrong. "
        f"Standardise x and y (kn.datasets.Dataset.standardised, or kn.BayesianRegressor, which does it)."
    ]


def _trained_like(net: nn.Module, frozen: set[str]) -> Tensor:
    """A number of the dtype in which parameters that are not frozen are trained, where they are."""
    every = dict(net.named_parameters())
    trained = [value for name, value in every.items() if name not in frozen]
    example = next(iter((*trained, *every.values())), torch.zeros(()))
    dtype = full_dtype(value.dtype for value in trained) if trained else example.dtype
    return torch.zeros((), dtype=dtype, device=example.device)


def _without_gradient(net: nn.Module, random: object) -> list[str]:
    """Parameters with ``requires_grad=False`` that ``random`` does not name in full."""
    every = [(name, value.requires_grad) for name, value in net.named_parameters()]
    named = [random] if isinstance(random, str) else list(random) if isinstance(random, Iterable) else []
    held = [name for name, wanted in every if not wanted and name not in named]
    if every and len(held) == len(every):
        raise InvalidArgument(
            "Every parameter of net has requires_grad=False, which freezes it. Call net.requires_grad_(True), or name "
            f"in full those that are random: random={held[-1:]}."
        )
    return held


def _literally(name: str) -> str:
    """A glob that matches ``name`` alone."""
    return name.replace("[", "[[]").replace("*", "[*]").replace("?", "[?]")


def _as_prior(prior: object) -> Prior | Mapping[str, Prior] | JointPrior:
    if prior is None:
        return Normal(1.0)
    if isinstance(prior, type):
        raise InvalidType(f"prior must be an instance: write {prior.__name__}(...) with parentheses.")
    if isinstance(prior, BecomesPrior):
        return prior.as_prior()
    if not isinstance(prior, Prior | Mapping | JointPrior):
        hint = ""
        if isinstance(prior, int | float) and not isinstance(prior, bool):
            hint = f" Write kn.Normal({readable(float(prior))}) for normal weights of that standard deviation."
        raise InvalidType(
            f"prior must be a knowable prior, a mapping of globs to priors, or a posterior; got {prior!r}.{hint}"
        )
    return prior
