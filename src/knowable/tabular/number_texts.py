"""Numbers as people write them: with percent signs, currency signs, thousands separators and decimal commas.

A column is read as a whole, for one value alone may be ambiguous: ``1,234`` is a thousand or a little more than one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

_NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?|[+-]?inf(inity)?", re.IGNORECASE)
_CURRENCY = r"[$€£¥₹]|\b(?:USD|EUR|GBP|CHF|JPY|CAD|AUD|SEK|NOK|DKK)\b|\bkr\b"
_SIGN = re.compile(rf"(?P<sign>%|{_CURRENCY})", re.IGNORECASE)
_GAPS = " \u00a0\u202f'’"  # what separates thousands besides the point or the comma
_GROUPED = {
    mark: re.compile(rf"[+-]?[1-9]\d{{0,2}}(?:([{_GAPS}{other}])\d{{3}}(?:\1\d{{3}})*)(?:{re.escape(mark)}\d*)?")
    for mark, other in ((".", ","), (",", r"\."))
}


def parse_number(text: str, *, decimal: str = ".") -> float | None:
    """The number that a text is, thousands separated or not, or None."""
    text = text.strip()
    if _GROUPED[decimal].fullmatch(text):
        text = re.sub(rf"[{_GAPS}{',' if decimal == '.' else '.'}]", "", text)
    elif decimal == "," and "." in text:
        return None
    text = text.replace(",", ".") if decimal == "," else text
    return float(text) if _NUMBER.fullmatch(text) else None


@dataclass(frozen=True)
class NumberTexts:
    """A column of texts as numbers.

    Attributes:
        numbers: The numbers, one for each text.
        sign: The percent or currency sign that was taken off, or nothing.
        decimal: What is before the decimals: ``"."`` or ``","``.
        ambiguous: Whether the other decimal mark would have given other numbers.
    """

    numbers: list[float]
    sign: str = ""
    decimal: str = "."
    ambiguous: bool = False

    def remark(self, example: str) -> str:
        """What to tell the user of how it was read; nothing where there is no doubt."""
        first = f"{self.numbers[0]:.15g}"
        if self.ambiguous:
            other = "a decimal comma" if self.decimal == "." else "a decimal point"
            return f"is ambiguous: {example!r} is read as {first}. If it has {other}, write the numbers plainly"
        if self.sign:
            what = "percent" if self.sign == "%" else f"currency ({self.sign})"
            return f"has {what} signs: {example!r} is read as {first}"
        return ""


def read_numbers(texts: Sequence[str], decimal: str | None = None, usual: str = ".") -> NumberTexts | None:
    """Texts as numbers, or None if one of them is not a number or their signs differ.

    Args:
        texts: Values that are not missing.
        decimal: The decimal mark, where it is known.
        usual: The decimal mark to take where the texts allow both.
    """
    if decimal is None and usual == "." and not any("_" in text for text in texts):  # which Python takes, and we do not
        try:
            return NumberTexts([*map(float, texts)])
        except ValueError:
            pass
    bare, sign = _without_sign(texts)
    if bare is None:
        return None
    found = {mark: numbers for mark in (".", ",") if (numbers := _all_numbers(bare, mark)) is not None}
    if not found:
        return None
    mark = decimal or usual
    mark = mark if mark in found else next(iter(found))
    return NumberTexts(found[mark], sign, mark, decimal is None and len({tuple(each) for each in found.values()}) > 1)


def _without_sign(texts: Iterable[str]) -> tuple[list[str] | None, str]:
    """The texts less their percent or currency sign; None where signs differ or only some have a percent sign."""
    bare, signs = [], set()
    for text in texts:
        found = _SIGN.search(text)
        signs.add(found["sign"].upper() if found else "")
        text = text.strip()
        negative = found is not None and text.startswith("(") and text.endswith(")")  # as accountants write it
        text = _SIGN.sub("", text, count=1).strip("() " if negative else " \u00a0\u202f")
        text = re.sub(rf"^([+-])[{_GAPS}]+", r"\1", text)
        bare.append(f"-{text}" if negative else text)
    real = signs - {""}
    if len(real) > 1 or ("%" in real and "" in signs):
        return None, ""
    return bare, next(iter(real), "")


def _all_numbers(texts: Sequence[str], decimal: str) -> list[float] | None:
    found = [parse_number(text, decimal=decimal) for text in texts]
    return None if None in found else [number for number in found if number is not None]
