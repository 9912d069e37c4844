"""Reward functions of the package: (prompts, completions, rows) -> one number per completion."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

# The short names that --reward takes beside a dotted path and file.py:name.
REWARDS = {
    "countdown": "dlm_bridge.train.rl.rewards.countdown_solved",
    "countdown_form": "dlm_bridge.train.rl.rewards.countdown_well_formed",
    "maths": "dlm_bridge.train.rl.rewards.correct_answer",
    "answer_format": "dlm_bridge.train.rl.rewards.answer_format",
}


ANSWER_TAGS = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
REASONING_AND_ANSWER = re.compile(r"\s*<reasoning>.*?</reasoning>\s*<answer>.*?</answer>\s*", re.DOTALL)


def answer_format(
    prompts: Sequence[Any], completions: Sequence[str], rows: Sequence[Mapping[str, Any]]
) -> list[float]:
    """1 for <reasoning>...</reasoning><answer>...</answer> and nothing else, 0.5 for one answer among other text."""
    return [
        1.0
        if REASONING_AND_ANSWER.fullmatch(text) and text.count("<answer>") == 1
        else 0.5 * (len(ANSWER_TAGS.findall(text)) == 1)
        for text in completions
    ]


def tagged_answer(completion: str) -> str:
    """The text in the last pair of answer tags; without any, the whole text."""
    tagged = ANSWER_TAGS.findall(completion)
    return (tagged[-1] if tagged else completion).strip()


LONGEST_EXPRESSION = 200  # characters of an expression
LARGEST_NUMBER = 10**12  # of a number in it, and of what it comes to


def countdown_solved(
    prompts: Sequence[Any], completions: Sequence[str], rows: Sequence[Mapping[str, Any]]
) -> list[float]:
    """1 where the completion is an expression of the row's `numbers` that equals its `target`, else 0."""
    return [
        float(value is not None and value[0] == row["target"] and _uses_numbers(value[1], row["numbers"]))
        for value, row in zip(map(evaluate_expression, map(_expression, completions)), rows, strict=True)
    ]


def countdown_well_formed(
    prompts: Sequence[Any], completions: Sequence[str], rows: Sequence[Mapping[str, Any]]
) -> list[float]:
    """1 where the completion is an expression of the row's `numbers`, whatever it comes to, else 0."""
    return [
        float(value is not None and _uses_numbers(value[1], row["numbers"]))
        for value, row in zip(map(evaluate_expression, map(_expression, completions)), rows, strict=True)
    ]


def evaluate_expression(expression: str) -> tuple[Fraction, list[int]] | None:
    """The value of an expression of whole numbers, + - * / and parentheses, and the numbers in it; None where it is
    anything else, divides by zero or grows out of bounds. Nothing is executed: the syntax tree is walked."""
    if len(expression) > LONGEST_EXPRESSION or "_" in expression:
        return None
    try:
        tree = ast.parse(expression.strip(), mode="eval")
        numbers: list[int] = []
        return _expression_value(tree.body, numbers), numbers
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return None


def _expression(completion: str) -> str:
    """What an answer claims: `(3 + 4) * 2 = 14` claims its left side."""
    return tagged_answer(completion).split("=")[0]


def _uses_numbers(found: Sequence[int], numbers: Sequence[int]) -> bool:
    return Counter(found) == Counter(numbers)


def _expression_value(node: ast.expr, numbers: list[int]) -> Fraction:
    if isinstance(node, ast.Constant) and type(node.value) is int and node.value <= LARGEST_NUMBER:
        numbers.append(node.value)
        return Fraction(node.value)
    if not isinstance(node, ast.BinOp):
        raise ValueError("neither a whole number nor an operation")
    left, right = _expression_value(node.left, numbers), _expression_value(node.right, numbers)
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
    if max(abs(value.numerator), value.denominator) > LARGEST_NUMBER:
        raise ValueError("out of bounds")
    return value


NUMBER_PATTERN = re.compile(r"-?\$?\d[\d,]*(?:\.\d+)?(?:/\d+)?|-?\.\d+")
FRACTION_PATTERN = re.compile(r"\\[dt]?frac\{(-?\d+)\}\{(-?\d+)\}")
LONGEST_NUMBER = 64  # characters of an answer that is read as a number


def correct_answer(
    prompts: Sequence[Any], completions: Sequence[str], rows: Sequence[Mapping[str, Any]]
) -> list[float]:
    """1 where the completion's final answer is the row's `answer` (its part after ####, where it has one), else 0.

    The final answer is what follows the last ####, is in the last \\boxed{...} or between the last answer tags; of
    other text, the last number.
    """
    return [
        float(same_answer(final_answer(text), final_answer(str(row["answer"]))))
        for text, row in zip(completions, rows, strict=True)
    ]


def final_answer(text: str) -> str:
    """The final answer of a text, see `correct`; empty where there is none."""
    if tagged := ANSWER_TAGS.findall(text):
        text = tagged[-1]
    if (boxed := _boxed(text)) is not None:
        return boxed.strip()
    if "####" in text:
        return text.rsplit("####", 1)[1].strip().split("\n")[0]
    if parse_number(text) is not None or len(text.split()) == 1:
        return text.strip()
    found = NUMBER_PATTERN.findall(text)
    return found[-1] if found else ""


def same_answer(one: str, other: str) -> bool:
    """Whether two answers are one: equal numbers, else equal texts but for case, blanks and a last full stop."""
    values = parse_number(one), parse_number(other)
    if None not in values:
        return values[0] == values[1]
    return bool(one) and _normalised(one) == _normalised(other)


def parse_number(text: str) -> Fraction | None:
    """The number that a text is, exactly: 1,234.50, $5, 50%, 3/4, \\frac{3}{4}; None where it is none."""
    text = FRACTION_PATTERN.sub(r"\1/\2", text.strip()).strip("$ ").rstrip(".").replace("\\%", "%").replace("\\$", "")
    percent = text.endswith("%")
    text = text.rstrip("% ").replace(",", "").replace("$", "")
    if len(text) > LONGEST_NUMBER or not re.fullmatch(r"[-+]?(\d+(\.\d*)?|\.\d+)(/\d+)?", text):
        return None
    above, _, below = text.partition("/")
    if below and int(below) == 0:
        return None
    value = Fraction(above) / (int(below) if below else 1)
    return value / 100 if percent else value


def _boxed(text: str) -> str | None:
    """What the last \\boxed{...} holds, its braces matched."""
    place = text.rfind("\\boxed{")
    if place < 0:
        return None
    start = place + len("\\boxed{")
    depth = 1
    for end in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[end], 0)
        if depth == 0:
            return text[start:end]
    return None


def _normalised(text: str) -> str:
    return "".join(text.lower().split()).rstrip(".")
