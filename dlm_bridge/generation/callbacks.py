"""Step callbacks and streamers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers.generation.streamers import TextStreamer

from dlm_bridge.errors import DlmBridgeError
from dlm_bridge.generation.canvas import Canvas, Columns
from dlm_bridge.generation.token_sampling import gather_tokens


@dataclass(frozen=True)
class DenoisingStep:
    """The whole batch after one forward, as it is now; in the columns of `generate`'s output.

    Args:
        forwards: how many times the model has been run so far.
        rows: the numbers of the batch's rows that took part in this step.
        tokens: [B, P + gen_length] token ids, prompts padded on the left, the mask token where nothing is settled.
            What stands behind a row's end is no part of the output. (A sampler without mask tokens shows its noise.)
        settled: [B, P + gen_length] bool, True where this step settled a token or changed it.
        confidence: [B, P + gen_length] float32, the probability that the model itself gave to what stands there, in
            the step that settled it: of the logits after guidance and constraints, before temperature and filters.
            NaN where nothing was settled yet, and in prompts.
    """

    forwards: int
    rows: tuple[int, ...]
    tokens: torch.Tensor
    settled: torch.Tensor
    confidence: torch.Tensor


class CallbackHandler:
    """Tells the listeners of one call of `generate` what happens on its canvas.

    A listener may have `on_step(step)`, called after every forward with a `DenoisingStep`, or be a streamer as
    transformers' are, with `put` and `end`, or both. A streamer is given the prompts [B, P] (of prompts to fill,
    what stands before the first hole), then each run of new
    tokens as soon as no later step can change it: [N] of a single row, [B, N] of several, as far as every row has
    got. A row that has ended is padding.
    """

    def __init__(self, streamer: Any, *, keep_history: bool, batch: int) -> None:
        """`streamer` is a listener, several in a list or tuple, or None.

        Raises:
            DlmBridgeError: a listener that cannot listen, or a text streamer for more than one row.
        """
        listeners = list(streamer) if isinstance(streamer, (list, tuple)) else [streamer] if streamer else []
        self._on_step = [one for one in listeners if hasattr(one, "on_step")]
        self._streams = [one for one in listeners if hasattr(one, "put") and hasattr(one, "end")]
        for one in listeners:
            if one not in self._on_step and one not in self._streams:
                raise DlmBridgeError(
                    f"streamer {type(one).__name__} has neither the methods put and end nor on_step: nothing to call"
                )
        _refuse_text_streamers(self._streams, batch)
        self._keep_history = keep_history
        self._previous = self._confidence = torch.empty(0)
        self._sent = 0  # columns of the output that the streams have been given
        self.history: list[DenoisingStep] = []
        self.row_forwards = 0  # the sum over the forwards of how many rows took part
        self._no_numbers: torch.Tensor | None = None  # whether the first forward's logits held NaN

    @property
    def saw_no_numbers(self) -> bool:
        """Whether the first forward gave NaN, which no rule can choose by. Waits for the device."""
        return self._no_numbers is not None and bool(self._no_numbers)

    @property
    def listens(self) -> bool:
        return bool(self._on_step or self._streams or self._keep_history)

    def begin(self, canvas: Canvas) -> None:
        if self.listens:
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
        """After a forward that predicted these columns of these rows of the canvas, and after what it settled is
        there; `final` says that no settled token can change any more."""
        self.row_forwards += len(rows)
        if self._no_numbers is None:
            self._no_numbers = logits_ANV.amax(dim=-1).isnan().any()
        if not self.listens:
            return
        if self._on_step or self._keep_history:
            tokens = canvas.snapshot()
            names = tuple(canvas.names[row] for row in rows)
            settled = tokens.ne(self._previous)
            probabilities_AN = gather_tokens(
                logits_ANV.softmax(dim=-1, dtype=torch.float32), canvas.take(rows, columns)
            )
            now = canvas.in_output(rows, columns, probabilities_AN)
            self._confidence = torch.where(settled, now, self._confidence)
            step = DenoisingStep(forwards, names, tokens, settled, self._confidence)
            self._previous = tokens
            for listener in self._on_step:
                listener.on_step(step)
            if self._keep_history:
                self.history.append(step)
        if final:
            self._stream(canvas, canvas.width)

    def block(self, canvas: Canvas, block: slice) -> None:
        """After a block, before the rows that it completes leave the canvas: what it settled stays."""
        self._stream(canvas, block.stop)

    def end(self, sequences: torch.Tensor) -> None:
        """With the result of the call."""
        if self._sent < sequences.shape[1]:
            self._send_run(sequences[:, self._sent :])
        for stream in self._streams:
            stream.end()

    def _stream(self, canvas: Canvas, stop: int) -> None:
        """Send the columns that every row has settled, as far as those of the canvas before `stop`."""
        if not self._streams:
            return
        tokens_BS, counts = canvas.settled(stop)
        count = min(counts)
        if count > self._sent:
            self._send_run(tokens_BS[:, self._sent : count])
            self._sent = count

    def _send_run(self, tokens_BN: torch.Tensor) -> None:
        self._send(tokens_BN[0] if len(tokens_BN) == 1 else tokens_BN)

    def _send(self, tokens: torch.Tensor) -> None:
        for stream in self._streams:
            stream.put(tokens.cpu())


def _refuse_text_streamers(streams: Sequence[Any], batch: int) -> None:
    for stream in streams:
        if batch > 1 and isinstance(stream, TextStreamer):
            raise DlmBridgeError(
                f"{type(stream).__name__} prints one row, there are {batch}: generate them one by one, or pass a "
                "streamer whose put takes [batch, tokens]"
            )
