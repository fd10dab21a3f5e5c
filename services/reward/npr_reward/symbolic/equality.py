"""Equality of mathematical values: math-verify's, between two checks at sample points.

- First, values that differ at a sample point are different. It is far cheaper than simplification, and it corrects
  math-verify where it compares numbers to an absolute precision, so that 1/2^99 and 1/2^98 are equal to it.
- Last, math-verify's variables are real, so that sqrt(1/n) and 1/sqrt(n) differ to it at n < 0, where neither is real.
  Expressions that are equal for positive variables, and agree wherever a sample with negative ones makes either of
  them real, are equal.

Callers have made sure that neither value is `too_large`.
"""

from __future__ import annotations

from collections.abc import Mapping

from math_verify import verify
from sympy import Basic, Expr, FiniteSet, Float, Interval, MatrixBase, Symbol, Tuple, UnevaluatedExpr, simplify

from npr_reward.symbolic.latex import Value

_EXACT_TOLERANCE = 1e-12
"""Relative difference at which exact numbers are equal: they are evaluated to `_DIGITS`."""
_FLOAT_TOLERANCE = 1e-5
"""Relative difference at which numbers may be equal if either holds a decimal, which a person rounded."""
_DIGITS = 30
_SAMPLES = (0.7390851332, 1.3247179572, 2.5029078750, 0.5671432904, 1.9021605831, 3.3598856662)
"""Values for variables, in order of their names; no two in a simple relation."""


def equal(gold: Value, answer: Value) -> bool:
    """Whether `answer` is the same mathematical object as `gold`. Not symmetric: `5` may answer `x = 5`."""
    if gold == answer:
        return True
    if _differ(gold, answer):
        return False
    if verify(gold, answer, timeout_seconds=None, allow_set_relation_comp=True):
        return True
    return _comparable(gold, answer) and _equal_where_real(gold, answer)


def _differ(gold: Value, answer: Value) -> bool:
    """Whether two values certainly differ: at a sample point, or in a member that no member of the other is near."""
    members = _members(gold), _members(answer)
    if members[0] and len(members[0]) == len(members[1]):
        return any(all(_differ(left, right) for right in members[1]) for left in members[0])
    return _comparable(gold, answer) and _differ_at(1, gold, answer)


def _comparable(gold: Value, answer: Value) -> bool:
    """Whether both are expressions that mean what they say.

    A lone symbol may be a text (`13` in a text command), and a percentage equals its number by convention.
    """
    return all(
        isinstance(value, Expr) and not isinstance(value, Symbol) and not value.has(UnevaluatedExpr)
        for value in (gold, answer)
    )


def _differ_at(sign: int, gold: Expr, answer: Expr) -> bool:
    """Whether two expressions have different finite values at the sample point, unless neither value is real."""
    point = _sample_point(_names(gold) | _names(answer), sign)
    left, right = _value_at(point, gold), _value_at(point, answer)
    if left is None or right is None:
        return False
    either_real = sign > 0 or _is_real(left) or _is_real(right)
    return either_real and not _close(left, right, _tolerance(gold, answer))


def _equal_where_real(gold: Expr, answer: Expr) -> bool:
    """Whether two expressions of variables are equal for positive ones, and wherever either is real for others."""
    names = _names(gold) | _names(answer)
    if not names or _differ_at(-1, gold, answer):
        return False
    positive = {name: Symbol(name, positive=True) for name in names}
    return bool(simplify(_rename(gold, positive) - _rename(answer, positive)).is_zero)


def _members(value: Value) -> tuple[Basic, ...]:
    """The members of a collection, ends of an interval included; none for anything else."""
    if isinstance(value, Interval):
        return (value.start, value.end)
    if isinstance(value, FiniteSet | Tuple):
        return tuple(value.args)
    return tuple(value.flat()) if isinstance(value, MatrixBase) else ()


def _sample_point(names: frozenset[str], sign: int) -> Mapping[str, Expr]:
    """A value for each variable; the first by name, and every second after it, times `sign`."""
    return {
        name: Float((sign if i % 2 == 0 else 1) * (_SAMPLES[i % len(_SAMPLES)] + i // len(_SAMPLES)))
        for i, name in enumerate(sorted(names))
    }


def _value_at(point: Mapping[str, Expr], expression: Expr) -> Expr | None:
    """The finite number that `expression` is at `point`; None where it is none."""
    value = _rename(expression, point).evalf(_DIGITS)
    return value if value.is_number and value.is_finite else None


def _rename(expression: Expr, values: Mapping[str, Expr]) -> Expr:
    """`expression` with its variables replaced by name, whatever the parser assumed of them."""
    return expression.subs({symbol: values[symbol.name] for symbol in expression.free_symbols})


def _names(expression: Expr) -> frozenset[str]:
    return frozenset(symbol.name for symbol in expression.free_symbols)


def _is_real(number: Expr) -> bool:
    return bool(abs(number.as_real_imag()[1]) <= _EXACT_TOLERANCE)


def _close(left: Expr, right: Expr, tolerance: float) -> bool:
    return bool(abs(left - right) <= tolerance * max(abs(left), abs(right)))


def _tolerance(gold: Expr, answer: Expr) -> float:
    return _FLOAT_TOLERANCE if gold.has(Float) or answer.has(Float) else _EXACT_TOLERANCE
