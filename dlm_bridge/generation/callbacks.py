"""Step callbacks and streamers of a call of `generate`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from transformers.generation.streamers import TextStreamer

from dlm_bridge.errors import SettingError
from dlm_bridge.generation.canvas import Canvas, Columns, to_device
from dlm_bridge.generation.request import MASK, Ended, Event, Extended
from dlm_bridge.generation.token_sampling import gather_tokens


@dataclass(frozen=True)
class DenoisingStep:
    """State of the whole batch after one forward pass, in the columns of `generate`'s output.

    Args:
        forwards: number of forward passes of the model so far.
        rows: rows of the batch that took part in this step.
        tokens: [B, P + gen_length] token ids, with prompts padded on the left and the mask token at masks. Tokens
            after a row's end are not part of the output. Samplers without mask tokens have noise instead of masks.
        masked: [B, P + gen_length] bool, True at masks.
        committed: [B, P + gen_length] bool, True at tokens that this step committed or changed; for samplers that
            insert and delete tokens, also at moved tokens.
        confidence: [B, P + gen_length] float32, the model's probability of each token in the step that committed it,
            after guidance and constraints, before temperature and filters. NaN at masks and in prompts.
    """

    forwards: int
    rows: tuple[int, ...]
    tokens: torch.Tensor
    masked: torch.Tensor
    committed: torch.Tensor
    confidence: torch.Tensor


class StepCallback(Protocol):
    """Interface of step callbacks, which are passed to `generate` as `streamer`."""

    def on_step(self, step: DenoisingStep) -> None:
        """Called after every forward pass."""


class StepObserver(Protocol):
    """Interface of an engine's observers. One with a true attribute `unconstrained` gets the model's logits, after
    guidance, without the sampler's bias and without constraints; others get those that tokens were proposed from."""

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
        """Called after a forward pass that predicted these columns, and after the commit. `final`: committed tokens do
        not change any more."""

    def block(self, canvas: Canvas, rows: list[int]) -> None:
        """Called when these rows have completed the block, before any of them leaves the canvas."""


@dataclass(frozen=True)
class OutputColumns:
    """Columns of `generate`'s output: prompts [B, width] padded on the left, then `gen_length` new tokens.

    Args:
        prompts: token ids of each row, with `MASK` at positions to fill in.
        padding: token ids to the left of each prompt.
        fills: True if the positions to fill in are in the prompts.
    """

    prompts: Sequence[Sequence[int]]
    padding: Sequence[Sequence[int]]
    width: int
    gen_length: int
    pad_token_id: int
    fills: bool

    def text(self, row: int, tokens: Sequence[int]) -> list[int]:
        """A row of the output without padding on the right. `tokens`: tokens of the row's events."""
        return [*self.padding[row], *(() if self.fills else self.prompts[row]), *tokens]


class StepRecorder:
    """Calls the step callbacks of a call, and records its history.

    Args:
        mask_token_id: token at masks.
        closing: token in the last column from the start.
    """

    def __init__(
        self,
        callbacks: Sequence[StepCallback],
        output: OutputColumns,
        device: torch.device,
        *,
        keep_history: bool,
        mask_token_id: int,
        closing: int | None,
    ) -> None:
        self._callbacks, self._output, self._keep_history = callbacks, output, keep_history
        self._mask_token_id = mask_token_id
        rows = [output.text(number, prompt if output.fills else []) for number, prompt in enumerate(output.prompts)]
        self._tokens = torch.nn.functional.pad(torch.tensor(rows), (0, output.gen_length), value=MASK).to(device)
        if closing is not None and output.gen_length:
            self._tokens[:, -1] = closing
        self._confidence = torch.full(self._tokens.shape, torch.nan, device=device)
        self._columns = torch.arange(self._tokens.shape[1], device=device)
        self.history: list[DenoisingStep] = []

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
        """See `StepObserver`."""
        if self._callbacks and any(canvas.read(canvas.non_finite)):
            return  # the call fails
        names = canvas.names
        tokens = self._tokens.clone()
        behind_AS = self._copy(canvas, canvas.rows, canvas.tokens, tokens)
        masked = tokens == MASK  # a rule may mask a token again
        committed = tokens.ne(self._tokens) & ~masked
        if canvas.grows:
            ended = to_device([int(name) for name in names], tokens.device)  # type: ignore[call-overload]
            committed[ended] &= ~behind_AS
        of_tokens_AN = canvas.take(rows, columns).clamp(min=0)
        probabilities_AN = gather_tokens(logits_ANV.softmax(dim=-1, dtype=torch.float32), of_tokens_AN)
        values_BS = probabilities_AN.new_full(canvas.tokens.shape, torch.nan)
        index = canvas.index(rows)
        values_BS[index] = values_BS[index].scatter(1, canvas.columns(rows, columns), probabilities_AN)
        now = torch.full_like(self._confidence, torch.nan)
        self._copy(canvas, rows, values_BS, now)
        self._confidence = torch.where(committed, now, self._confidence).masked_fill(masked, torch.nan)
        self._tokens = tokens
        step = DenoisingStep(
            forwards,
            tuple(names[row] for row in rows),  # type: ignore[misc]
            tokens.masked_fill(masked, self._mask_token_id),
            masked,
            committed,
            self._confidence,
        )
        for callback in self._callbacks:
            callback.on_step(step)
        if self._keep_history:
            self.history.append(step)

    def block(self, canvas: Canvas, rows: list[int]) -> None:
        """See `StepObserver`."""

    def _copy(self, canvas: Canvas, rows: list[int], values_BS: torch.Tensor, output_BS: torch.Tensor) -> torch.Tensor:
        """Copy these rows' values from the columns of the canvas to those of the output. Returns [A, S], True after
        each row's end; if rows grow and shrink, these columns are padding."""
        index, names, starts, ends = canvas.index(rows), canvas.names, canvas.starts, canvas.ends
        names_A = to_device([int(names[row]) for row in rows], output_BS.device)  # type: ignore[call-overload]
        start_A = canvas.first_new(rows)
        stops = [min(ends[row], starts[row] + self._output.gen_length) for row in rows]
        columns_AS = self._columns - (self._output.width - start_A)[:, None]  # of the canvas
        behind_AS = columns_AS >= to_device(stops, output_BS.device)[:, None]
        own_AS = (columns_AS >= canvas.origin(rows)[:, None]) & ~behind_AS
        before_AS = output_BS[names_A]
        if canvas.grows and not values_BS.is_floating_point():
            before_AS = torch.where(behind_AS, self._output.pad_token_id, before_AS)
        values_AS = values_BS[index].gather(1, columns_AS.clamp(0, canvas.width - 1))
        output_BS[names_A] = torch.where(own_AS, values_AS, before_AS)
        return behind_AS


