"""Predictor of blocks that are settled in small blocks, with Fast-dLLM v2's cache of the block itself."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from dlm_bridge.generation.canvas import Canvas, Columns
from dlm_bridge.generation.execution.runner import Runner, View
from dlm_bridge.generation.predict import Cache
from dlm_bridge.generation.settling import BlockCausal


class SmallBlockCausal(BlockCausal):
    """A block is settled from small block to small block.

    With the cache "dual" (`use_block_cache` in the published code) a forward runs just a row's current small block and
    sees the others of the block as they were when the block was last run as a whole: that is in its first forward, and
    in each one in which the small block's first token is not settled yet, since the column before predicts it. So a
    row's tokens do not depend on the other rows: rows that are not equally far share forwards, of as many columns as
    one of them needs, and keep of them what they would keep alone. A step is about each row's small block, no more.
    """

    caches: ClassVar[tuple[Cache, ...]] = ("none", "block", "dual")

    def __init__(self, runner: Runner, canvas: Canvas, *, small_block_length: int, **options: Any) -> None:
        super().__init__(runner, canvas, **options)
        self._small = small_block_length

    def run_ahead(self, *, done: bool = False) -> None:
        # What a row's next forward runs depends on what it has settled.
        if self._cache == "block" or done:
            super().run_ahead(done=done)

    def columns(self, rows: list[int] | None, block: slice) -> Columns:
        if self._cache != "dual":
            return block
        masked_BN = self.canvas.masked(None, block)
        first_B1 = masked_BN.int().argmax(dim=1, keepdim=True) // self._small * self._small
        self._whole_B1 = masked_BN.gather(1, first_B1)  # whether the row needs a look at the whole block
        self._first_B1 = block.start + first_B1
        small_BN = self._first_B1 + torch.arange(self._small, device=first_B1.device)
        return small_BN if rows is None else small_BN[self.canvas.index(rows)]

    def __call__(self, rows: list[int] | None, columns: Columns, shift: bool | None = None) -> torch.Tensor:
        if isinstance(columns, slice):
            return super().__call__(rows, columns, shift)
        view, first_B1 = self._look(self.canvas.rows if rows is None else rows)
        hidden_BQH = self._hidden(view) if view.columns is None else self._runner.hidden(view)
        # Of the first token of what is run nobody asks who predicts it: it is settled, or there is nothing before it.
        if rows is not None:
            index = self.canvas.index(rows)
            first_B1, hidden_BQH = first_B1[index], hidden_BQH[index]
        return self._runner.head_at(hidden_BQH, (columns - first_B1 - int(self.shift)).clamp(min=0))

    def _look(self, rows: list[int]) -> tuple[View, torch.Tensor]:
        """The next forward, of the whole batch, by what these rows of it need, and [B, 1] the first column that it
        runs of each row's block."""
        block, everywhere_B1 = self._block, torch.full_like(self._first_B1, self._block.start)
        if not self._fresh:
            self._fresh = True
            return self.view(None, block), everywhere_B1
        needs = torch.cat([self._first_B1, self._whole_B1.long()], dim=1).tolist()
        small_blocks, whole = {needs[row][0] for row in rows}, {needs[row][1] for row in rows}
        if whole == {1}:
            return self.view(None, block), everywhere_B1
        if whole == {0} and len(small_blocks) == 1:
            first = small_blocks.pop()
            return self._bidirectional(None, slice(first, first + self._small), block.stop), self._first_B1
        width = block.stop - block.start if 1 in whole else self._small
        return self._view_of_each(width), torch.where(self._whole_B1, everywhere_B1, self._first_B1)

    def _view_of_each(self, width: int) -> View:
        """So many columns of each row: its block or its small block, over and over where that is shorter."""
        canvas, block = self.canvas, self._block
        place_Q = torch.arange(width, device=self._first_B1.device)
        own_BQ = torch.where(self._whole_B1, block.start + place_Q, self._first_B1 + place_Q % self._small)
        positions_BS, real_BS = self._positions(None, canvas.width)
        # All of the canvas and a mask, not its columns as far as the block: one shape for every block.
        seen_BS = real_BS & (canvas.columns(None, slice(0, canvas.width)) < block.stop)
        return View(
            canvas.take(None, own_BQ), seen_BS, positions_BS.gather(1, own_BQ), end=canvas.width, columns=own_BQ
        )
