"""Canvas: the tokens of the rows that are sampled together, their masks by position, blocks, and the end of each row.

Rows enter and leave while others run. A row's prompt and its committed tokens stand before the block that it denoises:

                        block
    row 0     [ prompt ][ new : tokens ...... ]
    row 1        [ prompt  new: tokens : . ]       entered earlier
    row 2           [ prompt ]: [ ........... ]    enters

Without a KV cache, or with one whose columns are counted from a row's first token, each row goes on to its next block
as soon as it has completed one, and rows enter before any step: the canvas moves each row so that all blocks begin in
one column. Where keys and values are cached block by block in shared columns (`shares_blocks`), the block moves to the
right when all rows have completed it, and rows enter then. Where all rows enter together, no row is ever moved.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import torch

from dlm_bridge.errors import RowError
from dlm_bridge.generation.request import MASK
from dlm_bridge.generation.stopping import Read, StopCondition

Columns = slice | torch.Tensor  # the same columns of every row, or a [rows, N] tensor of each row's own


def to_device(numbers: Sequence[int] | torch.Tensor, device: torch.device) -> torch.Tensor:
    """Integers from the host as a tensor on the device, without a device synchronisation."""
    tensor = torch.as_tensor(numbers, dtype=torch.long)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def read_flags(flags: torch.Tensor, overlap_with: Callable[[], None]) -> list[Any]:
    """The tensor's values on the host. On a GPU `overlap_with` launches work before the host waits for them."""
    copy = HostCopy(flags)
    if flags.is_cuda:
        overlap_with()
    return list(copy.values().tolist())


class HostCopy:
    """An asynchronous copy of a tensor to the host."""

    def __init__(self, values: torch.Tensor) -> None:
        self._copy, self._event = values, None
        if values.is_cuda:
            self._copy = values.to("cpu", non_blocking=True)
            self._event = torch.cuda.current_stream(values.device).record_event()

    @property
    def arrived(self) -> bool:
        return self._event is None or self._event.query()

    def values(self) -> np.ndarray[Any, Any]:
        """The values; waits until they have arrived."""
        if self._event is not None:
            self._event.synchronize()
        return self._copy.numpy()


@dataclass(frozen=True)
class BlockLayout:
    """Division of the new tokens into blocks.

    Args:
        block_length: tokens of a block; None: one block of any length, also of a prompt to fill.
        aligned: blocks are counted from each row's first token, so that a prompt's ragged end shares the first block
            with new tokens, and the last block may go on behind the last new token. False: they start where the prompt
            ends, and the last one may be shorter.
        spare: mask columns behind the last new token, part of the last block.
        closing: a token that stands in the last new column from the start.
        first_masks: number of new tokens that rows begin with, of at most `gen_length`; they then grow and shrink
            (`Canvas.resize`). None: rows keep their length.
    """

    block_length: int | None
    aligned: bool = False
    spare: int = 0
    closing: int | None = None
    first_masks: int | None = None


