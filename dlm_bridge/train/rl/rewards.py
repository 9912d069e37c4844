"""Reward functions of the package: (prompts, completions, rows) -> one number per completion."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

# Short names of the setting `reward`, which also takes a dotted path or file.py:name.
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
    """1 for exactly <reasoning>...</reasoning><answer>...</answer>, 0.5 for one answer within other text, else 0."""
    return [
        1.0
        if REASONING_AND_ANSWER.fullmatch(text) and text.count("<answer>") == 1
        else 0.5 * (len(ANSWER_TAGS.findall(text)) == 1)
        for text in completions
    ]


def tagged_answer(completion: str) -> str:
    """The text in the last pair of answer tags, or the whole text without tags."""
    tagged = ANSWER_TAGS.findall(completion)
    return (tagged[-1] if tagged else completion).strip()


LONGEST_EXPRESSION = 200  # characters
LARGEST_NUMBER = 10**12  # of operands and results


def countdown_solved(
    prompts: Sequence[Any], completions: Sequence[str], rows: Sequence[Mapping[str, Any]]
) -> list[float]:
    """1 if the completion is an expression of the row's `numbers` with the value `target`, else 0."""
    return [
        float(value is not None and value[0] == row["target"] and _uses_numbers(value[1], row["numbers"]))
        for value, row in zip(map(evaluate_expression, map(_expression, completions)), rows, strict=True)
    ]


def countdown_well_formed(
    prompts: Sequence[Any], completions: Sequence[str], rows: Sequence[Mapping[str, Any]]
) -> list[float]:
    """1 if the completion is an expression of the row's `numbers`, whatever its value, else 0."""
    return [
        float(value is not None and _uses_numbers(value[1], row["numbers"]))
        for value, row in zip(map(evaluate_expression, map(_expression, completions)), rows, strict=True)
    ]


def evaluate_expression(expression: str) -> tuple[Fraction, list[int]] | None:
    """Value of an expression of integers, + - * / and parentheses, and the integers in it. None for anything else, a
    division by zero, or values out of bounds. The syntax tree is walked; nothing is executed."""
    if len(expression) > LONGEST_EXPRESSION or "_" in expression:
        return None
    try:
        tree = ast.parse(expression.strip(), mode="eval")
        numbers: list[int] = []
        return _expression_value(tree.body, numbers), numbers
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return None


def _expression(completion: str) -> str:
    """The expression of an answer: the left side of `(3 + 4) * 2 = 14`."""
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
LONGEST_NUMBER = 64  # characters


def correct_answer(
    prompts: Sequence[Any], completions: Sequence[str], rows: Sequence[Mapping[str, Any]]
) -> list[float]:
    """1 if the completion's final answer is the row's `answer` (its part after ####, if any), else 0.

    The final answer follows the last ####, or is in the last \\boxed{...} or the last answer tags; in other text it is
    the last number.
    """
    return [
        float(same_answer(final_answer(text), final_answer(str(row["answer"]))))
        for text, row in zip(completions, rows, strict=True)
    ]


def final_answer(text: str) -> str:
    """The final answer of a text, see `correct_answer`; empty if there is none."""
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
    """True for equal numbers, or texts that differ only in case, whitespace and a final full stop."""
    values = parse_number(one), parse_number(other)
    if None not in values:
        return values[0] == values[1]
    return bool(one) and _normalised(one) == _normalised(other)


def parse_number(text: str) -> Fraction | None:
    """Exact value of a text such as 1,234.50, $5, 50%, 3/4 or \\frac{3}{4}; None if it is not a number."""
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
    """Contents of the last \\boxed{...}, with matched braces."""
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
