"""Canvas: the token buffer of the rows that are sampled together, with their masks, blocks and ends.

Rows enter and leave while others run. Each row has its prompt and committed tokens to the left of the current block:

                        block
    row 0     [ prompt ][ new : tokens ...... ]
    row 1        [ prompt  new: tokens : . ]       entered earlier
    row 2           [ prompt ]: [ ........... ]    enters

Without a KV cache, or with one whose columns are counted from each row's first token, a row moves on to its next block
as soon as it has completed one, and rows may enter before any step. The canvas then moves each row so that all blocks
start in the same column. If keys and values are cached block by block in shared columns (`shares_blocks`), the block
moves to the right when all rows have completed it, and only then may rows enter. If all rows enter together, no row is
ever moved.
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

Columns = slice | torch.Tensor  # the same columns for every row, or [rows, N] columns of each row


def to_device(numbers: Sequence[int] | torch.Tensor, device: torch.device) -> torch.Tensor:
    """Integers from the host as a tensor on the device, without a device synchronisation."""
    tensor = torch.as_tensor(numbers, dtype=torch.long)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def read_flags(flags: torch.Tensor, overlap_with: Callable[[], None]) -> list[Any]:
    """Copy the tensor's values to the host. On a GPU, `overlap_with` is called before the host waits for them."""
    copy = HostCopy(flags)
    if flags.is_cuda:
        overlap_with()
    return list(copy.values().tolist())


class HostCopy:
    """Asynchronous copy of a tensor to the host."""

    def __init__(self, values: torch.Tensor) -> None:
        self._copy, self._event = values, None
        if values.is_cuda:
            self._copy = values.to("cpu", non_blocking=True)
            self._event = torch.cuda.current_stream(values.device).record_event()

    @property
    def arrived(self) -> bool:
        return self._event is None or self._event.query()

    def values(self) -> np.ndarray[Any, Any]:
        """Wait for the copy and return the values."""
        if self._event is not None:
            self._event.synchronize()
        return self._copy.numpy()


@dataclass(frozen=True)
class BlockLayout:
    """Division of the new tokens into blocks.

    Args:
        block_length: tokens per block; None: a single block of any length, including the masks of a prompt to fill in.
        aligned: True: blocks are counted from each row's first token. The end of a prompt may then share the first
            block with new tokens, and the last block may extend past the last new token. False: blocks start at the
            end of the prompt, and the last one may be shorter.
        spare: number of mask columns after the last new token, as part of the last block.
        closing: token that is placed in the last new column from the start.
        first_masks: number of new tokens at the start, at most `gen_length`; rows then grow and shrink
            (`Canvas.resize`). None: rows have a fixed length.
        multiple: a single block begins at a multiple of this, counted from the row's first token, at or before the end
            of the prompt.
    """

    block_length: int | None
    aligned: bool = False
    spare: int = 0
    closing: int | None = None
    first_masks: int | None = None
    multiple: int = 1