def cache_columns(layout: BlockLayout, max_length: int) -> int:
    """Columns of a KV cache for rows of at most `max_length` tokens: one more for padding or, where rows share their
    blocks, room to move the rows by whole blocks."""
    block, columns = layout.block_length, max_length + layout.spare
    return columns + 1 if block is None else -(-columns // block) * block + 4 * block


@dataclass(frozen=True)
class Entry:
    """A row that enters: its name, prompt tokens (`MASK` at positions to fill), and number of new tokens."""

    name: Hashable
    prompt: Sequence[int]
    gen_length: int


@dataclass
class _Row:
    """Columns of one row.

    Attributes:
        origin: of its first token.
        start: of its first new token behind the prompt.
        end: behind its last token.
        stop: behind the last one that may hold a new token, without the layout's `closing` one.
        before: number of its columns before its block.
        holes: positions in the prompt to fill, counted from the first token.
        inside: True while it denoises the block.
        steps: its steps in the block so far.
    """

    name: Hashable
    origin: int
    start: int
    end: int
    stop: int
    gen_length: int
    before: int
    holes: frozenset[int]
    inside: bool = False
    steps: int = 0

    def move(self, by: int) -> None:
        self.origin, self.start, self.end, self.stop = (
            column + by for column in (self.origin, self.start, self.end, self.stop)
        )


class Canvas:
    """B rows of S columns; `MASK` at masks and padding.

    Args:
        layout: the sampler's division into blocks.
        stop_condition: what ends a row, apart from its length.
        mask_token_id: the token that the model reads at masks; None: the sampler works without one.
        proposes_mask: this token is an ordinary one, which may also be sampled.
        cache_width: columns of a KV cache; a forward pass reads no more.
        shares_blocks: a row goes on to its next block only when all rows have completed theirs.
        infill: prompts hold masks to fill; otherwise only what follows the prompt is new.

    Attributes:
        rows, names: [B], the rows' numbers from 0, and their names.
        tokens: [B, S].
        excluded_token_id: the token that is never proposed; -1: none.
        block: the columns that rows denoise.
        blocks: the block and, where rows share blocks and go on behind it, the following one.
        memory: values that the rule and the predictor keep of each row within its block.
        non_finite: [B] bool on the device, True for rows whose logits have been NaN or infinite.
        errors: by name, errors of rows that fail for another reason than the model's logits.
        failed: the names of such rows that the host knows of, by `read`. They take no further step.
        ended: rows that have left since the caller last emptied the list: name and tokens, at most `gen_length` new;
            None in place of the tokens of a failed row.
        cancelled: names of rows that take no further step, and leave without a result.
    """

    def __init__(
        self,
        layout: BlockLayout,
        stop_condition: StopCondition,
        device: torch.device,
        *,
        mask_token_id: int | None,
        proposes_mask: bool = False,
        cache_width: int,
        shares_blocks: bool = False,
        infill: bool = False,
    ) -> None:
        self.tokens = torch.full((0, 0), MASK, device=device)
        self.mask_token_id = mask_token_id
        self.excluded_token_id = -1 if mask_token_id is None or proposes_mask else mask_token_id
        self.block, self.blocks = slice(0, 0), [slice(0, 0)]
        self.memory = RowMemory(0, device)
        self.non_finite = torch.zeros(0, dtype=torch.bool, device=device)
        self.failed: set[Hashable] = set()
        self.errors: dict[Hashable, RowError] = {}
        self.ended: list[tuple[Hashable, list[int] | None]] = []
        self.cancelled: set[Hashable] = set()
        self.cache_width, self.shares_blocks, self.infill = cache_width, shares_blocks, infill
        self.grows = layout.first_masks is not None
        self._layout = layout
        self._closing = int(layout.closing is not None)
        # New tokens in the middle of a text that grows and shrinks do not end it.
        self._stop_condition = StopCondition((), device) if infill and self.grows else stop_condition
        self._rows: list[_Row] = []
        self._index: tuple[list[int], torch.Tensor] | None = None
        self._next = 0  # where rows share blocks, the column of the next one
        self._is_hole: torch.Tensor | None = None  # [B, S]; None: no row has a hole
        self._refresh()

    # ---- Rows.

    @property
    def origins(self) -> list[int]:
        """[B], the column of each row's first token."""
        return [row.origin for row in self._rows]

    @property
    def starts(self) -> list[int]:
        """[B], the column of each row's first new token behind the prompt."""
        return [row.start for row in self._rows]

    @property
    def ends(self) -> list[int]:
        """[B], the column behind each row's last token."""
        return [row.end for row in self._rows]

    @property
    def stops(self) -> list[int]:
        """[B], the column behind the last one that may hold a new token, without the layout's `closing` one."""
        return [row.stop for row in self._rows]

    @property
    def firsts(self) -> list[int]:
        """[B], the column of position 0 of each row's events."""
        return self.origins if self.infill else self.starts

    @property
    def steps(self) -> list[int]:
        """[B], steps of each row in its block so far."""
        return [row.steps for row in self._rows]

    @property
    def inside(self) -> list[int]:
        """Rows that denoise the block."""
        return [number for number, row in enumerate(self._rows) if row.inside]

    @property
    def has_holes(self) -> bool:
        """True if a row's prompt has masks to fill."""
        return self._is_hole is not None

    @property
    def padded(self) -> bool:
        """True if some column of some row is padding."""
        return self._padded

    def count_step(self, rows: list[int]) -> None:
        """These rows have taken a step."""
        for row in rows:
            self._rows[row].steps += 1

    def index(self, rows: list[int]) -> torch.Tensor:
        """[A], the rows as an index on the device, cached for the last request."""
        if self._index is None or self._index[0] != rows:
            self._index = rows, to_device(rows, self.tokens.device)
        return self._index[1]

    # ---- Tokens. `rows` None means all rows; A is the number of rows, N that of columns.

    def take(self, rows: list[int] | None, columns: Columns) -> torch.Tensor:
        """[A, N] tokens."""
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

    def fail(self, name: Hashable, reason: str) -> None:
        """Give the reason why a row fails whose logits the caller makes NaN; of several the first."""
        self.errors.setdefault(name, RowError(reason, [name]))

    def read(self, flags: torch.Tensor, overlap_with: Callable[[], None] = lambda: None) -> list[Any]:
        """The values of `read_flags`; with them the host learns which rows have `failed`."""
        non_finite = HostCopy(self.non_finite)
        values = read_flags(flags, overlap_with)
        self.failed |= {name for name, bad in zip(self.names, non_finite.values().tolist(), strict=True) if bad}
        return values

    def behind_prompt(self, rows: list[int] | None, columns: Columns) -> torch.Tensor:
        """[A, N], True at columns that are not given: behind the row's prompt up to its end, and holes."""
        columns_AN = self.columns(rows, columns)
        behind_AN = columns_AN >= self.first_new(rows)[:, None]
        if self.grows and self._is_hole is not None:  # what follows the holes is given and moves with them
            behind_AN = torch.zeros_like(behind_AN)
        elif self._some_end_early:
            behind_AN &= columns_AN < (self._ends if rows is None else self._ends[self.index(rows)])[:, None]
        if self._is_hole is None:
            return behind_AN
        return behind_AN | (self._is_hole if rows is None else self._is_hole[self.index(rows)]).gather(1, columns_AN)

    def masked(self, rows: list[int] | None, columns: Columns) -> torch.Tensor:
        """[A, N], True at masks, not at padding."""
        return (self.take(rows, columns) == MASK) & self.behind_prompt(rows, columns)

    def columns(self, rows: list[int] | None, columns: Columns) -> torch.Tensor:
        """[A, N], the columns as a tensor."""
        count = len(self._rows if rows is None else rows)
        return self._columns[columns].expand(count, -1) if isinstance(columns, slice) else columns

    def first_new(self, rows: list[int] | None) -> torch.Tensor:
        """[A], the column of a row's first new token behind the prompt."""
        return self._starts if rows is None else self._starts[self.index(rows)]

    def origin(self, rows: list[int] | None) -> torch.Tensor:
        """[A], the column of a row's first token."""
        return self._origins if rows is None else self._origins[self.index(rows)]

    def places(self, rows: list[int] | None, columns: Columns = slice(None)) -> torch.Tensor:
        """[A, N], the columns counted from the row's first token; negative at padding."""
        return self.columns(rows, columns) - self.origin(rows)[:, None]

    def real(self, rows: list[int] | None) -> torch.Tensor:
        """[A, S], False at padding on either side."""
        return self._real if rows is None else self._real[self.index(rows)]

    def lengths(self, rows: list[int] | None, end: int, begin: int = 0, without: int = 0) -> tuple[int, ...]:
        """[A], the number of each row's real columns in [begin, end), without the last `without` of the row."""
        chosen = self._rows if rows is None else [self._rows[row] for row in rows]
        return tuple(max(0, min(row.end - without, end) - max(row.origin, begin)) for row in chosen)

    def texts(self) -> torch.Tensor:
        """[B, G], the tokens of each row from its first reported position on, G those of the longest; `MASK` behind a
        row's own."""
        positions_G = torch.arange(max(self._reported), device=self.tokens.device)
        columns_BG = (self._origins if self.infill else self._starts)[:, None] + positions_G
        own_BG = (positions_G < to_device(self._reported, columns_BG.device)[:, None]) & (columns_BG < self.width)
        tokens_BG = self.tokens.gather(1, columns_BG.clamp(max=self.width - 1))
        return tokens_BG.masked_fill(~own_BG, MASK)

    def masks(self, block: slice) -> list[int]:
        """[B], masks of an untouched block; 0 where it has no position to fill."""
        counts = []
        for row in self._rows:
            holes = sum(block.start <= row.origin + hole < block.stop for hole in row.holes)
            behind = max(0, min(block.stop, row.stop) - max(block.start, row.start))
            counts.append(holes + (behind if row.gen_length or holes else 0))
        return counts

    def opens(self, row: int, column: int) -> bool:
        """True if the column of an untouched block is a mask with a token of the row before it."""
        one = self._rows[row]
        return one.origin < column and (one.start <= column or column - one.origin in one.holes)

    def resize(self, rows: list[int], columns: slice, copies_AN: torch.Tensor, growth: Sequence[int]) -> torch.Tensor:
        """Insert and delete tokens of these rows; what follows moves.

        Args:
            columns: contains every column that changes, and all behind it.
            copies_AN: 0 where the token is deleted, 2 where it becomes two masks, else 1. A row has to stay within its
                `stops`.
            growth: the change of each row's length that `copies_AN` makes.

        Returns:
            [A, N], the earlier column of the token in each column.
        """
        index, count = self.index(rows), copies_AN.shape[1]
        places_AN = torch.arange(count, device=copies_AN.device).repeat(len(rows), 1)
        source_AN = torch.searchsorted(copies_AN.cumsum(dim=1), places_AN, right=True).clamp(max=count - 1)
        for row, more in zip(rows, growth, strict=True):
            self._rows[row].end += more
        self._measure()
        doubled_AN = copies_AN.gather(1, source_AN) > 1
        nothing_AN = places_AN + columns.start >= self._ends[index][:, None]
        tokens_AN = self.take(rows, columns).gather(1, source_AN)
        self.put(rows, columns, tokens_AN.masked_fill(doubled_AN | nothing_AN, MASK))
        if self._is_hole is not None:
            self._is_hole[index, columns] = self._is_hole[index, columns].gather(1, source_AN) & ~nothing_AN
        return source_AN

    def read_unfinished(
        self,
        rows: list[int] | None,
        block: slice,
        read: Read,
        values: Callable[[torch.Tensor], torch.Tensor] = lambda unfinished_A: unfinished_A,
    ) -> list[Any]:
        """[A], True if a new token of the block is a mask and the row does not end before it.

        Args:
            values: computes [A] numbers from it, which are read instead. It is called twice where there are stop
                strings: these are searched on the host, which does not wait for the device again.
        """
        tokens_AN, new_AN = self.take(rows, slice(0, block.stop)), self._wanted(rows, slice(0, block.stop))
        masked_AN, stop = tokens_AN == MASK, self._stop_condition
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
        table = read(torch.cat([both_A2, stop.texts(tokens_AN, new_AN)], dim=1))
        return [stopped if stop.string_end(text) >= 0 else going for going, stopped, *text in table]

    # ---- Rows that enter, go from block to block, and leave.

    @property
    def admits(self) -> bool:
        """True if rows may enter now."""
        return not self.shares_blocks or (bool(self._rows) and not self.inside)

    def admit(self, entering: Sequence[Entry], cached: int | None = None) -> int:
        """Add rows in front of the others, whose order becomes `order_behind`.

        Args:
            cached: number of columns in a KV cache of committed blocks; None: there is none.

        Returns:
            By how many columns the other rows have moved to the right (below 0: left).
        """
        if not self.shares_blocks:
            if entering:
                self._put_in_front(entering, [0] * len(entering))
            return 0
        if not self._rows:
            self._next = max(0, *map(self._columns_before, entering))
            self.blocks = [slice(self._next, self._next)]
        by = self._shift_for(entering, cached)
        if by:
            self._shift(by)
        if entering:
            self._put_in_front(entering, [self._next - self._columns_before(row) for row in entering])
        return by

    def open_block(self) -> list[int]:
        """Let rows begin a block. Returns these rows."""
        opening = [number for number, row in enumerate(self._rows) if not row.inside]
        if not opening or (self.shares_blocks and len(opening) < len(self._rows)):
            return []
        if self.shares_blocks:
            length, end = self._layout.block_length, max(self.stops)
            assert length is not None
            begins = range(self._next, end, length)[:2]
            self.blocks = [slice(begin, min(begin + length, end)) for begin in begins]
            self.block = self.blocks[0]
            self._next = self.block.stop
        else:
            self._arrange()
        for row in opening:
            self._rows[row].inside, self._rows[row].steps = True, 0
        return opening

    def close_block(self, rows: list[int]) -> list[int]:
        """Mark rows as done with the block. Returns the rows that have completed it: where rows share blocks all, once
        no row is inside any more."""
        for row in rows:
            self._rows[row].inside = False
        if self.shares_blocks:
            if self.inside:
                return []
            rows = self.rows
        for row in rows:
            self._rows[row].before += self._layout.block_length or 0
        self.memory.forget(rows)
        return rows

    def unwanted(self) -> list[int]:
        """Rows that have been cancelled or have failed."""
        leaving = self.cancelled | self.failed
        return [number for number, row in enumerate(self._rows) if row.name in leaving] if leaving else []

    def retire(self, rows: list[int], read: Read) -> list[int] | None:
        """Drop the rows whose text is complete, of those that have completed the block, and cancelled or failed
        rows.

        Args:
            read: copies flags to the host.

        Returns:
            The rows that stay, in their new order; None if all stay in place.
        """
        stop, whole = self.block.stop, self._layout.block_length is None
        over = {
            row
            for row in rows
            if whole or self._rows[row].start + max(0, self._rows[row].gen_length - self._closing) <= stop
        }
        over |= {*self.unwanted()}
        perhaps = [row for row in rows if row not in over]
        if self._stop_condition.active and perhaps:
            columns = slice(0, stop)
            tokens_AN, new_AN = self.take(perhaps, columns), self._wanted(perhaps, columns)
            ended = self._stop_condition.read_ended(tokens_AN, new_AN, read)
            over |= {row for row, ends in zip(perhaps, ended, strict=True) if ends}
        if not over:
            return None
        leaving, stay = sorted(over), order_without(over, len(self._rows))
        read_AS = torch.cat([self.tokens[leaving], self.non_finite[leaving, None]], dim=1).tolist()
        for number, (*tokens, failed) in zip(leaving, read_AS, strict=True):
            row = self._rows[number]
            if failed:
                self.failed.add(row.name)
            if row.name not in self.cancelled:
                first = row.origin if self.infill else row.start
                text = tokens[first : min(first + self._reported[number], row.end)]
                self.ended.append((row.name, None if failed else text))
        self.cancelled -= {self._rows[row].name for row in leaving}
        self._select_rows(stay)
        self.memory.select_rows(stay)
        self._refresh()
        return stay

    def _wanted(self, rows: list[int] | None, columns: slice) -> torch.Tensor:
        """[A, N], True at the row's `gen_length` new tokens."""
        new_AN = self._columns[columns] - self.first_new(rows)[:, None]
        lengths_A = self._lengths if rows is None else self._lengths[self.index(rows)]
        return (new_AN >= 0) & (new_AN < lengths_A[:, None])

    def _columns_before(self, row: Entry) -> int:
        """Number of the row's columns before its first block; below 0 where the block begins before the row."""
        length, block = len(row.prompt), self._layout.block_length
        if block is None:
            return 0 if self.infill else length
        if self._layout.aligned:
            return 0 if self.infill else length // block * block
        return -(-length % block) if self.infill else length

    def _put_in_front(self, entering: Sequence[Entry], origins: list[int]) -> None:
        """Add rows that begin in these columns."""
        count = len(entering)
        added = [self._row(entry, origin) for entry, origin in zip(entering, origins, strict=True)]
        width = max([self.width, *(row.stop + self._closing for row in added)])
        new = []
        for entry, row in zip(entering, added, strict=True):
            tokens = [MASK] * row.origin + list(entry.prompt) + [MASK] * (width - row.start)
            if self._layout.closing is not None and row.gen_length:
                tokens[row.stop] = self._layout.closing
            new.append(tokens)
        self._select_rows(order_behind(count, len(self._rows)))
        others = torch.nn.functional.pad(self.tokens, (0, width - self.width), value=MASK)
        self.tokens = torch.cat([to_device(list(chain.from_iterable(new)), others.device).view(count, width), others])
        if self._is_hole is not None or any(row.holes for row in added):
            shown = torch.zeros(count, width, dtype=torch.bool)
            for number, row in enumerate(added):
                shown[number, [row.origin + hole for hole in row.holes]] = True
            before = self.tokens.new_zeros(len(self._rows), self.width, dtype=torch.bool)
            before = before if self._is_hole is None else self._is_hole
            before = torch.nn.functional.pad(before, (0, width - self.width))
            self._is_hole = torch.cat([shown.to(before.device), before])
        self._rows = added + self._rows
        self.non_finite = torch.cat([self.non_finite.new_zeros(count), self.non_finite])
        for row in added:  # a name of a row that has left
            self.failed.discard(row.name)
            self.errors.pop(row.name, None)
        self.memory.admit(count)
        self._refresh()

    def _row(self, entry: Entry, origin: int) -> _Row:
        layout, new = self._layout, entry.gen_length
        holes = frozenset(place for place, token in enumerate(entry.prompt) if token == MASK) if self.infill else ()
        start = origin + len(entry.prompt)
        closing = self._closing if new else 0
        stop = start + new - closing + layout.spare
        if layout.aligned and layout.block_length is not None:  # whole blocks
            stop = origin - (origin - stop) // layout.block_length * layout.block_length
        end = stop + closing
        if layout.first_masks is not None:
            inside = self.infill
            end = start + (0 if inside else min(layout.first_masks, new))
            stop = start + ((new if holes else 0) - len(holes) if inside else new)
        before = self._columns_before(entry)
        return _Row(entry.name, origin, start, end, stop, new, before, frozenset(holes))

    def _select_rows(self, rows: list[int]) -> None:
        if rows == list(range(len(self._rows))):
            return
        index = to_device(rows, self.tokens.device)
        self.tokens, self.non_finite = self.tokens[index], self.non_finite[index]
        if self._is_hole is not None:
            self._is_hole = self._is_hole[index]
        self._rows = [self._rows[row] for row in rows]

    def _arrange(self) -> None:
        """Move the rows so that their blocks begin in one column, with nothing but padding before all rows."""
        length = self._layout.block_length
        start = max(row.before for row in self._rows)
        if length is not None:  # blocks are counted from the first column
            start = -(-start // length) * length
        by = [start - row.before - row.origin for row in self._rows]
        for row, shift in zip(self._rows, by, strict=True):
            row.move(shift)
        stop = max(self.stops)
        self.block = slice(start, stop if length is None else min(start + length, stop))
        self.blocks = [self.block]
        width = stop + self._closing
        if not any(by) and width == self.width:
            return
        source_BS = torch.arange(width, device=self.tokens.device) - to_device(by, self.tokens.device)[:, None]
        source_BS = source_BS.clamp(min=0, max=self.width - 1)
        self.tokens = self.tokens.gather(1, source_BS)
        if self._is_hole is not None:
            self._is_hole = self._is_hole.gather(1, source_BS)
        self._refresh()
        self.tokens.masked_fill_(~self._real, MASK)
        if self._is_hole is not None:
            self._is_hole &= self._real

    def _shift_for(self, entering: Sequence[Entry], cached: int | None) -> int:
        """By how many columns the canvas should move to the right (below 0: left), in whole blocks, before these rows
        enter. A KV cache is moved only where it must be."""
        block = self._layout.block_length
        assert block is not None
        first = min([*self.origins, *(self._next - self._columns_before(row) for row in entering)])
        if first < 0 or cached is None:
            return -(first // block * block)
        full = self._next + 2 * block > self.cache_width
        return -(min(first, cached) // block * block) if full else 0

    def _shift(self, by: int) -> None:
        """Move all rows to the right, or to the left over columns that no row needs."""
        if by > 0:
            self.tokens = torch.nn.functional.pad(self.tokens, (by, 0), value=MASK)
        else:
            self.tokens = self.tokens[:, -by:]
        if self._is_hole is not None:
            self._is_hole = torch.nn.functional.pad(self._is_hole, (by, 0))  # a negative pad crops
        for row in self._rows:
            row.move(by)
        self._next += by
        self._refresh()

    def _refresh(self) -> None:
        """Compute what follows from the rows' columns."""
        device = self.tokens.device
        self.rows, self.names = list(range(len(self._rows))), [row.name for row in self._rows]
        self.width = self.tokens.shape[1]
        self._reported = [
            (row.start - row.origin - len(row.holes) if self.infill and self.grows else 0)
            + (row.start - row.origin if self.infill and not self.grows else 0)
            + row.gen_length
            for row in self._rows
        ]
        geometry = [*self.origins, *self.starts, *(row.gen_length for row in self._rows)]
        self._origins, self._starts, self._lengths = to_device(geometry, device).view(3, -1).unbind()
        self._columns = torch.arange(self.width, device=device)
        self._index = None
        self._measure()

    def _measure(self) -> None:
        """Compute what follows from the rows' ends."""
        self._ends = to_device(self.ends, self.tokens.device)
        self._some_end_early = any(row.end != self.width for row in self._rows)
        self._padded = self._some_end_early or any(row.origin for row in self._rows)
        self._real = self._columns >= self._origins[:, None]
        if self._some_end_early:
            self._real = self._real & (self._columns < self._ends[:, None])


class RowMemory:
    """Values of each of B rows by name. A row that begins a block has zeros, in lists None.

    They follow their rows where others enter or leave the canvas.
    """

    def __init__(self, rows: int, device: torch.device) -> None:
        self._rows = rows
        self._device = device
        self._tensors: dict[str, torch.Tensor] = {}
        self._values: dict[str, list[Any]] = {}

    def tensor(self, name: str, *shape: int, dtype: torch.dtype = torch.long) -> torch.Tensor:
        """The named tensor [B, *shape], created as zeros; grown with zeros or narrowed to `shape`."""
        stored = self._tensors.get(name)
        if stored is None:
            stored = torch.zeros(self._rows, *shape, dtype=dtype, device=self._device)
        added = [max(0, size - old) for size, old in zip(shape, stored.shape[1:], strict=True)]
        if any(added):
            stored = torch.nn.functional.pad(stored, [side for size in reversed(added) for side in (0, size)])
        self._tensors[name] = stored
        for axis, size in enumerate(shape, 1):
            stored = stored.narrow(axis, 0, size)
        return stored

    def values(self, name: str) -> list[Any]:
        """B values on the host, to read and to write."""
        return self._values.setdefault(name, [None] * self._rows)

    def forget(self, rows: list[int]) -> None:
        """Reset rows that have completed their block."""
        if len(rows) == self._rows:
            self._tensors.clear()
            self._values.clear()
        if self._tensors:
            rows_A = to_device(rows, self._device)
            for stored in self._tensors.values():
                stored.index_fill_(0, rows_A, 0)
        for values in self._values.values():
            for row in rows:
                values[row] = None

    def select_rows(self, rows: list[int]) -> None:
        """Keep these rows only, in this order."""
        self._rows = len(rows)
        if self._tensors:
            rows_A = to_device(rows, self._device)
            self._tensors = {name: stored[rows_A] for name, stored in self._tensors.items()}
        self._values = {name: [values[row] for row in rows] for name, values in self._values.items()}

    def admit(self, count: int) -> None:
        """Add `count` rows in front of the others, whose order becomes `order_behind`."""
        self.select_rows(order_behind(count, self._rows))
        self._rows += count
        for name, stored in self._tensors.items():
            self._tensors[name] = torch.cat([stored.new_zeros(count, *stored.shape[1:]), stored])
        self._values = {name: [None] * count + values for name, values in self._values.items()}


def order_behind(count: int, others: int) -> list[int]:
    """Row order after inserting `count` rows at the front: the first `count` rows move to the end, so that few rows
    move in a KV cache."""
    return [*range(count, others), *range(min(count, others))]


def order_without(rows: set[int], total: int) -> list[int]:
    """Row order after dropping `rows` of `total`: the last rows take their places."""
    left = total - len(rows)
    last = (row for row in range(left, total) if row not in rows)
    return [next(last) if row in rows else row for row in range(left)]
