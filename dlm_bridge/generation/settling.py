"""Predictors of models that never look behind the block, so that what is settled stays what it is and can be kept.

With the cache "block" what is settled is run once more, with its tokens, for its keys and values. That takes no
forward of its own: in a block's first forward the block before it (in the first block's, the prompt) stands before it
and sees what it would see alone, and the new block sees all of that.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import torch

from dlm_bridge.generation.canvas import Canvas
from dlm_bridge.generation.execution.runner import Runner, View
from dlm_bridge.generation.predict import Cache, Predictor
from dlm_bridge.models.masks import block_causal_mask, causal_mask

# A GPU multiplies so many tokens in the time in which it reads the weights: as many may be launched on suspicion.
FREE_TOKENS = 256


class Settling(Predictor):
    """Attention that never looks behind the block."""

    caches: ClassVar[tuple[Cache, ...]] = ("none", "block")

    def __init__(
        self, runner: Runner, canvas: Canvas, *, shift: bool, cache: Cache = "none", cfg_scale: float = 0.0
    ) -> None:
        super().__init__(runner, canvas, shift=shift, cache=cache, cfg_scale=cfg_scale)
        self._kept_until = 0
        self._last_column: torch.Tensor | None = None  # [A, 1, H], of the last column that is kept
        # [A, N, H] of a forward that nobody has asked for yet: of the block, perhaps with the next one behind it.
        self._ahead: torch.Tensor | None = None

    @property
    def forwards(self) -> int:
        return super().forwards - (self._ahead is not None)

    def open(self, block: slice) -> None:
        if self._ahead is not None:  # it has kept the block before this one, and perhaps looked at this one
            length = self._block.stop - self._block.start
            self._keep_until(block.start, self._ahead[:, :length])
            self._ahead = self._ahead[:, length:] if self._ahead.shape[1] > length else None
        super().open(block)

    def keep(self, rows: list[int]) -> None:
        if self._last_column is not None:
            if self.cfg_scale:  # the blind copies stand behind all rows
                rows = rows + [len(self._last_column) // 2 + row for row in rows]
            self._last_column = self._last_column[rows]
            self._runner.keep(rows)
        if self._ahead is not None:
            self._ahead = self._ahead[rows]

    def end(self, block: slice) -> int:
        return block.stop

    def view(self, rows: list[int] | None, columns: slice) -> View:
        if self._cache == "none":
            return self._view_of_all(rows, columns)
        return self._view_from(self._kept_until, self._block)

    def run(self, view: View, keep: slice) -> torch.Tensor:
        if self._cache == "none":
            return super().run(view, keep)
        start = self._block.start
        if keep.stop <= start:  # no more than the column before the block, which is about to change
            return self._runner.head(self._column_before(), slice(None))
        hidden = self._hidden(view)[:, max(keep.start - start, 0) : keep.stop - start]
        if keep.start < start:
            assert self._last_column is not None
            hidden = torch.cat([self._last_column, hidden], dim=1)
        return self._runner.head(hidden, slice(None))

    def _hidden(self, view: View) -> torch.Tensor:
        """[A, N, H] of the block: by the forward that was launched ahead if there is one, which is this one then."""
        start, stop = self._block.start, self._block.stop
        hidden, self._ahead = self._ahead, None
        if hidden is None:
            hidden = self._runner.hidden(view, once=view.first == 0)  # a prompt's shape will not come again
            if view.first < start:
                self._keep_until(start, hidden[:, : start - view.first])
                hidden = hidden[:, start - view.first :]
        return hidden[:, : stop - start]

    def _column_before(self) -> torch.Tensor:
        """[A, 1, H] of the column before the block: by a forward of its own, if the column is not kept yet."""
        begin, start = self._kept_until, self._block.start
        self._ahead = None
        if begin < start:
            view = self._view_from(begin, slice(start, start))
            if self.cfg_scale:
                view = self._with_blind_rows(view, self._given(None, self._block))
            self._keep_until(start, self._runner.hidden(view, once=begin == 0))
        assert self._last_column is not None
        return self._last_column

    def _keep_until(self, column: int, hidden: torch.Tensor) -> None:
        """What stands before the column is kept, by a forward with the hidden states [A, N, H] of the last of it."""
        self._kept_until = column
        self._last_column = hidden[:, -1:].clone()

    def _view_of_all(self, rows: list[int] | None, block: slice) -> View:
        """The canvas as far as the block, which may be empty: then all of it is settled."""
        raise NotImplementedError

    def _view_from(self, begin: int, block: slice) -> View:
        """The columns from `begin` on as far as the block, where those before `begin` are kept."""
        if begin == block.start:
            return self._bidirectional(None, block, block.stop)
        whole = self._view_of_all(None, block)
        assert whole.attention_mask is not None
        assert whole.position_ids is not None
        mask, positions = whole.attention_mask[:, :, begin:], whole.position_ids[:, begin:]
        return View(whole.tokens[:, begin:], mask, positions, begin, block.stop)


class BlockCausal(Settling):
    """A position sees its own block and those before it. Blocks are counted from where those of the canvas begin."""

    def __init__(
        self,
        runner: Runner,
        canvas: Canvas,
        *,
        shift: bool,
        block_length: int,
        cache: Cache = "none",
        cfg_scale: float = 0.0,
    ) -> None:
        super().__init__(runner, canvas, shift=shift, cache=cache, cfg_scale=cfg_scale)
        self._block_length = block_length
        self._offset = -canvas.blocks[0].start % block_length

    def run_ahead(self, *, done: bool = False) -> None:
        """The block as it stands: its next step or, if it is done, what keeps it. With it the next block, whose first
        forward that is then, if the block is done for sure or the next one costs next to nothing."""
        block, blocks = self._block, self.canvas.blocks
        one = block.stop - block.start <= self._block_length and block != blocks[-1]
        if self._cache == "none" or not one or self.cfg_scale:
            return
        if self._ahead is not None or self._kept_until < block.start:
            return
        free = 2 * self._block_length * len(self.canvas.rows) <= FREE_TOKENS
        both = (done or free) and not self.seeded
        following = blocks[blocks.index(block) + 1] if both else block
        view = self._view_from(block.start, following)
        self._ahead = self._runner.hidden(view)

    def _view_of_all(self, rows: list[int] | None, block: slice) -> View:
        positions, real = self._positions(rows, block.stop)
        index = torch.arange(block.stop, device=positions.device).expand_as(positions) + self._offset
        mask = block_causal_mask(index, self._block_length, real)
        return View(self.canvas.take(rows, slice(0, block.stop)), mask, positions)

    def _view_from(self, begin: int, block: slice) -> View:
        # Whole blocks from `begin` on see what is kept as well as each other: that takes no mask. In a prompt's first
        # columns there may be none but padding.
        if not begin or (begin + self._offset) % self._block_length:
            return super()._view_from(begin, block)
        view = self._bidirectional(None, slice(begin, block.stop), block.stop)
        return view if block.stop - begin <= self._block_length else replace(view, block=self._block_length)


class CausalContext(Settling):
    """What stands before the current block is causal; the block sees all of that and itself (Nemotron)."""

    def _view_of_all(self, rows: list[int] | None, block: slice) -> View:
        positions, real = self._positions(rows, block.stop)
        return View(self.canvas.take(rows, slice(0, block.stop)), causal_mask(real, block.start), positions)
