"""Diagnostics of a fit: named terms, history, whether it converged, how long it took."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

NOT_BAYES = "the target is not the Bayes posterior"
"""Words in the note of a fit whose target is not the Bayes posterior."""


class LogEvidence(float):
    """The log evidence log p(D): a float with its kind and its Monte Carlo error.

    Attributes:
        kind: ``"exact"``, ``"bound"`` (the log evidence is at least this) or ``"estimate"``.
        standard_error: Monte Carlo error of the value (0 where it was computed in closed form).
    """

    kind: str
    standard_error: float

    def __new__(cls, value: float, kind: str, standard_error: float = 0.0) -> LogEvidence:
        self = super().__new__(cls, value)
        self.kind, self.standard_error = kind, standard_error
        return self

    def __getnewargs__(self) -> tuple[float, str, float]:
        return float(self), self.kind, self.standard_error

    def __repr__(self) -> str:
        error = f" ± {self.standard_error:.2g}" if self.standard_error else ""
        return f"{float(self):.6g}{error} ({self.kind})"


@dataclass(frozen=True)
class Diagnostics(Mapping[str, float]):
    """A mapping of the fit's named terms (on the full-data scale), with its history.

    Attributes:
        method: The method and its settings.
        terms: Named values at the end: expected log likelihood, KL, noise, ...
        history: Records through the fit.
        converged: True, False, or None if it is unknown.
        interrupted: Whether the fit was stopped from the keyboard.
        message: One sentence on how the fit ended.
        seconds: Time taken.
        notes: Warnings for the user: a target that is not the Bayes posterior, a divergence that was recovered from.
        out_of_time: Whether a time limit ended the fit, see :func:`~knowable.core.support.time_limit.time_limit`.
    """

    method: str = ""
    terms: dict[str, float] = field(default_factory=dict)
    history: list[dict[str, float]] = field(default_factory=list)
    converged: bool | None = None
    interrupted: bool = False
    message: str = ""
    seconds: float = 0.0
    notes: tuple[str, ...] = ()
    out_of_time: bool = False

    def __getitem__(self, key: str) -> float:
        return self.terms[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.terms)

    def __len__(self) -> int:
        return len(self.terms)

    @property
    def bayes(self) -> bool:
        """Whether the fit aimed at the Bayes posterior: no note says otherwise."""
        return not any(NOT_BAYES in note for note in self.notes)

    def to_json(self) -> dict[str, Any]:
        """As plain values, for the manifest of an artifact."""
        return {**asdict(self), "notes": list(self.notes)}

    @classmethod
    def from_json(cls, saved: dict[str, Any]) -> Diagnostics:
        """Back from plain values; TypeError if they are of other kinds."""
        if not isinstance(saved["terms"], dict) or not all(isinstance(each, dict) for each in saved["history"]):
            raise TypeError("diagnostics must have terms and a history by name")
        numbers = [*saved["terms"].values(), saved["seconds"], *(n for each in saved["history"] for n in each.values())]
        texts = [saved["method"], saved["message"], *saved["notes"]]
        if not all(isinstance(each, int | float) for each in numbers) or not all(isinstance(t, str) for t in texts):
            raise TypeError("diagnostics must be numbers and texts")
        return cls(**{**saved, "notes": tuple(saved["notes"])})

    def __repr__(self) -> str:
        lines = [self.method, f"  {self.message or 'no iterations'} ({self.seconds:.1f} s)"]
        lines += [f"  {name:<28}{value:>14.6g}" for name, value in self.terms.items()]
        lines += [f"  note: {note}" for note in self.notes]
        return "\n".join(lines)
