"""The interface of a method: a frozen dataclass of settings that turns a model and data into a posterior.

``Method.fit`` checks its arguments once, makes a :class:`FitJob` of them, and calls the method's own ``_fit(job)``.
"""

from __future__ import annotations

import difflib
import os
import re
import warnings
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any, ClassVar, Self, final

from knowable.core.compiling.engine import Engine, as_engine
from knowable.core.compiling.workers import Workers
from knowable.core.model.data import Data, as_data
from knowable.core.model.divided import divided
from knowable.core.model.model import Model
from knowable.core.network.inputs import tensors_of
from knowable.core.posterior.cached_features import rebound, with_features
from knowable.core.posterior.posterior import Posterior
from knowable.core.posterior.training_rows import TrainingRows
from knowable.core.storage.folder import Checkpoint, as_checkpoint, of_processes, part_of, tensor_fingerprint
from knowable.core.support.checks import arguments_named, check_count, readable
from knowable.core.support.progress import ProgressSetting
from knowable.core.support.randomness import own_randomness
from knowable.errors import InvalidArgument, InvalidType, ModelWarning, Unsupported

# Names of settings in other libraries.
_ELSEWHERE = {
    "lr": "learning_rate",
    "n_epochs": "epochs",
    "num_epochs": "epochs",
    "n_chains": "chains",
    "num_chains": "chains",
    "n_samples": "draws",
    "num_samples": "draws",
    "tune": "warmup",
    "num_warmup": "warmup",
    "n_members": "members",
    "optimizer": "optimiser",
    "verbose": "progress",
}
_PLACES = {
    "device": "A fit runs where the network is: move it with net.to(device) before Model(net, ...); data follow.",
    "dtype": "A fit computes in the network's own precision: write net.double() before Model(net, ...).",
}
_NOT_SETTINGS = {  # of any method, and what to do instead
    **_PLACES,
    "verbose": "A bar is shown on a terminal, or with fit(..., progress=True).",
    "progress": "Pass it to fit: fit(model, data, progress=True).",
    "seed": "Pass it to fit: fit(model, data, seed=0).",
    "random_state": "Pass it to fit: fit(model, data, seed=0).",
}


