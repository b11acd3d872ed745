"""Distillation: one network that predicts in one pass what a posterior predicts by many."""

from __future__ import annotations

import copy
import math
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from knowable.core.method import Method
from knowable.core.model.data import Data, as_data, as_input, column_of
from knowable.core.model.model import Model
from knowable.core.posterior.particles import Particles
from knowable.core.posterior.posterior import Posterior
from knowable.core.prediction.prediction import ClassPrediction, Prediction, RegressionPrediction
from knowable.core.support.checks import check_count, check_type
from knowable.core.support.randomness import derive_seed, own_randomness
from knowable.decisions.compress.compression import mean_params, network_at
from knowable.decisions.compress.saving import export_onnx, export_program
from knowable.decisions.student_likelihoods import DirichletStudent, GaussianStudent, dirichlet_information
from knowable.errors import InvalidArgument, InvalidData, Unsupported
from knowable.evaluation.detection import auroc
from knowable.evaluation.evaluate import evaluate
from knowable.evaluation.inputs import by_row
from knowable.inference.point.point import MaximumLikelihood
from knowable.priors.flat import Flat


def distill(
    posterior: Posterior,
    student: nn.Module,
    data: Any,
    *,
    method: Method | None = None,
    augment: Callable[[Tensor], Tensor] | None = None,
    copies: int = 1,
    samples: int = 64,
    seed: int = 0,
    progress: bool | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
) -> Distilled:
    r"""Train one network to predict, in one pass, what ``posterior`` predicts by averaging over its draws.

    .. math:: \max_s\ E_x\, E_{q(w)}\, E_{p(t \mid x, w)} \log p(t \mid x, s)

    (Bayesian dark knowledge; Korattikara et al., 2015). The student also learns how far the draws disagree, so that its
    predictions keep the split into aleatoric and epistemic: a Dirichlet distribution over class probabilities, or a
    normal over means with a noise variance. The teacher predicts once, before the student is trained.

    Args:
        posterior: The teacher: classes (``Categorical``, also of pixels) or numbers with finite variance.
        student: The network to train, not changed. For classes it has the teacher's outputs: its softmax is the
            mean prediction, and the size of its logits the concentration. For d numbers it has 3d outputs (means, log
            aleatoric and log epistemic variances); where it has d or 2d, its last linear layer is widened in a copy.
        data: Inputs to learn on: as for ``fit``, of which targets are not used, or inputs alone. No labels are needed,
            so that these may be many more than the teacher saw.
        method: How it is trained: a method with one set of weights. None is ``MaximumLikelihood()``.
        augment: Makes other inputs of a batch of them, for each of the ``copies``.
        copies: How many times the inputs are taken, each augmented by itself.
        samples: Draws of the teacher.
        seed: Fixes every random choice.
        progress: Show a progress bar; None shows it only on a terminal.
        checkpoint: A folder, from which training that was stopped goes on.

    Returns:
        The distilled network, a posterior with one set of weights.

    Example:
        >>> import torch
        >>> import knowable as kn
        >>> x = torch.randn(80, 2)
        >>> y = (x[:, 0] > 0).long()
        >>> net = lambda: torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
        >>> teacher = kn.DeepEnsemble(3, epochs=20).fit(kn.Model(net(), kn.Categorical()), (x, y))
        >>> distilled = kn.distill(teacher, net(), x, method=kn.MaximumLikelihood(epochs=20))
        >>> distilled.predict(x).epistemic.shape
        torch.Size([80])
    """
    check_type("posterior", posterior, Posterior, "a fitted posterior")
    check_type("student", student, nn.Module, "an nn.Module")
    check_count("samples", samples)
    if check_count("copies", copies) > 1 and augment is None:
        raise InvalidArgument(f"copies={copies} without augment= would be the same inputs {copies} times. Pass both.")
    x = _inputs(data, posterior)
    if augment is not None:
        with own_randomness(derive_seed(seed, "augment")):
            x = torch.cat([augment(x) for _ in range(copies)])
    targets, classes = _teacher_says(posterior, x, samples)
    student = _fitting(student, x[:2], targets, classes, posterior)
    model = Model(student, DirichletStudent() if classes else GaussianStudent(), Flat())
    method = MaximumLikelihood() if method is None else method
    if method.family != "point":
        raise InvalidArgument(f"method must be one with a single set of weights, MaximumLikelihood(), got {method!r}.")
    fitted = method.fit(model, (x, targets), seed=seed, progress=progress, checkpoint=checkpoint)
    made = Distilled(
        model, fitted.stack, fitted.log_weights, points=fitted.points, buffers=fitted.buffers,
        diagnostics=fitted.diagnostics, seed=seed,
    )  # fmt: skip
    made.target_shape = posterior.target_shape
    return made


