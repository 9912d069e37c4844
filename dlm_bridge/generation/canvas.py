"""The canvas: every row's tokens in aligned columns, which of them form a block, and what comes out in the end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from dlm_bridge.generation.ending import Ending
from dlm_bridge.generation.prompt import Prompt
from dlm_bridge.generation.transfers import send

Columns = slice | torch.Tensor  # the same columns of every row, or a [rows, N] tensor of each row's own


@dataclass(frozen=True)
class Layout:
    """How a sampler cuts the new tokens into blocks."""

    block_length: int
    # True: blocks are counted from each row's first token, so that a prompt's ragged end shares the first block with
    # new tokens, and the last block may go on behind the last new token. False: they start where the prompt ends, and
    # the last one may be shorter.
    aligned: bool = False
    whole: bool = False  # True: one block, however long, also of a prompt to fill
    spare: int = 0  # mask columns behind the last new token, part of the last block
    closing: int | None = None  # a token that stands in the last new column from the start


class Canvas:
    """B rows of S columns. Rows that are complete leave it, so B shrinks while the sampler runs."""

    def __init__(
        self,
        prompt: Prompt,
        layout: Layout,
        *,
        gen_length: int,
        mask_token_id: int,
        pad_token_id: int,
        ending: Ending,
    ) -> None:
        device = prompt.tokens.device
        batch, self.prompt_width = prompt.tokens.shape
        lengths = [self.prompt_width - pad for pad in prompt.pads]
        block = layout.block_length
        if layout.aligned:
            first = max(length // block for length in lengths) * block
            self.origins = [first - length // block * block for length in lengths]  # where a row's prompt begins
        else:
            first = self.prompt_width
            self.origins = list(prompt.pads)
        self.starts = [origin + length for origin, length in zip(self.origins, lengths, strict=True)]
        self._gen_length = gen_length
        closing = layout.closing if gen_length else None
        new = gen_length - (closing is not None)
        stop = max(self.starts) + new + layout.spare
        if layout.aligned:
            stop = first - (first - stop) // block * block  # whole blocks
        self.width = stop + (closing is not None)
        if prompt.holes:
            first, block = (0, stop) if layout.whole else (first % block, block)
        self.blocks = [slice(begin, min(begin + block, stop)) for begin in range(first, stop, block)]
        if prompt.holes and first:
            self.blocks.insert(0, slice(0, first))
        self.mask_token_id = mask_token_id
        self._pad_token_id = pad_token_id
        self._ending = ending

        self.tokens = torch.full((batch, self.width), mask_token_id, device=device)
        for row, (origin, length) in enumerate(zip(self.origins, lengths, strict=True)):
            self.tokens[row, origin : origin + length] = prompt.tokens[row, self.prompt_width - length :]
        if closing is not None:
            self.tokens[:, -1] = closing
        self._columns = torch.arange(self.width, device=device)
        self._starts = torch.tensor(self.starts, device=device)
        self._index: tuple[list[int], torch.Tensor] | None = None
        self._places = self._columns - torch.tensor(self.origins, device=device)[:, None]
        self._output = torch.full((batch, self.prompt_width + gen_length), pad_token_id, device=device)
        self._output[:, : self.prompt_width] = prompt.tokens
        self.names = list(range(batch))  # which row of the batch each row of the canvas is
        holes = prompt.holes or ((),) * batch
        self.holes = [{origin + hole for hole in gaps} for origin, gaps in zip(self.origins, holes, strict=True)]
        self._is_hole: torch.Tensor | None = None  # [B, S]; None: no prompt has a hole
        if any(self.holes):
            self._is_hole = torch.zeros(batch, self.width, dtype=torch.bool)
            for row, columns in enumerate(self.holes):
                self._is_hole[row, sorted(columns)] = True
            self._is_hole = self._is_hole.to(device)
        self._hole_count = sum(map(len, holes))
        # The first column of the output in which anything is to be settled, and which columns of prompts are not.
        self._given = torch.ones(batch, self.prompt_width, dtype=torch.bool, device=device)
        if self._is_hole is not None:
            for row, (pad, gaps) in enumerate(zip(prompt.pads, holes, strict=True)):
                self._given[row, [pad + gap for gap in gaps]] = False
        self.first_open = min(
            (pad + gaps[0] for pad, gaps in zip(prompt.pads, holes, strict=True) if gaps), default=self.prompt_width
        )

    @property
    def rows(self) -> list[int]:
        return list(range(len(self.names)))

    @property
    def padded(self) -> bool:
        return any(self.origins)

    def index(self, rows: list[int]) -> torch.Tensor:
        """[A], the rows as an index on the device, made once for all who ask in a step."""
        if self._index is None or self._index[0] != rows:
            self._index = rows, send(rows, self.tokens.device)
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

    def behind_prompt(self, rows: list[int] | None, columns: Columns) -> torch.Tensor:
        """[A, N], True at the columns that are not given: behind the row's prompt, or a hole in it."""
        columns_AN = self.columns(rows, columns)
        behind_AN = columns_AN >= self.first_new(rows)[:, None]
        if self._is_hole is None:
            return behind_AN
        return behind_AN | (self._is_hole if rows is None else self._is_hole[self.index(rows)]).gather(1, columns_AN)

    def masked(self, rows: list[int] | None, columns: Columns) -> torch.Tensor:
        """[A, N], True at what is not settled yet; padding, though made of mask tokens, is not meant."""
        return (self.take(rows, columns) == self.mask_token_id) & self.behind_prompt(rows, columns)

    def columns(self, rows: list[int] | None, columns: Columns) -> torch.Tensor:
        """[A, N], the columns as a tensor."""
        count = len(self.names if rows is None else rows)
        return self._columns[columns].expand(count, -1) if isinstance(columns, slice) else columns

    def first_new(self, rows: list[int] | None) -> torch.Tensor:
        """[A], the column of a row's first new token."""
        return self._starts if rows is None else self._starts[self.index(rows)]

    def places(self, rows: list[int] | None) -> torch.Tensor:
        """[A, S], each column counted from its row's first token: below 0 there is padding."""
        return self._places if rows is None else self._places[self.index(rows)]

    def real(self, rows: list[int] | None) -> torch.Tensor:
        """[A, S], False at padding."""
        return self.places(rows) >= 0

    def _wanted(self, rows: list[int] | None, columns: slice) -> torch.Tensor:
        """[A, N], True at the new tokens that are asked for: behind the prompt, `gen_length` of them."""
        new_AN = self._columns[columns] - self.first_new(rows)[:, None]
        return (new_AN >= 0) & (new_AN < self._gen_length)

    def masks(self, block: slice) -> list[int]:
        """How many columns of an untouched block are masks, by row; none where none of them is asked for."""
        counts = []
        for start, own in zip(self.starts, self.holes, strict=True):
            holes = sum(block.start <= hole < block.stop for hole in own)
            behind = max(0, block.stop - max(block.start, start)) if self._gen_length or holes else 0
            counts.append(holes + behind)
        return counts

    def opens(self, row: int, column: int) -> bool:
        """Whether the column of an untouched block is a mask behind some token of the row."""
        return self.origins[row] < column and (self.starts[row] <= column or column in self.holes[row])

    def unfinished(self, rows: list[int] | None, block: slice) -> torch.Tensor:
        """[A], True where a new token of the block is still a mask, and the row does not end before it."""
        tokens_AN = self.take(rows, slice(0, block.stop))
        new_AN = self._wanted(rows, slice(0, block.stop))
        open_AN = new_AN & (tokens_AN == self.mask_token_id)
        if self._ending.happens:
            open_AN &= self._ending.marks(tokens_AN, new_AN, self.mask_token_id).cumsum(dim=1) == 0
        if self._is_hole is not None:
            holes_AN = (self._is_hole if rows is None else self._is_hole[self.index(rows)])[:, : block.stop]
            open_AN |= holes_AN & (tokens_AN == self.mask_token_id)
        return open_AN.any(dim=1)

    def retire(self, block: slice, read: Callable[[torch.Tensor], list[bool]]) -> list[int] | None:
        """Take out the rows that the block completes. Returns those that stay, None if all do. `read` brings flags to
        the host."""
        done = [start + self._gen_length <= block.stop for start in self.starts]
        if block is self.blocks[-1]:
            done = [True] * len(done)
        elif self._ending.happens:
            columns = slice(0, block.stop)
            new_BN = self._wanted(None, columns)
            ended_B = self._ending.marks(self.tokens[:, columns], new_BN, self.mask_token_id).any(dim=1)
            done = [a or b for a, b in zip(done, read(ended_B), strict=True)]
        if not any(done):
            return None
        for row in [row for row, over in enumerate(done) if over]:
            self._copy(row, self.tokens[row], self._output)
        stay = [row for row, over in enumerate(done) if not over]
        self.tokens, self._starts, self._places = self.tokens[stay], self._starts[stay], self._places[stay]
        self.origins = [self.origins[row] for row in stay]
        self.starts = [self.starts[row] for row in stay]
        self.names = [self.names[row] for row in stay]
        self.holes = [self.holes[row] for row in stay]
        if self._is_hole is not None:
            self._is_hole = self._is_hole[stay]
        return stay

    def output(self) -> torch.Tensor:
        """[B, P + new], prompts padded on the left: padding from each row's end on, and no
        column that is padding in every row."""
        if not self._ending.happens:
            return self._output
        after_BS = self._after_end(self._output)
        width = int((~after_BS).sum(dim=1).max())
        return self._output.masked_fill(after_BS, self._pad_token_id)[:, :width]

    def new_tokens(self) -> torch.Tensor:
        """How many new tokens all rows have together, each as far as its end: a tensor, for no one may ask."""
        return (~self._after_end(self._output)[:, self.prompt_width :]).sum() + self._hole_count

    def snapshot(self) -> torch.Tensor:
        """[B, P + gen_length], every row of the batch as it is now, in the columns of the output."""
        tokens = self._output.clone()
        for row in self.rows:
            self._copy(row, self.tokens[row], tokens)
        return tokens

    def in_output(self, rows: list[int], columns: Columns, values_AN: torch.Tensor) -> torch.Tensor:
        """[B, P + gen_length], values of these columns where the output has them, NaN elsewhere."""
        values_AS = values_AN.new_full((len(rows), self.width), torch.nan)
        values_AS.scatter_(1, self.columns(rows, columns), values_AN)
        output_BS = values_AN.new_full(self._output.shape, torch.nan)
        for row, values_S in zip(rows, values_AS, strict=True):
            self._copy(row, values_S, output_BS)
        return output_BS

    def settled(self, stop: int) -> tuple[torch.Tensor, list[int]]:
        """A snapshot [B, P + gen_length] with padding behind the rows' ends, and how many of its first columns are
        settled in each row, of those that the output will have. Of the canvas only the columns before `stop` count."""
        tokens_BS = self.snapshot()
        closed_BS = tokens_BS != self.mask_token_id
        closed_BS[:, : self.prompt_width] |= self._given
        for row, name in enumerate(self.names):
            closed_BS[name, max(self.first_open, self._left(row) + stop - self.origins[row]) :] = False
        after_BS = self._after_end(torch.where(closed_BS.cumprod(dim=1).bool(), tokens_BS, self.mask_token_id))
        # Where every row has ended, the longest ends the output.
        width = (~after_BS).sum(dim=1).max()
        counts = (closed_BS | after_BS).cumprod(dim=1).sum(dim=1).clamp(max=width).tolist()
        return tokens_BS.masked_fill(after_BS, self._pad_token_id), counts

    def _left(self, row: int) -> int:
        """The column of the output in which a row of the canvas begins."""
        return self.prompt_width - (self.starts[row] - self.origins[row])

    def _copy(self, row: int, values_S: torch.Tensor, output_BS: torch.Tensor) -> None:
        """A row's values by the canvas' columns, put where the output has them."""
        own = values_S[self.origins[row] : self.starts[row] + self._gen_length]
        left = self._left(row)
        output_BS[self.names[row], left : left + len(own)] = own

    def _after_end(self, output_BS: torch.Tensor) -> torch.Tensor:
        """[B, P + gen_length], True behind the first new token that ends the row."""
        new_BS = (torch.arange(output_BS.shape[1], device=output_BS.device) >= self.prompt_width).expand_as(output_BS)
        ends_BS = self._ending.marks(output_BS, new_BS, self.mask_token_id)
        return ends_BS.long().cumsum(dim=1) - ends_BS.long() > 0