class Method(ABC):
    """An inference method. Concrete methods are frozen dataclasses, one file each.

    A method describes itself in the class attributes below, from which the registry, the command line and the
    citations are made.
    """

    family: ClassVar[str] = ""
    """Kind of inference: ``"point"``, ``"variational"``, ``"sampling"``, ..."""
    summary: ClassVar[str] = ""
    """One line for tables of methods."""
    aliases: ClassVar[tuple[str, ...]] = ()
    """Shorter names, beside the snake_case of the class name."""
    references: ClassVar[tuple[str, ...]] = ()
    """Keys of ``references.bib``: the papers to cite."""
    supports_row_weights: ClassVar[bool] = False
    """Whether rows of the data may have weights."""
    supports_binary: ClassVar[bool] = False
    """Whether parameters may be 0 or 1 (a Bernoulli prior)."""
    divides_weights: ClassVar[bool] = False
    """Whether it is for networks that are too large for one device: ``TorchDistributed(fully_shard=True)``."""
    fits_network: ClassVar[bool] = True
    """Whether the network's outputs are fitted to the targets: then they are compared with them before a fit."""
    moved: ClassVar[Mapping[str, str]] = {}
    """Settings of earlier versions, and how they are written now."""

    def __new__(cls, *args: Any, **settings: Any):
        """Refuse settings that do not exist with an error that names the nearest one that does."""
        if is_dataclass(cls):
            known = [each.name for each in fields(cls) if each.init]
            for name in settings:
                if name not in known:
                    raise InvalidType(_unknown_setting(cls, name, known))
        return super().__new__(cls)

    @final
    @arguments_named(
        {**_ELSEWHERE, **_PLACES, "random_state": "seed"},
        too_many="Pass inputs and targets as a pair: fit(model, (X, Y)).",
    )
    def fit(
        self,
        model: Model,
        data: Any,
        *,
        validation: Any = None,
        seed: int = 0,
        progress: ProgressSetting = None,
        checkpoint: Checkpoint | str | os.PathLike[str] | None = None,
        engine: Engine | Workers | str | None = None,
        start: Any = None,
    ) -> Any:
        """Fit the posterior of ``model`` given ``data``.

        Args:
            model: The model.
            data: ``(x, y)`` tensors or arrays, a Dataset or a DataLoader.
            validation: Held-out data of the same kind, for early stopping.
            seed: Fixes every random choice of the fit.
            progress: Show a progress bar; None shows it only on a terminal. Or a function of a
                :class:`~knowable.Progress`, which can look at the posterior as it is and stop the fit; or a tracker
                that gets every figure of the fit, ``kn.TensorBoard(folder)`` or ``kn.MLflow()``.
            checkpoint: A folder to save to at intervals; a fit that finds its own state there continues from it.
            engine: Precision of the arithmetic, how gradients are computed, and where: ``Engine(...)``,
                ``kn.engines.Ray(...)`` or ``"ray"`` for independent work, ``kn.engines.TorchDistributed(...)`` or
                ``"torch_distributed"`` for one fit in several processes.
            start: Initial weights, for methods with a setting of that name; overrides it.

        Returns:
            The posterior.
        """
        method = self if start is None else _with_start(self, start)
        job = FitJob.of(method, model, data, validation, seed, progress, checkpoint, engine)
        posterior = _fitted(job) if not job.engine.elsewhere or method._divides(job) else _fitted_elsewhere(job)
        posterior.target_shape, posterior.method = job.rows.shape_of_target, self
        posterior.training_rows, posterior.citation = TrainingRows.of(job.rows), self.references
        return posterior

    def continued(self) -> Self:
        """This method for the next data of the same model, where weights begin at those of the last posterior."""
        starts = [each.default for each in fields(self) if each.name == "start"]  # type: ignore[arg-type]
        return replace(self, start=starts[0]) if starts else self  # type: ignore[type-var]

    def _model_for_data(self, model: Model) -> Model:
        """The model whose network must accept the data: the user's own, unless the method changes the network."""
        return model

    @property
    def makes_inputs(self) -> bool:
        """Whether the network sees other inputs than the rows of the data: perturbed, transformed or drawn ones."""
        return False

    def _divides(self, job: FitJob) -> bool:
        """Whether :meth:`_fit` gives independent parts to the engine itself; else the fit is one piece of work."""
        return False

    @abstractmethod
    def _fit(self, job: FitJob) -> Posterior:
        """Fit the posterior; everything in the job has been checked."""

    def __repr__(self) -> str:
        """The settings that differ from the defaults."""
        changed = [
            f"{each.name}={readable(getattr(self, each.name))}"
            for each in sorted(fields(self), key=lambda each: each.kw_only)  # type: ignore[arg-type]
            if each.repr and getattr(self, each.name) != each.default
        ]
        return f"{type(self).__name__}({', '.join(changed)})"


