"""GSM8K-style answers: the final answer is found, normalised and compared as a number, or as text."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

from dlm_bridge.train.rl.rewards.form import ANSWER

NUMBER = re.compile(r"-?\$?\d[\d,]*(?:\.\d+)?(?:/\d+)?|-?\.\d+")
FRACTION = re.compile(r"\\[dt]?frac\{(-?\d+)\}\{(-?\d+)\}")
LONGEST = 64  # characters of an answer that is read as a number


def correct(prompts: Sequence[Any], completions: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> list[float]:
    """1 where the completion's final answer is the row's `answer` (its part after ####, where it has one), else 0.

    The final answer is what follows the last ####, is in the last \\boxed{...} or between the last answer tags; of
    other text, the last number.
    """
    return [
        float(same(final_answer(text), final_answer(str(row["answer"]))))
        for text, row in zip(completions, rows, strict=True)
    ]


def final_answer(text: str) -> str:
    """The final answer of a text, see `correct`; empty where there is none."""
    if tagged := ANSWER.findall(text):
        text = tagged[-1]
    if (boxed := _boxed(text)) is not None:
        return boxed.strip()
    if "####" in text:
        return text.rsplit("####", 1)[1].strip().split("\n")[0]
    if number(text) is not None or len(text.split()) == 1:
        return text.strip()
    found = NUMBER.findall(text)
    return found[-1] if found else ""


def same(one: str, other: str) -> bool:
    """Whether two answers are one: equal numbers, else equal texts but for case, blanks and a last full stop."""
    values = number(one), number(other)
    if None not in values:
        return values[0] == values[1]
    return bool(one) and _plain(one) == _plain(other)


def number(text: str) -> Fraction | None:
    """The number that a text is, exactly: 1,234.50, $5, 50%, 3/4, \\frac{3}{4}; None where it is none."""
    text = FRACTION.sub(r"\1/\2", text.strip()).strip("$ ").rstrip(".").replace("\\%", "%").replace("\\$", "")
    percent = text.endswith("%")
    text = text.rstrip("% ").replace(",", "").replace("$", "")
    if len(text) > LONGEST or not re.fullmatch(r"[-+]?(\d+(\.\d*)?|\.\d+)(/\d+)?", text):
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


def _plain(text: str) -> str:
    return "".join(text.lower().split()).rstrip(".")
