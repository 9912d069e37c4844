"""Step callbacks and streamers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from transformers.generation.streamers import TextStreamer

from dlm_bridge.errors import DlmBridgeError
from dlm_bridge.generation.canvas import Canvas, Columns
from dlm_bridge.generation.token_sampling import gather_tokens


@dataclass(frozen=True)
class DenoisingStep:
    """State of the whole batch after one forward pass, in the columns of `generate`'s output.

    Args:
        forwards: forward passes of the model so far.
        rows: rows of the batch that took part in this step.
        tokens: [B, P + gen_length] token ids, prompts padded on the left, the mask token where nothing is committed.
            Tokens behind a row's end are not part of the output. (A sampler without mask tokens shows its noise.)
        committed: [B, P + gen_length] bool, True where this step committed or changed a token; of samplers that insert
            and delete tokens, also where it moved one.
        confidence: [B, P + gen_length] float32, the model's probability of the token in the step that committed it, of
            the logits after guidance and constraints, before temperature and filters. NaN at masks and in prompts.
    """

    forwards: int
    rows: tuple[int, ...]
    tokens: torch.Tensor
    committed: torch.Tensor
    confidence: torch.Tensor


class StepCallback(Protocol):
    """An object that `generate` calls after every forward pass, passed as `streamer`."""

    def on_step(self, step: DenoisingStep) -> None:
        """Called after every forward pass."""


class StepObserver(Protocol):
    """What a sampler's rule reports its steps to."""

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
        """After a forward pass that predicted these columns, and after the commit; `final`: no committed token can
        change any more."""

    def block(self, canvas: Canvas, block: slice, rows: list[int]) -> None:
        """After these rows have completed the block, before any of them leaves the canvas."""


class CallbackHandler:
    """Calls the step callbacks and streamers of one call of `generate`.

    A streamer has `put` and `end`, as in transformers. It gets the prompts [B, P] (of prompts to fill, the columns
    before the first mask), then each run of new tokens as soon as no later step can change it: [N] of a single row,
    [B, N] of several, as far as every row is committed. A row that has ended is padding.
    """

    def __init__(self, streamer: Any, *, keep_history: bool, batch: int) -> None:
        """`streamer` is a step callback, a streamer, several of them in a list or tuple, or None.

        Raises:
            DlmBridgeError: an object that is neither, or a text streamer for more than one row.
        """
        observers = list(streamer) if isinstance(streamer, (list, tuple)) else [streamer] if streamer else []
        self._callbacks: list[StepCallback] = [one for one in observers if hasattr(one, "on_step")]
        self._streamers = [one for one in observers if hasattr(one, "put") and hasattr(one, "end")]
        for one in observers:
            if one not in self._callbacks and one not in self._streamers:
                raise DlmBridgeError(
                    f"streamer {type(one).__name__} has neither the methods put and end nor on_step: nothing to call"
                )
        _refuse_text_streamers(self._streamers, batch)
        self._keep_history = keep_history
        self._previous = self._confidence = torch.empty(0)
        self._sent = 0  # columns of the output that the streamers have got
        self.history: list[DenoisingStep] = []

    def begin(self, canvas: Canvas) -> None:
        """Before the first step."""
        self._previous = canvas.snapshot()
        self._confidence = torch.full(self._previous.shape, torch.nan, device=self._previous.device)
        self._sent = canvas.first_open
        self._send(self._previous[:, : self._sent])

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
        """After a forward pass that predicted these columns, and after the commit; `final`: no committed token can
        change any more."""
        if self._callbacks:
            _refuse_failed(canvas)
        if self._callbacks or self._keep_history:
            tokens = canvas.snapshot()
            names = tuple(canvas.names[row] for row in rows)
            masked = tokens == canvas.mask_token_id  # perhaps again: a rule may take a token back
            committed = tokens.ne(self._previous) & ~masked
            if canvas.grows:
                committed &= ~canvas.behind_rows()
            probabilities_AN = gather_tokens(
                logits_ANV.softmax(dim=-1, dtype=torch.float32), canvas.take(rows, columns)
            )
            now = canvas.in_output(rows, columns, probabilities_AN)
            self._confidence = torch.where(committed, now, self._confidence).masked_fill(masked, torch.nan)
            step = DenoisingStep(forwards, names, tokens, committed, self._confidence)
            self._previous = tokens
            for callback in self._callbacks:
                callback.on_step(step)
            if self._keep_history:
                self.history.append(step)
        if final:
            self._stream(canvas, canvas.width)

    def block(self, canvas: Canvas, block: slice, rows: list[int]) -> None:
        """After these rows have completed the block, before any of them leaves the canvas."""
        self._stream(canvas, block.stop)

    def end(self, sequences: torch.Tensor) -> None:
        """With the result of the call."""
        if self._sent < sequences.shape[1]:
            self._send_run(sequences[:, self._sent :])
        for streamer in self._streamers:
            streamer.end()

    def _stream(self, canvas: Canvas, stop: int) -> None:
        """Send the columns that are committed in every row, up to `stop` on the canvas."""
        if not self._streamers:
            return
        _refuse_failed(canvas)
        tokens_BS, counts = canvas.committed(stop)
        count = min(counts)
        if count > self._sent:
            self._send_run(tokens_BS[:, self._sent : count])
            self._sent = count

    def _send_run(self, tokens_BN: torch.Tensor) -> None:
        self._send(tokens_BN[0] if len(tokens_BN) == 1 else tokens_BN)

    def _send(self, tokens: torch.Tensor) -> None:
        for streamer in self._streamers:
            streamer.put(tokens.cpu())


def _refuse_failed(canvas: Canvas) -> None:
    """Raise NonFiniteError before tokens of a row that fails are shown, for which the host waits anyway."""
    canvas.read(canvas.non_finite)
    canvas.refuse_failed()


def _refuse_text_streamers(streams: Sequence[Any], batch: int) -> None:
    for stream in streams:
        if batch > 1 and isinstance(stream, TextStreamer):
            raise DlmBridgeError(
                f"{type(stream).__name__} prints one row, there are {batch}: generate them one by one, or pass a "
                "streamer whose put takes [batch, tokens]"
            )
