"""GSM8K's answers, and 95% intervals of accuracies: what every measurement on its problems shares."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

CALCULATOR = re.compile(r"<<.*?>>")  # annotations in the solutions
ANSWER = re.compile(r"####\s*\$?(-?[\d,]*\.?\d+)")
NUMBER = re.compile(r"-?\d[\d,]*\.?\d*|-?\.\d+")
BOOTSTRAP = 10_000


def stated_number(text: str) -> float | None:
    """The number after the first `####`, None if there is none.

    GSM8K's own reader and lm-evaluation-harness's `strict-match` take the first, too: it answers the question that was
    asked. A text that goes on behind it has not ended where it should, and asks and answers questions of its own.
    """
    found = ANSWER.search(text)
    return found and to_number(found[1])


def last_number(text: str) -> float | None:
    """The last number of a text, None if there is none (lm-evaluation-harness's `flexible-extract`)."""
    found = NUMBER.findall(text)
    return to_number(found[-1]) if found else None


def to_number(text: str) -> float | None:
    try:
        return float(text.replace(",", "").rstrip("."))
    except ValueError:
        return None


def wilson(right: int, count: int) -> tuple[float, float]:
    """Wilson's 95% interval of a fraction."""
    z, p = 1.959964, right / count
    middle, half = p + z * z / (2 * count), z * math.sqrt(p * (1 - p) / count + z * z / (4 * count * count))
    low, high = (middle - half) / (1 + z * z / count), (middle + half) / (1 + z * z / count)
    return round(max(low, 0.0), 4), round(min(high, 1.0), 4)


def ratio_interval(own: Sequence[float], reference: Sequence[float]) -> tuple[float, float, float] | None:
    """Ratio of two accuracies on the same problems, and its 95% interval by a paired bootstrap over the problems.

    Args:
        own: 1 or 0 per problem, for right and wrong.
        reference: the same of the accuracy in the denominator, in the same order.

    Returns:
        Ratio, lower and upper bound; None if the reference has no right answer.
    """
    import numpy as np

    if not any(reference):
        return None
    both = np.array([own, reference], dtype=float)
    picks = np.random.default_rng(0).integers(both.shape[1], size=(BOOTSTRAP, both.shape[1]))
    right = both[:, picks].sum(axis=2)
    low, high = np.quantile(right[0] / np.maximum(right[1], 1), [0.025, 0.975])
    return round(float(both[0].sum() / both[1].sum()), 4), round(float(low), 4), round(float(high), 4)