def cache_columns(layout: BlockLayout, max_length: int) -> int:
    """Number of columns of a KV cache for rows of at most `max_length` tokens. Includes one column for padding or, if
    the layout has blocks, four blocks, so that rows can be moved by whole blocks."""
    block, columns = layout.block_length, max_length + layout.spare
    return columns + 1 if block is None else -(-columns // block) * block + 4 * block


@dataclass(frozen=True)
class Entry:
    """A row to add: its name, prompt tokens (`MASK` at positions to fill in), and number of new tokens."""

    name: Hashable
    prompt: Sequence[int]
    gen_length: int


@dataclass
class _Row:
    """Position of one row on the canvas.

    Attributes:
        origin: column of the first token.
        start: column of the first new token after the prompt.
        end: column after the last token.
        stop: column after the last position for a new token, not counting the layout's `closing` token.
        before: number of columns of the row before its block.
        holes: positions in the prompt to fill in, counted from the first token.
        inside: True while the row denoises the block.
        steps: number of steps of the row in the block so far.
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
    """Token buffer of B rows and S columns; `MASK` at masks and padding.

    Args:
        layout: the sampler's division into blocks.
        stop_condition: conditions that end a row before its full length.
        mask_token_id: token that the model reads at masks; None: the sampler has no mask token.
        proposes_mask: True if the mask token is an ordinary token, which may also be sampled.
        cache_width: number of columns of the KV cache; a forward pass reads at most this many.
        shares_blocks: True if a row starts its next block only when all rows have completed theirs.
        infill: True if prompts contain masks to fill in; otherwise only tokens after the prompt are new.

    Attributes:
        rows, names: [B], the rows' indices and names.
        origins, starts, ends: [B], the columns of each row's first token, of its first new token after the prompt, and
            after its last token.
        stops: [B], the column after the last position for a new token, not counting the layout's `closing` token.
        tokens: [B, S] token ids.
        excluded_token_id: token that is never proposed; -1: none.
        block: the columns that rows denoise.
        blocks: the block and, if rows share blocks and there is a following block, that one.
        memory: values that the rule and the predictor store for each row within its block.
        non_finite: [B] bool on the device, True for rows with NaN or infinite logits so far.
        log_mass: [B] float64, see `Ended.constraint_log_mass`.
        log_masses: by name, that of rows that have left.
        errors: by name, errors of rows that failed for other reasons than the model's logits.
        failed: names of failed rows that the host has learned of through `read`. They take no further step.
        ended: (name, tokens) of rows that have left since the caller last emptied the list, with at most `gen_length`
            new tokens; tokens are None for a failed row.
        cancelled: names of rows that take no further step and leave without a result.
        moved: [A, N], while observers are called: the previous place among the columns of the token in each column;
            None: no token has moved.
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
        self.log_mass = torch.zeros(0, dtype=torch.float64, device=device)
        self.log_masses: dict[Hashable, float] = {}
        self.failed: set[Hashable] = set()
        self.errors: dict[Hashable, RowError] = {}
        self.ended: list[tuple[Hashable, list[int] | None]] = []
        self.cancelled: set[Hashable] = set()
        self.moved: torch.Tensor | None = None
        self.cache_width, self.shares_blocks, self.infill = cache_width, shares_blocks, infill
        self.grows = layout.first_masks is not None
        self._layout = layout
        self._closing = int(layout.closing is not None)
        # In a text that grows and shrinks, an EOS token in the middle does not end it.
        self._stop_condition = StopCondition((), device) if infill and self.grows else stop_condition
        self._rows: list[_Row] = []
        self._index: tuple[list[int], torch.Tensor] | None = None
        self._next = 0  # if rows share blocks, the column of the next block
        self._is_hole: torch.Tensor | None = None  # [B, S]; None: no row has a hole
        self._refresh()

    # ---- Rows.

    @property
    def firsts(self) -> list[int]:
        """[B], the column of position 0 of each row's events."""
        return self.origins if self.infill else self.starts

    @property
    def text_ends(self) -> list[int]:
        """[B], the column after the last position of each row's events, not counting the layout's `closing` token."""
        rows = zip(self.firsts, self._reported, self._rows, strict=True)
        return [first + count - (row.end - row.stop if row.gen_length else 0) for first, count, row in rows]

    def steps(self, rows: list[int]) -> list[int]:
        """[A], number of steps of these rows in their blocks so far."""
        return [self._rows[row].steps for row in rows]

    @property
    def inside(self) -> list[int]:
        """Indices of the rows that denoise the block."""
        return [number for number, row in enumerate(self._rows) if row.inside]

    @property
    def has_holes(self) -> bool:
        """True if some prompt has masks to fill in."""
        return self._is_hole is not None

    @property
    def padded(self) -> bool:
        """True if some row has padding."""
        return self._padded

    def count_step(self, rows: list[int]) -> None:
        """Count one step for these rows."""
        for row in rows:
            self._rows[row].steps += 1

    def selected(self, rows: list[int]) -> list[int] | None:
        """Return None, which selects all rows without an index, if `rows` are all rows."""
        return None if len(rows) == len(self.rows) else rows

    def index(self, rows: list[int]) -> torch.Tensor:
        """[A], `rows` as an index tensor on the device; the last one is cached."""
        if self._index is None or self._index[0] != rows:
            self._index = rows, to_device(rows, self.tokens.device)
        return self._index[1]

    # ---- Tokens. `rows` None means all rows; A is the number of rows, N the number of columns.

    def take(self, rows: list[int] | None, columns: Columns) -> torch.Tensor:
        """Return [A, N] tokens."""
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
        """Flag rows in which logits of new tokens are NaN or plus infinity; minus infinity suppresses a token.

        The flags stay on the device. The host reads them with the result of a step (`read`), or when a row leaves.
        """
        bad_AN = ~(logits_ANV.amax(dim=-1) < torch.inf)
        bad_A = (bad_AN & self.behind_prompt(rows, columns)).any(dim=1)
        if rows is None:
            self.non_finite |= bad_A
        else:
            self.non_finite[self.index(rows)] |= bad_A

    def fail(self, name: Hashable, reason: str) -> None:
        """Record why a row fails; the caller sets its logits to NaN. The first reason is kept."""
        self.errors.setdefault(name, RowError(reason, [name]))

    def read(self, flags: torch.Tensor, overlap_with: Callable[[], None] = lambda: None) -> list[Any]:
        """Return the values of `read_flags`, and update `failed`."""
        non_finite = HostCopy(self.non_finite)
        values = read_flags(flags, overlap_with)
        self.failed |= {name for name, bad in zip(self.names, non_finite.values().tolist(), strict=True) if bad}
        return values

    def behind_prompt(self, rows: list[int] | None, columns: Columns) -> torch.Tensor:
        """[A, N], True at columns that are not given: from the end of the row's prompt to its end, and at holes."""
        columns_AN = self.columns(rows, columns)
        behind_AN = columns_AN >= self.first_new(rows)[:, None]
        if self.grows and self._is_hole is not None:  # tokens after the holes are given and move with them
            behind_AN = torch.zeros_like(behind_AN)
        elif self._some_end_early:
            behind_AN &= columns_AN < (self._ends if rows is None else self._ends[self.index(rows)])[:, None]
        if self._is_hole is None:
            return behind_AN
        return behind_AN | (self._is_hole if rows is None else self._is_hole[self.index(rows)]).gather(1, columns_AN)

    def masked(self, rows: list[int] | None, columns: Columns) -> torch.Tensor:
        """[A, N], True at masks, False at padding."""
        return (self.take(rows, columns) == MASK) & self.behind_prompt(rows, columns)

    def columns(self, rows: list[int] | None, columns: Columns) -> torch.Tensor:
        """[A, N], column indices as a tensor."""
        count = len(self._rows if rows is None else rows)
        return self._columns[columns].expand(count, -1) if isinstance(columns, slice) else columns

    def first_new(self, rows: list[int] | None) -> torch.Tensor:
        """[A], the column of each row's first new token after the prompt."""
        return self._starts if rows is None else self._starts[self.index(rows)]

    def origin(self, rows: list[int] | None) -> torch.Tensor:
        """[A], the column of each row's first token."""
        return self._origins if rows is None else self._origins[self.index(rows)]

    def places(self, rows: list[int] | None, columns: Columns = slice(None)) -> torch.Tensor:
        """[A, N], columns counted from the row's first token; negative at padding on the left."""
        return self.columns(rows, columns) - self.origin(rows)[:, None]

    def real(self, rows: list[int] | None) -> torch.Tensor:
        """[A, S], True at real tokens, False at padding on either side."""
        return self._real if rows is None else self._real[self.index(rows)]

    def lengths(self, rows: list[int] | None, end: int, begin: int = 0, without: int = 0) -> tuple[int, ...]:
        """[A], number of real columns of each row in [begin, end), without the row's last `without` columns."""
        chosen = self._rows if rows is None else [self._rows[row] for row in rows]
        return tuple(max(0, min(row.end - without, end) - max(row.origin, begin)) for row in chosen)

    def texts(self) -> torch.Tensor:
        """[B, G], tokens of each row from its first reported position on; shorter rows are filled with `MASK`."""
        positions_G = torch.arange(max(self._reported), device=self.tokens.device)
        columns_BG = (self._origins if self.infill else self._starts)[:, None] + positions_G
        own_BG = (positions_G < to_device(self._reported, columns_BG.device)[:, None]) & (columns_BG < self.width)
        tokens_BG = self.tokens.gather(1, columns_BG.clamp(max=self.width - 1))
        return tokens_BG.masked_fill(~own_BG, MASK)

    def masks(self, block: slice) -> list[int]:
        """[B], number of masks of each row in a block that is not started yet."""
        counts = []
        for row in self._rows:
            holes = sum(block.start <= row.origin + hole < block.stop for hole in row.holes)
            behind = max(0, min(block.stop, row.stop) - max(block.start, row.start))
            counts.append(holes + (behind if row.gen_length or holes else 0))
        return counts

    def opens(self, row: int, column: int) -> bool:
        """True if `column`, in a block that is not started yet, is a mask with a token of the row to its left."""
        one = self._rows[row]
        return one.origin < column and (one.start <= column or column - one.origin in one.holes)

    def resize(self, rows: list[int], columns: slice, copies_AN: torch.Tensor, growth: Sequence[int]) -> torch.Tensor:
        """Insert and delete tokens of these rows; the tokens after them move.

        Args:
            columns: every column that changes, and all columns after it.
            copies_AN: 0 to delete the token, 2 to replace it by two masks, else 1. A row must stay within its `stops`.
            growth: resulting change of each row's length.

        Returns:
            [A, N], the previous column of the token in each column.
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
        provisional: torch.Tensor | None = None,
    ) -> list[Any]:
        """[A], True if the block has a masked new token and the row does not end before it.

        Args:
            read: copies flags to the host.
            values: computes [A] numbers from these flags, which are returned instead. With stop strings it is called
                twice: they are searched for on the host, without waiting for the device again.
            provisional: [A, S], True at tokens that count as masks, because they may change.
        """
        tokens_AN, new_AN = self.take(rows, slice(0, block.stop)), self._wanted(rows, slice(0, block.stop))
        if provisional is not None:
            tokens_AN = tokens_AN.masked_fill(provisional[:, : block.stop], MASK)
        masked_AN, stop = tokens_AN == MASK, self._stop_condition
        open_AN = masked_AN & new_AN
        if stop.active:
            open_AN &= stop.by_token(tokens_AN, new_AN).cumsum(dim=1) == 0
        open_A, holes_A = open_AN.any(dim=1), torch.zeros_like(open_AN[:, 0])  # a hole is open even after an EOS token
        if self._is_hole is not None:
            holes_AN = self._is_hole if rows is None else self._is_hole[self.index(rows)]
            holes_A = (holes_AN[:, : block.stop] & masked_AN).any(dim=1)
        if not stop.has_strings:
            return read(values(open_A | holes_A))
        both_A2 = torch.stack([values(open_A | holes_A), values(holes_A)], dim=1)
        table = read(torch.cat([both_A2, stop.texts(tokens_AN, new_AN)], dim=1))
        return [stopped if stop.string_end(text) >= 0 else going for going, stopped, *text in table]

    # ---- Adding rows, starting and completing blocks, removing rows.

    @property
    def admits(self) -> bool:
        """True if rows may enter now."""
        return not self.shares_blocks or (bool(self._rows) and not self.inside)

    def admit(self, entering: Sequence[Entry], cached: int | None = None) -> int:
        """Add rows before the others, which are reordered by `order_behind`.

        Args:
            cached: number of columns in a KV cache of committed blocks; None: no such cache.

        Returns:
            Number of columns by which the other rows moved to the right (negative: to the left).
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
        """Start the next block. Returns the rows that begin it."""
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
        """Mark rows as done with the block. Returns the rows that have completed it; if rows share blocks, that is
        none until all are done, and then all."""
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
        """Drop rows whose text is finished, and cancelled or failed rows.

        Args:
            rows: rows that have completed the block.
            read: copies flags to the host.

        Returns:
            Indices of the rows kept, in their new order; None if none was dropped.
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
        masses = self.log_mass[leaving].tolist()
        for number, (*tokens, failed), mass in zip(leaving, read_AS, masses, strict=True):
            row = self._rows[number]
            self.log_masses[row.name] = mass
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
        """[A, N], True at the row's first `gen_length` new tokens."""
        new_AN = self._columns[columns] - self.first_new(rows)[:, None]
        lengths_A = self._lengths if rows is None else self._lengths[self.index(rows)]
        return (new_AN >= 0) & (new_AN < lengths_A[:, None])

    def _columns_before(self, row: Entry) -> int:
        """Number of columns of the row before its first block; negative if the block starts before the row."""
        length, block = len(row.prompt), self._layout.block_length
        if block is None:
            return 0 if self.infill else length - length % self._layout.multiple
        if self._layout.aligned:
            return 0 if self.infill else length // block * block
        return -(-length % block) if self.infill else length

    def _put_in_front(self, entering: Sequence[Entry], origins: list[int]) -> None:
        """Insert rows before the others, with their first tokens at the columns `origins`."""
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
        self.log_mass = torch.cat([self.log_mass.new_zeros(count), self.log_mass])
        for row in added:  # may reuse the name of a row that has left
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
        self.log_mass = self.log_mass[index]
        if self._is_hole is not None:
            self._is_hole = self._is_hole[index]
        self._rows = [self._rows[row] for row in rows]

    def _arrange(self) -> None:
        """Move the rows so that their blocks start in the same column. Columns to the left of a row become padding."""
        length = self._layout.block_length
        start = max(row.before for row in self._rows)
        if length is not None:  # blocks are counted from the first column
            start = -(-start // length) * length
        by = [start - row.before - row.origin for row in self._rows]
        for row, shift in zip(self._rows, by, strict=True):
            row.move(shift)
        stop = max(row.stop for row in self._rows)
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
        """Number of columns, in whole blocks, by which the canvas must move to the right (negative: left) before these
        rows enter. With a KV cache, it moves only if necessary."""
        block = self._layout.block_length
        assert block is not None
        first = min([*self.origins, *(self._next - self._columns_before(row) for row in entering)])
        if first < 0 or cached is None:
            return -(first // block * block)
        full = self._next + 2 * block > self.cache_width
        return -(min(first, cached) // block * block) if full else 0

    def _shift(self, by: int) -> None:
        """Move all rows to the right, or to the left over unused columns."""
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
        """Recompute the values that depend on the rows' columns."""
        device = self.tokens.device
        self.rows, self.names = list(range(len(self._rows))), [row.name for row in self._rows]
        self.origins, self.starts = [row.origin for row in self._rows], [row.start for row in self._rows]
        self.stops = [row.stop for row in self._rows]
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
        """Recompute the values that depend on the rows' ends."""
        self.ends = [row.end for row in self._rows]
        self._ends = to_device(self.ends, self.tokens.device)
        self._some_end_early = any(row.end != self.width for row in self._rows)
        self._padded = self._some_end_early or any(row.origin for row in self._rows)
        self._real = self._columns >= self._origins[:, None]
        if self._some_end_early:
            self._real = self._real & (self._columns < self._ends[:, None])


class RowMemory:
    """Named per-row values, reset at the start of each block: tensors to zeros, lists to None.

    Values move with their rows when other rows enter or leave the canvas.
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
        """The named list of B values on the host, created as None; the caller may modify it."""
        return self._values.setdefault(name, [None] * self._rows)

    def forget(self, rows: list[int]) -> None:
        """Reset the values of rows that have completed their block."""
        if len(rows) == self._rows:
            self._tensors.clear()
            self._values.clear()
        if self._tensors and rows:
            rows_A = to_device(rows, self._device)
            for stored in self._tensors.values():
                stored.index_fill_(0, rows_A, 0)
        for values in self._values.values():
            for row in rows:
                values[row] = None

    def select_rows(self, rows: list[int]) -> None:
        """Keep only these rows, in this order."""
        self._rows = len(rows)
        if self._tensors:
            rows_A = to_device(rows, self._device)
            self._tensors = {name: stored[rows_A] for name, stored in self._tensors.items()}
        self._values = {name: [values[row] for row in rows] for name, values in self._values.items()}

    def admit(self, count: int) -> None:
        """Add `count` rows before the others, which are reordered by `order_behind`."""
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
