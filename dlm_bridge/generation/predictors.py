"""Predictors: the model's logits for canvas columns, by attention pattern, logit shift and KV cache.

Values of `cache`:

- "none": every forward pass runs the canvas as far as the attention pattern lets later columns matter.
- "prefix", "dual" (Fast-dLLM v1, arXiv 2505.22618), for bidirectional models: a block's first forward pass runs the
  whole canvas and writes the cache; later ones run the block ("dual"), or the block and what follows it ("prefix").
  Approximate.
- "block", for block-causal models: committed blocks are run once more and cached. Exact.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import torch

from dlm_bridge.attention_mask import block_causal_mask
from dlm_bridge.generation.canvas import Canvas, Columns
from dlm_bridge.generation.kv_cache import CacheMode
from dlm_bridge.generation.runtime.runner import CanvasView, ModelRunner


class Predictor:
    """Bidirectional attention over the whole canvas: every block sees the masks of all later ones."""

    caches: ClassVar[tuple[CacheMode, ...]] = ("none", "prefix", "dual")
    seeded = False  # True: the loop asks for a block's first token alone, before the others

    def __init__(
        self, runner: ModelRunner, canvas: Canvas, *, shift: bool, cache: CacheMode = "none", cfg_scale: float = 0.0
    ) -> None:
        self.canvas = canvas
        self.shift = shift
        self.cfg_scale = cfg_scale
        self._runner = runner
        self._cache = cache
        self._block = slice(0, 0)
        self._fresh = False  # whether what is kept was made in this block

    @property
    def forwards(self) -> int:
        """How many times the model has been run."""
        return self._runner.forwards

    def open(self, block: slice) -> None:
        """The loop begins a block."""
        self._block, self._fresh = block, False

    def keep(self, rows: list[int]) -> None:
        """The canvas goes on with these rows of those that it had."""

    def columns(self, rows: list[int] | None, block: slice) -> Columns:
        """The columns of the block that the rows' next step is about."""
        return block

    def __call__(self, rows: list[int] | None, columns: Columns, shift: bool | None = None) -> torch.Tensor:
        """Logits [A, N, V] of these columns' tokens, in the model's dtype.

        `rows` None means all. `shift` overrides the model's own alignment.
        """
        assert isinstance(columns, slice)
        # What is kept is that of every row, so that every row runs.
        asked, rows = (rows, None) if self._cache != "none" else (None, rows)
        logits = self._guided(rows, columns, self.shift if shift is None else shift)
        return logits if asked is None else logits[self.canvas.index(asked)]

    def view(self, rows: list[int] | None, columns: slice) -> CanvasView:
        """What the model is given for a forward."""
        end = self.end(columns)
        seen = slice(0, end)
        if self._cache != "none" and self._fresh:
            # With a shift, a block's first token is predicted by the column before it.
            first = max(self._block.start - self.shift, 0)
            seen = slice(first, end if self._cache == "prefix" else self._block.stop)
        return self._bidirectional(rows, seen, end)

    def launch_speculatively(self, *, done: bool = False) -> None:
        """Launch the next forward before it is known what comes next, if it is of use whatever comes. `done`: the
        block is settled, what is not known is which rows go on."""

    def end(self, block: slice) -> int:
        """How many columns the model sees."""
        return self.canvas.width

    def _bidirectional(self, rows: list[int] | None, seen: slice, end: int) -> CanvasView:
        """The columns `seen` looking at all of the canvas' first `end` ones."""
        tokens = self.canvas.take(rows, seen)
        if not self.canvas.padded:  # the same numbers, by the faster kernel
            return CanvasView(tokens, None, None, seen.start, end)
        positions, real = self._positions(rows, end)
        return CanvasView(tokens, real, positions[:, seen], seen.start, end)

    def _guided(self, rows: list[int] | None, columns: slice, shift: bool) -> torch.Tensor:
        view = self.view(rows, columns)
        origins = self.canvas.origins if rows is None else [self.canvas.origins[row] for row in rows]
        if not self.cfg_scale:
            return self._logits(origins, view, columns, shift)
        both = self._with_blind_rows(view, self._given(rows, columns))
        logits, unconditional = self._logits(origins * 2, both, columns, shift).chunk(2)
        return unconditional + (self.cfg_scale + 1) * (logits - unconditional)

    def _with_blind_rows(self, view: CanvasView, given_AS: torch.Tensor) -> CanvasView:
        """Classifier-free guidance: a second copy of the rows, which does not see what was given."""
        blind = view.tokens.clone()
        blind[given_AS[:, view.first : view.first + blind.shape[1]]] = self.canvas.mask_token_id
        mask, positions = view.attention_mask, view.position_ids
        return replace(
            view,
            tokens=torch.cat([view.tokens, blind]),
            attention_mask=mask if mask is None else mask.repeat(2, *[1] * (mask.dim() - 1)),
            position_ids=positions if positions is None else positions.repeat(2, 1),
        )

    def _given(self, rows: list[int] | None, columns: slice) -> torch.Tensor:
        """[A, S], True at what guidance hides: the prompt."""
        return ~self.canvas.behind_prompt(rows, slice(0, self.canvas.width))

    def _positions(self, rows: list[int] | None, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """[A, E] positions, each row counted from its own first token, and which columns are no padding."""
        places = self.canvas.places(rows)[:, :end]
        return places.clamp(min=0), places >= 0

    def _logits(self, origins: list[int], view: CanvasView, columns: slice, shift: bool) -> torch.Tensor:
        first = columns.start
        # With a shift, logits[i - 1] are about token i. A row's first token has nothing before it: it is predicted
        # by its own logits, as Dream's sampler does.
        alone = [(row, at - first) for row, at in enumerate(origins) if first <= at < columns.stop] if shift else []
        own = bool(alone) or (shift and first == 0)
        logits = self.run(view, slice(max(first - shift, 0), columns.stop - (shift and not own)))
        if not own:
            return logits
        if first == 0:
            shifted, unshifted = torch.cat([logits[:, :1], logits[:, :-1]], dim=1), logits
        else:
            shifted, unshifted = logits[:, :-1].clone(), logits[:, 1:]
        for row, place in alone:
            if first + place > 0:
                shifted[row, place] = unshifted[row, place]
        return shifted

    def run(self, view: CanvasView, keep: slice) -> torch.Tensor:
        """One forward; the output layer runs on the canvas' columns `keep` alone (a slice costs no device sync)."""
        self._fresh = True
        return self._runner.logits(view, keep)


# A GPU multiplies so many tokens in the time in which it reads the weights: as many may be launched on suspicion.
SPECULATIVE_TOKENS = 256


class BlockCachePredictor(Predictor):
    """Attention that never looks behind the block."""

    caches: ClassVar[tuple[CacheMode, ...]] = ("none", "block")

    def __init__(
        self, runner: ModelRunner, canvas: Canvas, *, shift: bool, cache: CacheMode = "none", cfg_scale: float = 0.0
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

    def view(self, rows: list[int] | None, columns: slice) -> CanvasView:
        if self._cache == "none":
            return self._view_of_all(rows, columns)
        return self._view_from(self._kept_until, self._block)

    def run(self, view: CanvasView, keep: slice) -> torch.Tensor:
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

    def _hidden(self, view: CanvasView) -> torch.Tensor:
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

    def _view_of_all(self, rows: list[int] | None, block: slice) -> CanvasView:
        """The canvas as far as the block, which may be empty: then all of it is settled."""
        raise NotImplementedError

    def _view_from(self, begin: int, block: slice) -> CanvasView:
        """The columns from `begin` on as far as the block, where those before `begin` are kept."""
        if begin == block.start:
            return self._bidirectional(None, block, block.stop)
        whole = self._view_of_all(None, block)
        assert whole.attention_mask is not None
        assert whole.position_ids is not None
        mask, positions = whole.attention_mask[:, :, begin:], whole.position_ids[:, begin:]
        return CanvasView(whole.tokens[:, begin:], mask, positions, begin, block.stop)


class BlockCausalPredictor(BlockCachePredictor):
    """A position sees its own block and those before it. Blocks are counted from where those of the canvas begin."""

    def __init__(
        self,
        runner: ModelRunner,
        canvas: Canvas,
        *,
        shift: bool,
        block_length: int,
        cache: CacheMode = "none",
        cfg_scale: float = 0.0,
    ) -> None:
        super().__init__(runner, canvas, shift=shift, cache=cache, cfg_scale=cfg_scale)
        self._block_length = block_length
        self._offset = -canvas.blocks[0].start % block_length

    def launch_speculatively(self, *, done: bool = False) -> None:
        """The block as it stands: its next step or, if it is done, what keeps it. With it the next block, whose first
        forward that is then, if the block is done for sure or the next one costs next to nothing."""
        block, blocks = self._block, self.canvas.blocks
        one = block.stop - block.start <= self._block_length and block != blocks[-1]
        if self._cache == "none" or not one or self.cfg_scale:
            return
        if self._ahead is not None or self._kept_until < block.start:
            return
        free = 2 * self._block_length * len(self.canvas.rows) <= SPECULATIVE_TOKENS
        both = (done or free) and not self.seeded
        following = blocks[blocks.index(block) + 1] if both else block
        view = self._view_from(block.start, following)
        self._ahead = self._runner.hidden(view)

    def _view_of_all(self, rows: list[int] | None, block: slice) -> CanvasView:
        positions, real = self._positions(rows, block.stop)
        index = torch.arange(block.stop, device=positions.device).expand_as(positions) + self._offset
        mask = block_causal_mask(index, self._block_length, real)
        return CanvasView(self.canvas.take(rows, slice(0, block.stop)), mask, positions)

    def _view_from(self, begin: int, block: slice) -> CanvasView:
        # Whole blocks from `begin` on see what is kept as well as each other: that takes no mask. In a prompt's first
        # columns there may be none but padding.
        if not begin or (begin + self._offset) % self._block_length:
            return super()._view_from(begin, block)
        view = self._bidirectional(None, slice(begin, block.stop), block.stop)
        return view if block.stop - begin <= self._block_length else replace(view, block=self._block_length)
