"""Rolling canvas: rows enter at a block boundary and leave when they end, all in the same block columns.

A row's first block begins where the batch's next block begins: its prompt stands before that column, and it ends in a
column of its own.

                      next block of the batch
    row 0   [ prompt ][ new tokens : ...... ]
    row 1      [ prompt  new tokens : . ]         began earlier
    row 2         [ prompt ]:[ ........... ]      enters
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import torch

from dlm_bridge.generation.canvas import BlockLayout, Canvas, StopCondition


@dataclass(frozen=True)
class EnteringRow:
    """A row to enter: its name, prompt tokens, and number of new tokens."""

    name: Hashable
    prompt: Sequence[int]
    gen_length: int


def cache_columns(layout: BlockLayout, max_length: int) -> int:
    """The columns of a KV cache for rows of at most so many tokens: where rows enter, with room to move the columns by
    whole blocks."""
    block = layout.block_length
    columns = -(-(max_length + layout.spare) // block) * block
    return columns if layout.whole else columns + 4 * block


class RollingCanvas(Canvas):
    """Rows of different lengths on both sides. Columns that no row needs any more are dropped on the left.

    Args:
        cache_width: columns that a KV cache of committed blocks has; a forward pass reads no more.

    Attributes:
        ended: rows that have left since the caller last emptied the list, each with its new tokens, at most
            `gen_length`.
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
        self.blocks: list[slice] = []  # the current one and, if rows go on behind it, the following one
        self.tokens = torch.full((0, 0), mask_token_id, device=device)
        self.names: list[Hashable] = []
        self.origins: list[int] = []
        self.starts: list[int] = []
        self.stops: list[int] = []
        self.ends: list[int] = []
        self.grows = layout.first_masks is not None
        self.gen_lengths: list[int] = []
        self.holes: list[set[int]] = []
        self.ended: list[tuple[Hashable, list[int]]] = []
        self.cancelled: set[Hashable] = set()
        self._layout = layout
        self._cache_width = cache_width
        self._stop_condition = stop_condition
        self._is_hole = None
        self._next = 0  # where the next block begins
        self._refresh()

    def still_wanted(self, rows: list[int]) -> list[int]:
        return [row for row in rows if self.names[row] not in self.cancelled]

    @property
    def rolls(self) -> bool:
        return not self._layout.whole

    @property
    def cache_width(self) -> int:
        return self._cache_width

    def next_block(self) -> slice:
        """Open the next block."""
        length, end = self._layout.block_length, max(self.stops) - (self._layout.closing is not None)
        begins = range(self._next, end, length)[:2]
        self.blocks = [slice(begin, min(begin + length, end)) for begin in begins]
        self._next = self.blocks[0].stop
        return self.blocks[0]

    def shift_for(self, entering: Sequence[EnteringRow], cached: int | None) -> int:
        """By how many columns the canvas should move to the right (below 0: left), in whole blocks, before these rows
        enter. `cached` are the columns in a KV cache of committed blocks, which is moved only where it must be; None:
        there is none."""
        block = self._layout.block_length
        first = min([*self.origins, *(self._next - self._columns_before(row) for row in entering)])
        if first < 0:
            return -(first // block * block)
        if cached is None:
            return -(first // block * block)
        full = self._next + 2 * block > self._cache_width
        return -(min(first, cached) // block * block) if full else 0

    def shift(self, by: int) -> None:
        """Move all rows to the right, or to the left over columns that no row needs."""
        if by > 0:
            self.tokens = torch.nn.functional.pad(self.tokens, (by, 0), value=self.mask_token_id)
        else:
            self.tokens = self.tokens[:, -by:]
        self.origins = [column + by for column in self.origins]
        self.starts = [column + by for column in self.starts]
        self.stops = [column + by for column in self.stops]
        self.ends = [column + by for column in self.ends]
        self._next += by
        self._refresh()

    def admit(self, entering: Sequence[EnteringRow]) -> None:
        """Let these rows enter, in front of the others."""
        layout, block = self._layout, self._layout.block_length
        if not self.names:
            self._next = max(map(self._columns_before, entering))
        origins = [self._next - self._columns_before(row) for row in entering]
        starts = [origin + len(row.prompt) for origin, row in zip(origins, entering, strict=True)]
        stops = [start + row.gen_length + layout.spare for start, row in zip(starts, entering, strict=True)]
        if layout.aligned:
            stops = [self._next - (self._next - stop) // block * block for stop in stops]  # whole blocks
        ends = stops
        if layout.first_masks is not None:
            ends = [min(start + layout.first_masks, stop) for start, stop in zip(starts, stops, strict=True)]
        width = max(stops + self.stops)
        tokens = torch.full((len(entering), width), self.mask_token_id)
        for row, (one, origin, start, stop) in enumerate(zip(entering, origins, starts, stops, strict=True)):
            tokens[row, origin:start] = torch.tensor(list(one.prompt), dtype=torch.long)
            if layout.closing is not None:
                tokens[row, stop - 1] = layout.closing
        others = self.tokens[:, :width]  # what is cut off is no row's
        others = torch.nn.functional.pad(others, (0, width - others.shape[1]), value=self.mask_token_id)
        self.tokens = torch.cat([tokens.to(others.device), others])
        self.names = [row.name for row in entering] + self.names
        self.origins, self.starts = origins + self.origins, starts + self.starts
        self.stops, self.ends = stops + self.stops, ends + self.ends
        self.gen_lengths = [row.gen_length for row in entering] + self.gen_lengths
        self.holes = [set() for _ in self.names]
        self._refresh()

    def retire(self, block: slice, read: Callable[[torch.Tensor], list[bool]]) -> list[int] | None:
        """As `Canvas.retire`; cancelled rows leave as well, without a result."""
        done = [
            start + length - (self._layout.closing is not None) <= block.stop or name in self.cancelled
            for start, length, name in zip(self.starts, self.gen_lengths, self.names, strict=True)
        ]
        if self._stop_condition.active and not all(done):
            columns = slice(0, block.stop)
            new_BN = self._wanted(None, columns)
            ended_B = self._stop_condition.marks(self.tokens[:, columns], new_BN, self.mask_token_id).any(dim=1)
            done = [a or b for a, b in zip(done, read(ended_B), strict=True)]
        if not any(done):
            return None
        over = [row for row, ends in enumerate(done) if ends]
        for row, tokens in zip(over, self.tokens[over].tolist(), strict=True):
            if self.names[row] not in self.cancelled:
                start = self.starts[row]
                end = min(start + self.gen_lengths[row], self.ends[row])
                self.ended.append((self.names[row], tokens[start:end]))
        self.cancelled -= {self.names[row] for row in over}
        self._select_rows([row for row, ends in enumerate(done) if not ends])
        return [row for row, ends in enumerate(done) if not ends]

    def masks(self, block: slice) -> list[int]:
        return [
            max(0, min(block.stop, stop) - max(block.start, start))
            for start, stop in zip(self.starts, self.stops, strict=True)
        ]

    def _wanted(self, rows: list[int] | None, columns: slice) -> torch.Tensor:
        new_AN = self._columns[columns] - self.first_new(rows)[:, None]
        lengths_A = self._lengths if rows is None else self._lengths[self.index(rows)]
        return (new_AN >= 0) & (new_AN < lengths_A[:, None])

    def _columns_before(self, row: EnteringRow) -> int:
        """The row's columns before its first block."""
        length, block = len(row.prompt), self._layout.block_length
        return length // block * block if self._layout.aligned else length

    def _select_rows(self, stay: list[int]) -> None:
        self.tokens = self.tokens[stay]
        for name in ("names", "origins", "starts", "stops", "ends", "gen_lengths", "holes"):
            values = getattr(self, name)
            setattr(self, name, [values[row] for row in stay])
        self._refresh()

    def _refresh(self) -> None:
        """The tensors that follow from the rows' columns."""
        device = self.tokens.device
        self.width = self.tokens.shape[1]
        geometry = torch.tensor([self.origins, self.starts, self.gen_lengths], dtype=torch.long, device=device)
        origins_B, self._starts, self._lengths = geometry.unbind()
        self._columns = torch.arange(self.width, device=device)
        self._places = self._columns - origins_B[:, None]
        self._measure_rows()
        self._index = None
