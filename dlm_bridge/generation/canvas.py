"""Canvas: prompts and new tokens of a batch in aligned columns, the blocks, and the end of each row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from dlm_bridge.errors import NonFiniteError
from dlm_bridge.generation.rows import PromptBatch, PromptLimits, Read, RowMemory, StopCondition, to_device


def read_flags(flags: torch.Tensor, overlap_with: Callable[[], None]) -> list[Any]:
    """The tensor's values on the host. On a GPU `overlap_with` launches work before the host waits for them."""
    copy = HostCopy(flags)
    if flags.is_cuda:
        overlap_with()
    return list(copy.values().tolist())


class HostCopy:
    """A copy of a tensor on its way to the host."""

    def __init__(self, values: torch.Tensor) -> None:
        self._copy, self._event = values, None
        if values.is_cuda:
            self._copy = values.to("cpu", non_blocking=True)
            self._event = torch.cuda.current_stream(values.device).record_event()

    @property
    def arrived(self) -> bool:
        return self._event is None or self._event.query()

    def values(self) -> np.ndarray[Any, Any]:
        """The values, when they have arrived."""
        if self._event is not None:
            self._event.synchronize()
        return self._copy.numpy()


Columns = slice | torch.Tensor  # the same columns of every row, or a [rows, N] tensor of each row's own


@dataclass(frozen=True)
class BlockLayout:
    """How a sampler divides the new tokens into blocks.

    Args:
        block_length: tokens of a block; None: one block of any length, also of a prompt to fill.
        aligned: blocks are counted from each row's first token, so that a prompt's ragged end shares the first block
            with new tokens, and the last block may go on behind the last new token. False: they start where the prompt
            ends, and the last one may be shorter.
        spare: mask columns behind the last new token, part of the last block.
        closing: a token that stands in the last new column from the start.
        first_masks: rows begin with so many new tokens, of at most `gen_length`, and then grow and shrink
            (`Canvas.resize`). None: they keep their length.
    """

    block_length: int | None
    aligned: bool = False
    spare: int = 0
    closing: int | None = None
    first_masks: int | None = None


