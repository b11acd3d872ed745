"""An alarm for a stream of rows: is what comes still like the held-out rows? Few false alarms, however long it runs."""

from __future__ import annotations

import bisect
import json
import math
import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from knowable.core.prediction.prediction import Prediction
from knowable.core.support.checks import check_count, check_number
from knowable.core.support.files import as_file, write_atomically
from knowable.core.support.randomness import derive_seed
from knowable.errors import DamagedArtifact, InvalidData, InvalidType
from knowable.evaluation.inputs import Array, by_row, in_double, score_tensor

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_POWERS = (0.1, 0.3, 0.6)
_FORMAT = 1


class StreamAlarm:
    r"""A test martingale: a gambler who bets that new rows are *not* like the earlier ones.

    Each row's score is ranked among those of all rows before it, held-out and new. As long as rows are exchangeable the
    ranks :math:`p_1, p_2, \ldots` are independent and uniform (Vovk et al., 2005), and no bet on them gains on average.
    The wealth of the gambler

    .. math:: W_n = 1 - \sum_{k \le n} w_k + \sum_{k \le n} w_k \frac{1}{|F|} \sum_{f \in F} \prod_{i=k}^n f(p_i)

    begins at 1 and keeps a part :math:`w_k` for each possible beginning k of a change. Bets are
    :math:`f(p) = \epsilon p^{\epsilon - 1}`, on large scores, and the same of 1 - p, on small ones. By Ville's
    inequality

    .. math:: P(\exists n : W_n \ge 1 / \delta) \le \delta,

    so an alarm at 1/delta is false with probability ``delta`` at most, over the whole stream, however often one looks.

    Score anything: the uncertainty of predictions, their losses once outcomes are known, an input.

    Args:
        reference: Scores of held-out rows, ``(n,)``; or a Prediction, whose total uncertainty is taken.
        delta: Probability of a false alarm, ever.
        seed: Breaks ties of equal scores at random.

    Attributes:
        delta: As given.
        alarm_at: Number of rows of the stream after which the alarm was raised, or None.

    Example:
        >>> alarm = StreamAlarm(range(100), delta=0.01)
        >>> alarm.update([40.0, 70.0, 12.0])
        False
        >>> alarm.update([200.0 + i for i in range(20)])
        True
    """

    def __init__(self, reference: Prediction | Array, *, delta: float = 0.01, seed: int = 0):
        self.delta = check_number("delta", delta, above=0.0, below=1.0)
        self._seed = check_count("seed", seed, at_least=0)
        self._sorted = sorted(_scores("reference", reference))
        if not self._sorted:
            raise InvalidData("reference is empty. Pass the scores of held-out rows.")
        self._bets = [-math.inf] * (2 * len(_POWERS))  # logarithms of the parts of the wealth that were bet
        self._history: list[float] = []  # logarithms of the wealth
        self.alarm_at: int | None = None

    @property
    def seen(self) -> int:
        """Number of rows of the stream so far."""
        return len(self._history)

    @property
    def alarmed(self) -> bool:
        """Whether the alarm was raised; it stays so."""
        return self.alarm_at is not None

    @property
    def wealth(self) -> Tensor:
        """Wealth after each row of the stream, ``(seen,)``; infinite where it is too large for a number."""
        return torch.tensor(self._history, dtype=torch.float64).exp()

    @property
    def log_wealth(self) -> float:
        """Logarithm of the wealth now, 0 at first; the alarm is raised at -log delta."""
        return self._history[-1] if self._history else 0.0

    def update(self, scores: Prediction | Array) -> bool:
        """Take the next rows of the stream, in their order.

        Args:
            scores: Their scores, ``(rows,)``, of the same kind as the reference; one number; or a Prediction.

        Returns:
            Whether the alarm has been raised, now or before.
        """
        for score in _scores("scores", scores):
            self._bet(self._rank(score))
            if self.alarm_at is None and self._history[-1] >= -math.log(self.delta):
                self.alarm_at = self.seen
        return self.alarmed

    def _rank(self, score: float) -> float:
        """Share of earlier scores that are larger, equal ones (and itself) in random order: uniform on (0, 1]."""
        first, last = bisect.bisect_left(self._sorted, score), bisect.bisect_right(self._sorted, score)
        size = len(self._sorted) + 1
        uniform = 1.0 - derive_seed(self._seed, "tie", self.seen) / 2.0**63  # in (0, 1]
        rank = (len(self._sorted) - last + uniform * (last - first + 1)) / size
        self._sorted.insert(last, score)
        return rank

    def _bet(self, rank: float) -> None:
        n = self.seen + 1
        begin = math.log(_kept(n - 1) - _kept(n)) - math.log(len(self._bets))
        low, high = math.log(max(rank, 1e-300)), math.log(max(1.0 - rank, 1e-300))
        gains = [math.log(e) + (e - 1) * each for each in (low, high) for e in _POWERS]
        self._bets = [_log_add(old, begin) + gain for old, gain in zip(self._bets, gains, strict=True)]
        wealth = math.log(_kept(n))
        for each in self._bets:
            wealth = _log_add(wealth, each)
        self._history.append(wealth)

    def plot(self) -> Figure:
        """Draw the wealth along the stream, and where it raises the alarm.

        Raises:
            MissingExtra: If matplotlib is not installed.
        """
        from knowable.decisions.certificate_plot import plot_wealth

        return plot_wealth(torch.tensor(self._history, dtype=torch.float64), self.delta, self.alarm_at)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write its state to a JSON file, from which :meth:`load` goes on as if it had not stopped."""
        return write_atomically(path, json.dumps(self.to_json()))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> StreamAlarm:
        """Read a file that :meth:`save` wrote."""
        file = as_file(path)
        try:
            return cls.from_json(json.loads(file.read_text(encoding="utf-8")))
        except FileNotFoundError:
            raise DamagedArtifact(f"There is no file {str(file)!r}.") from None
        except (ValueError, UnicodeDecodeError):
            raise DamagedArtifact(f"{file} is not a saved alarm.") from None

    def to_json(self) -> dict[str, Any]:
        """Its state as plain values."""
        return {
            "format": _FORMAT,
            "delta": self.delta,
            "seed": self._seed,
            "scores": self._sorted,
            "bets": [None if math.isinf(each) else each for each in self._bets],
            "log_wealth": self._history,
            "alarm_at": self.alarm_at,
        }

    @classmethod
    def from_json(cls, state: dict[str, Any]) -> StreamAlarm:
        """The inverse of :meth:`to_json`."""
        try:
            alarm = cls(state["scores"], delta=state["delta"], seed=state["seed"])
            alarm._bets = [-math.inf if each is None else float(each) for each in state["bets"]]
            alarm._history = [float(each) for each in state["log_wealth"]]
            alarm.alarm_at = None if state["alarm_at"] is None else int(state["alarm_at"])
            if state["format"] > _FORMAT or len(alarm._bets) != 2 * len(_POWERS):
                raise DamagedArtifact("This alarm was saved by a newer version of knowable. Upgrade knowable.")
            return alarm
        except (KeyError, TypeError, AttributeError) as error:
            raise DamagedArtifact(f"This is not the state of an alarm: {error!r}.") from None

    def __repr__(self) -> str:
        state = f"raised after {self.alarm_at:,} rows" if self.alarmed else "not raised"
        wealth = math.exp(min(self._history[-1], 700.0)) if self._history else 1.0
        return f"StreamAlarm({state}, seen={self.seen:,}, wealth={wealth:.3g}, alarm at {1 / self.delta:g})"


def _kept(n: int) -> float:
    """Share of the wealth that is kept for changes after row n; it goes to zero slowly, so late ones cost little."""
    return math.log(2.0) / math.log(n + 2.0)


def _log_add(a: float, b: float) -> float:
    high, low = max(a, b), min(a, b)
    return high if low == -math.inf else high + math.log1p(math.exp(low - high))


def _scores(name: str, given: Any) -> Iterable[float]:
    if isinstance(given, Prediction):
        values = by_row(in_double(given.total)).mean(1)
    else:
        given = list(given) if isinstance(given, range) else given
        values = score_tensor(name, given).double().reshape(-1) if _flat(name, given) else torch.zeros(0)
    if not values.isfinite().all():
        row = int(torch.nonzero(~values.isfinite())[0])
        raise InvalidData(f"{name} has a missing or infinite score in row {row} (counting from 0). Drop this row.")
    return values.tolist()


def _flat(name: str, given: Any) -> bool:
    shape = score_tensor(name, given).shape
    if len(shape) > 1 and shape[1:].numel() != 1:
        raise InvalidType(f"{name} must have one score a row, got shape {tuple(shape)}.")
    return True
