"""Rows of a continuous batch: requests, their state while they run, and what is reported of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch.nn.functional import pad

from dlm_bridge.errors import DlmBridgeError, NonFiniteError
from dlm_bridge.generation.canvas import Canvas, Columns, HostCopy
from dlm_bridge.generation.commit_rules import MASKS_LEFT, DenoisingRule
from dlm_bridge.generation.constraints import Constraints
from dlm_bridge.generation.rolling_canvas import RollingCanvas
from dlm_bridge.generation.rows import StopCondition, to_device
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
        live: report its tokens as they come, in a batch that streams.
    """

    name: Hashable
    prompt: Sequence[int]
    gen_length: int | None = None
    seed: int | None = None
    live: bool = True


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
        written: of a batch that records, all of its new tokens, also those behind the end; the mask token where
            nothing is committed.
        steps: by token of `written`, which of the row's forward passes committed it, counted from 1, or changed it
            last; 0: none did.
    """

    name: Any
    tokens: tuple[int, ...]
    finish_reason: Literal["stop", "length"]
    forwards: int
    written: tuple[int, ...] = ()
    steps: tuple[int, ...] = ()


@dataclass(frozen=True)
class RowFailed:
    """A row has left the batch without a result: a constraint leaves it no token, its rule leaves masks, or its
    logits are NaN."""

    name: Any
    error: DlmBridgeError


Event = RowTokens | RowCommits | RowEnded | RowFailed


@dataclass(frozen=True)
class RowPlan:
    """How rows of one length are sampled, by a rule under their constraints. Rows of equal `key` share a batch."""

    settings: GenerationSettings
    spec: SamplerSpec
    constraints: Constraints | None
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

    What a step has changed is found on the device, and copied to the host without waiting for it: on a GPU a step is
    reported at the latest when the next one has been launched.

    Args:
        stop: of the batch.
        stream: whether steps of live rows are reported, not only ends.
        record: whether ends have `written` and `steps`.
    """

    def __init__(
        self,
        running: dict[Hashable, RunningRow],
        events: list[Event],
        stop: StopCondition,
        *,
        stream: bool,
        record: bool,
    ) -> None:
        self._running = running
        self._events = events
        self._stop = stop
        self._stream = stream
        self._record = record
        self._rows: list[RunningRow | None] = []  # B, of the tensors below
        self._seen = torch.empty(0, 0, dtype=torch.long)  # [B, G], new tokens after the last step
        self._steps = torch.empty(0, 0, dtype=torch.int32)  # [B, G], the step that changed each, if recorded
        self._pending: deque[_Changes] = deque()

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
        assert isinstance(canvas, RollingCanvas)
        running = [self._running.get(name) for name in canvas.names]
        for number in rows:
            row = running[number]
            if row is not None:
                row.forwards += 1
        live = self._stream and any(row is not None and row.request.live for row in running)
        if not (live or self._record):
            return
        self._align(running, canvas)
        now_BG = canvas.written()
        changed_BG = now_BG != self._seen
        self._seen = now_BG
        if self._record:
            steps_B = to_device([0 if row is None else row.forwards for row in running], now_BG.device)
            self._steps = torch.where(changed_BG & (now_BG != canvas.mask_token_id), steps_B[:, None], self._steps)
        if live:
            shown_BG = changed_BG & ~canvas.non_finite[:, None]  # no token of a row that fails
            copy = HostCopy(torch.where(shown_BG, now_BG, UNCHANGED))
            self._report_pending()
            steps = [0 if row is None else row.forwards for row in running]
            finals = [row.gen_length if final and row is not None else 0 for row in running]
            self._pending.append(_Changes(copy, running, steps, finals))
            self.poll()

    def poll(self) -> None:
        """Report what has arrived from the device."""
        while self._pending and self._pending[0].arrived:
            self._report_changes(self._pending.popleft())

    def block(self, canvas: Canvas, block: slice, rows: list[int]) -> None:
        """After these rows have completed the block."""
        if self._stream:
            running = [self._running.get(canvas.names[row]) for row in rows]
            finals = [block.stop - canvas.starts[row] for row in rows]
            self._pending.append(_Changes(None, running, [], finals))
            self.poll()

    def ended(self, canvas: RollingCanvas) -> None:
        """After rows have left the canvas."""
        if not canvas.ended:
            return
        self._report_pending()
        rows = [self._running.pop(name) for name, _ in canvas.ended]
        steps = self._recorded(rows) if self._record else [[]] * len(rows)
        for row, (name, tokens), own_steps in zip(rows, canvas.ended, steps, strict=True):
            if tokens is None:
                self._events.append(RowFailed(name, NonFiniteError(rows=[name])))
                continue
            end = self._stop.end_of(tokens)
            kept = tokens if end is None else tokens[:end]
            if canvas.mask_token_id in kept:
                self._events.append(RowFailed(name, DlmBridgeError(f"row {name!r}: {MASKS_LEFT}")))
                continue
            whole = tokens + [canvas.mask_token_id] * (row.gen_length - len(tokens))
            if self._stream and row.request.live:
                places = [place for place, (a, b) in enumerate(zip(row.tokens, whole, strict=True)) if a != b]
                self._report(row, places, [whole[place] for place in places], row.forwards)
                self._report_text(row, len(tokens))
            short = len(tokens) < row.gen_length  # of a sampler whose rows grow and shrink
            reason: Literal["stop", "length"] = "length" if end is None and not short else "stop"
            written = tuple(whole) if self._record else ()
            self._events.append(RowEnded(name, tuple(kept), reason, row.forwards, written, tuple(own_steps)))
        canvas.ended.clear()

    def _align(self, rows: list[RunningRow | None], canvas: RollingCanvas) -> None:
        """Let the tensors have these rows; of those that have entered, masks."""
        longest = max(canvas.gen_lengths)
        same = len(rows) == len(self._rows) and all(a is b for a, b in zip(rows, self._rows, strict=True))
        if same and self._seen.shape[1] == longest:
            return
        places = {id(row): place for place, row in enumerate(self._rows) if row is not None}
        index_B = to_device([places.get(id(row), len(self._rows)) for row in rows], canvas.tokens.device)
        more = (0, longest - self._seen.shape[1], 0, 1)  # columns and a row of masks
        self._seen = pad(self._seen.to(index_B.device), more, value=canvas.mask_token_id)[index_B]
        self._steps = pad(self._steps.to(index_B.device), more)[index_B]
        self._rows = rows

    def _recorded(self, rows: Sequence[RunningRow]) -> list[list[int]]:
        """The recorded steps of rows that have left, of each of their new tokens."""
        places = {id(row): place for place, row in enumerate(self._rows)}
        known = [row for row in rows if id(row) in places]  # the others have taken no step
        index_A = to_device([places[id(row)] for row in known], self._steps.device)
        steps = dict(zip(map(id, known), self._steps[index_A].tolist(), strict=True))
        return [steps.get(id(row), [0] * row.gen_length)[: row.gen_length] for row in rows]

    def _report_pending(self) -> None:
        while self._pending:
            self._report_changes(self._pending.popleft())

    def _report_changes(self, changes: _Changes) -> None:
        """Report these changes, those of earlier steps first."""
        numbers = list(range(len(changes.rows)))
        tokens_BG = None if changes.copy is None else changes.copy.values()
        if tokens_BG is not None:
            numbers = np.flatnonzero((tokens_BG != UNCHANGED).any(axis=1)).tolist()
        for number in numbers:
            row = changes.rows[number]
            if row is None or self._running.get(row.request.name) is not row or not row.request.live:
                continue
            if tokens_BG is not None:
                places = np.flatnonzero(tokens_BG[number] != UNCHANGED)
                self._report(row, places.tolist(), tokens_BG[number, places].tolist(), changes.steps[number])
            self._report_text(row, min(changes.finals[number], row.gen_length))

    def _report(self, row: RunningRow, places: list[int], tokens: list[int], step: int) -> None:
        """Report that a step changed the row's new tokens at these places to these."""
        mask = row.plan.settings.limits.masked_token_id
        for place, token in zip(places, tokens, strict=True):
            row.tokens[place] = token
        committed = [place for place in places if row.tokens[place] != mask]
        if committed:
            changed = tuple(row.tokens[place] for place in committed)
            self._events.append(RowCommits(row.request.name, step, tuple(committed), changed))

    def _report_text(self, row: RunningRow, final: int) -> None:
        """Report new tokens of the row that are final: the first `final` cannot change any more."""
        mask = row.plan.settings.limits.masked_token_id
        ready = row.sent
        while ready < final and row.tokens[ready] != mask:
            ready += 1
        if ready == row.sent:
            return
        end = self._stop.end_of(row.tokens[:ready])
        ready = ready if end is None else end
        if ready > row.sent:
            self._events.append(RowTokens(row.request.name, row.sent, tuple(row.tokens[row.sent : ready])))
            row.sent = ready


UNCHANGED = -(2**31)  # in the place of a token


@dataclass(frozen=True)
class _Changes:
    """What a step, or the end of a block, has changed in the rows of a canvas."""

    copy: HostCopy | None  # [B, G] new tokens, `UNCHANGED` where they are as before; None: all are
    rows: list[RunningRow | None]
    steps: list[int]  # by row, forward passes that it has taken part in
    finals: list[int]  # by row, how many of its first new tokens cannot change any more

    @property
    def arrived(self) -> bool:
        return self.copy is None or self.copy.arrived
