"""Bayesian optimisation: evaluate an expensive function where its posterior says that it pays."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from scipy.stats import binom
from torch import Tensor, nn

from knowable.core.method import Method
from knowable.core.model.model import Model
from knowable.core.posterior.posterior import Posterior
from knowable.core.storage.folder import is_folder, read_folder, write_folder
from knowable.core.support.checks import check_choice, check_count, check_number, check_type
from knowable.core.support.randomness import derive_seed, own_randomness
from knowable.decisions.botorch_model import as_model
from knowable.decisions.optimizer_plots import regret_figure, surrogate_figure
from knowable.decisions.proposals import ACQUISITIONS, Known, best_row, build
from knowable.decisions.space import Choice, Point, Space
from knowable.decisions.surrogate import fit_surrogate
from knowable.errors import CalibrationWarning, InvalidArgument, InvalidData
from knowable.likelihoods import Gaussian

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_KIND = "optimisation"
_LEVEL = 1.96  # standard deviations, outside of which 5% of the values should fall
_FEWEST, _RARE = 10, 1e-3  # errors that are judged; probability of so many outside, below which there is a warning
_LEAST_NOISE = 1e-3


class Best(NamedTuple):
    """The best point and its value."""

    point: Point
    value: float


class Optimizer:
    r"""Bayesian optimisation with ask, tell and run.

    The surrogate is fitted to all values told so far; the next point maximises an acquisition function of its
    posterior, such as the upper confidence bound

    .. math:: a(x) = m(x) + \beta\, \sigma(x)

    with the mean m of the function and its epistemic standard deviation σ. Where the function is minimised it is that
    of its negative. Inputs are scaled to [0, 1], options are one-hot, values are standardised. The first points are
    quasi-random (Sobol).

    Args:
        space: Dimensions by name, or in a list: ``(low, high)``, ``kn.Real(low, high, log=True)``,
            ``kn.Integer(low, high)``, ``kn.Choice([...])``. Points are dicts, or lists.
        method: The method that fits the surrogate. None: Bayesian linear regression on random Fourier features, whose
            length scales maximise the evidence.
        acquisition: ``"ucb"``; ``"logei"``, the logarithm of the expected improvement on the best mean of a point told
            (Ament et al., 2023); ``"lognei"``, that on the best value of the function, which is not known where values
            are noisy; ``"thompson"``, the maximum of a function drawn from the posterior; ``"random"``, Sobol points,
            the baseline.
        maximise: Whether large values are good; False minimises.
        beta: The β of ``"ucb"``.
        model: The model for ``method``, with ``width`` inputs and one output, in double precision. None: a tanh network
            of two layers of 50 units.
        constraints: Number of constraints, told beside each value; a point is feasible where all are <= 0. The
            acquisition is weighted by the probability of that.
        noise: Standard deviation of the values' noise, in their units. None is learned; 0 says that there is none. A
            point of a space without intervals is asked again only where this is above 0.
        initial: Number of quasi-random points; None is twice the dimensions, at least 5.
        seed: Fixes every random choice.
        checkpoint: A folder in which every point asked and value told is saved at once. The same lines in a new
            process go on from it.

    Attributes:
        points: The points told, in their order.
        values: Their values, NaN where there was none.
        constraint_values: Their constraints, a list for each.
        pending: Points that were asked and not told yet.
        errors: One-step-ahead errors: each value less what the surrogate predicted when it asked, in predictive
            standard deviations. A warning comes when too many are large.

    Example:
        >>> import knowable as kn
        >>> optimizer = kn.Optimizer({"x": (0.0, 1.0)}, maximise=False, noise=0.0)
        >>> best = optimizer.run(lambda point: (point["x"] - 0.3) ** 2, 8)
        >>> abs(best.point["x"] - 0.3) < 0.1
        True
    """

    def __init__(
        self,
        space: Mapping[str, Any] | Sequence[Any],
        method: Method | None = None,
        acquisition: str = "ucb",
        *,
        maximise: bool = True,
        beta: float = 2.0,
        model: Model | None = None,
        constraints: int = 0,
        noise: float | None = None,
        initial: int | None = None,
        seed: int = 0,
        checkpoint: str | os.PathLike[str] | None = None,
    ):
        self.space = Space(space)
        self.method = None if method is None else check_type("method", method, Method, "a method, such as kn.HMC()")
        self.acquisition = check_choice("acquisition", acquisition, ACQUISITIONS)
        self.maximise = check_type("maximise", maximise, bool, "True or False")
        self.beta = check_number("beta", beta, at_least=0.0)
        self.model = None if model is None else check_type("model", model, Model, "a knowable Model")
        if model is not None and method is None:
            raise InvalidArgument("model needs a method that fits it: Optimizer(space, kn.HMC(), model=model).")
        self.constraints = check_count("constraints", constraints, at_least=0)
        self.noise = None if noise is None else check_number("noise", noise, at_least=0.0)
        default = max(5, 2 * len(self.space.dimensions))
        self.initial = default if initial is None else check_count("initial", initial, at_least=2)
        self.seed = check_count("seed", seed, at_least=0)
        self.points: list[Point] = []
        self.values: list[float] = []
        self.constraint_values: list[list[float]] = []
        self.pending: list[Point] = []
        self.errors: list[float] = []
        self._expected: list[list[float] | None] = []  # mean and standard deviation of each point that is pending
        self._asked = 0
        self._fitted: tuple[int, list[Posterior]] | None = None
        self._warned = False
        self.checkpoint = None if checkpoint is None else Path(checkpoint)
        self._restore()

    # --- the loop ----------------------------------------------------------------------------------------------------

    def ask(self, n: int = 1) -> list[Point]:
        """The next points to evaluate, chosen to go well together and with those that are pending.

        Raises:
            InvalidArgument: If every point of a space without intervals has been asked.
        """
        check_count("n", n)
        found = [self._next() for _ in range(n)]
        self._save()
        return found

    def tell(self, points: Any, values: Any, *, constraints: Any = None) -> None:
        """Take the values of some points, asked or not.

        Args:
            points: A point or a list of points.
            values: Their values: a number, or a list of numbers. None, NaN or infinite: there is none. Such a point is
                kept, does not count in the fit, and others keep away from it.
            constraints: A row of numbers for each point, if the optimiser has constraints.

        What is refused leaves everything as it was.
        """
        one = isinstance(points, Mapping) or (self.space.names is None and not _is_list_of_points(points))
        points = [_copied(point) for point in ([points] if one else points)]
        told = [values] if one or values is None else _as_list(values)
        limits = self._checked_constraints(constraints, len(points), one)
        if len(told) != len(points):
            raise InvalidData(f"values must be one for each of {len(points)} points, got {len(told)}.")
        for point in points:
            self.space.encode(point)
        numbers = [_as_value(value, place) for place, value in enumerate(told)]
        for point, value, row in zip(points, numbers, limits, strict=True):
            expected = self._take_pending(point)
            if expected is not None and math.isfinite(value):
                self.errors.append((value - expected[0]) / expected[1])
            self.points.append(point)
            self.values.append(value)
            self.constraint_values.append(row)
        self._save()
        self._check_surrogate()

    def run(self, function: Callable[[Any], Any], n: int) -> Best:
        """Ask, evaluate and tell until ``n`` points have been told, those before this call among them.

        Args:
            function: Returns the value of a point; with constraints a pair ``(value, constraints)``. If it raises, all
                before is kept, and its point stays pending.
            n: Number of points in all.
        """
        check_count("n", n)
        while len(self.points) < n:
            point = self.pending[0] if self.pending else self.ask()[0]
            result = function(point)
            value, limits = result if self.constraints else (result, None)
            self.tell([point], [value], constraints=None if limits is None else [limits])
        return self.best

    @property
    def best(self) -> Best:
        """The best feasible point told, and its value.

        With ``noise`` above 0, the one with the best posterior mean, and that mean: of noisy values the best is lucky.
        """
        good = self._feasible() & torch.tensor([math.isfinite(value) for value in self.values], dtype=torch.bool)
        if not good.any():
            what = "feasible point" if self.constraints else "value"
            raise InvalidArgument(f"There is no {what} yet among the {len(self.points)} points told.")
        values = torch.tensor(self.values, dtype=torch.float64)
        if self.noise and len(self._finite()) >= 2 and self.acquisition != "random":
            mean, _ = self.predict([self.points[place] for place in good.nonzero().flatten().tolist()])
            values[good] = mean
        place = int(torch.where(good, self._sign * values, -math.inf).argmax())
        return Best(self.points[place], values[place].item())

    @property
    def posterior(self) -> Posterior:
        """The surrogate given all values so far: of the values standardised, and negated where they are minimised."""
        return self._posteriors()[0]

    def predict(self, points: Sequence[Any]) -> tuple[Tensor, Tensor]:
        """Mean and epistemic standard deviation of the function at some points, in its units."""
        rows = torch.tensor([self.space.encode(point) for point in points], dtype=torch.float64)
        with torch.no_grad():
            found = as_model(self.posterior).posterior(rows.unsqueeze(1))
        shift, scale = self._units()
        mean, std = found.mean.flatten(), found.variance.clamp_min(0).sqrt().flatten()
        return self._sign * mean * scale + shift, std * scale

    def plot(self) -> Figure:
        """The surrogate of a space of one dimension, with what was told and the acquisition below.

        Raises:
            MissingExtra: If matplotlib is not installed.
        """
        if len(self.space.dimensions) != 1 or isinstance(self.space.dimensions[0], Choice):
            raise InvalidArgument("plot() is for spaces of one dimension with numbers. See plot_regret().")
        return surrogate_figure(self)

    def plot_regret(self, *others: Optimizer, optimum: float | None = None) -> Figure:
        """The best value after each evaluation, or how far it is from a known ``optimum``, beside other runs.

        Raises:
            MissingExtra: If matplotlib is not installed.
        """
        return regret_figure((self, *others), optimum)

    def __repr__(self) -> str:
        name = "random features" if self.method is None else type(self.method).__name__
        known = f"{len(self.points)} told" + (f", {len(self.pending)} pending" if self.pending else "")
        good = self._feasible() & torch.tensor([math.isfinite(value) for value in self.values], dtype=torch.bool)
        best = f", best={self.best.value:.4g}" if good.any() else ""
        return f"Optimizer({name}, {self.acquisition}: {known}{best})"

    # --- choosing ----------------------------------------------------------------------------------------------------

    def _next(self) -> Point:
        """One point more, which is then pending."""
        expected, seed = None, derive_seed(self.seed, "ask", self._asked)
        few = len(self._finite()) < 2 or len(self.points) + len(self.pending) < self.initial
        if few or self.acquisition == "random":
            row = self._sobol_row()
        else:
            acquisition = self._acquisition(seed)
            with own_randomness(seed):
                row = best_row(acquisition, self.space, self._known(), self._taken(), seed)
            row = self._none_left() if row is None else row
            expected = self._expectation(row)
        point = self.space.decode(row)
        self._asked += 1
        self.pending.append(point)
        self._expected.append(expected)
        return point

    def _acquisition(self, seed: int) -> Any:
        with own_randomness(seed):
            first, *others = self._posteriors()
            return build(self.acquisition, first, others, self._known(), beta=self.beta, seed=seed)

    def _sobol_row(self) -> Tensor:
        taken, seed = self._taken(), derive_seed(self.seed, "sobol") % 2**31
        engine = torch.quasirandom.SobolEngine(len(self.space.dimensions), scramble=True, seed=seed)
        for u in engine.fast_forward(self._asked).draw(256, dtype=torch.float64):
            row = self.space.from_uniform(u.unsqueeze(0))[0]
            if not (taken == row).all(1).any():
                return row
        left = [row for row in self.space.every_row() if not (taken == row).all(1).any()]
        return left[0] if left else self._none_left()

    def _none_left(self) -> Any:
        raise InvalidArgument(
            f"All {self.space.size:,.0f} points of the space have been asked. If values are noisy, say so with noise=, "
            f"and points are asked again."
        )

    def _taken(self) -> Tensor:
        """Rows that must not come again."""
        asked = [] if self.noise or math.isinf(self.space.size) else [*self.points, *self.pending]
        return self._rows(asked)

    def _expectation(self, row: Tensor) -> list[float]:
        """Mean and standard deviation of the next value there, its noise included."""
        with torch.no_grad():
            found = as_model(self.posterior).posterior(row.view(1, 1, -1))
            prediction = self.posterior.predict(row.view(1, -1).to(self.posterior.model.dtype))
        shift, scale = self._units()
        variance = found.variance.item() + prediction.aleatoric.double().sum().item()
        return [self._sign * found.mean.item() * scale + shift, math.sqrt(variance) * scale]

    # --- what is known -----------------------------------------------------------------------------------------------

    @property
    def _sign(self) -> float:
        return 1.0 if self.maximise else -1.0

    def _rows(self, points: Sequence[Point]) -> Tensor:
        rows = [self.space.encode(point) for point in points]
        return torch.tensor(rows, dtype=torch.float64).view(-1, self.space.width)

    def _finite(self) -> list[int]:
        return [place for place, value in enumerate(self.values) if math.isfinite(value)]

    def _units(self) -> tuple[float, float]:
        """Mean and standard deviation of the values."""
        values = torch.tensor([self.values[place] for place in self._finite()], dtype=torch.float64)
        spread = values.std().item() if len(values) > 1 else 0.0
        return values.mean().item(), spread if spread > 0 else 1.0

    def _feasible(self) -> Tensor:
        limits = torch.tensor(self.constraint_values, dtype=torch.float64).view(len(self.points), self.constraints)
        return (limits <= 0).all(1)  # NaN is not

    def _known(self) -> Known:
        kept = self._finite()
        shift, scale = self._units()
        y = self._sign * (torch.tensor([self.values[place] for place in kept], dtype=torch.float64) - shift) / scale
        failed = [point for point, value in zip(self.points, self.values, strict=True) if not math.isfinite(value)]
        return Known(
            self._rows([self.points[place] for place in kept]), y, self._feasible()[kept],
            self._rows(self.pending), self._rows(failed),
        )  # fmt: skip

    # --- the surrogate -----------------------------------------------------------------------------------------------

    def _posteriors(self) -> list[Posterior]:
        """Of the value and of each constraint, fitted once for all that was told."""
        if self._fitted is None or self._fitted[0] != len(self.points):
            if len(self._finite()) < 2:
                raise InvalidArgument(f"The surrogate needs at least 2 values, got {len(self._finite())}.")
            known = self._known()
            noise = None if self.noise is None else self.noise / self._units()[1]
            seed = derive_seed(self.seed, "fit", len(self.points))
            made = [self._fit(known.x, known.y, noise, seed)]
            for k in range(self.constraints):
                rows = [place for place, row in enumerate(self.constraint_values) if math.isfinite(row[k])]
                if len(rows) < 2:
                    continue  # nothing is known of it
                limit = torch.tensor([self.constraint_values[place][k] for place in rows], dtype=torch.float64)
                scale = limit.square().mean().sqrt().clamp_min(1e-12)  # 0 stays where it is
                x = self._rows([self.points[place] for place in rows])
                made.append(self._fit(x, limit / scale, None, derive_seed(seed, "constraint", k)))
            self._fitted = len(self.points), made
        return self._fitted[1]

    def _fit(self, x: Tensor, y: Tensor, noise: float | None, seed: int) -> Posterior:
        if self.method is None:
            return fit_surrogate(x, y, noise=noise, seed=seed)
        model = self._network(noise, seed) if self.model is None else self.model
        x, y = x.to(model.dtype), y.unsqueeze(1).to(model.dtype)
        return self.method.fit(model, (x, y), seed=seed, progress=False)

    def _network(self, noise: float | None, seed: int) -> Model:
        with own_randomness(seed):
            layers = nn.Linear(self.space.width, 50), nn.Tanh(), nn.Linear(50, 50), nn.Tanh(), nn.Linear(50, 1)
            net = nn.Sequential(*layers).double()
        return Model(net, Gaussian(noise=None if noise is None else max(noise, _LEAST_NOISE)))

    def _check_surrogate(self) -> None:
        """Warn, once, when more values are far from what was expected than chance allows."""
        recent = self.errors[-5 * _FEWEST :]
        outside = sum(abs(error) > _LEVEL for error in recent)
        if len(recent) >= _FEWEST and not self._warned and binom.sf(outside - 1, len(recent), 0.05) < _RARE:
            self._warned = True
            warnings.warn(
                f"The surrogate is too sure: {outside} of the last {len(recent)} values were outside of its 95% "
                f"intervals when they came. Try another method, more initial points, or noise=None if it is fixed.",
                CalibrationWarning, stacklevel=3,
            )  # fmt: skip

    # --- what is told, and kept --------------------------------------------------------------------------------------

    def _take_pending(self, point: Point) -> list[float] | None:
        """Remove a point from those that are pending; what was expected there."""
        row = self.space.encode(point)
        for place, other in enumerate(self.pending):
            if all(abs(a - b) <= 1e-9 for a, b in zip(row, self.space.encode(other), strict=True)):
                del self.pending[place]
                return self._expected.pop(place)
        return None

    def _checked_constraints(self, given: Any, count: int, one: bool) -> list[list[float]]:
        if self.constraints == 0:
            if given is not None:
                raise InvalidArgument("This optimiser has no constraints. Make it with constraints=<their number>.")
            return [[] for _ in range(count)]
        if given is None:
            raise InvalidData(f"constraints must have {self.constraints} numbers for each point, got none.")
        rows = _as_list(given)
        rows = [rows] if one and not (rows and isinstance(rows[0], list | tuple)) else rows
        found = [[_as_value(value, place) for value in _as_list(row)] for place, row in enumerate(rows)]
        if len(found) != count or any(len(row) != self.constraints for row in found):
            raise InvalidData(f"constraints must have {count} rows of {self.constraints} numbers, got {given!r}.")
        return found

    def _identity(self) -> dict[str, str]:
        settings = ("method", "acquisition", "maximise", "beta", "model", "constraints", "noise", "initial", "seed")
        space = repr((self.space.names, self.space.dimensions))
        return {"space": space, **{name: repr(getattr(self, name)) for name in settings}}

    def _save(self) -> None:
        if self.checkpoint is None:
            return
        content = {
            "identity": self._identity(),
            "points": self.space.plain(self.points), "pending": self.space.plain(self.pending),
            "expected": self._expected, "errors": self.errors, "asked": self._asked, "warned": self._warned,
        }  # fmt: skip
        limits = torch.tensor(self.constraint_values, dtype=torch.float64).view(len(self.points), self.constraints)
        tensors = {"values": torch.tensor(self.values, dtype=torch.float64), "constraints": limits}
        write_folder(self.checkpoint, _KIND, content, tensors)

    def _restore(self) -> None:
        if self.checkpoint is None or not is_folder(self.checkpoint):
            return
        content, tensors = read_folder(self.checkpoint, _KIND)
        different = [key for key, value in self._identity().items() if content["identity"].get(key) != value]
        if different:
            raise InvalidArgument(
                f"checkpoint {str(self.checkpoint)!r} belongs to another run: {', '.join(different)} differ. Give "
                f"another folder or delete this one."
            )
        self.points, self.pending = self.space.from_plain(content["points"]), self.space.from_plain(content["pending"])
        self.values, self.constraint_values = tensors["values"].tolist(), tensors["constraints"].tolist()
        self._expected, self.errors = content["expected"], content["errors"]
        self._asked, self._warned = content["asked"], content["warned"]


def _as_list(given: Any) -> list[Any]:
    if isinstance(given, Mapping | str) or not (hasattr(given, "tolist") or isinstance(given, Sequence)):
        return [given]
    found: Any = given.tolist() if hasattr(given, "tolist") else list(given)  # type: ignore[union-attr]
    return found if isinstance(found, list) else [found]


def _copied(point: Any) -> Any:
    """A point that nobody else changes, an array as a list."""
    if isinstance(point, Mapping):
        return dict(point)
    return _as_list(point) if hasattr(point, "tolist") or isinstance(point, Sequence) else point


def _is_list_of_points(points: Any) -> bool:
    values = _as_list(points)
    return not values or isinstance(values[0], list | tuple) or (hasattr(values[0], "tolist") and values[0].ndim > 0)


def _as_value(value: Any, place: int) -> float:
    """A number; NaN for one that is missing or infinite."""
    if value is None:
        return math.nan
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise InvalidData(f"values[{place}] must be a number, or None if there is none; got {value!r}.") from None
    return number if math.isfinite(number) else math.nan
