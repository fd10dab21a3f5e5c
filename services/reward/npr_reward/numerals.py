"""Numbers that are written out, read without evaluating anything."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

from npr_reward.answer import unwrap

_INTEGER = re.compile(r"[+-]?(?:\d{1,3}(?:,\d{3})+|\d{1,400})")
_DECIMAL = re.compile(r"[+-]?\d{0,400}\.\d{1,400}")
_FRACTION = re.compile(r"([+-]?)(?:\\[dt]?frac\{(\d{1,400})\}\{(\d{1,400})\}|(\d{1,400})/(\d{1,400}))")


@dataclass(frozen=True, slots=True)
class Numeral:
    """A rational number; `exact` unless it is written as a decimal, which may stand for a rounded number."""

    value: Fraction
    exact: bool


def parse_integer(text: str) -> int | None:
    """The integer that `text` is in digits, thousands separators and leading zeros allowed; None for anything else."""
    plain = _plain(text)
    return int(plain.replace(",", "")) if _INTEGER.fullmatch(plain) else None


def parse_numeral(text: str) -> Numeral | None:
    """The integer, fraction of integers or decimal that `text` is; None for anything else."""
    integer = parse_integer(text)
    if integer is not None:
        return Numeral(Fraction(integer), exact=True)
    plain = _plain(text)
    if _DECIMAL.fullmatch(plain):
        return Numeral(Fraction(plain), exact=False)
    match = _FRACTION.fullmatch(plain)
    if match is None:
        return None
    sign, *numbers = match.groups()
    numerator, denominator = (int(number) for number in numbers if number is not None)
    return Numeral(Fraction(int(f"{sign}1") * numerator, denominator), exact=True) if denominator else None


def _plain(text: str) -> str:
    """`text` unwrapped, with LaTeX's spacing removed and its separators and signs in ASCII."""
    plain = unwrap(text).replace("{,}", ",").replace("\\,", "").replace("\\!", "")
    return plain.replace("\u2212", "-").strip().removesuffix(".")
