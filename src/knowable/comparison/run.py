"""All methods on all folds: fold after fold, so that whatever is finished can be compared in pairs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from knowable.comparison.budget import Budget
from knowable.comparison.contenders import Contender
from knowable.comparison.folds import Split
from knowable.comparison.journal import Journal, Record
from knowable.comparison.subject import Fitted
from knowable.comparison.trial import Conditions, attempt
from knowable.core.progress import Bar, progress_bar


@dataclass
class Run:
    """A comparison on its way.

    Attributes:
        conditions: What is the same for every fit.
        contenders: The methods, in the order of the user.
        splits: The folds.
        reference: The one of the methods that the others are held against, or None.
        journal: Finished fits.
        budget: The clock.
        records: What came out, failures too.
        not_run: Methods and folds that there was no time for.
    """

    conditions: Conditions
    contenders: Sequence[Contender]
    splits: Sequence[Split]
    reference: Contender | None
    journal: Journal
    budget: Budget
    records: list[Record] = field(default_factory=list)
    not_run: list[tuple[str, int]] = field(default_factory=list)

    def go(self, progress: bool | None = None) -> None:
        """Make every fit that is not in the journal yet, as far as the time goes."""
        with progress_bar("comparing", progress) as bar:
            for fold in range(len(self.splits)):
                self._fold(fold, bar)
        self.records.sort(key=lambda record: (record.fold, self._place(record.method)))

    def _fold(self, fold: int, bar: Bar) -> None:
        """One fold, the reference first."""
        truth: Fitted | None = None
        missing = [contender for contender in self.contenders if self._known(contender, fold) is None]
        for contender in sorted(self.contenders, key=lambda each: each is not self.reference):
            bar.update(self._done, len(self.splits) * len(self.contenders), f"fold {fold + 1}, {contender.name}")
            known = self._known(contender, fold)
            if known is not None:
                self.records.append(replace(known, method=contender.name))
            if contender is self.reference and missing:  # needed by the others, even if its scores are known
                truth = self._attempt(contender, fold, None, keep=known is None)
            elif known is None:
                self._attempt(contender, fold, truth)

    def _attempt(self, contender: Contender, fold: int, truth: Fitted | None, *, keep: bool = True) -> Fitted | None:
        """One fit, if there is time for it; it is kept unless it is only made again for the sake of others."""
        if not self.budget.allows(contender.name):
            if keep:
                self.not_run.append((contender.name, fold))
                self.budget.skip()
            return None
        left = self.budget.left
        outcome = attempt(
            self.conditions, contender, fold, self.splits[fold], seconds=self.budget.for_fit(contender.name),
            reference=self._reference_of(contender), truth=truth,
        )  # fmt: skip
        if keep:
            self.journal.add(outcome.record)
            self.records.append(outcome.record)
            self.budget.count(contender.name, began=left, fit=outcome.seconds)
        return outcome.fitted

    def _known(self, contender: Contender, fold: int) -> Record | None:
        return self.journal.find(contender.settings, self._reference_of(contender), fold)

    def _reference_of(self, contender: Contender) -> str:
        """Settings of what a method is held against: the reference is held against nothing."""
        return "" if self.reference is None or contender is self.reference else self.reference.settings

    def _place(self, name: str) -> int:
        return next(place for place, contender in enumerate(self.contenders) if contender.name == name)

    @property
    def _done(self) -> int:
        return len(self.records) + len(self.not_run)


def fits_to_make(
    journal: Journal, contenders: Sequence[Contender], splits: Sequence[Split], reference: Contender | None
) -> int:
    """How many fits are not in the journal yet."""
    wanted = [
        journal.find(each.settings, "" if reference is None or each is reference else reference.settings, fold)
        for each in contenders
        for fold in range(len(splits))
    ]
    return sum(record is None for record in wanted)
