"""A distribution over parameters, bound to its model: sample it, predict with it, save it."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from knowable.core.model.data import as_input
from knowable.core.model.model import Model
from knowable.core.model.prior import JointPrior
from knowable.core.network.network import DRAWS_AT_ONCE
from knowable.core.network.params import Buffers, Params, expand_params, index_params
from knowable.core.posterior.arviz import exported
from knowable.core.posterior.diagnostics import Diagnostics, LogEvidence
from knowable.core.posterior.saving import FAMILIES, save_posterior
from knowable.core.posterior.training_rows import TrainingRows
from knowable.core.prediction.prediction import Prediction
from knowable.core.support.checks import arguments_named, check_count, check_generator, parse_memory
from knowable.core.support.randomness import generator_for
from knowable.errors import InvalidArgument, Unsupported

T = TypeVar("T")

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
        self.training_rows: TrainingRows | None = None
        self._kept: tuple[int, Params] | None = None  # draws kept from one prediction to the next

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
                ``"scale"``; for classes ``"temperature"``, or ``"vector"`` if that is clearly better.
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
        left = None if memory is None else memory - _bytes_to_export(self, x, count, memory)
        outputs = None if x is None else predict_outputs(self, x, samples, seed, left)[0]
        kept = self._kept is not None and self._kept[0] == hash((samples, seed))  # for the outputs, just now
        return self._ordered(_block(self, 0, count, samples, seed, keep=kept)), outputs, log_weights

    # --- on disk -----------------------------------------------------------------------------------------------------

    def save(self, path: str | os.PathLike[str], *, overwrite: bool = False, frozen: str = "stored") -> Path:
        """Write a folder of safetensors and JSON that ``knowable.load`` reads; it never contains code.

        Args:
            path: The folder.
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


# --- Monte Carlo prediction under a memory limit: blocks of draws, blocks of rows, one result ------------------------
#
# Draws are made once and kept for the next call where they fit. What they have in common runs once for a block of them.
# Where few weights are random, several draws run in one batched call (their time is overhead, or products with weights
# that all share); where many are, draw by draw (their time is arithmetic, which batching cannot save).

_DRAWS_TO_EXPORT = 1000  # where a posterior has no draws of its own
_DEFAULT_MEMORY = 2 * 2**30  # working memory when no cap is given
_VECTORISE_BELOW = 20_000  # random parameters; beyond it a batched call is no faster than a loop,
_OR_SHARE = 0.02  # unless they are so few of all that draws have nearly all products in common


def differentiable_prediction(posterior: Posterior, x: Tensor, *, samples: int, seed: int) -> Prediction:
    """What :meth:`Posterior.predict` gives, as a function of ``x`` that can be differentiated.

    All activations of all draws are kept for the gradient: give few rows at a time, see :func:`rows_to_differentiate`.

    Args:
        posterior: The posterior.
        x: Inputs in the model's dtype and on its device, which require a gradient.
        samples: Number of draws.
        seed: Fixes them; ``posterior.seed`` has those of :meth:`Posterior.predict`.
    """
    with torch.enable_grad():
        return posterior._predict(x, samples, seed, None).shaped(posterior.target_shape)


