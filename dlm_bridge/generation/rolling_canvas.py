"""Rolling canvases: rows enter while others are in the middle of their texts, and leave when they end.

All rows denoise in the same columns, the block: a row's prompt and what it has written stand before it, and a row ends
in a column of its own.

                        block
    row 0     [ prompt ][ new : tokens ...... ]
    row 1        [ prompt  new: tokens : . ]       began earlier
    row 2           [ prompt ]: [ ........... ]    enters

`OwnBlocksCanvas` moves each row to the left when it has completed its block, so that rows enter before any step.
`SharedBlocksCanvas` leaves them where their keys and values are cached: the block moves to the right when all rows
have completed it, and rows enter then.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from dlm_bridge.generation.canvas import BlockLayout, Canvas
from dlm_bridge.generation.rows import Read, RowMemory, StopCondition, order_behind, order_without, to_device


@dataclass(frozen=True)
class EnteringRow:
    """A row to enter: its name, prompt tokens, and number of new tokens."""

    name: Hashable
    prompt: Sequence[int]
    gen_length: int


def cache_columns(layout: BlockLayout, max_length: int) -> int:
    """The columns of a KV cache for rows of at most so many tokens: with one for padding or, of rows that share their
    blocks, with room to move the columns by whole blocks."""
    block, columns = layout.block_length, max_length + layout.spare
    return columns + 1 if block is None else -(-columns // block) * block + 4 * block


class RollingCanvas(Canvas):
    """Rows of different lengths on both sides.

    Args:
        cache_width: columns that a KV cache has; a forward pass reads no more.

    Attributes:
        ended: rows that have left since the caller last emptied the list, each with its new tokens, at most
            `gen_length`; None of a row whose logits were NaN or infinite.
        cancelled: names of rows that take no further step, and leave without a result.
    """

    def __init__(
        self,
        layout: BlockLayout,
        mask_token_id: int,
        stop_condition: StopCondition,
        device: torch.device,
        cache_width: int,
    ) -> None:
        # None of Canvas' own: it lays a whole batch out at once.
        self.mask_token_id = mask_token_id
        self.width = 0
        self.block, self.blocks = slice(0, 0), [slice(0, 0)]
        self.tokens = torch.full((0, 0), mask_token_id, device=device)
        self.names: list[Hashable] = []
        self.origins: list[int] = []
        self.starts: list[int] = []
        self.stops: list[int] = []
        self.ends: list[int] = []
        self.grows = layout.first_masks is not None
        self.gen_lengths: list[int] = []
        self.inside: list[bool] = []
        self.steps: list[int] = []
        self.memory = RowMemory(0, device)
        self.non_finite = torch.zeros(0, dtype=torch.bool, device=device)
        self.failed = set()
        self.holes: list[set[int]] = []
        self.ended: list[tuple[Hashable, list[int] | None]] = []
        self.cancelled: set[Hashable] = set()
        self._layout = layout
        self._closing = int(layout.closing is not None)
        self._cache_width = cache_width
        self._stop_condition = stop_condition
        self._is_hole = None
        self._refresh()

    @property
    @abstractmethod
    def admits(self) -> bool:
        """Whether rows may enter now."""

    @abstractmethod
    def admit(self, entering: Sequence[EnteringRow], cached: int | None) -> int:
        """Let these rows enter, in front of the others in the order `order_behind`. Returns by how many columns the
        others have moved to the right (below 0: left).

        Args:
            cached: the columns in a KV cache of committed blocks; None: there is none.
        """

    def unwanted(self) -> list[int]:
        leaving = self.cancelled | self.failed
        return [row for row, name in enumerate(self.names) if name in leaving] if leaving else []

    @property
    def rolls(self) -> bool:
        return True

    @property
    def cache_width(self) -> int:
        return self._cache_width

    def written(self) -> torch.Tensor:
        """[B, G], the new tokens of each row, G those of the longest; the mask token behind a row's own."""
        places_G = torch.arange(max(self.gen_lengths), device=self.tokens.device)
        columns_BG = self._starts[:, None] + places_G
        own_BG = (places_G < self._lengths[:, None]) & (columns_BG < self.width)
        tokens_BG = self.tokens.gather(1, columns_BG.clamp(max=self.width - 1))
        return tokens_BG.masked_fill(~own_BG, self.mask_token_id)

    def retire(self, rows: list[int], read: Read) -> list[int] | None:
        """As `Canvas.retire`; cancelled and failed rows leave as well, without a result."""
        stop = self.block.stop
        over = {row for row in rows if self.starts[row] + self.gen_lengths[row] - self._closing <= stop}
        over |= {*self.unwanted()}
        perhaps = [row for row in rows if row not in over]
        if self._stop_condition.active and perhaps:
            columns = slice(0, stop)
            tokens_AN, new_AN = self.take(perhaps, columns), self._wanted(perhaps, columns)
            ended = self._stop_condition.read_ended(tokens_AN, new_AN, self.mask_token_id, read)
            over |= {row for row, ends in zip(perhaps, ended, strict=True) if ends}
        if not over:
            return None
        leaving, stay = sorted(over), order_without(over, len(self.names))
        read_AS = torch.cat([self.tokens[leaving], self.non_finite[leaving, None]], dim=1).tolist()
        self.failed |= {self.names[row] for row, (*_, failed) in zip(leaving, read_AS, strict=True) if failed}
        for row, (*tokens, failed) in zip(leaving, read_AS, strict=True):
            if self.names[row] not in self.cancelled:
                start = self.starts[row]
                end = min(start + self.gen_lengths[row], self.ends[row])
                self.ended.append((self.names[row], None if failed else tokens[start:end]))
        self.cancelled -= {self.names[row] for row in leaving}
        self._select_rows(stay)
        self.memory.select_rows(stay)
        self._refresh()
        return stay

    def masks(self, block: slice) -> list[int]:
        return [
            max(0, min(block.stop, stop) - max(block.start, start))
            for start, stop in zip(self.starts, self.stops, strict=True)
        ]

    _row_lists: ClassVar[tuple[str, ...]] = (
        "names",
        "origins",
        "starts",
        "stops",
        "ends",
        "gen_lengths",
        "inside",
        "steps",
        "holes",
    )

    def _wanted(self, rows: list[int] | None, columns: slice) -> torch.Tensor:
        new_AN = self._columns[columns] - self.first_new(rows)[:, None]
        lengths_A = self._lengths if rows is None else self._lengths[self.index(rows)]
        return (new_AN >= 0) & (new_AN < lengths_A[:, None])

    def _columns_before(self, row: EnteringRow) -> int:
        """The row's columns before its first block."""
        length, block = len(row.prompt), self._layout.block_length
        return length // block * block if self._layout.aligned and block is not None else length

    def _select_rows(self, rows: list[int]) -> None:
        index = to_device(rows, self.tokens.device)
        self.tokens, self.non_finite = self.tokens[index], self.non_finite[index]
        for name in self._row_lists:
            values = getattr(self, name)
            setattr(self, name, [values[row] for row in rows])

    def _put_in_front(self, entering: Sequence[EnteringRow], origins: list[int]) -> None:
        """Add these rows, which begin in these columns."""
        layout, mask, count = self._layout, self.mask_token_id, len(entering)
        self._select_rows(order_behind(count, len(self.names)))
        starts = [origin + len(row.prompt) for origin, row in zip(origins, entering, strict=True)]
        stops = [
            start + row.gen_length + layout.spare - self._closing for start, row in zip(starts, entering, strict=True)
        ]
        if layout.aligned and layout.block_length is not None:  # whole blocks
            length = layout.block_length
            stops = [origin - (origin - stop) // length * length for origin, stop in zip(origins, stops, strict=True)]
        ends = [stop + self._closing for stop in stops]
        if layout.first_masks is not None:
            ends = [min(start + layout.first_masks, stop) for start, stop in zip(starts, stops, strict=True)]
        width = max([self.width, *(stop + self._closing for stop in stops)])
        new = [[mask] * origin + list(row.prompt) for origin, row in zip(origins, entering, strict=True)]
        for tokens, stop in zip(new, stops, strict=True):
            tokens += [mask] * (stop - len(tokens)) + ([] if layout.closing is None else [layout.closing])
            tokens += [mask] * (width - len(tokens))
        others = torch.nn.functional.pad(self.tokens, (0, width - self.width), value=mask)
        self.tokens = torch.cat(
            [to_device([token for tokens in new for token in tokens], others.device).view(count, width), others]
        )
        self.non_finite = torch.cat([self.non_finite.new_zeros(count), self.non_finite])
        self.failed -= {row.name for row in entering}  # a name of a row that has left
        self.names = [row.name for row in entering] + self.names
        self.origins, self.starts = origins + self.origins, starts + self.starts
        self.stops, self.ends = stops + self.stops, ends + self.ends
        self.gen_lengths = [row.gen_length for row in entering] + self.gen_lengths
        self.inside, self.steps = [False] * count + self.inside, [0] * count + self.steps
        self.holes = [set() for _ in self.names]
        self.memory.admit(count)
        self._refresh()

    def _move(self, by: list[int]) -> None:
        """Move each row to the right by so many columns, or to the left."""
        self.origins, self.starts, self.stops, self.ends = (
            [column + shift for column, shift in zip(columns, by, strict=True)]
            for columns in (self.origins, self.starts, self.stops, self.ends)
        )

    def _refresh(self) -> None:
        """The tensors that follow from the rows' columns."""
        device = self.tokens.device
        self.width = self.tokens.shape[1]
        geometry = to_device([*self.origins, *self.starts, *self.gen_lengths], device).view(3, -1)
        origins_B, self._starts, self._lengths = geometry.unbind()
        self._columns = torch.arange(self.width, device=device)
        self._places = self._columns - origins_B[:, None]
        self._measure_rows()
        self._index = None


class OwnBlocksCanvas(RollingCanvas):
    """Each row goes on to its next block as soon as it has completed one, and may enter before any step. For models
    without a KV cache, or with one in columns that are counted from a row's first token."""

    _row_lists: ClassVar[tuple[str, ...]] = (*RollingCanvas._row_lists, "_before")

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._before: list[int] = []  # each row's columns before its block

    @property
    def admits(self) -> bool:
        return True

    @property
    def shares_blocks(self) -> bool:
        return False

    def admit(self, entering: Sequence[EnteringRow], cached: int | None) -> int:
        if entering:
            self._put_in_front(entering, [0] * len(entering))
            self._before = [self._columns_before(row) for row in entering] + self._before
        return 0

    def open_block(self) -> list[int]:
        opening = [row for row in self.rows if not self.inside[row]]
        if opening:
            self._arrange()
            self._begin(opening)
        return opening

    def close_block(self, rows: list[int]) -> list[int]:
        for row in rows:
            self.inside[row] = False
            self._before[row] += self._layout.block_length or 0
        self.memory.forget(rows)
        return rows

    def _arrange(self) -> None:
        """Move the rows so that their blocks begin in one column, and nothing but padding is before all rows."""
        length = self._layout.block_length
        start = max(self._before)
        if length is not None:  # blocks are counted from the first column
            start = -(-start // length) * length
        by = [start - before - origin for before, origin in zip(self._before, self.origins, strict=True)]
        self._move(by)
        stop = max(self.stops)
        self.block = slice(start, stop if length is None else min(start + length, stop))
        self.blocks = [self.block]
        source_BS = torch.arange(stop + self._closing, device=self.tokens.device)
        source_BS = source_BS - to_device(by, self.tokens.device)[:, None]
        self.tokens = self.tokens.gather(1, source_BS.clamp(min=0, max=self.width - 1))
        self._refresh()
        self.tokens.masked_fill_(~self._real, self.mask_token_id)


class SharedBlocksCanvas(RollingCanvas):
    """All rows denoise the same block of the canvas, at whose boundaries they enter. Columns that no row needs any
    more are dropped on the left."""

    _next = 0  # where the next block begins

    @property
    def admits(self) -> bool:
        return bool(self.names) and not any(self.inside)

    def admit(self, entering: Sequence[EnteringRow], cached: int | None) -> int:
        if not self.names:
            self._next = max(map(self._columns_before, entering))
            self.blocks = [slice(self._next, self._next)]
        by = self._shift_for(entering, cached)
        if by:
            self._shift(by)
        if entering:
            self._put_in_front(entering, [self._next - self._columns_before(row) for row in entering])
        return by

    def open_block(self) -> list[int]:
        if any(self.inside):
            return []
        length, end = self._layout.block_length, max(self.stops)
        assert length is not None
        begins = range(self._next, end, length)[:2]
        # The current one and, if rows go on behind it, the following one.
        self.blocks = [slice(begin, min(begin + length, end)) for begin in begins]
        self.block = self.blocks[0]
        self._next = self.block.stop
        self._begin(self.rows)
        return self.rows

    def _shift_for(self, entering: Sequence[EnteringRow], cached: int | None) -> int:
        """By how many columns the canvas should move to the right (below 0: left), in whole blocks, before these rows
        enter. A KV cache is moved only where it must be."""
        block = self._layout.block_length
        assert block is not None
        first = min([*self.origins, *(self._next - self._columns_before(row) for row in entering)])
        if first < 0:
            return -(first // block * block)
        if cached is None:
            return -(first // block * block)
        full = self._next + 2 * block > self._cache_width
        return -(min(first, cached) // block * block) if full else 0

    def _shift(self, by: int) -> None:
        """Move all rows to the right, or to the left over columns that no row needs."""
        if by > 0:
            self.tokens = torch.nn.functional.pad(self.tokens, (by, 0), value=self.mask_token_id)
        else:
            self.tokens = self.tokens[:, -by:]
        self._move([by] * len(self.names))
        self._next += by
        self._refresh()
