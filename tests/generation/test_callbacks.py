"""Watching: every step's snapshot, text that streams as it commits, and what the returned dict says."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from transformers import TextStreamer
from transformers.generation.streamers import BaseStreamer

from dlm_bridge.errors import SettingError
from dlm_bridge.generation import DenoisingStep, generate
from tests.generation.conftest import MASK as MODEL_MASK
from tests.generation.conftest import prompts
from tests.generation.standin import MASK, StandIn, family, ragged
from tests.generation.test_samplers import CASES, FAST, build
from tests.refusals import refused


class Watcher(BaseStreamer):
    """Writes down all that it is told."""

    def __init__(self) -> None:
        self.runs: list[torch.Tensor] = []
        self.steps: list[DenoisingStep] = []
        self.sent: list[int] = []  # columns that had been streamed when each step was told
        self.ended = 0

    def put(self, value: torch.Tensor) -> None:
        self.runs.append(value)

    def on_step(self, step: DenoisingStep) -> None:
        self.steps.append(step)
        self.sent.append(sum(run.shape[-1] for run in self.runs))

    def end(self) -> None:
        self.ended += 1


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("ends", [None, (3, 9, 20, 31)])
@pytest.mark.fast(*(f"None-{name}" for name in FAST))
def test_what_is_watched_is_what_happens(name: str, ends: tuple[int, ...] | None) -> None:
    model, arguments = build(name)
    _, ids, mask = ragged((5, 9, 2, 8))
    arguments |= {"attention_mask": mask, "eos_token_id": ends, "pad_token_id": 0, "seed": 3}
    watcher = Watcher()
    result = generate(model, ids, streamer=watcher, return_dict_in_generate=True, output_history=True, **arguments)
    assert torch.equal(result.sequences, generate(model, ids, **arguments))  # watching changes nothing
    assert watcher.ended == 1
    assert torch.equal(torch.cat(watcher.runs, dim=1), result.sequences)
    assert torch.equal(watcher.runs[0], result.sequences[:, :9])

    steps = watcher.steps
    assert list(map(id, result.history)) == list(map(id, steps))
    assert [step.forwards for step in steps] == list(range(1, result.forwards + 1))
    before = torch.full((4, 21), MASK)
    before[:, :9] = steps[0].tokens[:, :9]
    if name.startswith("rnd1") and ends:
        before[:, -1] = 0  # its padding is there from the start
    sure = torch.full((4, 21), torch.nan)
    for step, sent in zip(steps, watcher.sent, strict=True):
        assert torch.equal(step.committed, (step.tokens != before) & (step.tokens != MASK))
        assert not (step.committed & (step.tokens == MASK)).any()
        others = [row for row in range(4) if row not in step.rows]
        assert not step.committed[others].any()
        assert not step.committed[:, :9].any()
        assert ((step.confidence[step.committed] > 0) & (step.confidence[step.committed] <= 1)).all()
        sure = torch.where(step.committed, step.confidence, sure)  # what was committed before keeps its own
        sure[step.tokens == MASK] = torch.nan  # unless it is masked again
        torch.testing.assert_close(step.confidence, sure, rtol=0, atol=0, equal_nan=True)
        before = step.tokens
        # What has been streamed was committed, and never changes.
        width = min(sent, result.sequences.shape[1])
        shown, final = step.tokens[:, :width], result.sequences[:, :width]
        assert torch.equal(torch.where(final == 0, final, shown), final)
    width = result.sequences.shape[1]
    assert torch.equal(torch.where(result.sequences == 0, 0, before[:, :width]), result.sequences)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("lengths", [(5,), (5, 9)])
@pytest.mark.fast(*(f"lengths1-{name}" for name in FAST))
def test_what_is_streamed_ends_with_the_longest_row(name: str, lengths: tuple[int, ...]) -> None:
    """A row may have ended before its block is done; nothing behind that is streamed, or returned."""
    model, arguments = build(name)
    _, ids, mask = ragged(lengths)
    watcher, ends = Watcher(), tuple(range(3, MASK, 2))
    output = generate(
        model, ids, attention_mask=mask, streamer=watcher, eos_token_id=ends, pad_token_id=0, seed=3, **arguments
    )
    assert output.shape[1] < ids.shape[1] + arguments["gen_length"]
    assert torch.equal(torch.cat([run.reshape(len(ids), -1) for run in watcher.runs], dim=1), output)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_confidence_is_the_model_s_own(model: Any, temperature: float) -> None:
    settings = {"gen_length": 12, "block_length": 4, "steps": 6, "eos_token_id": None, "temperature": temperature}
    result = model.generate(prompts(2, 5), **settings, top_k=3, return_dict_in_generate=True, output_history=True)
    before = torch.cat([prompts(2, 5), torch.full((2, 12), MODEL_MASK)], dim=1)
    for step in result.history:
        probabilities = model(before).logits.softmax(-1).gather(-1, step.tokens[..., None])[..., 0]
        torch.testing.assert_close(step.confidence[step.committed], probabilities[step.committed])
        before = step.tokens
    assert result.history[-1].confidence[:, :5].isnan().all()
    assert not result.history[-1].confidence[:, 5:].isnan().any()


def test_blocks_are_streamed_as_they_commit(model: Any) -> None:
    watcher = Watcher()
    output = model.generate(prompts(1, 5), streamer=watcher, gen_length=32, block_length=8, steps=8, eos_token_id=None)
    assert all(run.dim() == 1 for run in watcher.runs[1:])  # as transformers' streamers take a single row
    assert torch.equal(torch.cat([watcher.runs[0][0], *watcher.runs[1:]]), output[0])
    # Two steps commit a block; the one that completes it makes its tokens final, of later blocks none.
    for number, sent in enumerate(watcher.sent):
        assert 5 + number // 2 * 8 <= sent < 5 + (number // 2 + 1) * 8
    assert len(watcher.steps) == 8


@pytest.mark.extension("extra_samplers")
def test_what_may_be_edited_is_not_streamed() -> None:
    model, arguments = build("llada2.1")
    watcher = Watcher()
    generate(model, torch.tensor([[1, 2, 3]]), streamer=watcher, eos_token_id=None, seed=1, **arguments)
    final = torch.cat([watcher.runs[0][0], *watcher.runs[1:]])
    changed = [a.tokens != b.tokens for a, b in pairwise(watcher.steps)]
    assert any(
        ((a.tokens != MASK) & c).any() for a, c in zip(watcher.steps, changed, strict=False)
    )  # edits there were
    for step, sent in zip(watcher.steps, watcher.sent, strict=True):
        assert torch.equal(step.tokens[0, :sent], final[:sent])


def test_tokens_per_forward_counts_what_rows_kept() -> None:
    table = torch.zeros(12, 4)
    table[:, 0] = 1.0
    table[5, 1] = 2.0
    from tests.generation.scripted import Scripted

    result = generate(
        Scripted(table), torch.zeros(3, 0, dtype=torch.long), gen_length=12, block_length=4, steps=6, eos_token_id=1,
        return_dict_in_generate=True,
    )  # fmt: skip
    # Two blocks of two steps, then every row has ended: six tokens in four forwards.
    assert (result.forwards, result.tokens_per_forward) == (4, 1.5)
    assert result.time > 0
    assert result.history is None


class _Tokenizer:
    def decode(self, tokens: list[int], **kwargs: Any) -> str:
        return "".join(f"{token} " for token in tokens)


def test_a_text_streamer_prints_one_row(model: Any, capsys: pytest.CaptureFixture[str]) -> None:
    ids = prompts(1, 5)
    streamer = TextStreamer(_Tokenizer(), skip_prompt=True)
    output = model.generate(ids, streamer=streamer, gen_length=16, block_length=4, eos_token_id=None)
    assert capsys.readouterr().out.split() == [str(token) for token in output[0, 5:].tolist()]
    with refused(SettingError, "streamer", "TextStreamer", "2"):
        model.generate(prompts(2, 5), streamer=streamer, gen_length=16)
    with refused(SettingError, "streamer", "on_step"):
        model.generate(ids, streamer=object())


def test_several_watch_at_once() -> None:
    model = StandIn(family(algorithm="llada"))
    first, second = Watcher(), Watcher()
    generate(model, torch.tensor([[1, 2]]), streamer=[first, second], gen_length=8, eos_token_id=None)
    assert len(first.steps) == len(second.steps) == 8
    assert first.ended == second.ended == 1
