"""Evaluates arithmetic in text that a model wrote. The text may be anything.

The text is parsed, never run, and only numbers and operators count. Every result is bounded before the next operation, and a
power before it is taken, so that ``9**9**9`` is refused in microseconds instead of filling the memory.
"""

import ast
import math
import operator
from collections.abc import Callable
from typing import Any

MAX_CHARACTERS = 200
"""Also bounds how deep the parser and `evaluate` recurse."""
MAX_BITS = 256
"""Of an integer, and of a power's exponent as a number: far above what a question needs, far below what takes time."""

OPERATIONS: dict[type[ast.operator] | type[ast.unaryop], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}


class ExpressionError(ValueError):
    """The calculator does not evaluate this text. The env sends the message to the model."""


def evaluate(expression: str) -> int | float:
    """The value of an expression of numbers, ``+ - * / // % **`` and parentheses.

    Raises:
        ExpressionError: it is anything else, divides by zero, or a value on the way is too large.
    """
    if len(expression) > MAX_CHARACTERS:
        raise ExpressionError("expression too long")
    try:
        return _value(ast.parse(expression.strip(), mode="eval").body)
    except ZeroDivisionError:
        raise ExpressionError("division by zero") from None
    except OverflowError:
        raise ExpressionError("number too large") from None
    # Null bytes, lone surrogates, a hundred open parentheses: the parser has several ways to refuse.
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise error if isinstance(error, ExpressionError) else ExpressionError("invalid expression") from None


def number_text(value: int | float) -> str:
    """Integers in full, other numbers with ten significant digits."""
    if isinstance(value, int) or (value.is_integer() and abs(value) < 1e15):
        return str(int(value))
    return f"{value:.10g}"


def _value(node: ast.expr) -> int | float:
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            return _bounded(value)
        case ast.UnaryOp(op=op, operand=operand) if type(op) in OPERATIONS:
            return OPERATIONS[type(op)](_value(operand))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATIONS:
            a, b = _value(left), _value(right)
            # An integer of n bits is at least 2 ** (n - 1).
            bits = a.bit_length() - 1 if isinstance(a, int) else 0
            if isinstance(op, ast.Pow) and (abs(b) > MAX_BITS or bits * abs(b) > MAX_BITS):
                raise ExpressionError("number too large")
            return _bounded(OPERATIONS[type(op)](a, b))
    raise ExpressionError("invalid expression")


def _bounded(value: int | float | complex) -> int | float:
    if isinstance(value, complex):
        raise ExpressionError("not a real number")
    if not math.isfinite(value) or (isinstance(value, int) and value.bit_length() > MAX_BITS):
        raise ExpressionError("number too large")
    return value