def rows_to_differentiate(posterior: Posterior, x: Tensor, samples: int) -> int:
    """How many rows of ``x`` at a time :func:`differentiable_prediction` may have."""
    each = 2 * samples * bytes_per_row(posterior.model, x, posterior.buffers)
    return max(1, _free_memory(posterior.model.device) // (2 * each))


def predict_outputs(
    posterior: Posterior, x: Tensor, samples: int, seed: int, memory: int | None
) -> tuple[Tensor, Params, Tensor]:
    """Network outputs ``(K, rows, ...)`` for K draws, the draws' likelihood parameters, and their log weights."""
    draws, log_weights = posterior.draws_for_prediction(samples, seed)
    budget = _Budget(posterior, x, draws, memory)
    outputs: Tensor | None = None
    own: list[Params] = []
    for start in range(0, draws, budget.block):
        stop = min(start + budget.block, draws)
        stack = _block(posterior, start, stop, samples, seed, keep=budget.keep)
        own.append({name: value.clone() for name, value in stack.items() if name.startswith("likelihood.")})
        network = posterior.model.network_params(stack)
        for row in range(0, len(x), budget.rows):
            rows = x[row : row + budget.rows]
            out = posterior.run_draws(network, rows, first=start, seed=seed, vectorise=budget.vectorise)
            if outputs is None:
                outputs = out.new_empty((draws, len(x), *out.shape[2:]))
            outputs[start : start + budget.block, row : row + budget.rows] = out
    assert outputs is not None
    return outputs, {name: torch.cat([each[name] for each in own]) for name in own[0]}, log_weights


def _bytes_to_export(posterior: Posterior, x: Tensor | None, draws: int, memory: int) -> int:
    """Bytes of draws, and of an outcome and the log likelihoods of each; refuse a ``memory`` that is too small."""
    parameters = sum(value.numel() * value.element_size() for value in posterior.mean().values())
    each = parameters if x is None else parameters + 2 * len(x) * _Footprint(posterior, x).output
    if draws * each > memory // 2:
        raise InvalidArgument(
            f"max_memory={memory:,} is too small: {draws:,} draws take {draws * each:,} bytes, and at most half may go "
            f"into them. Ask for fewer samples, or give fewer rows."
        )
    return draws * each


def check_result_fits(posterior: Posterior, x: Tensor, draws: int, memory: int | None) -> None:
    """Refuse a ``memory`` limit of which the outputs of ``draws`` draws alone would take more than half."""
    _check_result(len(x) * draws * _Footprint(posterior, x).output, draws, len(x), memory)


def _check_result(size: int, draws: int, rows: int, memory: int | None) -> None:
    if memory is not None and size > memory // 2:
        raise InvalidArgument(
            f"max_memory={memory:,} is too small: the outputs of {draws} draws for {rows:,} rows and their copies take "
            f"{size:,} bytes, and at most half may go into them. Use predict_stream, which yields predictions for "
            f"blocks of rows, or fewer samples."
        )


def rows_that_fit(posterior: Posterior, x: Tensor, samples: int, memory: int | None) -> int:
    """How many rows a prediction may have so that its result takes at most half of the memory."""
    per_row = _Footprint(posterior, x).output * samples
    return max(1, (memory or _free_memory(posterior.model.device)) // (2 * per_row))


def _free_memory(device: torch.device) -> int:
    """Working memory where no limit is given: 2 GiB, or half of what is free on a graphics card if that is less."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return _DEFAULT_MEMORY
    return min(_DEFAULT_MEMORY, torch.cuda.mem_get_info(device)[0] // 2)


def _block(posterior: Posterior, start: int, stop: int, samples: int, seed: int, *, keep: bool) -> Params:
    """Draws start..stop and the buffers of each, from those kept at an earlier call if they are the same ones."""
    if not keep:
        return _drawn(posterior, start, stop, samples, seed)
    key = hash((samples, seed))
    if posterior._kept is None or posterior._kept[0] != key:
        count, _ = posterior.draws_for_prediction(samples, seed)
        posterior._kept = (key, _drawn(posterior, 0, count, samples, seed))
    return index_params(posterior._kept[1], slice(start, stop))


def _drawn(posterior: Posterior, start: int, stop: int, samples: int, seed: int) -> Params:
    draws = posterior.draw_block(start, stop, samples, seed)
    return {**draws, **posterior.buffer_block(start, stop, samples, seed)}


class _Budget:
    """Sizes of the blocks of draws and of rows with which a prediction stays within its memory limit."""

    def __init__(self, posterior: Posterior, x: Tensor, draws: int, memory: int | None):
        footprint = _Footprint(posterior, x)
        result = draws * len(x) * footprint.output
        _check_result(result, draws, len(x), memory)
        left = (memory or _free_memory(posterior.model.device) + result) - result
        self.keep = draws * footprint.draw <= left // 4
        self.block = draws if self.keep else max(1, min(draws, left // (4 * footprint.draw)))
        left -= self.block * footprint.draw
        every = sum(value.numel() for value in posterior.model.net.parameters())
        self.vectorise = footprint.random <= max(_VECTORISE_BELOW, _OR_SHARE * every)
        together = min(self.block, DRAWS_AT_ONCE) if self.vectorise else 1
        self.rows = max(1, int(left // 2 // (footprint.working + (together - 1) * footprint.own)))


class _Footprint:
    """Bytes per row: a draw's output with its copies, all activations, those of each draw alone; and of a draw."""

    def __init__(self, posterior: Posterior, x: Tensor):
        params, network, buffers = posterior.mean(), posterior.model.network, posterior.buffers
        random = {name: value for name, value in params.items() if name not in posterior.points}
        all_params, rows = posterior.model.network_params(params), x[:2]
        varying = {name: value for name, value in all_params.items() if name in random}
        with torch.no_grad():
            function, once = _counted(lambda: network.given(all_params, varying, rows, buffers), len(rows))
            output, self.own = _counted(lambda: function(varying), len(rows))
        self.working = max(once, self.own)
        copies = posterior.model.likelihood.copies
        self.output = max(1, copies * output.numel() * output.element_size() // len(rows))
        self.draw = max(1, sum(value.numel() * value.element_size() for value in random.values()))
        self.random = sum(value.numel() for value in random.values())


def bytes_per_row(model: Model, x: Tensor, buffers: Buffers) -> int:
    """Bytes of all activations of one row in a forward pass."""
    params, rows = model.network_params(model.params()), x[:2]
    with torch.no_grad():
        return _counted(lambda: model.network(params, rows, buffers=buffers), len(rows))[1]


def _counted(run: Callable[[], T], rows: int) -> tuple[T, int]:
    """What ``run`` returns, and the bytes that it allocates for each of so many rows."""
    with _CountBytes() as counted:
        output = run()
    return output, max(1, counted.bytes // rows)


class _CountBytes(TorchDispatchMode):
    """Adds up the sizes of all tensors that operations allocate: an upper bound of the peak memory."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        given = {each.untyped_storage().data_ptr() for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)}
        for each in tree_leaves(result):
            if isinstance(each, Tensor) and each.untyped_storage().data_ptr() not in given:  # a view takes nothing
                self.bytes += each.numel() * each.element_size()
        return result