class TextStreams:
    """Sends the final tokens of a call to its streamers.

    A streamer has the methods `put` and `end`, as in transformers. It receives the prompts [B, P] (up to the first
    mask, for prompts to fill in), then each run of new tokens that are committed in every row and final: [N] for a
    single row, [B, N] for several. Ended rows are padded.
    """

    def __init__(self, streamers: Sequence[Any], output: OutputColumns) -> None:
        self._streamers, self._output = streamers, output
        self._rows = [output.text(number, []) for number in range(len(output.prompts))]  # final columns of each row
        self._ended: set[Any] = set()
        if output.fills:
            for row, prompt in zip(self._rows, output.prompts, strict=True):
                row += prompt[: prompt.index(MASK) if MASK in prompt else len(prompt)]
        self._sent = min(map(len, self._rows))
        self._send(torch.tensor([row[: self._sent] for row in self._rows], dtype=torch.long))

    def report(self, event: Event) -> None:
        """Send the columns that the event completes in all rows."""
        if isinstance(event, Extended):
            whole = self._output.text(event.name, [])
            self._rows[event.name] = whole + self._rows[event.name][len(whole) :][: event.first] + [*event.tokens]
        elif isinstance(event, Ended):
            self._rows[event.name] = self._output.text(event.name, event.tokens)
            self._ended.add(event.name)
        running = [len(row) for number, row in enumerate(self._rows) if number not in self._ended]
        self._send_until(min(running) if running else max(map(len, self._rows)))

    def end(self, sequences: torch.Tensor) -> None:
        """Send the remaining columns."""
        if self._sent < sequences.shape[1]:
            run = sequences[:, self._sent :].cpu()
            self._send(run[0] if len(run) == 1 else run)
        for streamer in self._streamers:
            streamer.end()

    def _send_until(self, stop: int) -> None:
        if stop <= self._sent:
            return
        padding = [self._output.pad_token_id] * stop
        run = torch.tensor([(row + padding)[self._sent : stop] for row in self._rows], dtype=torch.long)
        self._sent = stop
        self._send(run[0] if len(run) == 1 else run)

    def _send(self, tokens: torch.Tensor) -> None:
        for streamer in self._streamers:
            streamer.put(tokens)


def split_observers(streamer: Any, batch: int) -> tuple[list[StepCallback], list[Any]]:
    """Split `streamer` (None, an object, or a list or tuple of objects) into step callbacks and streamers.

    Raises:
        SettingError: an object is neither, or a text streamer is used for more than one row.
    """
    observers = list(streamer) if isinstance(streamer, (list, tuple)) else [streamer] if streamer else []
    callbacks: list[StepCallback] = [one for one in observers if hasattr(one, "on_step")]
    streamers = [one for one in observers if hasattr(one, "put") and hasattr(one, "end")]
    for one in observers:
        if one not in callbacks and one not in streamers:
            raise SettingError("streamer", f"{type(one).__name__} has neither the methods put and end nor on_step")
    for one in streamers:
        if batch > 1 and isinstance(one, TextStreamer):
            raise SettingError(
                "streamer",
                f"{type(one).__name__} prints one row, but there are {batch}: generate them one by one, or use a "
                "streamer whose put takes [batch, tokens]",
            )
    return callbacks, streamers
