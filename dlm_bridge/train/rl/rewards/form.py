"""The form of an answer: what follows the reasoning, between <answer> and </answer>."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
WHOLE = re.compile(r"\s*<reasoning>.*?</reasoning>\s*<answer>.*?</answer>\s*", re.DOTALL)


def answer_format(
    prompts: Sequence[Any], completions: Sequence[str], rows: Sequence[Mapping[str, Any]]
) -> list[float]:
    """1 for <reasoning>...</reasoning><answer>...</answer> and nothing else, 0.5 for one answer among other text."""
    return [
        1.0 if WHOLE.fullmatch(text) and text.count("<answer>") == 1 else 0.5 * (len(ANSWER.findall(text)) == 1)
        for text in completions
    ]


def answer_of(completion: str) -> str:
    """What stands in the last pair of answer tags; without any, all of it."""
    tagged = ANSWER.findall(completion)
    return (tagged[-1] if tagged else completion).strip()
