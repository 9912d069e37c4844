"""Events of the rows that an engine runs: changed tokens, final tokens, and ends."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
from torch.nn.functional import pad

from dlm_bridge.errors import NonFiniteError, RowError
from dlm_bridge.generation.canvas import Canvas, Columns, HostCopy, to_device
from dlm_bridge.generation.request import MASK, Committed, Ended, Event, Extended, Failed, Request
from dlm_bridge.generation.stopping import StopCondition

UNCHANGED = -(2**31)  # in place of a token id
MASKS_LEFT = "the sampler's rule left masks in the text: it must plan more steps"


@dataclass
class RunningRequest:
    """State of a running request.

    Attributes:
        given: number of positions that are part of the prompt.
        tokens: tokens by position, as last reported.
        sent: number of tokens reported as final.
        forwards: number of forward passes that the request has taken part in.
    """

    request: Request
    given: int
    tokens: list[int]
    sent: int = 0
    forwards: int = 0

    @classmethod
    def begin(cls, request: Request, gen_length: int, *, infill: bool, grows: bool) -> RunningRequest:
        """Initial state of a request. `infill`, `grows`: see `Canvas`."""
        if not infill:
            return cls(request, 0, [MASK] * gen_length)
        holes = sum(token == MASK for token in request.prompt)
        new = gen_length - holes if grows else gen_length
        # Tokens in the middle of a text that grows and shrinks do not end it.
        given = len(request.prompt) + new if grows else len(request.prompt)
        return cls(request, given, [*request.prompt, *[MASK] * new])

    def end(self, stop: StopCondition, tokens: Sequence[int]) -> int | None:
        """Number of these tokens up to and including the one that ends the row; None if none does."""
        end = stop.end_of(tokens[self.given :])
        return None if end is None else self.given + end


class EventReporter:
    """Appends the events of a run's rows to the list `events`.

    The changes of a step are computed on the device and copied to the host asynchronously. On a GPU, a step is
    reported at the latest when the next one has been launched.

    Args:
        running: running rows by name; ended rows are removed.
        stop: stop condition of the run.
        stream: also report steps of rows whose request streams.
        record: report `canvas` and `steps` with ends.
    """

    def __init__(
        self,
        running: dict[Hashable, RunningRequest],
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
        self._rows: list[RunningRequest | None] = []  # [B], rows of the tensors below
        self._seen = torch.empty(0, 0, dtype=torch.long)  # [B, G], tokens after the last step
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
        """Report a step of these rows. `final`: committed tokens do not change any more."""
        running = [self._running.get(name) for name in canvas.names]
        for number in rows:
            row = running[number]
            if row is not None:
                row.forwards += 1
        live = self._stream and any(row is not None and row.request.stream for row in running)
        if not (live or self._record):
            return
        now_BG = canvas.texts()
        self._align(running, now_BG)
        changed_BG = now_BG != self._seen
        self._seen = now_BG
        if self._record:
            steps_B = to_device([0 if row is None else row.forwards for row in running], now_BG.device)
            self._steps = torch.where(changed_BG & (now_BG != MASK), steps_B[:, None], self._steps)
        if live:
            shown_BG = changed_BG & ~canvas.non_finite[:, None]  # not of failing rows
            copy = HostCopy(torch.where(shown_BG, now_BG, UNCHANGED))
            self._report_pending()
            steps = [0 if row is None else row.forwards for row in running]
            finals = [len(row.tokens) if final and row is not None else 0 for row in running]
            self._pending.append(_Changes(copy, running, steps, finals))
            self.poll()

    def poll(self) -> None:
        """Report changes that have arrived from the device."""
        while self._pending and self._pending[0].arrived:
            self._report_changes(self._pending.popleft())

    def block(self, canvas: Canvas, rows: list[int]) -> None:
        """Report that these rows have completed the block."""
        if self._stream:
            names, firsts = canvas.names, canvas.firsts
            running = [self._running.get(names[row]) for row in rows]
            self._pending.append(_Changes(None, running, [], [canvas.block.stop - firsts[row] for row in rows]))
            self.poll()

    def ended(self, canvas: Canvas) -> None:
        """Report the rows that have left the canvas."""
        if not canvas.ended:
            return
        self._report_pending()
        rows = [self._running.pop(name) for name, _ in canvas.ended]
        steps = self._recorded(rows) if self._record else [[]] * len(rows)
        for row, (name, tokens), own_steps in zip(rows, canvas.ended, steps, strict=True):
            mass = canvas.log_masses.pop(name, None) if row.request.constraint is not None else None
            if tokens is None:
                self._events.append(Failed(name, canvas.errors.get(name) or NonFiniteError(rows=[name])))
                continue
            end = row.end(self._stop, tokens)
            kept = tokens if end is None else tokens[:end]
            if MASK in kept:
                self._events.append(Failed(name, RowError(MASKS_LEFT, [name])))
                continue
            whole = tokens + [MASK] * (len(row.tokens) - len(tokens))
            if self._stream and row.request.stream:
                places = [place for place, (a, b) in enumerate(zip(row.tokens, whole, strict=True)) if a != b]
                self._report(row, places, [whole[place] for place in places], row.forwards)
                self._report_text(row, len(tokens))
            short = len(tokens) < len(whole)  # the sampler chose the length
            reason: Literal["stop", "length"] = "length" if end is None and not short else "stop"
            shown = tuple(whole) if self._record else ()
            self._events.append(Ended(name, tuple(kept), reason, row.forwards, shown, tuple(own_steps), mass))
        canvas.ended.clear()
        canvas.log_masses.clear()

    def _align(self, rows: list[RunningRequest | None], now_BG: torch.Tensor) -> None:
        """Make the tensors match these rows. Entering rows start with their given tokens."""
        longest = now_BG.shape[1]
        same = len(rows) == len(self._rows) and all(a is b for a, b in zip(rows, self._rows, strict=True))
        if same and self._seen.shape[1] == longest:
            return
        known = {id(row): place for place, row in enumerate(self._rows) if row is not None}
        index_B = to_device([known.get(id(row), len(self._rows)) for row in rows], now_BG.device)
        more = (0, longest - self._seen.shape[1], 0, 1)  # columns, and one row for entering ones
        self._seen = pad(self._seen.to(index_B.device), more, value=MASK)[index_B]
        self._steps = pad(self._steps.to(index_B.device), more)[index_B]
        for number, row in enumerate(rows):
            if row is not None and row.given and id(row) not in known:
                self._seen[number, : len(row.tokens)] = to_device(row.tokens, now_BG.device)
        self._rows = rows

    def _recorded(self, rows: Sequence[RunningRequest]) -> list[list[int]]:
        """Recorded steps of rows that have left, by position."""
        places = {id(row): place for place, row in enumerate(self._rows)}
        known = [row for row in rows if id(row) in places]  # others have not taken a step
        index_A = to_device([places[id(row)] for row in known], self._steps.device)
        steps = dict(zip(map(id, known), self._steps[index_A].tolist(), strict=True))
        return [steps.get(id(row), [0] * len(row.tokens))[: len(row.tokens)] for row in rows]

    def _report_pending(self) -> None:
        while self._pending:
            self._report_changes(self._pending.popleft())

    def _report_changes(self, changes: _Changes) -> None:
        numbers = list(range(len(changes.rows)))
        tokens_BG = None if changes.copy is None else changes.copy.values()
        if tokens_BG is not None:
            numbers = np.flatnonzero((tokens_BG != UNCHANGED).any(axis=1)).tolist()
        for number in numbers:
            row = changes.rows[number]
            if row is None or self._running.get(row.request.name) is not row or not row.request.stream:
                continue
            if tokens_BG is not None:
                places = np.flatnonzero(tokens_BG[number] != UNCHANGED)
                self._report(row, places.tolist(), tokens_BG[number, places].tolist(), changes.steps[number])
            self._report_text(row, min(changes.finals[number], len(row.tokens)))

    def _report(self, row: RunningRequest, places: list[int], tokens: list[int], step: int) -> None:
        """Report that a step changed the row's tokens at these positions."""
        for place, token in zip(places, tokens, strict=True):
            row.tokens[place] = token
        committed = [place for place in places if row.tokens[place] != MASK]
        if committed:
            changed = tuple(row.tokens[place] for place in committed)
            self._events.append(Committed(row.request.name, step, tuple(committed), changed))

    def _report_text(self, row: RunningRequest, final: int) -> None:
        """Report the committed ones among the first `final` tokens, which do not change any more."""
        ready = row.sent
        while ready < final and row.tokens[ready] != MASK:
            ready += 1
        if ready == row.sent:
            return
        end = row.end(self._stop, row.tokens[:ready])
        ready = ready if end is None else end
        if ready > row.sent:
            self._events.append(Extended(row.request.name, row.sent, tuple(row.tokens[row.sent : ready])))
            row.sent = ready


@dataclass(frozen=True)
class _Changes:
    """Changes of a step, or of the end of a block.

    Args:
        copy: [B, G] tokens, or `UNCHANGED`; None: no changes.
        rows: [B], rows of the batch.
        steps: [B], number of forward passes that each row has taken part in.
        finals: [B], number of positions at the start of each row that do not change any more.
    """

    copy: HostCopy | None
    rows: list[RunningRequest | None]
    steps: list[int]
    finals: list[int] = field(default_factory=list)

    @property
    def arrived(self) -> bool:
        return self.copy is None or self.copy.arrived
