r"""Refuses numbers too large to be written down, before anything evaluates them.

`too_large` walks an unevaluated tree once and estimates its numbers in floating point with an unbounded exponent. A
tree that it accepts holds no power, exponential, factorial or binomial coefficient of numbers beyond `MAX_DIGITS`
digits and no sum or product of more than `MAX_TERMS` terms, so that a hostile `10^{10^{10}}` costs microseconds rather
than a deadline. What it can't estimate (a function it has no rule for) is left to the sandbox's limits.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from operator import add, mul
from typing import Any

import mpmath  # type: ignore[import-untyped]
from sympy import (
    Add,
    Basic,
    MatrixBase,
    Mul,
    Number,
    NumberSymbol,
    Pow,
    Product,
    Sum,
    UnevaluatedExpr,
    binomial,
    exp,
    factorial,
    factorial2,
    gamma,
)

from npr_reward.symbolic.latex import Value

MAX_DIGITS = 10_000
"""Decimal digits (of the number or of its inverse) that evaluation may produce."""
MAX_TERMS = 100_000
"""Terms that a sum or product with numeric limits may have."""

# An mpmath number, or None for what is no number or can't be estimated.
Estimate = Any


class TooLargeError(ValueError):
    """Evaluation would meet a number of more than `MAX_DIGITS` digits, or more than `MAX_TERMS` terms."""


def too_large(value: Value) -> bool:
    """Whether evaluating `value` would meet a number or a sum beyond the limits, or a tree too deep to walk."""
    try:
        for element in value.flat() if isinstance(value, MatrixBase) else [value]:
            _estimate(element)
    except (TooLargeError, RecursionError):
        return True
    return False


def _estimate(node: Basic) -> Estimate:
    """The approximate value of `node`. Raises TooLargeError; visits every node."""
    if isinstance(node, Number | NumberSymbol):
        return mpmath.mpf(str(node.evalf(15))) if node.is_finite else None
    children = [_estimate(child) for child in node.args]
    if isinstance(node, Sum | Product):
        _refuse_long_ranges(node)
    rule = _RULES.get(node.func)
    return rule(*children) if rule is not None else None


def _refuse_long_ranges(node: Sum | Product) -> None:
    for _, *bounds in (tuple(limit) for limit in node.limits):
        ends = [_estimate(bound) for bound in bounds]
        if len(ends) == 2 and None not in ends and abs(ends[1] - ends[0]) > MAX_TERMS:
            raise TooLargeError


def _refuse(digits: Estimate) -> None:
    if digits > MAX_DIGITS:
        raise TooLargeError


def _fold(operator: Callable[[Any, Any], Any]) -> Callable[..., Estimate]:
    def fold(*values: Estimate) -> Estimate:
        return None if None in values else reduce(operator, values)

    return fold


def _power(base: Estimate, exponent: Estimate) -> Estimate:
    if exponent is None:
        return None
    if base is None:  # a polynomial's degree, not its value, is what its expansion costs
        _refuse(abs(exponent))
        return None
    if base == 0:
        return None
    _refuse(abs(exponent) * abs(mpmath.log10(abs(base))))
    return mpmath.power(base, exponent)


def _exponential(exponent: Estimate) -> Estimate:
    return _power(mpmath.e, exponent)


def _factorial(argument: Estimate) -> Estimate:
    if argument is None or not isinstance(argument, mpmath.mpf) or argument < 0:
        return None
    _refuse(mpmath.loggamma(argument + 1) / mpmath.ln(10))
    return mpmath.gamma(argument + 1)


def _gamma(argument: Estimate) -> Estimate:
    return None if argument is None else _factorial(argument - 1)


def _binomial(n: Estimate, k: Estimate) -> Estimate:
    if n is None or k is None:
        return None
    _refuse(min(abs(k), abs(n - k)) * mpmath.log10(abs(n) + 1))
    return mpmath.binomial(n, k)


_RULES: dict[Any, Callable[..., Estimate]] = {
    Add: _fold(add),
    Mul: _fold(mul),
    Pow: _power,
    exp: _exponential,
    factorial: _factorial,
    factorial2: _factorial,
    gamma: _gamma,
    binomial: _binomial,
    UnevaluatedExpr: lambda child: child,
}
