"""Choosing between models by their evidence: how probable each is given the data, and how sure one can be of that."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from knowable.comparison.methods import as_method
from knowable.comparison.text import aligned, listed
from knowable.core.method import Method
from knowable.core.model.data import as_data
from knowable.core.model.model import Model
from knowable.core.posterior.diagnostics import LogEvidence
from knowable.core.posterior.model_average import ModelAverage, average_of
from knowable.core.posterior.posterior import Posterior
from knowable.core.prediction.joint import JointPrediction
from knowable.core.prediction.prediction import Prediction, RegressionPrediction
from knowable.core.support.checks import check_count, check_number
from knowable.core.support.figure import COLOURS, INK, MUTED, new_figure
from knowable.errors import InvalidArgument, InvalidType, Unsupported
from knowable.registry import find_method
from knowable.report.scores import shown, with_error

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_SURE = 2.0  # standard errors
_DRAWS = 4_000  # of the log evidences, for the intervals of probabilities
_FULL = 2_000  # random parameters up to which the default takes the whole curvature
_SCALES = "exact given its scales"  # of the noise or the prior
_KINDS = {
    "Laplace": "Laplace",
    "ImportanceSampling": "importance",
    "AnnealedImportance": "annealed",
    "ExactLinear": _SCALES,
}
_USE = (
    "Use ExactLinear (exact, for linear models), Laplace (an approximation), AnnealedImportance or ImportanceSampling "
    "(estimates with an error, for small networks), or MeanFieldVI (a bound)."
)
_STRENGTH = {1.0: "hardly worth a mention", 3.0: "positive evidence", 5.0: "strong evidence"}  # up to so many nats


def select(
    models: Mapping[str, Model],
    data: Any,
    *,
    method: Method | str | Mapping[str, Method | str] | None = None,
    prior: Mapping[str, float] | None = None,
    seed: int = 0,
    progress: bool | None = None,
) -> Selection:
    r"""Choose between models by their evidence (MacKay, 1992; Kass and Raftery, 1995).

    .. math:: p(M \mid D) = \frac{p(M)\, p(D \mid M)}{\sum_j p(M_j)\, p(D \mid M_j)}, \qquad
        p(D \mid M) = \int p(D \mid \theta, M)\, p(\theta \mid M)\, d\theta

    The evidence p(D | M) is the probability of the data before the weights were known. A model that is too simple does
    not reach the data; one that is too flexible spreads its probability over many other data sets. It depends on the
    prior of the weights: a prior that is ten times too wide costs about log 10 for each weight that the data determine.

    Args:
        models: Two or more models by name. Their likelihoods must be of the same outcome.
        data: ``(x, y)``, a Dataset or a DataLoader, the same for all.
        method: What computes the evidence: one method or its name for all, or a mapping from names of models. None:
            ``ExactLinear`` where that applies, else ``Laplace``; a model that a mapping leaves out is fitted so too.
        prior: Weights of the models before the data, by name; they need not sum up to one. None: all the same.
        seed: Fixes every random choice.
        progress: Show progress bars; None shows them only on a terminal.

    Returns:
        The selection. It says whether the ranking is safe given the errors and the kinds of the values.

    Example:
        >>> import torch
        >>> import knowable as kn
        >>> x = torch.linspace(-1, 1, 30).unsqueeze(1)
        >>> y = x**2 + 0.1 * torch.randn(30, 1)
        >>> models = {f"k={k}": kn.Model(kn.features.Polynomial(k).linear(), kn.Gaussian(0.1)) for k in (1, 2)}
        >>> kn.select(models, (x, y)).best
        'k=2'
    """
    models = _checked_models(models)
    methods = _checked_methods(method, models)
    weights = _checked_prior(prior, models)
    seed = check_count("seed", seed, at_least=0)
    _check_outcomes(models, data)
    posteriors: dict[str, Posterior] = {}
    for name, model in models.items():
        posteriors[name] = _fitted(name, model, methods[name], data, seed, progress)
    return Selection(posteriors, weights, seed)


@dataclass(frozen=True, repr=False)
class Selection:
    """Models with their evidence and probabilities; prints as a table with a verdict.

    Attributes:
        posteriors: The fitted posterior of each model, by name.
        prior: p(M) of each model.
        seed: Fixed every random choice.
    """

    posteriors: dict[str, Posterior]
    prior: dict[str, float]
    seed: int = 0

    @property
    def log_evidence(self) -> dict[str, LogEvidence]:
        """Log p(D | M) of each model, in nats: numbers with their kind and standard error."""
        known = {name: posterior.log_evidence for name, posterior in self.posteriors.items()}
        return {name: value for name, value in known.items() if value is not None}

    @property
    def kinds(self) -> dict[str, str]:
        """What each log evidence is: exact, Laplace, importance, annealed, another estimate, or a bound (the ELBO)."""
        return {name: _kind(posterior) for name, posterior in self.posteriors.items()}

    @cached_property
    def posterior(self) -> ModelAverage:
        """The average over models: predict with it, save it, load it."""
        log_prior = {name: math.log(weight) for name, weight in self.prior.items()}
        return average_of(self.posteriors, log_prior, seed=self.seed, method=f"select({len(self.prior)} models)")

    @property
    def probabilities(self) -> dict[str, float]:
        """p(M | D) of each model, from the values as they are."""
        return self.posterior.probabilities

    @cached_property
    def probability_intervals(self) -> dict[str, tuple[float, float]]:
        """In which interval p(M | D) is with 95 % probability, as the standard errors say.

        A bound's distance from the log evidence and the error of an approximation such as Laplace are not known, and
        not in it.
        """
        values = list(self.log_evidence.values())
        mean = torch.tensor([float(value) for value in values], dtype=torch.float64)
        error = torch.tensor([value.standard_error for value in values], dtype=torch.float64)
        noise = torch.randn((_DRAWS, len(values)), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        log_prior = torch.tensor(list(self.prior.values()), dtype=torch.float64).log()
        drawn = (mean + error * noise + log_prior).softmax(1)
        low, high = torch.quantile(drawn, torch.tensor([0.025, 0.975], dtype=torch.float64), dim=0).tolist()
        return dict(zip(self.prior, zip(low, high, strict=True), strict=True))

    @property
    def ranking(self) -> list[str]:
        """Names of the models, the most probable first."""
        return sorted(self.prior, key=lambda name: -self._log_joint(name))

    @property
    def best(self) -> str:
        """The most probable model."""
        return self.ranking[0]

    def log_bayes_factor(self, model: str, other: str) -> float:
        """Log p(D | model) - log p(D | other), in nats: how much the data speak for one model against another."""
        for name in (model, other):
            if name not in self.posteriors:
                raise InvalidArgument(f"There is no model {name!r}. The models are: {', '.join(self.posteriors)}.")
        return float(self.log_evidence[model]) - float(self.log_evidence[other])

    def bayes_factor(self, model: str, other: str) -> float:
        """p(D | model) / p(D | other), infinite where it is too large for a number."""
        difference = self.log_bayes_factor(model, other)
        return math.exp(difference) if difference < 709 else math.inf

    @property
    def safe(self) -> bool:
        """Whether the most probable model is known to be that, given the errors and the kinds of the values."""
        return not self.doubts

    @cached_property
    def doubts(self) -> tuple[str, ...]:
        """Why it is not known which model is the most probable; none where it is."""
        best, said = self.best, list[str]()
        for name, posterior in self.posteriors.items():
            if posterior.diagnostics.converged is False:
                said.append(
                    f"The fit of {name} has not converged: {posterior.diagnostics.message or 'see its warning'}."
                )
            if not posterior.diagnostics.bayes:
                said.append(f"The fit of {name} did not aim at the Bayes posterior: see diagnostics.notes.")
            if posterior.model.hyper_names:
                said.append(f"The prior of {name} was fitted to the data, so that its evidence is too high.")
        margins = {name: self._log_joint(best) - self._log_joint(name) for name in self.ranking[1:]}
        blind = [name for name in self.ranking if self._error_is_unknown(name)]
        if blind:
            near = self.ranking[1] if best in blind else blind[0]
            kinds = {self.kinds[name] for name in blind}
            advice = (
                "a NormalInverseGamma prior makes it exact" if kinds == {_SCALES} else "check with AnnealedImportance"
            )
            said.append(
                f"The error of {listed(blind)} is not known ({listed(sorted(kinds))}). {best} stays ahead of {near} "
                f"unless that is more than {shown(margins[near])} nats; {advice}."
            )
        bounds = [name for name in margins if self.log_evidence[name].kind == "bound"]
        if bounds:
            plural = "values of {} are bounds" if len(bounds) > 1 else "value of {} is a bound"
            than = f"looser than that of {best}" if self.log_evidence[best].kind == "bound" else "too low"
            said.append(
                f"The {plural.format(listed(bounds))}, which may be far too low. {bounds[0]} is more probable than "
                f"{best} if its bound is {shown(margins[bounds[0]])} nats {than}."
            )
        for name in margins if best not in blind else ():
            if name in blind or name in bounds:
                continue
            error = math.hypot(self.log_evidence[name].standard_error, self.log_evidence[best].standard_error)
            if margins[name] < _SURE * error:
                said.append(
                    f"{best} and {name} differ by {with_error(margins[name], error)} nats, less than {_SURE:.0f} "
                    f"standard errors: give more draws."
                )
        return tuple(said)

    @property
    def verdict(self) -> str:
        """In words: which model is the most probable, how strongly the data say so, and whether that is safe."""
        best, second = self.ranking[:2]
        difference = self.log_bayes_factor(best, second)
        strength = next((word for limit, word in _STRENGTH.items() if abs(difference) < limit), "very strong evidence")
        ahead = f"e^{difference:.1f}" if abs(difference) > 10 else shown(math.exp(difference))
        share = _percent(self.probabilities[best])
        lines = [
            f"{best} is the most probable model: p(M | D) {share if share[0] in '<>' else f'= {share}'}. Bayes factor "
            f"against {second}: {ahead}, {strength}{'' if difference >= 0 else f' for {second}'}."
        ]
        kinds = sorted(set(self.kinds.values()))
        if len(kinds) > 1:
            lines.append(f"The values are of different kinds ({', '.join(kinds)}), which are not equally good.")
        if self.safe:
            kinds_of = {value.kind for value in self.log_evidence.values()}
            why = "all values are exact" if kinds_of == {"exact"} else f"{best} is ahead by more than the errors"
            if self.log_evidence[best].kind == "bound":
                why += ", and its own value is a bound, which can only be too low"
            lines.append(f"This ranking is safe: {why}.")
        else:
            lines += ["This ranking is not safe:", *(f"- {why}" for why in self.doubts)]
        if self.probabilities[best] < 0.95:
            lines.append("The data do not settle on one model: predict with the average, selection.posterior.")
        return "\n".join(lines)

    def summary(self) -> str:
        """The models with their log evidence, its kind, their probabilities and Bayes factors, and the verdict."""
        best = self.best
        header = ("model", "log evidence", "kind", "p(M)", "p(M | D)", "95 % by its error", "Bayes factor of the best")
        rows: list[tuple[str, ...]] = [header]
        for name, value in self.log_evidence.items():
            low, high = self.probability_intervals[name]
            away = self.log_bayes_factor(best, name)
            rows.append(
                (
                    name,
                    ("≥ " if value.kind == "bound" else "") + _value(value),
                    self.kinds[name],
                    _percent(self.prior[name]),
                    _percent(self.probabilities[name]),
                    "" if high - low < 5e-4 else f"{_percent(low)} to {_percent(high)}",
                    "best" if name == best else f"e^{away:.1f}" if abs(away) > 10 else shown(math.exp(away)),
                )
            )
        blank = {number for number in range(len(header)) if all(not row[number] for row in rows[1:])}
        kept = [[cell for number, cell in enumerate(row) if number not in blank] for row in rows]
        title = f"Selection between {len(self.prior)} models by their evidence"
        return "\n".join([title, "", *aligned(kept, left=(0, 2)), "", self.verdict])

    def __repr__(self) -> str:
        return self.summary()

    def plot(self) -> Figure:
        """Draw the log evidence of each model and its probability.

        Left: dots are exact values and estimates, with two standard errors; an arrow is a bound, which the log evidence
        may exceed; a hollow dot is an approximation whose error is not known. Right: p(M | D), with 95 % of it as the
        errors say, and a tick at p(M).

        Returns:
            The figure; ``figure.savefig("selection.png")`` writes it.

        Raises:
            MissingExtra: If matplotlib is not installed.
        """
        names = list(self.prior)

        def draw(figure: Figure) -> None:
            left, right = figure.subplots(1, 2, sharey=True)
            for place, name in enumerate(names):
                value, (low, high) = self.log_evidence[name], self.probability_intervals[name]
                colour = COLOURS[0] if name == self.best else MUTED
                marker = ">" if value.kind == "bound" else "o"
                fill = "white" if self._error_is_unknown(name) else colour
                left.errorbar(
                    float(value), place, xerr=_SURE * value.standard_error, fmt=marker, color=colour, markersize=5,
                    markerfacecolor=fill, capsize=2,
                )  # fmt: skip
                right.barh(place, self.probabilities[name], color=colour, height=0.6)
                if high - low > 5e-4:
                    right.plot([low, high], [place, place], color=INK, linewidth=1.2)
                right.plot([self.prior[name]], [place], "|", color=INK, markersize=12)
            left.set(yticks=range(len(names)), yticklabels=names, xlabel="log evidence (nats)")
            left.grid(axis="x", alpha=0.4)
            left.invert_yaxis()
            right.set(xlim=(0, 1), xlabel="p(M | D); tick: p(M)")

        return new_figure(6.5, 1.2 + 0.27 * len(names), draw)

    def _log_joint(self, name: str) -> float:
        return float(self.log_evidence[name]) + math.log(self.prior[name])

    def _error_is_unknown(self, name: str) -> bool:
        value = self.log_evidence[name]
        return value.kind == "estimate" and value.standard_error == 0.0


# --- checks, and the fit of one model --------------------------------------------------------------------------------


def _checked_models(models: Any) -> dict[str, Model]:
    if not isinstance(models, Mapping):
        raise InvalidType(
            f"models must be a mapping from names to models, got {type(models).__name__}. Write "
            f"select({{'one': model, 'other': model}}, data)."
        )
    found = {str(name): model for name, model in models.items()}
    if len(found) < 2:
        raise InvalidArgument(f"models must have two models or more to choose between, got {len(found)}.")
    for name, model in found.items():
        if not isinstance(model, Model):
            raise InvalidType(f"models[{name!r}] must be a knowable Model, got {type(model).__name__}.")
    return found


def _checked_methods(method: Any, models: Mapping[str, Model]) -> dict[str, Method | None]:
    """A method for each model; None where the default is meant."""
    if not isinstance(method, Mapping):
        chosen: dict[str, Any] = dict.fromkeys(models, method)
    else:
        _refuse_unknown("method", method, models)
        chosen = {**dict.fromkeys(models), **{str(name): each for name, each in method.items()}}
    found = {name: None if each is None else as_method(each, "method") for name, each in chosen.items()}
    for name, each in found.items():
        if each is not None and not _may_have_evidence(each):
            raise Unsupported(f"{type(each).__name__}, the method for {name!r}, does not compute an evidence. {_USE}")
    return found


def _may_have_evidence(method: Method) -> bool:
    """Whether a fit may give one; the families below do not, but for these methods."""
    exceptions = ("ImportanceSampling", "AnnealedImportance", "EnsembleOf", "MultiSWAG")
    return method.family not in ("point", "ensembles", "sampling") or type(method).__name__ in exceptions


def _checked_prior(prior: Any, models: Mapping[str, Model]) -> dict[str, float]:
    if prior is None:
        return dict.fromkeys(models, 1.0 / len(models))
    if not isinstance(prior, Mapping):
        raise InvalidType(f"prior must be a mapping from names of models to weights, got {type(prior).__name__}.")
    _refuse_unknown("prior", prior, models)
    missing = [name for name in models if name not in prior]
    if missing:
        raise InvalidArgument(f"prior lacks a weight for {', '.join(missing)}: give one to every model.")
    weights = {name: check_number(f"prior[{name!r}]", prior[name], above=0.0) for name in models}
    total = math.fsum(weights.values())
    return {name: weight / total for name, weight in weights.items()}


def _refuse_unknown(argument: str, given: Mapping[Any, Any], models: Mapping[str, Model]) -> None:
    unknown = [str(name) for name in given if name not in models]
    if unknown:
        raise InvalidArgument(
            f"{argument} names {', '.join(unknown)}, which models does not have. The models are: {', '.join(models)}."
        )


def _check_outcomes(models: Mapping[str, Model], data: Any) -> None:
    """Refuse likelihoods whose evidences are not comparable: a density is no probability, labels are no numbers."""
    kinds: dict[str, str] = {}
    for name, model in models.items():
        output = model.probe(as_data(data, model).first[0]).unsqueeze(0)
        own = {key: value.unsqueeze(0) for key, value in model.likelihood_params(model.params()).items()}
        with torch.no_grad():
            kinds[name] = _outcome(model.likelihood.predict(output, own, torch.zeros(1).to(output)))
    first = next(iter(kinds))
    other = next((name for name in kinds if kinds[name] != kinds[first]), None)
    if other is not None:
        raise InvalidArgument(
            f"The models are of different outcomes, and their evidences cannot be compared: {first} is of "
            f"{kinds[first]} ({models[first].likelihood!r}), {other} of {kinds[other]} ({models[other].likelihood!r}). "
            f"Give all of them likelihoods of the same outcome."
        )


def _outcome(prediction: Prediction) -> str:
    if isinstance(prediction, JointPrediction):
        return ", ".join(f"{name}: {_outcome(head)}" for name, head in sorted(prediction.heads.items()))
    if isinstance(prediction, RegressionPrediction):
        return "counts (probabilities)" if prediction.components.discrete else "numbers (densities)"
    return f"labels ({type(prediction).__name__.removesuffix('Prediction')})"


def _fitted(name: str, model: Model, method: Method | None, data: Any, seed: int, progress: bool | None) -> Posterior:
    made = (
        _by_default(model, data, seed, progress)
        if method is None
        else method.fit(model, data, seed=seed, progress=progress)
    )
    if made.log_evidence is not None and math.isfinite(made.log_evidence):
        return made
    if any(prior is not None and not prior.proper for prior in map(model.prior.prior_of, model.random_names)):
        raise InvalidArgument(
            f"Model {name!r} has no evidence: its prior {model.prior!r} is improper, and the data have no probability "
            f"under it. Give every weight a proper prior, such as Normal(1.0)."
        )
    if made.log_evidence is not None:
        raise Unsupported(f"The log evidence of model {name!r} is {float(made.log_evidence)}, by {made.method!r}.")
    raise Unsupported(f"{type(made.method).__name__}, the method for {name!r}, does not compute an evidence. {_USE}")


def _by_default(model: Model, data: Any, seed: int, progress: bool | None) -> Posterior:
    exact = find_method("exact_linear").cls()
    start = model.params()
    size = sum(start[name].numel() for name in model.random_names)
    if size <= exact.max_parameters:  # type: ignore[attr-defined]
        try:
            return exact.fit(model, data, seed=seed, progress=progress)
        except Unsupported:
            pass
    laplace = find_method("laplace").cls
    chosen = laplace(structure="full") if size <= _FULL else laplace()  # type: ignore[call-arg]
    return chosen.fit(model, data, seed=seed, progress=progress)


# --- words -----------------------------------------------------------------------------------------------------------


def _kind(posterior: Posterior) -> str:
    value = posterior.log_evidence
    assert value is not None
    if value.kind == "bound":
        return "bound (ELBO)"
    return "exact" if value.kind == "exact" else _KINDS.get(type(posterior.method).__name__, "estimate")


def _value(value: LogEvidence) -> str:
    return with_error(value, value.standard_error) if value.standard_error else f"{float(value):.2f}"


def _percent(value: float) -> str:
    """A probability in percent, never rounded to certainty."""
    if 0 < value < 0.0005:
        return "< 0.1 %"
    return "> 99.9 %" if 0.9995 < value < 1 else f"{100 * value:.1f} %"
