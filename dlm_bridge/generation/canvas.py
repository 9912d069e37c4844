"""The canvas: every row's tokens in aligned columns, which of them form a block, and what comes out in the end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dlm_bridge.generation.prompt import Prompt

Columns = slice | torch.Tensor  # the same columns of every row, or a [rows, N] tensor of each row's own


@dataclass(frozen=True)
class Layout:
    """How a sampler cuts the new tokens into blocks."""

    block_length: int
    # True: blocks are counted from each row's first token, so that a prompt's ragged end shares the first block with
    # new tokens, and the last block may go on behind the last new token. False: they start where the prompt ends, and
    # the last one may be shorter.
    aligned: bool = False
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
        eos_token_ids: Sequence[int],
    ) -> None:
        device = prompt.tokens.device
        batch, self._prompt_width = prompt.tokens.shape
        lengths = [self._prompt_width - pad for pad in prompt.pads]
        block = layout.block_length
        if layout.aligned:
            first = max(length // block for length in lengths) * block
            self.origins = [first - length // block * block for length in lengths]  # where a row's prompt begins
        else:
            first = self._prompt_width
            self.origins = list(prompt.pads)
        self.starts = [origin + length for origin, length in zip(self.origins, lengths, strict=True)]
        self._gen_length = gen_length
        new = gen_length - (layout.closing is not None)
        stop = max(self.starts) + new + layout.spare
        if layout.aligned:
            stop = first - (first - stop) // block * block  # whole blocks
        self.width = stop + (layout.closing is not None)
        self.blocks = [slice(begin, min(begin + block, stop)) for begin in range(first, stop, block)]
        self.mask_token_id = mask_token_id
        self._pad_token_id = pad_token_id
        self._eos = torch.tensor(list(eos_token_ids), dtype=torch.long, device=device)

        self.tokens = torch.full((batch, self.width), mask_token_id, device=device)
        for row, (origin, length) in enumerate(zip(self.origins, lengths, strict=True)):
            self.tokens[row, origin : origin + length] = prompt.tokens[row, self._prompt_width - length :]
        if layout.closing is not None:
            self.tokens[:, -1] = layout.closing
        self._columns = torch.arange(self.width, device=device)
        self._starts = torch.tensor(self.starts, device=device)
        self._output = torch.full((batch, self._prompt_width + gen_length), pad_token_id, device=device)
        self._output[:, : self._prompt_width] = prompt.tokens
        self._names = list(range(batch))  # which row of the batch each row of the canvas is

    @property
    def rows(self) -> list[int]:
        return list(range(len(self._names)))

    @property
    def padded(self) -> bool:
        return any(self.origins)

    def take(self, rows: list[int] | None, columns: Columns) -> torch.Tensor:
        """[A, N] tokens; `rows` None means all of them."""
        tokens = self.tokens if rows is None else self.tokens[rows]
        return tokens[:, columns] if isinstance(columns, slice) else tokens.gather(1, columns)

    def put(self, rows: list[int] | None, columns: Columns, tokens_AN: torch.Tensor) -> None:
        """Write [A, N] tokens."""
        if isinstance(columns, slice):
            self.tokens[slice(None) if rows is None else rows, columns] = tokens_AN
        elif rows is None:
            self.tokens.scatter_(1, columns, tokens_AN)
        else:
            self.tokens[rows] = self.tokens[rows].scatter(1, columns, tokens_AN)

    def behind_prompt(self, rows: list[int] | None, columns: Columns) -> torch.Tensor:
        """[A, N], True at the columns behind the row's prompt."""
        starts_A1 = (self._starts if rows is None else self._starts[rows])[:, None]
        columns = self._columns[columns] if isinstance(columns, slice) else columns
        return columns >= starts_A1

    def _wanted(self, rows: list[int] | None, columns: slice) -> torch.Tensor:
        """[A, N], True at the new tokens that are asked for: behind the prompt, `gen_length` of them."""
        starts_A1 = (self._starts if rows is None else self._starts[rows])[:, None]
        return self.behind_prompt(rows, columns) & (self._columns[columns] < starts_A1 + self._gen_length)

    def masks(self, block: slice) -> list[int]:
        """How many columns of an untouched block are masks, by row."""
        return [block.stop - max(block.start, start) for start in self.starts]

    def unfinished(self, rows: list[int] | None, block: slice) -> torch.Tensor:
        """[A], True where a new token of the block is still a mask that no end-of-sequence token precedes."""
        tokens_AN = self.take(rows, slice(0, block.stop))
        new_AN = self._wanted(rows, slice(0, block.stop))
        open_AN = new_AN & (tokens_AN == self.mask_token_id)
        if len(self._eos):
            open_AN &= (new_AN & torch.isin(tokens_AN, self._eos)).cumsum(dim=1) == 0
        return open_AN.any(dim=1)

    def retire(self, block: slice) -> list[int] | None:
        """Take out the rows that the block completes. Returns those that stay, None if all do."""
        done = [start + self._gen_length <= block.stop for start in self.starts]
        if block is self.blocks[-1]:
            done = [True] * len(done)
        elif len(self._eos):
            columns = slice(0, block.stop)
            ended_B = (torch.isin(self.tokens[:, columns], self._eos) & self._wanted(None, columns)).any(dim=1)
            done = [a or b for a, b in zip(done, ended_B.tolist(), strict=True)]
        if not any(done):
            return None
        for row in [row for row, over in enumerate(done) if over]:
            begin, end = self.origins[row], self.starts[row] + self._gen_length
            settled = self.tokens[row, begin:end]  # shorter where the canvas ends at this block
            left = self._prompt_width - (self.starts[row] - begin)
            self._output[self._names[row], left : left + len(settled)] = settled
        stay = [row for row, over in enumerate(done) if not over]
        self.tokens, self._starts = self.tokens[stay], self._starts[stay]
        self.origins = [self.origins[row] for row in stay]
        self.starts = [self.starts[row] for row in stay]
        self._names = [self._names[row] for row in stay]
        return stay

    def output(self) -> torch.Tensor:
        """[B, P + new], prompts padded on the left: padding from each row's first end-of-sequence token on, and no
        column that is padding in every row."""
        if not len(self._eos):
            return self._output
        new_BG = self._output[:, self._prompt_width :]
        is_end_BG = torch.isin(new_BG, self._eos)
        after_BG = is_end_BG.long().cumsum(dim=1) - is_end_BG.long() > 0
        width = self._prompt_width + int((~after_BG).sum(dim=1).max())
        prompts = self._output[:, : self._prompt_width]
        return torch.cat([prompts, new_BG.masked_fill(after_BG, self._pad_token_id)], dim=1)[:, :width]