@dataclass(frozen=True)
class FitJob:
    """The arguments of one fit, checked."""

    method: Method  # the method that fits, for its name and settings
    model: Model  # the model
    rows: Data  # the training data
    validation: Data | None = None  # held-out data, or None
    seed: int = 0  # fixes every random choice
    progress: ProgressSetting = None  # show a progress bar (None: only on a terminal), a function or a tracker
    checkpoint: Checkpoint | None = None  # where to save at intervals, or None
    engine: Engine = field(default_factory=Engine)  # precision of the arithmetic, and how gradients are computed
    label: str = ""  # text of the progress bar; the method's name where it is empty

    @classmethod
    def of(
        cls,
        method: Method,
        model: Any,
        data: Any,
        validation: Any = None,
        seed: int = 0,
        progress: ProgressSetting = None,
        checkpoint: Checkpoint | str | os.PathLike[str] | None = None,
        engine: Engine | Workers | str | None = None,
    ) -> FitJob:
        """Check the arguments of a fit."""
        if not isinstance(model, Model):
            raise InvalidType(
                f"model must be a knowable Model (network, likelihood, prior), got {type(model).__name__}. Write "
                f"kn.Model(net, kn.Gaussian()), or the likelihood that your targets have."
            )
        seed = check_count("seed", seed, at_least=0)
        own = method._model_for_data(model)
        batch_size = getattr(method, "batch_size", None)
        rows = as_data(data, own, batch_size=batch_size)
        held_out = None if validation is None else as_data(validation, own, name="validation", batch_size=batch_size)
        if rows.weights is not None and rows.weights.dim() != 1:
            raise InvalidArgument(f"weights must be one number for each row, got shape {tuple(rows.weights.shape)}.")
        if held_out is not None and held_out.weighted:
            raise Unsupported("validation has row weights: held-out rows all count the same. Leave weights out.")
        job = cls(method, model, rows, held_out, seed, progress, as_checkpoint(checkpoint), as_engine(engine))
        job = job.for_method(method)._in_processes()
        if method.fits_network:
            _warn_about(own, rows)
        return job

    def for_method(self, method: Method) -> FitJob:
        """The same fit by another method, which must support the model's prior and the data's row weights."""
        binary = self.model.binary_names
        if binary and not method.supports_binary:
            raise Unsupported(
                f"{type(method).__name__} does not support parameters that are 0 or 1 ({', '.join(binary[:5])}). "
                f"Use DiscreteVI, or freeze them."
            )
        if self.rows.weighted and not method.supports_row_weights:
            raise Unsupported(
                f"{type(method).__name__} does not support row weights: its class does not say that it counts them "
                f"(supports_row_weights = True). All methods of knowable do."
            )
        changes = method.makes_inputs or method._model_for_data(self.model) is not self.model
        if self.engine.cache_features and changes:
            raise Unsupported(
                f"cache_features=True is not for {method!r}, which changes the network or its inputs. Leave it out."
            )
        return replace(self, method=method)

    def _in_processes(self) -> FitJob:
        """The part of this process, where the engine runs the fit in several: all must have been given the same."""
        processes = self.engine.processes
        if not processes.several:
            return self
        own, model = self.engine.shards, self.model
        if self.engine.fully_shard:
            self._refuse_fully_shard()
        values = [*model.params().values(), *model.frozen_params().values(), *model.buffers().values()]
        processes.agree("Settings", (repr(self.method), self.seed, repr(self.engine)), "Give all the same.")
        processes.agree("Models", repr(model), "Give all the same.")
        advice = "Write torch.manual_seed(0) before the network is built, or load the same weights in all."
        processes.agree("Initial weights", tensor_fingerprint(*values), advice)
        if not own:
            advice = (
                "If the rows of each are its own, say so: TorchDistributed(shards=True). Else pass the same to all."
            )
            processes.agree("The rows", (self.rows.size, _rows_identity(self.rows)), advice)
        return replace(
            self, rows=divided(self.rows, processes, own=own),
            progress=self.progress if processes.first else False,
            checkpoint=None if self.checkpoint is None else of_processes(self.checkpoint, processes),
        )  # fmt: skip

    def _refuse_fully_shard(self) -> None:
        """Refuse what cannot be done where each process has a part of the weights."""
        method, training = self.method, getattr(self.method, "training", None)
        likely = list(self.model.likelihood_params(self.model.params()))
        if not method.divides_weights:
            said = f"{type(method).__name__} needs all weights in every process. MAP and MaximumLikelihood do not"
        elif likely:
            said = f"The likelihood has parameters of its own ({', '.join(likely)}). Fix them: Gaussian(noise=0.1)"
        elif self.checkpoint is not None:
            said = "checkpoint= cannot save weights that are divided"
        elif training is not None and training.clip is not None:
            said = "Training(clip=...) cannot clip a gradient that is divided"
        elif training is not None and training.optimiser == "sgd":
            said = "The fused step of 'sgd' does not take divided weights. Write Training(optimiser=torch.optim.SGD)"
        else:
            return
        raise Unsupported(f"fully_shard=True does not go with this fit. {said}. Or leave fully_shard out.")

    def part(self, name: str, **changes: Any) -> FitJob:
        """A fit that is one part of this one: its checkpoint is a folder inside this one's."""
        return replace(self, checkpoint=part_of(self.checkpoint, name), **changes)

    @property
    def options(self) -> dict[str, Any]:
        """Arguments of the training loop beside the objective, the data and its settings."""
        return {
            "validation": self.validation,
            "seed": self.seed,
            "progress": self.progress,
            "checkpoint": self.checkpoint,
            "engine": self.engine,
            "label": self.label or type(self.method).__name__,
            "identity": self.identity,
        }

    @property
    def identity(self) -> dict[str, Any]:
        """Identifies the fit in its checkpoint, if there is one: a resumed fit must have the same."""
        if self.checkpoint is None:
            return {}
        model = self.model
        known = [*model.params().values(), *model.frozen_params().values(), *model.buffers().values()]
        return {
            "method": repr(self.method),
            "model": repr(model),
            "start": tensor_fingerprint(*known),
            "prior": str(model.log_prior(model.params()).item()),
            "data": _rows_identity(self.rows),
            "validation": None if self.validation is None else _rows_identity(self.validation),
        }


