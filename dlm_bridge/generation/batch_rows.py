"""Rows of a continuous batch: requests, their state while they run, and what is reported of them."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from dlm_bridge.errors import DlmBridgeError
from dlm_bridge.generation.canvas import Canvas, Columns, StopCondition
from dlm_bridge.generation.commit_rules import DenoisingRule
from dlm_bridge.generation.constraints import Constraints
from dlm_bridge.generation.rolling_canvas import RollingCanvas
from dlm_bridge.generation.samplers import SamplerSpec
from dlm_bridge.generation.settings import GenerationSettings


@dataclass(frozen=True)
class RowRequest:
    """A row to sample.

    Args:
        name: identifies the row; unique among those that are waiting or running.
        prompt: token ids.
        gen_length: new tokens; None: as the batch's settings say.
        seed: of the row's noise; None: from torch's global random state.
    """

    name: Hashable
    prompt: Sequence[int]
    gen_length: int | None = None
    seed: int | None = None


@dataclass(frozen=True)
class RowTokens:
    """New tokens of a row that are final, as is everything on their left. One after the other they are the text."""

    name: Any
    first: int  # index of the first of them among the row's new tokens
    tokens: tuple[int, ...]


@dataclass(frozen=True)
class RowCommits:
    """New tokens that a step of a row committed or changed, anywhere in it, behind its end as well."""

    name: Any
    step: int  # forward passes that the row has taken part in
    places: tuple[int, ...]  # indices among the row's new tokens
    tokens: tuple[int, ...]


@dataclass(frozen=True)
class RowEnded:
    """A row has left the batch.

    Args:
        tokens: its new tokens, up to and including the one that ends it.
        finish_reason: "stop": an end-of-sequence token or a stop string, or fewer than `gen_length` tokens of a
            sampler that chooses the length; "length": `gen_length` tokens.
        forwards: forward passes that the row took part in.
    """

    name: Any
    tokens: tuple[int, ...]
    finish_reason: Literal["stop", "length"]
    forwards: int


@dataclass(frozen=True)
class RowFailed:
    """A row has left the batch without a result: a constraint leaves it no token, or the model's logits are NaN."""

    name: Any
    error: DlmBridgeError


Event = RowTokens | RowCommits | RowEnded | RowFailed


@dataclass(frozen=True)
class RowPlan:
    """How rows of one length are sampled, by a rule under their constraints. Rows of equal `key` share a batch."""

    settings: GenerationSettings
    spec: SamplerSpec
    constraints: Constraints
    rule: DenoisingRule
    key: Any


@dataclass
class RunningRow:
    """A row of the batch. `tokens` are the new tokens as last reported, `sent` how many of them are final."""

    request: RowRequest
    plan: RowPlan
    gen_length: int
    tokens: list[int]
    sent: int = 0
    forwards: int = 0


class RowReporter:
    """Reports a run's steps and ends to the list `events`, of the rows in `running`.

    Args:
        stop: on the CPU.
        stream: whether steps are reported, not only ends.
    """

    def __init__(
        self, running: dict[Hashable, RunningRow], events: list[Event], stop: StopCondition, stream: bool
    ) -> None:
        self._running = running
        self._events = events
        self._stop = stop
        self._stream = stream

    def step(
        self,
        canvas: Canvas,
        rows: list[int],
        columns: Columns,
        logits_ANV: torch.Tensor,
        forwards: int,
        *,
        final: bool,
    ) -> None:
        """After a step of these rows; `final`: no committed token can change any more."""
        for row in rows:
            if canvas.names[row] in self._running:
                self._running[canvas.names[row]].forwards += 1
        if self._stream:
            self._report_rows(canvas, rows, canvas.width if final else 0)

    def block(self, canvas: Canvas, block: slice, rows: list[int]) -> None:
        """After these rows have completed the block."""
        if self._stream:
            self._report_rows(canvas, rows, block.stop)

    def ended(self, canvas: RollingCanvas) -> None:
        """After rows have left the canvas."""
        for name, tokens in canvas.ended:
            row = self._running.pop(name)
            end = self._end_of(tokens)
            kept = tokens if end is None else tokens[:end]
            if canvas.mask_token_id in kept:
                error = DlmBridgeError(f"row {name!r}: the model's logits are NaN: look for NaN in its weights")
                self._events.append(RowFailed(name, error))
                continue
            if self._stream:
                self._report(row, tokens, len(tokens))
            short = len(tokens) < row.gen_length  # of a sampler whose rows grow and shrink
            reason: Literal["stop", "length"] = "length" if end is None and not short else "stop"
            self._events.append(RowEnded(name, tuple(kept), reason, row.forwards))
        canvas.ended.clear()

    def _report_rows(self, canvas: Canvas, rows: list[int], stop: int) -> None:
        tokens = canvas.tokens.tolist()
        for row in rows:
            state = self._running.get(canvas.names[row])
            if state is not None:
                start = canvas.starts[row]
                final = min(max(stop - start, state.sent), state.gen_length)
                self._report(state, tokens[row][start : start + state.gen_length], final)

    def _report(self, row: RunningRow, tokens: list[int], final: int) -> None:
        """Report what has changed in a row, of whose new tokens the first `final` cannot change any more."""
        mask = row.plan.settings.limits.masked_token_id
        tokens = tokens + [mask] * (row.gen_length - len(tokens))
        places = [place for place, (a, b) in enumerate(zip(row.tokens, tokens, strict=True)) if a != b and b != mask]
        if places:
            changed = tuple(tokens[place] for place in places)
            self._events.append(RowCommits(row.request.name, row.forwards, tuple(places), changed))
        row.tokens = tokens
        ready = next((place for place in range(final) if tokens[place] == mask), final)
        if ready <= row.sent:
            return
        end = self._end_of(tokens[:ready])
        ready = ready if end is None else end
        if ready > row.sent:
            self._events.append(RowTokens(row.request.name, row.sent, tuple(tokens[row.sent : ready])))
            row.sent = ready

    def _end_of(self, tokens: list[int]) -> int | None:
        """The number of tokens up to and including the one that ends the row; None: it does not end."""
        if not self._stop.active or not tokens:
            return None
        row_1N = torch.tensor([tokens])
        marks_1N = self._stop.marks(row_1N, torch.ones_like(row_1N, dtype=torch.bool), mask_token_id=-1)
        return int(marks_1N.int().argmax()) + 1 if bool(marks_1N.any()) else None
