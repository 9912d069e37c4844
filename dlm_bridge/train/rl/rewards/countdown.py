"""Countdown: an expression of the given numbers, each used once, that equals the target; checked exactly."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

from dlm_bridge.train.rl.rewards.form import answer_of

LONGEST = 200  # characters of an expression
LARGEST = 10**12  # of a number in it, and of what it comes to


def solved(prompts: Sequence[Any], completions: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> list[float]:
    """1 where the completion is an expression of the row's `numbers` that equals its `target`, else 0."""
    return [
        float(value is not None and value[0] == row["target"] and _uses(value[1], row["numbers"]))
        for value, row in zip(map(evaluate, map(_expression, completions)), rows, strict=True)
    ]


def well_formed(prompts: Sequence[Any], completions: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> list[float]:
    """1 where the completion is an expression of the row's `numbers`, whatever it comes to, else 0."""
    return [
        float(value is not None and _uses(value[1], row["numbers"]))
        for value, row in zip(map(evaluate, map(_expression, completions)), rows, strict=True)
    ]


def evaluate(expression: str) -> tuple[Fraction, list[int]] | None:
    """The value of an expression of whole numbers, + - * / and parentheses, and the numbers in it; None where it is
    anything else, divides by zero or grows out of bounds. Nothing is executed: the syntax tree is walked."""
    if len(expression) > LONGEST or "_" in expression:
        return None
    try:
        tree = ast.parse(expression.strip(), mode="eval")
        numbers: list[int] = []
        return _value(tree.body, numbers), numbers
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return None


def _expression(completion: str) -> str:
    """What an answer claims: `(3 + 4) * 2 = 14` claims its left side."""
    return answer_of(completion).split("=")[0]


def _uses(found: Sequence[int], numbers: Sequence[int]) -> bool:
    return Counter(found) == Counter(numbers)


def _value(node: ast.expr, numbers: list[int]) -> Fraction:
    if isinstance(node, ast.Constant) and type(node.value) is int and node.value <= LARGEST:
        numbers.append(node.value)
        return Fraction(node.value)
    if not isinstance(node, ast.BinOp):
        raise ValueError("neither a whole number nor an operation")
    left, right = _value(node.left, numbers), _value(node.right, numbers)
    if isinstance(node.op, ast.Add):
        value = left + right
    elif isinstance(node.op, ast.Sub):
        value = left - right
    elif isinstance(node.op, ast.Mult):
        value = left * right
    elif isinstance(node.op, ast.Div):
        value = left / right
    else:
        raise ValueError("an operation that Countdown does not have")
    if max(abs(value.numerator), value.denominator) > LARGEST:
        raise ValueError("out of bounds")
    return value