def _fitted(job: FitJob) -> Posterior:
    return _fit_on_features(job) if job.engine.cache_features else job.method._fit(job)


def _fitted_elsewhere(job: FitJob) -> Posterior:
    """The whole fit as one piece of work for the engine."""
    name = type(job.method).__name__
    ((_, (posterior, of_this_model)),) = job.engine.run(_whole, job, ["all"], label=name, progress=job.progress)
    if of_this_model:  # and not of the worker's copy
        posterior.model = job.model
    return posterior


def _whole(job: FitJob, task: str) -> tuple[Posterior, bool]:
    """The posterior, and whether its model is the one that was given."""
    posterior = _fitted(job)
    return posterior, posterior.model is job.model


def _fit_on_features(job: FitJob) -> Posterior:
    """Fit with the frozen layers computed once; the posterior is of the model itself."""
    datas = [each for each in (job.rows, job.validation) if each is not None]
    with with_features(job.model, datas, job.engine.cache_features) as (model, (rows, *others)):
        made = job.method._fit(replace(job, model=model, rows=rows, validation=others[0] if others else None))
        return rebound(made, job.model)


def method_name(cls: type[Method]) -> str:
    """Snake case of the class name, as on the command line: ``mean_field_vi`` for ``MeanFieldVI``."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", cls.__name__).lower()


def _rows_identity(data: Data) -> str:
    return tensor_fingerprint(*tensors_of(*data.tensors)) if data.in_memory else str(data.size)


_ROWS_TRIED = 32  # to find what is probably not meant


def _warn_about(model: Model, rows: Data) -> None:
    """Warn about what is probably not meant; the rows of a loader are not read for it."""
    if not rows.in_memory:
        return
    x, y = rows.tensors[:2]
    with own_randomness(0):
        said = model.doubts(x[: min(_ROWS_TRIED, rows.at_once or _ROWS_TRIED)], y)
    for each in said:
        warnings.warn(each, ModelWarning, stacklevel=4)


def _with_start(method: Method, start: Any) -> Method:
    if "start" not in [each.name for each in fields(method)]:  # type: ignore[arg-type]
        raise Unsupported(f"{type(method).__name__} has no setting start. Leave start= out.")
    return replace(method, start=start)  # type: ignore[type-var]


def _unknown_setting(cls: type[Method], name: str, known: list[str]) -> str:
    says = f"{cls.__name__} has no setting {name!r}."
    if "samples" in name and name not in cls.moved:
        says += " Draws of a prediction: posterior.predict(x, samples=...)."
    if name in _NOT_SETTINGS:
        return f"{says} {_NOT_SETTINGS[name]}"
    name = _ELSEWHERE.get(name, name)
    if name in cls.moved:
        return f"{says} Write {cls.moved[name]}."
    near = [name] if name in known else difflib.get_close_matches(name, known, n=1)
    return f"{says} Did you mean {near[0]!r}?" if near else f"{says} Its settings are {', '.join(known)}."
