"""Active learning: ask for the labels that tell most, fit, and ask again."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from knowable.core.method import Method
from knowable.core.model.data import as_data, as_input
from knowable.core.model.model import Model
from knowable.core.network.inputs import tensors_of
from knowable.core.posterior.posterior import Posterior
from knowable.core.prediction.prediction import ClassPrediction, Prediction, RegressionPrediction
from knowable.core.storage.folder import is_folder, read_folder, tensor_fingerprint, write_folder
from knowable.core.support.checks import check_choice, check_count, check_type
from knowable.core.support.figure import COLOURS, new_figure
from knowable.core.support.randomness import derive_seed, generator_for
from knowable.core.support.tensors import to_tensor
from knowable.decisions import acquisition as scores
from knowable.decisions.coreset import k_centre
from knowable.errors import InvalidArgument, InvalidData, ModelWarning, Unsupported
from knowable.evaluation.inputs import by_row
from knowable.evaluation.scores import accuracy

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ACQUISITIONS = (
    "bald", "batch_bald", "epig", "variance", "variance_reduction", "entropy", "margin", "variation_ratio", "coreset",
    "random",
)  # fmt: skip
_OF_CLASSES = ("entropy", "margin", "variation_ratio")
_TARGETS = 200  # rows of the pool that stand for what will be predicted
_WATCHED = 1_000  # rows of the pool whose predictions tell whether learning has settled
_SETTLED, _ROUNDS = 0.99, 3  # agreement of predictions from one fit to the next, so many times
_KIND = "active"


class ActiveLearner:
    """Chooses which rows of a pool to label, from the joint draws of a posterior.

    Args:
        model: The model.
        method: The method that is fitted to the rows labelled so far, each time from the beginning.
        pool: Inputs without labels.
        acquisition: How rows are chosen.
            ``"bald"``: what the label tells about the weights (for numbers: about the function).
            ``"batch_bald"``: the same of all rows of a query together, so that they do not repeat each other.
            ``"epig"``: what the label tells about the predictions at ``targets``.
            ``"variance"``: the epistemic variance (of the class probabilities).
            ``"variance_reduction"``: how much a number lowers the variance at ``targets``.
            ``"entropy"``, ``"margin"``, ``"variation_ratio"``: how undecided the labels are.
            ``"coreset"``: rows far from all labelled ones (k-centre).
            ``"random"``: any rows, the baseline.
            Images with a label for each pixel are chosen by the mean over their pixels. A function of a prediction of
            the pool gives a score for each row.
        test: Inputs and targets on which each fit is scored.
        targets: Inputs of the kind that will be predicted; None takes rows of the pool.
        samples: Draws of the posterior.
        candidates: How many rows of the pool, drawn at random, are looked at in a query; None looks at all.
        seed: Fixes every random choice.
        checkpoint: A folder in which every label is saved when it comes. The same lines in a new process go on from it.

    Attributes:
        indices: The rows labelled so far, in their order.
        history: A :class:`Round` for each fit.

    Example:
        >>> import torch
        >>> import knowable as kn
        >>> pool = torch.randn(200, 2)
        >>> y = (pool[:, 0] > 0).long()
        >>> model = kn.Model(torch.nn.Linear(2, 2), kn.Categorical())
        >>> learner = kn.ActiveLearner(model, kn.Laplace(structure="full"), pool, acquisition="epig")
        >>> posterior = learner.run(y, budget=8, batch=4)
        >>> len(learner.indices)
        8
    """

    def __init__(
        self,
        model: Model,
        method: Method,
        pool: Any,
        acquisition: str | Callable[[Prediction], Tensor] = "bald",
        *,
        test: Any = None,
        targets: Any = None,
        samples: int = 100,
        candidates: int | None = None,
        seed: int = 0,
        checkpoint: str | os.PathLike[str] | None = None,
    ):
        self.model = check_type("model", model, Model, "a knowable Model")
        self.method = check_type("method", method, Method, "a method, such as kn.MCDropout()")
        self.pool = as_input(pool, model, name="pool")
        self.acquisition = (
            acquisition if callable(acquisition) else check_choice("acquisition", acquisition, ACQUISITIONS)
        )
        self.test = None if test is None else as_data(test, model, name="test")
        self.targets = None if targets is None else as_input(targets, model, name="targets")
        self.samples, self.seed = check_count("samples", samples), check_count("seed", seed, at_least=0)
        self.candidates = None if candidates is None else check_count("candidates", candidates)
        self.indices: list[int] = []
        self.history: list[Round] = []
        self._y: Tensor | None = None
        self._fitted: tuple[int, Posterior] | None = None  # to how many labels
        self._watched: Tensor | None = None  # predictions of the last fit
        self.checkpoint = None if checkpoint is None else Path(checkpoint)
        self._restore()

    # --- the loop ----------------------------------------------------------------------------------------------------

    @property
    def left(self) -> int:
        """How many rows of the pool have no label."""
        return len(self.pool) - len(self.indices)

    def query(self, n: int = 1) -> Tensor:
        """Which rows of the pool to label next, ``(n,)``; before the first label, rows at random.

        Raises:
            InvalidArgument: If fewer than n rows are left.
        """
        check_count("n", n)
        if n > self.left:
            raise InvalidArgument(f"n must be at most the {self.left} rows of the pool that have no label, got {n}.")
        free = torch.ones(len(self.pool), dtype=torch.bool)
        free[self.indices] = False
        rows = free.nonzero().flatten()
        seed = derive_seed(self.seed, "query", len(self.indices))
        if self.candidates is not None and self.candidates < len(rows):
            order = torch.randperm(len(rows), generator=generator_for(seed, "candidates"))
            rows = rows[order[: max(self.candidates, n)]].sort().values
        if not self.indices or self.acquisition == "random":
            return rows[torch.randperm(len(rows), generator=generator_for(seed, "random"))[:n]]
        return rows[self._choose(self.pool[rows.to(self.pool.device)], n, seed)]

    def label(self, indices: Any, y: Any, *, posterior: Posterior | None = None) -> None:
        """Take the targets of some rows of the pool.

        Args:
            indices: Rows of the pool, as :meth:`query` gave them.
            y: Their targets. What is refused leaves everything as it was.
            posterior: The posterior given all labels, these among them, where it is known already; it is then not
                fitted again.
        """
        rows = [int(each) for each in to_tensor(indices, "indices").flatten().tolist()]
        wrong = [row for row in rows if not 0 <= row < len(self.pool)]
        if wrong:
            raise InvalidArgument(f"indices must be from 0 to {len(self.pool) - 1}, rows of the pool; got {wrong[0]}.")
        known = set(self.indices)
        again = [row for place, row in enumerate(rows) if row in known or row in rows[:place]]
        if again:
            raise InvalidArgument(f"Row {again[0]} of the pool has a label already.")
        checked = as_data((self.pool[rows], self.model.likelihood.rows_of(y)), self.model, name="labels")
        labels = checked.tensors[1]
        self._y = labels if self._y is None else torch.cat([self._y, labels])
        self.indices += rows
        if posterior is not None:
            self._fitted = len(self.indices), posterior
        self._save()

    @property
    def posterior(self) -> Posterior:
        """The posterior given all labels so far; it is fitted when it is asked for."""
        if self._y is None:
            raise InvalidArgument("No row has a label yet: call label(indices, y) first.")
        count = len(self.indices)
        if self._fitted is None or self._fitted[0] != count:
            folder = None if self.checkpoint is None else self.checkpoint / "fit"
            seed = derive_seed(self.seed, "fit", count)
            rows = self.pool[self.indices], self._y
            part = None if folder is None else folder / str(count)
            with warnings.catch_warnings():  # classes that nobody has named yet
                warnings.filterwarnings("ignore", "y has (no row of class|the labels 1 to)", ModelWarning)
                made = self.method.fit(self.model, rows, seed=seed, progress=False, checkpoint=part)
            self._fitted = count, made
            self._record(made)
        return self._fitted[1]

    def run(
        self,
        oracle: Callable[[Tensor], Any] | Any,
        budget: int,
        *,
        batch: int = 1,
        until: str = "budget",
    ) -> Posterior:
        """Query, label and fit until there are ``budget`` labels.

        Args:
            oracle: A function of indices that returns their targets; or the targets of the whole pool.
            budget: Number of labels in all, those before this call among them.
            batch: Rows of each query.
            until: ``"settled"`` also stops when the predictions of the pool no longer change, see :attr:`settled`.

        Returns:
            The posterior given all labels.
        """
        check_count("budget", budget, at_most=len(self.pool))
        check_count("batch", batch)
        check_choice("until", until, ("budget", "settled"))
        if not callable(oracle) and len(oracle) != len(self.pool):
            raise InvalidData(f"oracle has {len(oracle)} targets, the pool {len(self.pool)} rows. Pass one for each.")
        while len(self.indices) < budget and not (until == "settled" and self.settled):
            rows = self.query(min(batch, budget - len(self.indices)))
            self.label(rows, oracle(rows) if callable(oracle) else _rows_of(oracle, rows))
            _ = self.posterior
        return self.posterior

    # --- what is known of the run ------------------------------------------------------------------------------------

    @property
    def settled(self) -> bool:
        """Whether predictions of the pool agreed from fit to fit, three times in a row, so that labels change little.

        For labels: 99% of them are the same. For numbers: the means moved by at most a tenth of the predictive standard
        deviation (root mean square). (Bloodgood and Vijay-Shanker, 2009.)
        """
        last = [each.agreement for each in self.history[-_ROUNDS:]]
        return len(last) == _ROUNDS and all(value >= _SETTLED for value in last)

    def labels_to_reach(self, score: float) -> float:
        """Number of labels at which the test accuracy (or log likelihood, for numbers) stays at ``score`` or above.

        Interpolated between fits; infinite if it was not reached.
        """
        points = [(each.labels, each.score) for each in self.history]
        if not points or math.isnan(points[-1][1]):
            raise InvalidArgument("No fit was scored: pass test= when the learner is made.")
        below = max((place for place, (_, value) in enumerate(points) if value < score), default=-1)
        if below == len(points) - 1:
            return math.inf
        if below < 0:
            return float(points[0][0])
        (before, low), (after, high) = points[below], points[below + 1]
        return before + (after - before) * (score - low) / (high - low)

    def labels_saved(self, baseline: ActiveLearner) -> float:
        """How many labels more ``baseline`` needed (such as one that asks at random) for the best score of both."""
        reached = max(each.score for each in self.history) if self.history else math.nan
        best = min(reached, max((each.score for each in baseline.history), default=math.nan))
        return baseline.labels_to_reach(best) - self.labels_to_reach(best)

    def plot(self, *others: ActiveLearner) -> Figure:
        """The learning curve, beside those of other learners.

        Raises:
            MissingExtra: If matplotlib is not installed.
        """
        return new_figure(5.5, 3.4, lambda figure: _draw(figure, (self, *others)))

    def __repr__(self) -> str:
        name = self.acquisition if isinstance(self.acquisition, str) else "own function"
        score = f", score={self.history[-1].score:.3f}" if self.history and self.test is not None else ""
        return f"ActiveLearner({name}: {len(self.indices):,} of {len(self.pool):,} labelled{score})"

    # --- choosing ----------------------------------------------------------------------------------------------------

    def _choose(self, x: Tensor, n: int, seed: int) -> Tensor:
        """Places of n rows of ``x``, the best first."""
        if self.acquisition == "coreset":
            return k_centre(x, n, chosen=self.pool[self.indices], seed=seed).cpu()
        prediction = self.posterior.predict_jointly(x, samples=self.samples)
        if callable(self.acquisition):
            found = to_tensor(self.acquisition(prediction), "acquisition")
            if found.shape != (len(x),):
                raise InvalidData(f"acquisition must return one number for each of {len(x)} rows, got {found.shape}.")
        elif isinstance(prediction, ClassPrediction):
            found = self._of_classes(prediction, n, seed)
        elif isinstance(prediction, RegressionPrediction):
            found = self._of_numbers(prediction, n, seed)
        else:
            raise Unsupported(f"acquisition={self.acquisition!r} is for labels or numbers; pass a function instead.")
        if found.isnan().any():
            raise InvalidData("acquisition is NaN for some rows: the predictions are not finite.")
        return found if found.dtype == torch.long else found.topk(n).indices.cpu()

    def _of_classes(self, prediction: ClassPrediction, n: int, seed: int) -> Tensor:
        """A score for each row, or the rows themselves."""
        name, weights = str(self.acquisition), prediction.log_weights.exp()
        probs, pixels = _as_rows(prediction)
        if name in ("bald", "entropy", "margin", "variation_ratio", "variance"):
            score = {
                "bald": scores.mutual_information, "entropy": scores.entropy, "margin": scores.margin,
                "variation_ratio": scores.variation_ratio, "variance": _variance_of_probs,
            }[name](probs, weights)  # fmt: skip
            return score.view(-1, pixels).mean(1)
        if pixels > 1 or name == "variance_reduction":
            why = "labels of pixels" if pixels > 1 else "labels"
            raise Unsupported(f"acquisition={name!r} is not for {why}. Use 'bald' or 'entropy'.")
        if name == "batch_bald":
            chosen, information = scores.batch_mutual_information(probs, weights, n, seed=seed)
            return torch.tensor(chosen) if math.isfinite(information) else torch.tensor([math.nan])
        return scores.epig(probs, _as_rows(self._at_targets(seed))[0], weights)

    def _of_numbers(self, prediction: RegressionPrediction, n: int, seed: int) -> Tensor:
        """A score for each row, or the rows themselves; several outputs of a row are averaged."""
        name, weights = self.acquisition, prediction.log_weights.exp()
        if name in _OF_CLASSES:
            raise Unsupported(f"acquisition={name!r} is for labels. For numbers use 'bald', 'epig' or 'variance'.")
        if name == "variance":
            return by_row(prediction.epistemic).mean(1)
        means, noise, outputs = _means_and_noise(prediction)
        if name == "bald":
            return scores.normal_information(means, noise, weights).view(-1, outputs).mean(1)
        if outputs > 1:
            raise Unsupported(f"acquisition={name!r} is for one number in each row. Use 'bald' or 'variance'.")
        if name == "batch_bald":
            return torch.tensor(scores.batch_normal_information(means, noise, weights, n)[0])
        targets, target_noise, _ = _means_and_noise(self._at_targets(seed))
        if name == "epig":
            return scores.normal_epig(means, noise, targets, target_noise, weights)
        return scores.variance_reduction(means, noise, targets, weights)

    def _at_targets(self, seed: int) -> Any:
        """Predictions, by the same draws, of inputs of the kind that will be predicted."""
        x = self.pool if self.targets is None else self.targets
        chosen = torch.randperm(len(x), generator=generator_for(seed, "targets"))[:_TARGETS]
        return self.posterior.predict_jointly(x[chosen.to(x.device)], samples=self.samples)

    # --- what is kept ------------------------------------------------------------------------------------------------

    def _record(self, posterior: Posterior) -> None:
        """Score the fit, unless it was scored before."""
        if self.history and self.history[-1].labels >= len(self.indices):
            return
        chosen = torch.randperm(len(self.pool), generator=generator_for(self.seed, "watched"))[:_WATCHED]
        watched = posterior.predict(self.pool[chosen.to(self.pool.device)], samples=self.samples)
        labels = isinstance(watched, ClassPrediction)
        now = watched.labels if labels else getattr(watched, "mean", None)
        agreement = math.nan
        if now is not None and self._watched is not None:
            if labels:
                agreement = (now == self._watched).double().mean().item()
            else:
                agreement = 1.0 - 0.1 * ((now - self._watched) / watched.std).square().mean().sqrt().item()  # type: ignore[attr-defined]
        self._watched = now
        score = math.nan
        if self.test is not None:
            x, y = self.test.tensors[:2]
            prediction = posterior.predict(x, samples=self.samples)
            is_class = isinstance(prediction, ClassPrediction)
            score = accuracy(prediction, y) if is_class else prediction.log_prob(y).double().mean().item()
        self.history.append(Round(len(self.indices), score, agreement))
        self._save()

    def _identity(self) -> dict[str, str]:
        return {
            "model": repr(self.model), "method": repr(self.method), "pool": tensor_fingerprint(*tensors_of(self.pool)),
            "acquisition": str(self.acquisition) if isinstance(self.acquisition, str) else "own function",
            "samples": str(self.samples), "candidates": str(self.candidates), "seed": str(self.seed),
        }  # fmt: skip

    def _save(self) -> None:
        if self.checkpoint is None or self._y is None:
            return
        tensors = {"indices": torch.tensor(self.indices), "y": self._y}
        if self._watched is not None:
            tensors["watched"] = self._watched
        content = {"identity": self._identity(), "history": [asdict(each) for each in self.history]}
        write_folder(self.checkpoint / "labels", _KIND, content, tensors)

    def _restore(self) -> None:
        if self.checkpoint is None or not is_folder(self.checkpoint / "labels"):
            return
        content, tensors = read_folder(self.checkpoint / "labels", _KIND)
        different = [key for key, value in self._identity().items() if content["identity"].get(key) != value]
        if different:
            raise InvalidArgument(
                f"checkpoint {str(self.checkpoint)!r} belongs to another run: {', '.join(different)} differ. Give "
                f"another folder or delete this one."
            )
        self.indices, self._y = tensors["indices"].tolist(), tensors["y"].to(self.model.device)
        self.history = [Round(**each) for each in content["history"]]
        self._watched = tensors.get("watched")


@dataclass(frozen=True)
class Round:
    """One fit of an active learner.

    Attributes:
        labels: Number of labels it had.
        score: Accuracy on the test data (labels), or mean log likelihood of a row (numbers); NaN without test data.
        agreement: Share of the pool's labels that are those of the fit before; for numbers 1 less a tenth of how far
            the means moved, in predictive standard deviations. NaN for the first.
    """

    labels: int
    score: float
    agreement: float


def _as_rows(prediction: ClassPrediction) -> tuple[Tensor, int]:
    """Draws of the probabilities ``(K, rows x pixels, classes)``, and the number of pixels of a row."""
    probs = prediction.samples
    if prediction.probs.dim() == 1 or _is_binary(prediction):  # P(y = 1)
        probs = torch.stack([1.0 - probs, probs], 2)
    if probs.dim() == 3:
        return probs, 1
    flat = probs.movedim(2, -1).flatten(2, -2)  # (K, rows, pixels, classes)
    return flat.flatten(1, 2), flat.shape[2]


def _is_binary(prediction: ClassPrediction) -> bool:
    return prediction.labels.shape == prediction.probs.shape


def _variance_of_probs(probs: Tensor, weights: Tensor) -> Tensor:
    """Variance of the class probabilities over the draws, summed over classes."""
    weights = weights.to(probs)
    mean = torch.tensordot(weights, probs, dims=1)
    return torch.tensordot(weights, (probs - mean).square(), dims=1).sum(-1)


def _means_and_noise(prediction: RegressionPrediction) -> tuple[Tensor, Tensor, int]:
    """Draws of the means ``(K, rows x outputs)``, the noise variance, and the number of outputs of a row."""
    means = prediction.samples.flatten(2) if prediction.samples.dim() > 2 else prediction.samples.unsqueeze(2)
    noise = by_row(prediction.aleatoric).clamp_min(torch.finfo(means.dtype).tiny)
    return means.flatten(1), noise.flatten(), means.shape[2]


def _rows_of(targets: Any, rows: Tensor) -> Any:
    return targets[rows.tolist()] if not isinstance(targets, Tensor) else targets[rows.to(targets.device)]


def _draw(figure: Figure, learners: Sequence[ActiveLearner]) -> None:
    axes = figure.subplots()
    for learner, colour in zip(learners, COLOURS * len(learners), strict=False):
        name = learner.acquisition if isinstance(learner.acquisition, str) else "own function"
        points = [(each.labels, each.score) for each in learner.history]
        axes.plot(*zip(*points, strict=True), color=colour, marker="o", markersize=3, linewidth=1.4, label=name)
    classes = bool(learners[0].history) and 0.0 <= learners[0].history[-1].score <= 1.0
    axes.set(xlabel="labels", ylabel="test accuracy" if classes else "test log likelihood of a row")
    axes.legend()
