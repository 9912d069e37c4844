"""What docs/quality.md stands on: the stories' probabilities and what is made of figures."""

from __future__ import annotations

import math
import random
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))

import quality_measure as measure
import quality_page
import quality_stories as stories


def test_what_is_written_is_read_with_the_same_probability() -> None:
    drawn = stories.batch(seed=0, number=3, size=300)
    assert drawn == stories.batch(seed=0, number=3, size=300)
    assert drawn[0] != stories.batch(seed=1, number=3, size=1)[0]
    for text, log_probability in drawn:
        assert stories.read(text) == pytest.approx(log_probability, rel=1e-12)
        assert stories.understood(text[: len(text) // 2]) == 1.0


@dataclass
class Follower(stories.Writer):
    """A writer that takes the choices it is told, then the first of each, and notes how many there were."""

    told: list[int] = field(default_factory=list)
    taken: list[tuple[int, int]] = field(default_factory=list)

    def choose(self, choice: stories.Choice) -> str:
        number = self.told[len(self.taken)] if len(self.taken) < len(self.told) else 0
        self.taken.append((number, len(choice.texts)))
        self.log_probability += choice.logs[number]
        self.pieces.append(choice.texts[number])
        return choice.texts[number]


def test_probabilities_of_everything_that_an_event_can_be_add_up_to_one() -> None:
    for event in (stories.shop, stories.move, stories.count, stories.hide):
        found: dict[str, float] = {}
        told: list[int] | None = []
        while told is not None:
            cast = stories.Cast("Mia", "Tom", True, "baker", stock={"apple": 6}, places={"apron": "red box"})
            writer = Follower(random.Random(0), told=told)
            event(writer, cast)
            text = "".join(writer.pieces)
            assert text not in found
            found[text] = math.exp(writer.log_probability)
            open_ = [number for number, (chosen, of) in enumerate(writer.taken) if chosen + 1 < of]
            told = (
                [chosen for chosen, _ in writer.taken[: open_[-1]]] + [writer.taken[open_[-1]][0] + 1]
                if open_
                else None
            )
        assert math.fsum(found.values()) == pytest.approx(1.0, abs=1e-9)
        assert len(found) > 20


def test_a_slip_is_found_where_it_is() -> None:
    text = next(text for text, _ in stories.batch(0, 0, 50) if "bought" in text and "and kept" in text)
    place = text.index("and kept ") + len("and kept ")
    wrong = text[:place] + "twelve" + text[text.index(".", place) :]
    with pytest.raises(stories.Departure) as found:
        stories.read(wrong)
    assert place <= found.value.place <= place + 1  # "two" and "twelve" begin alike
    assert stories.understood(wrong) == found.value.place / len(wrong)
    assert stories.understood("") == 0.0
    with pytest.raises(stories.Departure):
        stories.read(text + " More.")


def test_choices_that_a_reader_could_confuse_are_refused() -> None:
    with pytest.raises(ValueError, match="'car' begins 'cart'"):
        stories.even(("car", "cart"))


def test_standard_errors_are_those_of_a_mean() -> None:
    held_out = measure.HeldOut([[0] * 11] * 4, bytes=80, truth=[4.0, 5.0, 6.0, 7.0])
    figures = measure.summary(held_out, [6.0, 7.0, 8.0, 9.0])
    assert figures["nats_per_token"] == pytest.approx(0.75)
    assert figures["standard_error"] == pytest.approx(torch.tensor([0.6, 0.7, 0.8, 0.9]).std().item() / 2)
    assert figures["bits_per_byte"] == pytest.approx(30 / math.log(2) / 80)
    assert (figures["above_truth"], figures["above_truth_error"]) == pytest.approx((0.2, 0.0))


def test_rows_hold_whole_stories() -> None:
    class Words:
        eos_token_id = 0

        def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
            return {"input_ids": [len(word) for word in text.split()]}

    drawn = stories.batch(0, 0, 60)
    rows = measure.rows_of_stories(Words(), drawn, seq_length=300, rows=3)
    assert rows.truth is not None
    assert all(row[0] == row[-1] == 0 and len(row) <= 300 for row in rows.rows)
    counts = [row.count(0) - 1 for row in rows.rows]
    used = [story for story in drawn if len(story[0].split()) < 299][: sum(counts)]
    assert sum(rows.truth) == pytest.approx(-stories.total(used))
    assert rows.bytes == stories.sizes(used)
    with pytest.raises(ValueError, match="60 stories fill only"):
        measure.rows_of_stories(Words(), drawn, seq_length=300, rows=1000)


def test_the_page_says_what_was_found() -> None:
    figures = {"nats_per_token": 1.25, "standard_error": 0.01, "bits_per_byte": 0.5, "above_truth": 0.75}
    figures["above_truth_error"] = 0.02
    way = {"name": "in order", "whole_stories": 0.5, "understood": 0.875, "ended": 1.0, "seconds": 1.0, "text": "Mia."}
    run = {
        "parameters": 3_000_000,
        "training_tokens": 2_000_000,
        "seconds": 61.0,
        "tokens_per_s": 9e4,
        "samples": [way],
    }
    found = {
        "corpus": {"documents": 5, "bytes": 999},
        "held_out": {"rows": 2, "tokens": 7, "left_out": 0.25},
        "truth": figures,
        "models": {"autoregressive": run | figures, "diffusion": run | figures},
    }
    sizes = {"layers": 2, "hidden": 8, "global_batch_size": 4, "seq_length": 16, "bound_samples": 32}
    page = quality_page.page(
        {
            "preset": "cpu",
            "sizes": sizes,
            "machine": quality_page.machine(),
            "seconds": 90.0,
            "texts": {"stories": found},
        }
    )
    assert "| diffusion (upper bound) | 1.2500 ± 0.0100 | 0.5000 | 0.7500 ± 0.0200 | 2.0 M | 90k | 61 |" in page
    assert "| diffusion | in order | 50% | 88% | 100% | 1.0 |" in page
    assert "{" not in page
