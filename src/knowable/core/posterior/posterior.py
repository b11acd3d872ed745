"""A distribution over parameters, bound to its model: sample it, predict with it, save it."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from knowable.core.model.data import as_input
from knowable.core.model.model import Model
from knowable.core.model.prior import JointPrior
from knowable.core.network.network import DRAWS_AT_ONCE
from knowable.core.network.params import Buffers, Params, expand_params
from knowable.core.posterior.arviz import exported
from knowable.core.posterior.diagnostics import Diagnostics, LogEvidence
from knowable.core.posterior.monte_carlo import bytes_to_export, draws_of_block, predict_outputs, rows_that_fit
from knowable.core.posterior.saving import FAMILIES, save_posterior
from knowable.core.posterior.training_rows import TrainingRows
from knowable.core.prediction.prediction import Prediction
from knowable.core.storage.tensor_file import Unchecked
from knowable.core.support.checks import arguments_named, check_count, check_generator, parse_memory
from knowable.core.support.randomness import generator_for
from knowable.errors import InvalidArgument, Unsupported

_DRAWS_TO_EXPORT = 1000  # where a posterior has no draws of its own

# Names of arguments in other libraries.
_ELSEWHERE: dict[str, str] = dict.fromkeys(("n_samples", "num_samples", "draws", "n_draws", "mc_samples"), "samples")


class Posterior(ABC):
    """A distribution over all parameters of a model that are not frozen.

    Random parameters vary from draw to draw; parameters that are point estimates are the same in every draw.

    Attributes:
        model: The model this is a posterior of.
        points: Values of the parameters that are point estimates.
        buffers: The network's buffers after the fit.
        diagnostics: How the fit went.
        log_evidence: log p(D): exact, a bound, an estimate, or None.
        seed: Fixes the draws that :meth:`predict` uses when it is given no generator.
        target_shape: Shape of one target of the data that was fitted, which predictions have too: ``()`` for y of shape
            ``(N,)``, by name where there are several. None, the network's own shape, where the data came from a loader.
        method: The method that fitted it; None where it was loaded or made by hand.
        citation: Keys of the papers behind the method, which ``knowable cite`` prints.
        training_rows: Hashes of the rows that were fitted, by which held-out data are checked; None if not known.
    """

    log_alpha_threshold: ClassVar[float] = 3.0
    """Where the log of noise over signal, :math:`-2 \\log` :meth:`signal_to_noise`, says that a weight can go."""
    family: ClassVar[str]
    families: ClassVar[dict[str, type[Posterior]]] = FAMILIES

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "family" in cls.__dict__:
            Posterior.families[cls.family] = cls

    def __init__(
        self,
        model: Model,
        *,
        points: Params | None = None,
        buffers: Buffers | None = None,
        diagnostics: Diagnostics | None = None,
        log_evidence: LogEvidence | None = None,
        seed: int = 0,
    ):
        self.model = model
        self.points = {name: value.detach() for name, value in (points or {}).items()}
        self.buffers = model.buffers() if buffers is None else {k: v.detach().clone() for k, v in buffers.items()}
        self.diagnostics = Diagnostics() if diagnostics is None else diagnostics
        self.log_evidence = log_evidence
        self.seed = seed
        self.target_shape: Any = None
        self.method: Any = None
        self.citation: tuple[str, ...] = ()
        self.training_rows: TrainingRows | None = None
        self._kept: tuple[int, Params] | None = None  # draws kept from one prediction to the next
        self._footprints: dict[Any, Any] = {}  # what a row takes, by its shape

    # --- what a family defines ---------------------------------------------------------------------------------------

    @abstractmethod
    def _sample_random(self, n: int, generator: torch.Generator | None) -> Params:
        """Draw n sets of the random parameters, stacked."""

    @abstractmethod
    def _mean_random(self) -> Params:
        """Means of the random parameters."""

    @abstractmethod
    def _std_random(self) -> Params:
        """Standard deviations of the random parameters."""

    @abstractmethod
    def _tensors(self) -> dict[str, Tensor]:
        """What has to be saved, by name."""

    @classmethod
    @abstractmethod
    def _from_tensors(cls, model: Model, tensors: dict[str, Tensor], **common: Any) -> Posterior:
        """The inverse of :meth:`_tensors` and :meth:`_settings`; ``common`` goes to ``__init__``."""

    def check_when_used(self, unchecked: Unchecked | None) -> None:
        """Take over tensors in mapped memory; a family that uses them bit by bit checks them bit by bit."""
        if unchecked is not None:
            unchecked.check_all()

    def _settings(self) -> dict[str, Any]:
        """Plain values that are saved beside the tensors, and come back as arguments of :meth:`_from_tensors`."""
        return {}

    def log_prob(self, params: Params) -> Tensor:
        """Log density of the random parameters in ``params``: a scalar for one draw, ``(n,)`` for a stack."""
        known = sorted(cls.__name__ for cls in self.families.values() if cls.log_prob is not Posterior.log_prob)
        raise Unsupported(f"{type(self).__name__} has no density. Families with one: {', '.join(known)}.")

    def as_prior(self) -> JointPrior:
        """This posterior as the prior of the next data set."""
        raise Unsupported(
            f"{type(self).__name__} has no density, so it cannot be a prior. Fit a method whose posterior has one, "
            f"such as MeanFieldVI."
        )

    def update(self, data: Any, *, method: Any = None, **options: Any) -> Posterior:
        r"""The posterior after more data: this one is the prior, and nothing that was seen before is needed again.

        .. math:: p(\theta \mid D_1, D_2) \propto p(D_2 \mid \theta)\, p(\theta \mid D_1)

        There is no weight between old and new to choose: both are on the full-data scale. With exact inference the
        result is that of all data at once; with an approximation its errors add up over the updates. Point estimates
        have no variance, so they stay at their values.

        Args:
            data: The new data, as for ``fit``.
            method: The method that fits it; None takes the one that fitted this posterior.
            options: Further arguments of ``fit``: ``seed``, ``validation``, ``checkpoint``, ...

        Raises:
            Unsupported: If this posterior has no density, such as that of an ensemble.
        """
        method = self.method if method is None else method
        if method is None:
            raise InvalidArgument(
                "method is not known: this posterior was loaded, or made by hand. Pass the one that fits the new data, "
                "posterior.update(data, method=kn.MeanFieldVI())."
            )
        made = method.continued().fit(self.model.with_prior(self), data, **options)
        made.training_rows = None if self.training_rows is None else self.training_rows.joined(made.training_rows)
        return made

    # --- draws -------------------------------------------------------------------------------------------------------

    def sample(self, n: int, generator: torch.Generator | None = None) -> Params:
        """Draw n sets of parameters: a dict in which every tensor has a leading dimension n."""
        check_count("n", n)
        check_generator(generator)
        return self._ordered({**self._sample_random(n, generator), **expand_params(self.points, n)})

    def mean(self) -> Params:
        """Posterior mean of every parameter."""
        return self._ordered({**self._mean_random(), **self.points})

    def std(self) -> Params:
        """Posterior standard deviation of every parameter (0 for point estimates)."""
        return self._ordered({**self._std_random(), **{k: torch.zeros_like(v) for k, v in self.points.items()}})

    def signal_to_noise(self) -> Params:
        """|mean| / standard deviation of every random parameter, elementwise; infinite where there is no spread."""
        means = {name: mean.abs() for name, mean in self.mean().items() if name in self.model.random_names}
        stds = {name: std for name, std in self.std().items() if name in means and name not in self.points}
        return {name: (means[name] / std).masked_fill(~(std > 0), torch.inf) for name, std in stds.items()}

    def _ordered(self, params: Params) -> Params:
        return {name: params[name] for name in self.model.names}

    def draws_for_prediction(self, samples: int, seed: int) -> tuple[int, Tensor]:
        """How many draws a prediction uses, and their normalised log weights."""
        zeros = torch.zeros(samples, dtype=self.model.dtype, device=self.model.device)
        return samples, zeros.log_softmax(0)

    def draw_block(self, start: int, stop: int, samples: int, seed: int) -> Params:
        """Draws ``start`` to ``stop`` of a prediction. Each has its own stream, so blocks may be of any size."""
        count, device = stop - start, self.model.device
        block: Params = {}
        for k in range(count):
            draw = self._sample_random(1, generator_for(seed, "predict", start + k, device=device))
            block = block or {name: value.new_empty((count, *value.shape[1:])) for name, value in draw.items()}
            for name, value in draw.items():
                block[name][k] = value[0]
        return self._ordered({**block, **expand_params(self.points, count)})

    def buffer_block(self, start: int, stop: int, samples: int, seed: int) -> Buffers:
        """Buffers that differ from draw to draw, for the draws of :meth:`draw_block`, stacked; none by default."""
        return {}

    def run_draws(self, stack: Params, x: Tensor, *, first: int, seed: int, vectorise: bool) -> Tensor:
        """Network outputs ``(K, rows, ...)`` for K draws, of which number ``first`` of the prediction is the first.

        ``stack`` holds the network's parameters, and the buffers that differ from draw to draw.
        """
        return self.model.network.over_draws(stack, x, buffers=self.buffers, vectorise=vectorise, at_once=DRAWS_AT_ONCE)

    # --- prediction --------------------------------------------------------------------------------------------------

    @arguments_named(_ELSEWHERE)
    def predict(
        self, x: Any, samples: int = 64, generator: torch.Generator | None = None, max_memory: int | str | None = None
    ) -> Prediction:
        """The predictive distribution at ``x``, by Monte Carlo over the weights.

        The same posterior gives the same prediction every time, unless a ``generator`` is passed.

        Args:
            x: Inputs, one row each; or a Dataset or a DataLoader of inputs or pairs, all of whose rows are predicted
                in the order of the data set, shuffled or not.
            samples: Number of posterior draws (a posterior of K atoms uses its atoms, at most this many).
            generator: Makes the draws new.
            max_memory: Bytes (or ``"500MB"``) the computation and its result may take.
        """
        check_count("samples", samples)
        x = as_input(x, self.model)
        with torch.no_grad():
            found = self._predict(x, samples, self._seed_from(generator), parse_memory(max_memory))
            return found.shaped(self.target_shape)

    def _predict(self, x: Tensor, samples: int, seed: int, memory: int | None) -> Prediction:
        """The prediction at checked inputs. It follows gradients where they are enabled and ``x`` asks for them."""
        outputs, params, log_weights = predict_outputs(self, x, samples, seed, memory)
        return self.model.likelihood.predict(outputs, self.model.likelihood_params(params), log_weights)

    @arguments_named(_ELSEWHERE)
    def predict_stream(
        self, x: Any, samples: int = 64, generator: torch.Generator | None = None, max_memory: int | str = "1GB"
    ) -> Iterator[Prediction]:
        """Predictions for consecutive blocks of rows, each small enough for ``max_memory``; see :meth:`predict`."""
        check_count("samples", samples)
        x = as_input(x, self.model)
        memory = parse_memory(max_memory)
        seed = self._seed_from(generator)
        for rows in x.split(rows_that_fit(self, x, samples, memory)):
            with torch.no_grad():
                found = self._predict(rows, samples, seed, memory).shaped(self.target_shape)
            yield found

    def predict_jointly(self, x: Any, samples: int = 64, generator: torch.Generator | None = None) -> Prediction:
        """A prediction whose draws are functions: draw k of every row, here and in the next call, has the same weights.

        :meth:`predict` integrates some posteriors in closed form, row by row, and then its draws say nothing of how
        rows go together. What asks that (a batch of labels, Bayesian optimisation) takes these.

        Args:
            x: Inputs, as for :meth:`predict`.
            samples: Number of posterior draws.
            generator: Makes the draws new.
        """
        check_count("samples", samples)
        x = as_input(x, self.model)
        with torch.no_grad():
            params, outputs, log_weights = self._outputs_of_draws(x, samples, self._seed_from(generator), None)
            assert outputs is not None
            made = self.model.likelihood.predict(outputs, self.model.likelihood_params(params), log_weights)
        return made.shaped(self.target_shape)

    def _seed_from(self, generator: torch.Generator | None) -> int:
        check_generator(generator)
        if generator is None:
            return self.seed
        return int(torch.randint(2**62, (), generator=generator, device=generator.device))

    # --- with held-out data ------------------------------------------------------------------------------------------

    def recalibrated(self, held_out: Any, method: str = "auto", *, samples: int = 64) -> Posterior:
        """This posterior with predictions that are recalibrated on held-out data.

        A posterior of a wrong model, or an approximate one, may be too sure or not sure enough. Each draw's prediction
        is changed by a map with few parameters, those under which the held-out outcomes are most probable; see
        :mod:`knowable.core.prediction.recalibration` for the maps. The weights stay as they are. The result's ``repr``
        says what was fitted and what it gained.

        Args:
            held_out: Rows that were not used for training, of the same kind as these. Training rows are refused.
            method: For classes ``"temperature"``, ``"vector"`` or ``"isotonic"``, for numbers ``"scale"``. ``"auto"``:
                ``"scale"``, for classes ``"temperature"`` or ``"vector"``, and none of them where predictions do not
                become clearly better: by cross-validation, by more than two standard errors.
            samples: Number of posterior draws with which it is fitted.

        Raises:
            InvalidData: If ``held_out`` is empty, has training rows, or one class only where classes have parameters.
            Unsupported: If there is no such map, as for counts.
        """
        return self.families["recalibrated"].of(self, held_out, method, samples)  # type: ignore[attr-defined]

    # --- for ArviZ ---------------------------------------------------------------------------------------------------

    def to_arviz(
        self,
        x: Any = None,
        y: Any = None,
        *,
        samples: int | None = None,
        generator: torch.Generator | None = None,
        max_memory: int | str | None = None,
    ) -> Any:
        """An ArviZ ``DataTree`` of draws, all of the same weight; with data, ``arviz_stats.loo`` takes it.

        The groups are ``posterior``, the random parameters; ``sample_stats``, what a sampler said of each draw. With
        ``x`` the network's outputs ``f`` join the parameters, and ``posterior_predictive`` holds an outcome ``y`` of
        each draw. With ``y`` there are also ``log_likelihood``, log p(y | x, θ) of each draw and row, and
        ``observed_data``. Chains are chains there; draws of other posteriors are one chain.

        Outputs are those that :meth:`predict` uses for its draws: of the linearised network for a ``Laplace`` posterior
        that predicts so. Draws whose weights differ are resampled.

        Args:
            x: Inputs, one row each.
            y: Their targets.
            samples: Number of draws. None: every draw of chains, every atom of an ensemble, 1,000 draws of others.
                Chains and ensembles give no more than they have.
            generator: Makes the draws new.
            max_memory: Bytes (or ``"500MB"``) that the draws and the result may take.

        Raises:
            MissingExtra: Without ArviZ; ``pip install 'knowable[diag]'``.
        """
        if samples is not None:
            check_count("samples", samples)
        return exported(self, x, y, samples, self._seed_from(generator), parse_memory(max_memory))

    def _draws_to_export(self, samples: int | None) -> tuple[Posterior, int, int, dict[str, Tensor]]:
        """The posterior whose draws these are, how many, of how many chains, and what is known of each draw."""
        return self, samples or _DRAWS_TO_EXPORT, 1, {}

    def _outputs_of_draws(
        self, x: Tensor | None, samples: int, seed: int, memory: int | None
    ) -> tuple[Params, Tensor | None, Tensor]:
        """Draws of all parameters, the outputs of each at ``x`` as :meth:`predict` has them, and the log weights."""
        count, log_weights = self.draws_for_prediction(samples, seed)
        left = None if memory is None else memory - bytes_to_export(self, x, count, memory)
        outputs = None if x is None else predict_outputs(self, x, samples, seed, left)[0]
        kept = self._kept is not None and self._kept[0] == hash((samples, seed))  # for the outputs, just now
        return self._ordered(draws_of_block(self, 0, count, samples, seed, keep=kept)), outputs, log_weights

    # --- on disk -----------------------------------------------------------------------------------------------------

    def save(self, path: str | os.PathLike[str], *, overwrite: bool = False, frozen: str = "stored") -> Path:
        """Write a folder of safetensors and JSON that ``knowable.load`` reads; it never contains code.

        Args:
            path: The folder; a name that ends in ``.knowable`` is that of a single file with the same content.
            overwrite: Replace a posterior that was saved there before.
            frozen: ``"stored"``: the frozen parameters are saved too, once. ``"reference"``: only their hashes are, and
                loading needs the network that has them, ``kn.load(path, net)``, and checks them.
        """
        return save_posterior(self, path, overwrite=overwrite, frozen=frozen)

    def __repr__(self) -> str:
        start = self.model.params()
        size = sum(start[name].numel() for name in self.model.random_names if name not in self.points)
        evidence = f", log evidence {self.log_evidence!r}" if self.log_evidence is not None else ""
        target = "" if self.diagnostics.bayes else ", not the Bayes posterior: see diagnostics.notes"
        return f"{type(self).__name__}({size:,} random parameters of {type(self.model.net).__name__}{evidence}{target})"