class Distilled(Particles):
    """A network that was trained to predict as a posterior does: it predicts in one pass, and keeps the split.

    It is saved and loaded as a posterior is: ``distilled.save(path)``, ``kn.load(path)``.
    """

    family = "distilled"

    @property
    def net(self) -> nn.Module:
        """The network as an ordinary module, in evaluation mode: logarithms of concentrations, or 3d numbers."""
        return network_at(self.model, mean_params(self), self.buffers)

    def export(self, path: str | os.PathLike[str], example: Any) -> Path:
        """Write the network for other runtimes: ``.pt2`` for ``torch.export``, ``.onnx`` for ONNX; batches of any size.

        Args:
            path: The file, whose ending says which.
            example: Some inputs.
        """
        x = as_input(example, self.model)
        return export_onnx(self.net, x, path) if str(path).endswith(".onnx") else export_program(self.net, x, path)

    def fidelity(
        self, teacher: Posterior, test: Any, *, outside: Any = None, alone: Posterior | None = None, samples: int = 64
    ) -> Fidelity:
        """How near the student comes to its teacher, on data that neither has seen.

        Args:
            teacher: The posterior it was distilled from.
            test: Inputs and targets.
            outside: Inputs from elsewhere, to see whether uncertainty still tells them apart.
            alone: The same network trained on the labels alone, such as
                ``kn.MaximumLikelihood().fit(kn.Model(student, kn.Categorical()), data)``.
            samples: Draws of the teacher.
        """
        x, y = test if isinstance(test, tuple) else (column_of(test, 0), column_of(test, 1))
        rows = {"teacher": teacher, "student": self} | ({} if alone is None else {"alone": alone})
        table, inside = {}, {}
        for name, posterior in rows.items():
            inside[name] = posterior.predict(x, samples=samples)
            scores = evaluate(inside[name], y)
            table[name] = {each: scores[each] for each in ("nll", "accuracy", "rmse", "ece") if each in scores}
            if outside is not None:
                table[name]["auroc"] = auroc(inside[name], posterior.predict(outside, samples=samples))
            table[name]["seconds"] = _seconds(posterior, as_input(x, posterior.model)[:_TIMED], samples)
        correlations = {
            each: _rank_correlation(getattr(inside["teacher"], each), getattr(inside["student"], each))
            for each in ("total", "aleatoric", "epistemic")
        }
        return Fidelity(table, correlations)

    def __repr__(self) -> str:
        size = sum(value.numel() for value in self.model.net.parameters())
        return f"Distilled({type(self.model.net).__name__}, {size:,} parameters, one pass)"


@dataclass(frozen=True)
class Fidelity:
    """How near a distilled network comes to its teacher.

    Attributes:
        table: For ``"teacher"``, ``"student"`` and ``"alone"``: NLL, accuracy or RMSE, ECE, ``auroc`` of total
            uncertainty against inputs from elsewhere, and ``seconds`` of a prediction of up to 1,000 rows, the best of
            three.
        correlations: Spearman's rank correlation of teacher and student, of ``"total"``, ``"aleatoric"`` and
            ``"epistemic"`` uncertainty; NaN where one of them is the same in all rows.
    """

    table: Mapping[str, Mapping[str, float]]
    correlations: Mapping[str, float]

    @property
    def speedup(self) -> float:
        """How many times quicker the student predicts than the teacher, on this machine."""
        return self.table["teacher"]["seconds"] / self.table["student"]["seconds"]

    def __repr__(self) -> str:
        names = list(self.table["teacher"])
        lines = [f"{'':<8}" + "".join(f"{name:>10}" for name in names)]
        for who, scores in self.table.items():
            lines.append(f"{who:<8}" + "".join(f"{scores[name]:>10.4g}" for name in names))
        ranks = ", ".join(f"{name} {value:.3f}" for name, value in self.correlations.items())
        return "\n".join([*lines, f"rank correlations: {ranks}; {self.speedup:.1f} times quicker"])


# --- what the student learns -----------------------------------------------------------------------------------------

_SMALLEST = 1e-8  # epistemic variance, as a part of the aleatoric, that is told from none
_LOG_CONCENTRATIONS = (-12.0, 25.0)
_TIMED = 1_000  # rows of the prediction whose time is taken


def _inputs(data: Any, posterior: Posterior) -> Tensor:
    """Inputs alone, or those of pairs."""
    if isinstance(data, Data | tuple):
        data = as_data(data).tensors[0]
    return as_input(data, posterior.model, name="data")


@torch.no_grad()
def _teacher_says(posterior: Posterior, x: Tensor, samples: int) -> tuple[Tensor, bool]:
    """What the student is fitted to, and whether these are classes."""
    parts = [_targets(each) for each in posterior.predict_stream(x, samples=samples)]
    if not all(part.isfinite().all() for part, _ in parts):
        raise InvalidData("The teacher's predictions are not finite: its variance may not exist (heavy tails), or NaN.")
    return torch.cat([part for part, _ in parts]), parts[0][1]


