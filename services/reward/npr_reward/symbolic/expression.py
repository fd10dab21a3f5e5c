"""Expressions in program notation (`3*x**2 + sqrt(y)`) to SymPy, unevaluated and without `eval`.

SymPy's own `parse_expr` evaluates Python code, which no text of a model may reach. Here Python's grammar is only
parsed; a fixed set of operators, functions and constants is translated, and everything else is refused.
"""

from __future__ import annotations

import ast
from functools import lru_cache
from typing import Any

import sympy
from sympy import Add, Expr, Float, Integer, Mul, Pow, Symbol

_FUNCTIONS: dict[str, Any] = {
    name: getattr(sympy, name)
    for name in ("sqrt", "sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh", "tanh", "exp", "log", "factorial")
} | {"abs": sympy.Abs, "ln": sympy.log}
_CONSTANTS = {"pi": sympy.pi, "e": sympy.E, "E": sympy.E, "I": sympy.I}


class NotAnExpressionError(ValueError):
    """The text is not in program notation, or uses what has no translation."""


@lru_cache(maxsize=4096)
def parse_expression(text: str) -> Expr:
    """The expression that `text` writes; `^` is a power. Raises NotAnExpressionError."""
    try:
        tree = ast.parse(text.strip().replace("^", "**"), mode="eval")
        return _translate(tree.body)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise NotAnExpressionError(str(error)) from error


def _translate(node: ast.expr) -> Expr:  # noqa: PLR0911 - one return a kind of node
    match node:
        case ast.Constant(value=bool()):
            raise NotAnExpressionError("a truth value is no expression")
        case ast.Constant(value=int() as number):
            return Integer(number)
        case ast.Constant(value=float() as number):
            return Float(number)
        case ast.Name(id=name):
            return _CONSTANTS.get(name) or Symbol(name, real=True)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _translate(operand)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return _negated(_translate(operand))
        case ast.BinOp(left=left, op=operator, right=right):
            return _combine(operator, _translate(left), _translate(right))
        case ast.Call(func=ast.Name(id=name), args=[argument], keywords=[]) if name in _FUNCTIONS:
            return _FUNCTIONS[name](_translate(argument), evaluate=False)
    raise NotAnExpressionError(f"{type(node).__name__} has no translation")


def _combine(operator: ast.operator, left: Expr, right: Expr) -> Expr:
    match operator:
        case ast.Add():
            return Add(left, right, evaluate=False)
        case ast.Sub():
            return Add(left, _negated(right), evaluate=False)
        case ast.Mult():
            return Mul(left, right, evaluate=False)
        case ast.Div():
            return Mul(left, Pow(right, Integer(-1), evaluate=False), evaluate=False)
        case ast.Pow():
            return Pow(left, right, evaluate=False)
    raise NotAnExpressionError(f"operator {type(operator).__name__} has no translation")


def _negated(value: Expr) -> Expr:
    return Mul(Integer(-1), value, evaluate=False)
