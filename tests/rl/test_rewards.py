"""Rewards: what is right, what only looks so, and functions that raise, hang or cannot be loaded."""

from __future__ import annotations

from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from dlm_bridge.errors import RowError, SettingError
from dlm_bridge.train.rl import rewards
from dlm_bridge.train.rl.reward_worker import RewardWorkers
from tests.refusals import refused


@dataclass
class Line:
    fields: dict[str, Any] = field(default_factory=dict)
    where: str = "rows.jsonl, line 1"


@pytest.mark.parametrize(
    ("text", "solved", "formed"),
    [
        ("(3 + 4) * 2", 1, 1),
        ("2*(3+4) = 14", 1, 1),
        ("so <answer>3*2</answer> no, <answer> (4+3)*2 </answer>", 1, 1),
        ("2*(3+4) = 15", 1, 1),  # what it claims to come to is not asked for
        ("3 + 4 * 2", 0, 1),
        ("3/4*2", 0, 1),
        ("7 * 2", 0, 0),  # not the numbers
        ("(3+4)*2*2/2", 0, 0),
        ("3**2 + 4 + 1", 0, 0),
        ("4/(3-3)*2", 0, 0),
        ("-3+4+2", 0, 0),
        ("3 + 4 +", 0, 0),
        ("", 0, 0),
        ("14", 0, 0),
        ("sum([3,4,2])+5", 0, 0),
        ("__import__('os').getpid()", 0, 0),
        ("9" * 500, 0, 0),
        ("(" * 150 + "3", 0, 0),
        ("True + 3 + 4 + 2", 0, 0),
        ("3.0+4+2", 0, 0),
    ],
)
def test_countdown(text: str, solved: int, formed: int) -> None:
    row = {"numbers": [2, 3, 4], "target": 14}
    assert rewards.countdown_solved([""], [text], [row]) == [solved]
    assert rewards.countdown_well_formed([""], [text], [row]) == [formed]


def test_expressions_are_exact_and_bounded() -> None:
    assert rewards.evaluate_expression("1/3*3") == (Fraction(1), [1, 3, 3])
    assert rewards.evaluate_expression("1000000*1000000") == (Fraction(10**12), [10**6, 10**6])
    assert rewards.evaluate_expression("1000000*1000001") is None


@pytest.mark.parametrize(
    ("text", "answer", "right"),
    [
        ("He has 5 apples.\n#### 1,234", "so 1234 #### 1234", True),
        ("The answer is \\boxed{\\frac{3}{4}}", "0.75", True),
        ("<answer>$18.00</answer>", "18", True),
        ("it is 18 dollars a day", "18", True),
        ("it was 20, now it is 18.", "20", False),
        ("50%", "1/2", True),
        ("\\boxed{x + 1}", "X+1", True),
        ("no idea", "7", False),
        ("", "", False),
        ("-3", "3", False),
        ("1/0", "0", False),
        ("7" * 200, "7", False),
    ],
)
def test_maths(text: str, answer: str, right: bool) -> None:
    assert rewards.correct_answer([""], [text], [{"answer": answer}]) == [float(right)]


def test_form() -> None:
    texts = ["<reasoning>a\nb</reasoning>\n<answer>1</answer>", "well, <answer>1</answer>", "1", "<answer>1"]
    assert rewards.answer_format([""] * 4, texts, [{}] * 4) == [1.0, 0.5, 0.0, 0.0]


REWARDS = """
import time
def length(prompts, completions, rows):
    print("printed, not answered")
    return [len(text) for text in completions]
def raises(prompts, completions, rows):
    if "bad" in completions:
        raise KeyError("which line")
    return [1] * len(rows)
def hangs(prompts, completions, rows):
    if "bad" in completions:
        time.sleep(60)
    return [1] * len(rows)
def dies(prompts, completions, rows):
    if "bad" in completions:
        import os; os._exit(3)
    return [1] * len(rows)
def short(prompts, completions, rows):
    return [1]
def nan(prompts, completions, rows):
    return [float("nan")] * len(rows)
number = 3
"""
LINES = [Line(where=f"rows.jsonl, line {number}") for number in (1, 2, 3)]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rewards") / "mine.py"
    path.write_text(REWARDS)
    return path


def test_sums_are_weighted(file: Path) -> None:
    worker = RewardWorkers([f"0.5*{file}:length", "countdown_form"])
    lines = [Line({"numbers": [1, 2]}), Line({"numbers": [3]})]
    scored = worker(["", ""], ["1+2", "four"], lines)
    worker.close()
    assert scored.rewards == [2.5, 2.0]
    assert scored.parts == {f"{file}:length": [3, 4], "countdown_form": [1, 0]}


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("raises", "KeyError: 'which line'"),
        ("hangs", "no answer in 0.5 s"),
        ("dies", "its process ended"),
    ],
)
def test_rewards_that_fail(file: Path, name: str, what: str) -> None:
    worker = RewardWorkers([f"{file}:{name}"], timeout=0.5)
    with refused(RowError, "rows.jsonl, line 2", f"{file}:{name}", what):
        worker([""] * 3, ["fine", "bad", "fine"], LINES)
    worker.failure = "zero"
    scored = worker([""] * 3, ["fine", "bad", "fine"], LINES)
    assert (scored.rewards, scored.failed) == ([1.0, 0.0, 1.0], 1)
    assert worker([""] * 3, ["fine"] * 3, LINES).rewards == [1.0] * 3  # its process is there again
    worker.close()


@pytest.mark.parametrize(
    ("name", "what"),
    [("short", "it gave 1 rewards for 3 completions"), ("nan", "it gave a reward that is not a finite number")],
)
def test_rewards_that_are_none(file: Path, name: str, what: str) -> None:
    worker = RewardWorkers([f"{file}:{name}"])
    with refused(RowError, None, f"{file}:{name}", what if name == "nan" else ""):
        worker([""] * 3, ["a"] * 3, LINES)
    worker.close()


@pytest.mark.parametrize(
    "name", ["nowhere", "no.such.module.f", "{file}:absent", "{file}:number", "/no/file.py:f", "x*countdown"]
)
def test_rewards_that_cannot_be_loaded(file: Path, name: str) -> None:
    with refused(SettingError, "reward", name.format(file=file)):
        RewardWorkers([name.format(file=file)])