class Canvas:
    """B rows of S columns. Complete rows leave it, so B shrinks while the sampler runs.

    Attributes:
        origins: the column of each row's first token.
        starts: of its first new token behind the prompt.
        ends: the column behind its last token.
        stops: the column behind the last one that may hold a new token, without the layout's `closing` one.
        block: the columns that rows denoise.
        inside: whether each row denoises the block.
        steps: each row's steps in the block so far.
        memory: what the rule and the predictor keep of each row within its block.
        non_finite: [B] bool on the device, the rows whose logits have been NaN or infinite.
        failed: the names of those that the host knows of, by `read`.
    """

    def __init__(
        self,
        prompt: PromptBatch,
        layout: BlockLayout,
        limits: PromptLimits,
        pad_token_id: int,
        stop_condition: StopCondition,
    ) -> None:
        batch, self.prompt_width = prompt.tokens.shape
        device = prompt.tokens.device
        self.mask_token_id = limits.masked_token_id
        self._pad_token_id = pad_token_id
        # What follows a mask inside a prompt is given: it does not end a row.
        self._stop_condition = StopCondition((), device) if limits.inside else stop_condition
        self.names: list[Any] = list(range(batch))  # which row of the batch each row of the canvas is
        self._lay_out_columns(prompt, layout, limits)
        self.block = slice(0, 0)
        self._blocks_opened = 0
        self.inside, self.steps = [False] * batch, [0] * batch
        self.memory = RowMemory(batch, device)
        self.non_finite = torch.zeros(batch, dtype=torch.bool, device=device)
        self.failed: set[Any] = set()
        self._fill(prompt, layout.closing if limits.gen_length else None)
        self._begin_output(prompt)

    def _lay_out_columns(self, prompt: PromptBatch, layout: BlockLayout, limits: PromptLimits) -> None:
        """Where each row and each block begins and ends."""
        lengths = [self.prompt_width - pad for pad in prompt.pads]
        block = layout.block_length
        if layout.aligned and block is not None:
            first = max(length // block for length in lengths) * block
            self.origins = [first - length // block * block for length in lengths]  # where a row's prompt begins
        else:
            first = self.prompt_width
            self.origins = list(prompt.pads)
        self.starts = [origin + length for origin, length in zip(self.origins, lengths, strict=True)]  # of new tokens
        self._gen_length = gen_length = limits.gen_length
        closing = int(layout.closing is not None and gen_length > 0)
        stop = max(self.starts) + gen_length - closing + layout.spare
        if layout.aligned and block is not None:
            stop = first - (first - stop) // block * block  # whole blocks
        self.width = stop + closing
        holes = prompt.holes or ((),) * len(lengths)
        self.holes = [{origin + hole for hole in gaps} for origin, gaps in zip(self.origins, holes, strict=True)]
        self.stops, self.ends = [stop] * len(lengths), [self.width] * len(lengths)
        self.grows = layout.first_masks is not None
        if layout.first_masks is not None:
            first_masks = 0 if limits.inside else min(layout.first_masks, gen_length)
            self.ends = [start + first_masks for start in self.starts]
            replaced = [len(gaps) if limits.inside else 0 for gaps in holes]
            room = [gen_length if gaps or not limits.inside else 0 for gaps in holes]
            self.stops = [start + more - less for start, more, less in zip(self.starts, room, replaced, strict=True)]
        if block is None:
            first, block = (0, stop) if prompt.holes else (first, max(stop - first, 1))
        elif prompt.holes:
            first = first % block
        self.blocks = [slice(begin, min(begin + block, stop)) for begin in range(first, stop, block)]
        if prompt.holes and first:
            self.blocks.insert(0, slice(0, first))

    def _fill(self, prompt: PromptBatch, closing: int | None) -> None:
        """The tokens, and the tensors that follow from the columns of the rows."""
        device = prompt.tokens.device
        self.tokens = torch.full((len(self.names), self.width), self.mask_token_id, device=device)
        for row, (origin, start) in enumerate(zip(self.origins, self.starts, strict=True)):
            self.tokens[row, origin:start] = prompt.tokens[row, self.prompt_width - (start - origin) :]
        if closing is not None:
            self.tokens[:, -1] = closing
        self._columns = torch.arange(self.width, device=device)
        self._starts = torch.tensor(self.starts, device=device)
        self._index: tuple[list[int], torch.Tensor] | None = None
        self._places = self._columns - torch.tensor(self.origins, device=device)[:, None]
        self._measure_rows()
        self._is_hole: torch.Tensor | None = None  # [B, S]; None: no prompt has a hole
        if any(self.holes):
            self._is_hole = torch.zeros(self.tokens.shape, dtype=torch.bool)
            for row, columns in enumerate(self.holes):
                self._is_hole[row, sorted(columns)] = True
            self._is_hole = self._is_hole.to(device)

    def _begin_output(self, prompt: PromptBatch) -> None:
        """The output with the prompts alone, and which of its columns they give."""
        batch, device = len(self.names), prompt.tokens.device
        self._output = torch.full((batch, self.prompt_width + self._gen_length), self._pad_token_id, device=device)
        self._output[:, : self.prompt_width] = prompt.tokens
        self._output_columns = torch.arange(self._output.shape[1], device=device)
        # [B], the column of the output behind each row's last one; of rows that grow and shrink.
        self._output_ends = torch.full((batch,), self._output.shape[1], device=device)
        self._hole_count = sum(map(len, self.holes))
        # The given columns of prompts, and the first column of the output that is not given.
        self._given = torch.ones(batch, self.prompt_width, dtype=torch.bool, device=device)
        self.first_open = self.prompt_width
        for row, (pad, gaps) in enumerate(zip(prompt.pads, prompt.holes, strict=False)):
            if gaps:
                self._given[row, [pad + gap for gap in gaps]] = False
                self.first_open = min(self.first_open, pad + gaps[0])

    @property
    def rows(self) -> list[int]:
        return list(range(len(self.names)))

    @property
    def padded(self) -> bool:
        return any(self.origins) or any(end != self.width for end in self.ends)

    def unwanted(self) -> list[int]:
        """Rows that have been cancelled, or have failed while others go on."""
        return []

    @property
    def rolls(self) -> bool:
        """Whether rows enter while others run."""
        return False

    @property
    def shares_blocks(self) -> bool:
        """Whether a row goes on to its next block only when all have completed theirs."""
        return True

    @property
    def cache_width(self) -> int:
        """The columns that a KV cache has."""
        return self.width

    def index(self, rows: list[int]) -> torch.Tensor:
        """[A], the rows as an index on the device, cached for the last request."""
        if self._index is None or self._index[0] != rows:
            self._index = rows, to_device(rows, self.tokens.device)
        return self._index[1]

    def take(self, rows: list[int] | None, columns: Columns) -> torch.Tensor:
        """[A, N] tokens; `rows` None means all of them."""
        tokens = self.tokens if rows is None else self.tokens[self.index(rows)]
        return tokens[:, columns] if isinstance(columns, slice) else tokens.gather(1, columns)

    def put(self, rows: list[int] | None, columns: Columns, tokens_AN: torch.Tensor) -> None:
        """Write [A, N] tokens."""
        if isinstance(columns, slice):
            self.tokens[slice(None) if rows is None else self.index(rows), columns] = tokens_AN
        elif rows is None:
            self.tokens.scatter_(1, columns, tokens_AN)
        else:
            index = self.index(rows)
            self.tokens[index] = self.tokens[index].scatter(1, columns, tokens_AN)

    def flag_non_finite(self, rows: list[int] | None, columns: Columns, logits_ANV: torch.Tensor) -> None:
        """Flag the rows in which logits of new tokens are NaN or plus infinity; minus infinity suppresses a token.

        The host learns of it when it reads the result of a step (`read`), or when a row leaves the canvas.
        """
        bad_AN = ~(logits_ANV.amax(dim=-1) < torch.inf)
        bad_A = (bad_AN & self.behind_prompt(rows, columns)).any(dim=1)
        if rows is None:
            self.non_finite |= bad_A
        else:
            self.non_finite[self.index(rows)] |= bad_A

    def read(self, flags: torch.Tensor, overlap_with: Callable[[], None] = lambda: None) -> list[Any]:
        """The values of `read_flags`; with them the host learns which rows have `failed`."""
        non_finite = HostCopy(self.non_finite)
        values = read_flags(flags, overlap_with)
        self.failed |= {name for name, bad in zip(self.names, non_finite.values().tolist(), strict=True) if bad}
        return values

    def refuse_failed(self) -> None:
        """Raise NonFiniteError for the rows that have `failed`."""
        if self.failed:
            raise NonFiniteError(rows=sorted(self.failed) if len(self.failed) < len(self._output) else ())

    def behind_prompt(self, rows: list[int] | None, columns: Columns) -> torch.Tensor:
        """[A, N], True at the columns that are not given: behind the row's prompt up to its end, or masks in it."""
        columns_AN = self.columns(rows, columns)
        behind_AN = columns_AN >= self.first_new(rows)[:, None]
        if self.grows and self._is_hole is not None:  # what follows the prompt's masks is given and moves with them
            behind_AN = torch.zeros_like(behind_AN)
        elif self._some_end_early:
            behind_AN &= columns_AN < (self._ends if rows is None else self._ends[self.index(rows)])[:, None]
        if self._is_hole is None:
            return behind_AN
        return behind_AN | (self._is_hole if rows is None else self._is_hole[self.index(rows)]).gather(1, columns_AN)

    def masked(self, rows: list[int] | None, columns: Columns) -> torch.Tensor:
        """[A, N], True at masks, except padding, which consists of mask tokens, too."""
        return (self.take(rows, columns) == self.mask_token_id) & self.behind_prompt(rows, columns)

    def columns(self, rows: list[int] | None, columns: Columns) -> torch.Tensor:
        """[A, N], the columns as a tensor."""
        count = len(self.names if rows is None else rows)
        return self._columns[columns].expand(count, -1) if isinstance(columns, slice) else columns

    def first_new(self, rows: list[int] | None) -> torch.Tensor:
        """[A], the column of a row's first new token."""
        return self._starts if rows is None else self._starts[self.index(rows)]

    def origin(self, rows: list[int] | None) -> torch.Tensor:
        """[A], the column of a row's first token."""
        return -self.places(rows)[:, 0]

    def places(self, rows: list[int] | None, columns: Columns = slice(None)) -> torch.Tensor:
        """[A, N], the columns counted from the row's first token; negative at padding."""
        if isinstance(columns, torch.Tensor):
            return columns - self.origin(rows)[:, None]
        return self._places[slice(None) if rows is None else self.index(rows), columns]

    def real(self, rows: list[int] | None) -> torch.Tensor:
        """[A, S], False at padding on either side."""
        return self._real if rows is None else self._real[self.index(rows)]

    def lengths(self, rows: list[int] | None, end: int, begin: int = 0, without: int = 0) -> tuple[int, ...]:
        """The number of real columns of each row, of the canvas' columns from `begin` up to `end`; `without` so many
        of the row's last."""
        chosen = self.rows if rows is None else rows
        return tuple(max(0, min(self.ends[row] - without, end) - max(self.origins[row], begin)) for row in chosen)

    def resize(self, rows: list[int], columns: slice, copies_AN: torch.Tensor, growth: Sequence[int]) -> torch.Tensor:
        """Insert and delete tokens of these rows, which get longer and shorter: what follows moves.

        Args:
            columns: contains every column that changes, and all behind it.
            copies_AN: 0 where the token is deleted, 2 where it becomes two masks, else 1. A row has to stay within its
                `stops`.
            growth: by how many tokens each row gets longer, as `copies_AN` says.

        Returns:
            [A, N], where the token in each column was before.
        """
        index, count = self.index(rows), copies_AN.shape[1]
        places_AN = torch.arange(count, device=copies_AN.device).repeat(len(rows), 1)
        source_AN = torch.searchsorted(copies_AN.cumsum(dim=1), places_AN, right=True).clamp(max=count - 1)
        for row, more in zip(rows, growth, strict=True):
            self.ends[row] += more
        self._measure_rows()
        doubled_AN = copies_AN.gather(1, source_AN) > 1
        nothing_AN = places_AN + columns.start >= self._ends[index][:, None]
        tokens_AN = self.take(rows, columns).gather(1, source_AN)
        self.put(rows, columns, tokens_AN.masked_fill(doubled_AN | nothing_AN, self.mask_token_id))
        if self._is_hole is not None:
            self._is_hole[index, columns] = self._is_hole[index, columns].gather(1, source_AN) & ~nothing_AN
        return source_AN

    def _wanted(self, rows: list[int] | None, columns: slice) -> torch.Tensor:
        """[A, N], True at the row's `gen_length` new tokens."""
        new_AN = self._columns[columns] - self.first_new(rows)[:, None]
        return (new_AN >= 0) & (new_AN < self._gen_length)

    def masks(self, block: slice) -> list[int]:
        """Masks of an untouched block, by row; 0 where no new token is requested there."""
        counts = []
        for start, own in zip(self.starts, self.holes, strict=True):
            holes = sum(block.start <= hole < block.stop for hole in own)
            behind = max(0, block.stop - max(block.start, start)) if self._gen_length or holes else 0
            counts.append(holes + behind)
        return counts

    def opens(self, row: int, column: int) -> bool:
        """Whether the column of an untouched block is a mask behind some token of the row."""
        return self.origins[row] < column and (self.starts[row] <= column or column in self.holes[row])

    def read_unfinished(
        self,
        rows: list[int] | None,
        block: slice,
        read: Read,
        values: Callable[[torch.Tensor], torch.Tensor] = lambda unfinished_A: unfinished_A,
    ) -> list[Any]:
        """Of each row, whether a new token of the block is a mask and the row does not end before it.

        Args:
            values: [A] numbers that follow from it, which are read instead. Is called twice where there are stop
                strings: these are searched on the host, which does not wait for the device again.
        """
        tokens_AN, new_AN = self.take(rows, slice(0, block.stop)), self._wanted(rows, slice(0, block.stop))
        masked_AN, stop = tokens_AN == self.mask_token_id, self._stop_condition
        open_AN = masked_AN & new_AN
        if stop.active:
            open_AN &= stop.by_token(tokens_AN, new_AN).cumsum(dim=1) == 0
        open_A, holes_A = open_AN.any(dim=1), torch.zeros_like(open_AN[:, 0])  # a hole is open whatever ends the row
        if self._is_hole is not None:
            holes_AN = self._is_hole if rows is None else self._is_hole[self.index(rows)]
            holes_A = (holes_AN[:, : block.stop] & masked_AN).any(dim=1)
        if not stop.has_strings:
            return read(values(open_A | holes_A))
        both_A2 = torch.stack([values(open_A | holes_A), values(holes_A)], dim=1)
        table = read(torch.cat([both_A2, stop.texts(tokens_AN, new_AN, self.mask_token_id)], dim=1))
        return [stopped if stop.string_end(text) >= 0 else going for going, stopped, *text in table]

    def open_block(self) -> list[int]:
        """Let rows begin a block. Returns these rows: all, where none is inside of one."""
        if any(self.inside):
            return []
        self.block = self.blocks[self._blocks_opened]
        self._blocks_opened += 1
        self._begin(self.rows)
        return self.rows

    def _begin(self, rows: list[int]) -> None:
        for row in rows:
            self.inside[row], self.steps[row] = True, 0

    def close_block(self, rows: list[int]) -> list[int]:
        """These rows take no further step in the block. Returns the rows that have completed it: all, where none is
        inside any more."""
        for row in rows:
            self.inside[row] = False
        if any(self.inside):
            return []
        self.memory.forget(self.rows)
        return self.rows

    def retire(self, rows: list[int], read: Read) -> list[int] | None:
        """Remove those of these rows, which have completed the block, whose text is complete. Returns the rows that
        stay, None if all do. `read` copies flags to the host."""
        block = self.block
        done = [start + self._gen_length <= block.stop for start in self.starts]
        if block == self.blocks[-1]:
            done = [True] * len(done)
        elif self._stop_condition.active:
            columns = slice(0, block.stop)
            new_BN = self._wanted(None, columns)
            ended = self._stop_condition.read_ended(self.tokens[:, columns], new_BN, self.mask_token_id, read)
            done = [a or b for a, b in zip(done, ended, strict=True)]
        if not any(done):
            return None
        if block == self.blocks[-1] or not self._stop_condition.active:
            self.read(self.non_finite)  # no row leaves before the host knows whether it has failed
        self._write_output([row for row, over in enumerate(done) if over], self.tokens, self._output)
        stay = [row for row, over in enumerate(done) if not over]
        self.tokens, self._starts, self._places = self.tokens[stay], self._starts[stay], self._places[stay]
        self.non_finite = self.non_finite[stay]
        self.origins = [self.origins[row] for row in stay]
        self.starts = [self.starts[row] for row in stay]
        self.stops = [self.stops[row] for row in stay]
        self.ends = [self.ends[row] for row in stay]
        self.names = [self.names[row] for row in stay]
        self.holes = [self.holes[row] for row in stay]
        self.inside = [self.inside[row] for row in stay]
        self.steps = [self.steps[row] for row in stay]
        self.memory.select_rows(stay)
        self._measure_rows()
        if self._is_hole is not None:
            self._is_hole = self._is_hole[stay]
        return stay

    def output(self) -> torch.Tensor:
        """[B, P + new], prompts padded on the left, with padding behind each row's end, as wide as the longest row."""
        if not self._stop_condition.active and not self.grows:
            return self._output
        after_BS = self._after_end(self._output)
        width = int((~after_BS).sum(dim=1).max())
        return self._output.masked_fill(after_BS, self._pad_token_id)[:, :width]

    def output_ends(self) -> torch.Tensor:
        """[B], the column of the output behind each row's last token."""
        return (~self._after_end(self._output)).sum(dim=1)

    def new_tokens(self) -> torch.Tensor:
        """Number of new tokens of all rows, each as far as its end, as a tensor: reading it would sync."""
        given = self._output.shape[0] * self.prompt_width - self._hole_count
        return self.output_ends().sum() - given

    def snapshot(self) -> torch.Tensor:
        """[B, P + gen_length], the current tokens of every row of the batch, in the columns of the output; padding
        behind rows that grow and shrink."""
        tokens_BS = self._output.clone()
        if self.grows:
            names_B, begin_B = to_device(self.names, tokens_BS.device), self._starts - self.origin(None)
            behind_BS = self._output_columns >= (self.prompt_width - begin_B)[:, None]
            tokens_BS[names_B] = tokens_BS[names_B].masked_fill(behind_BS, self._pad_token_id)
        self._write_output(self.rows, self.tokens, tokens_BS)
        return tokens_BS

    def in_output(self, rows: list[int], columns: Columns, values_AN: torch.Tensor) -> torch.Tensor:
        """[B, P + gen_length], values of these columns in the columns of the output, NaN elsewhere."""
        values_BS = values_AN.new_full(self.tokens.shape, torch.nan)
        index = self.index(rows)
        values_BS[index] = values_BS[index].scatter(1, self.columns(rows, columns), values_AN)
        output_BS = values_AN.new_full(self._output.shape, torch.nan)
        self._write_output(rows, values_BS, output_BS)
        return output_BS

    def committed(self, stop: int) -> tuple[torch.Tensor, list[int]]:
        """A snapshot [B, P + gen_length] with padding behind the rows' ends, and the number of leading columns of the
        output that are committed in each row. Only canvas columns before `stop` count."""
        tokens_BS = self.snapshot()
        closed_BS = tokens_BS != self.mask_token_id
        closed_BS[:, : self.prompt_width] |= self._given
        stop_B = (self.prompt_width + stop - self._starts).clamp(min=self.first_open)
        closed_BS[to_device(self.names, closed_BS.device)] &= self._output_columns < stop_B[:, None]
        after_BS = self._after_end(torch.where(closed_BS.cumprod(dim=1).bool(), tokens_BS, self.mask_token_id))
        # Where every row has ended, the longest row ends the output.
        width = (~after_BS).sum(dim=1).max()
        counts = (closed_BS | after_BS).cumprod(dim=1).sum(dim=1).clamp(max=width).tolist()
        return tokens_BS.masked_fill(after_BS, self._pad_token_id), counts

    def _write_output(self, rows: list[int], values_BS: torch.Tensor, output_BS: torch.Tensor) -> None:
        """Copy these rows' values from the columns of the canvas to those of the output."""
        index = self.index(rows)
        names_A = to_device([self.names[row] for row in rows], output_BS.device)
        start_A, stop_A = self._starts[index], torch.minimum(self._ends[index], self._starts[index] + self._gen_length)
        columns_AS = self._output_columns - (self.prompt_width - start_A)[:, None]  # of the canvas
        own_AS = (columns_AS >= self.origin(rows)[:, None]) & (columns_AS < stop_A[:, None])
        values_AS = values_BS[index].gather(1, columns_AS.clamp(0, self.width - 1))
        output_BS[names_A] = torch.where(own_AS, values_AS, output_BS[names_A])
        if self.grows:
            self._output_ends[names_A] = self.prompt_width + stop_A - start_A

    def behind_rows(self) -> torch.Tensor:
        """[B, P + gen_length], True behind the last token that each row has in the last snapshot."""
        return self._output_columns >= self._output_ends[:, None]

    def _after_end(self, output_BS: torch.Tensor) -> torch.Tensor:
        """[B, P + gen_length], True behind the row, or behind the first new token that ends it."""
        new_BS = (self._output_columns >= self.prompt_width).expand_as(output_BS)
        ends_BS = self._stop_condition.marks(output_BS, new_BS, self.mask_token_id)
        after_BS = ends_BS.long().cumsum(dim=1) - ends_BS.long() > 0
        return after_BS | self.behind_rows() if self.grows else after_BS

    def _measure_rows(self) -> None:
        """The tensors that follow from the rows' ends."""
        self._ends = to_device(self.ends, self.tokens.device)
        self._some_end_early = any(end != self.width for end in self.ends)
        self._real = self._places >= 0
        if self._some_end_early:
            self._real = self._real & (self._columns < self._ends[:, None])