def _targets(prediction: Prediction) -> tuple[Tensor, bool]:
    if isinstance(prediction, ClassPrediction) and prediction.probs.dim() > 1 and prediction.samples.dim() > 2:
        probs = prediction.probs.double()
        log_s = matching_concentration(probs, mutual_information(prediction))
        return torch.cat([probs, log_s.unsqueeze(1)], 1).to(prediction.probs.dtype), True
    if isinstance(prediction, RegressionPrediction) and not prediction.components.discrete:
        mean, noise, spread = (
            value if value.dim() > 1 else value.unsqueeze(1)
            for value in (prediction.mean, prediction.aleatoric, prediction.epistemic)
        )
        floor = torch.finfo(noise.dtype).tiny
        return torch.cat([mean, noise, torch.maximum(spread, _SMALLEST * noise).clamp_min(floor)], -1), False
    raise Unsupported(
        f"distill takes predictions of classes (Categorical) or of numbers, not {type(prediction).__name__}. For "
        f"yes/no targets fit Categorical() with two outputs."
    )


def mutual_information(prediction: ClassPrediction) -> Tensor:
    r"""Mutual information of label and weights, :math:`E_w\, \mathrm{KL}(p_w \,\|\, \bar p)`, in double precision.

    As a sum of terms none of which is negative it keeps its digits where the draws nearly agree.
    """
    each = prediction.samples.double()  # (K, batch, classes, ...)
    weights = prediction.log_weights.double().exp()
    mean = torch.tensordot(weights, each, dims=1)
    terms = torch.special.xlogy(each, each / mean.clamp_min(torch.finfo(torch.float64).tiny)) - each + mean
    return torch.tensordot(weights, terms.sum(2), dims=1)


def matching_concentration(probs: Tensor, information: Tensor) -> Tensor:
    """Logarithm of the concentration at which a Dirichlet with means ``probs`` has this mutual information.

    Args:
        probs: ``(batch, classes, ...)``.
        information: In nats, ``(batch, ...)``. It falls from the entropy of the means to 0 as the concentration grows.
    """
    log_probs = probs.clamp_min(1e-300).log()
    low, high = (torch.full_like(information, value) for value in _LOG_CONCENTRATIONS)
    for _ in range(50):  # bisection
        middle = 0.5 * (low + high)
        more = dirichlet_information(log_probs, middle) > information
        low, high = torch.where(more, middle, low), torch.where(more, high, middle)
    return 0.5 * (low + high)


def _fitting(student: nn.Module, x: Tensor, targets: Tensor, classes: bool, posterior: Posterior) -> nn.Module:
    """The student, with as many outputs as it must have; its last linear layer is widened in a copy."""
    with torch.no_grad():
        found = copy.deepcopy(student).eval()(x)
    if not isinstance(found, Tensor):
        raise InvalidData(f"The student must return one tensor, got {type(found).__name__}.")
    wanted = (targets.shape[1] - 1, *targets.shape[2:]) if classes else tuple(targets.shape[1:])
    if tuple(found.shape[1:]) == wanted:
        return student
    width = wanted[-1] // 3
    if not classes and found.shape[1:-1] == wanted[:-1] and found.shape[-1] in (width, 2 * width):
        made = _widened(student, found.shape[-1], 3 * width)
        if made is not None:
            return made
    raise InvalidData(
        f"The student's output has shape {tuple(found.shape[1:])} for a row, but this teacher needs {wanted}"
        f"{'' if classes else ' (means, log aleatoric and log epistemic variances)'}. Change its last layer."
    )


def _widened(student: nn.Module, outputs: int, wanted: int) -> nn.Module | None:
    """A copy whose last linear layer has more outputs, the first ones as they were; None if there is no such layer."""
    made = copy.deepcopy(student)
    places = [name for name, module in made.named_modules() if isinstance(module, nn.Linear)]
    old = made.get_submodule(places[-1]) if places else None
    if not isinstance(old, nn.Linear) or old.out_features != outputs:
        return None
    new = nn.Linear(old.in_features, wanted, device=old.weight.device, dtype=old.weight.dtype)
    with torch.no_grad():
        new.weight.zero_()[:outputs] = old.weight
        new.bias.zero_()
        if old.bias is not None:
            new.bias[:outputs] = old.bias
    if not places[-1]:
        return new
    parent, _, name = places[-1].rpartition(".")
    setattr(made.get_submodule(parent), name, new)
    return made


def _seconds(posterior: Posterior, x: Tensor, samples: int) -> float:
    best = math.inf
    for _ in range(3):
        start = time.perf_counter()
        posterior.predict(x, samples=samples)
        best = min(best, time.perf_counter() - start)
    return best


def _rank_correlation(first: Tensor, second: Tensor) -> float:
    """Spearman's, of row means; NaN where one of them is constant."""
    from scipy.stats import rankdata

    ranks = [torch.from_numpy(rankdata(by_row(each).mean(1).double().cpu().numpy())) for each in (first, second)]
    ranks = [each - each.mean() for each in ranks]
    sizes = ranks[0].norm() * ranks[1].norm()
    return math.nan if sizes == 0 else (ranks[0] @ ranks[1] / sizes).item()
