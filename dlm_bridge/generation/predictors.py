"""Predictors: the model's logits for canvas columns, by attention pattern, logit shift and KV cache.

A predictor is the denoising loop's interface to the model. It determines which columns a forward pass runs, what they
attend to, and which logits predict which column.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

import torch

from dlm_bridge.attention.masks import block_causal_mask, causal_mask
from dlm_bridge.generation.canvas import Canvas, Columns, order_behind, to_device
from dlm_bridge.generation.kv_cache import BlockKVCache, DualKVCache, KVCache, PrefixKVCache
from dlm_bridge.generation.request import MASK
from dlm_bridge.generation.runtime.runner import CanvasView, ModelRunner
from dlm_bridge.generation.runtime.varlen import Packing

# Number of tokens that a GPU computes while it reads the weights; limit for speculative launches.
SPECULATIVE_TOKENS = 256
# On a GPU, the width of rows of different lengths is rounded up to a multiple of this, so that graphs are reused.
COMPACT_MULTIPLE = 32


class Predictor:
    """Bidirectional attention over the whole canvas: every block attends to the masks of all later ones.

    Attributes:
        caches: KV cache classes that the attention pattern allows.
        commits_first_token: True if a block's first token is predicted alone, before the others.
    """

    caches: ClassVar[tuple[type[KVCache], ...]] = (KVCache, PrefixKVCache, DualKVCache)
    commits_first_token = False

    def __init__(
        self, runner: ModelRunner, canvas: Canvas, cache: KVCache, *, shift: bool, cfg_scale: float = 0.0
    ) -> None:
        self.canvas = canvas
        self.cache = cache
        self.shift = shift
        self.cfg_scale = cfg_scale
        self._runner = runner
        self._block = slice(0, 0)
        self._cached_rows = 0
        self._not_cached = 0  # number of rows at the front that have entered a running batch and are not cached yet

    @property
    def forwards(self) -> int:
        """Number of forward passes of the model so far."""
        return self._runner.forwards

    def open_block(self, block: slice, rows: list[int]) -> None:
        """Start the block in these rows."""
        self._block = block
        if len(rows) == len(self.canvas.rows):
            self.cache.open_block(block)
            self._cached_rows, self._not_cached = len(rows), 0

    def select_rows(self, rows: list[int]) -> None:
        """Keep only these rows of the canvas, in this order."""
        if self.cache.stores and not self.canvas.shares_blocks:
            # With guidance, the unconditional rows follow the others.
            copies = [self._cached_rows + row for row in rows] if self.cfg_scale else []
            self.cache.select_rows(rows + copies)
            self._cached_rows = len(rows)

    def shift_columns(self, by: int) -> None:
        """Move the columns to the right by `by`, between two blocks."""
        self._block = slice(self._block.start + by, self._block.stop + by)
        self.cache.shift(by)

    def admit(self, count: int) -> None:
        """Insert `count` rows at the front, see `order_behind`. Other rows may be inside their block, unless rows
        share blocks."""
        others = len(self.canvas.rows) - count
        if self.cache.stores and others and not self.canvas.shares_blocks:
            self.cache.select_rows(self._room_in_front(count, others))
            self._not_cached += count
            self._cached_rows += count

    def columns(self, rows: list[int] | None, block: slice) -> Columns:
        """Columns of the block that the rows' next step predicts."""
        return block

    def __call__(self, rows: list[int] | None, columns: Columns, shift: bool | None = None) -> torch.Tensor:
        """Logits [A, N, V] that predict the tokens of these columns, in the model's dtype.

        Args:
            rows: rows of the canvas; None: all.
            shift: overrides the model's logit shift.
        """
        assert isinstance(columns, slice)
        if self._not_cached:
            self._fill_cache(columns)
        # The cache contains all rows, so every row runs.
        asked, rows = (rows, None) if self.cache.stores else (None, rows)
        logits = self._logits(rows, columns, self.shift if shift is None else shift)
        return logits if asked is None else logits[self.canvas.index(asked)]

    def columns_to_run(self, end: int, *, shift: bool) -> slice:
        """Columns that the next forward pass runs, of the `end` attended ones; the others are cached."""
        return self.cache.read(self._block, end, shift=shift)

    def launch_speculatively(self, *, done: bool = False) -> None:
        """Start the next forward pass early if it is needed whatever this step commits.

        Args:
            done: True if the block is complete, and only the remaining rows are unknown.
        """

    def end(self, block: slice) -> int:
        """Number of columns of the canvas that the model attends to."""
        return self.canvas.width

    def _logits(self, rows: list[int] | None, columns: slice, shift: bool) -> torch.Tensor:
        """Logits [A, N, V] of a forward pass in which every row begins in the first column, with classifier-free
        guidance un + (cfg_scale + 1) * (cond - un)."""
        canvas = self.canvas
        run = self.columns_to_run(self.end(columns), shift=shift)
        origin = self._common_origin(rows, run, columns.start - shift)
        if origin is not None:
            view = self._unpadded_view(rows, columns, run, origin)
            self.cache.write(columns.stop)
            both = self._runner.logits(view, slice(columns.start - shift - origin, columns.stop - shift - origin))
        else:
            view, first_A1 = self._compact_view(rows, columns, run)
            # With a shift, logits[i - 1] predict token i; a row's first token is predicted by its own logits, as in
            # Dream.
            from_AN = torch.maximum(canvas.columns(rows, columns) - int(shift), canvas.origin(rows)[:, None])
            from_AN = (from_AN - first_A1).clamp(max=view.tokens.shape[1] - 1)
            self.cache.write(columns.stop)
            both = self._runner.logits_at(view, from_AN.repeat(2, 1) if self.cfg_scale else from_AN)
        if not self.cfg_scale:
            return both
        logits, unconditional = both.chunk(2)
        return unconditional + (self.cfg_scale + 1) * (logits - unconditional)

    def _common_origin(self, rows: list[int] | None, run: slice, first: int) -> int | None:
        """Common first column of these rows; None unless they also end in one column, `run` has no padding, and the
        column `first`, whose logits are read, is not before it."""
        canvas = self.canvas
        origins, ends = canvas.origins, canvas.ends
        chosen = canvas.rows if rows is None else rows
        origin, end = origins[chosen[0]], ends[chosen[0]]
        if any(origins[row] != origin or ends[row] != end for row in chosen):
            return None
        return origin if origin <= first and run.stop <= end else None

    def _unpadded_view(self, rows: list[int] | None, columns: slice, run: slice, origin: int) -> CanvasView:
        """View of a forward pass over these columns of rows that all begin in column `origin`. Attention without a
        mask runs its fastest kernel."""
        run = slice(max(run.start, origin), run.stop)
        tokens_AQ = self.canvas.take(rows, run)
        if self.cfg_scale:
            condition_AQ = self._condition(rows, columns)[:, run]
            tokens_AQ = torch.cat([tokens_AQ, tokens_AQ.masked_fill(condition_AQ, MASK)])
        return CanvasView(tokens_AQ, None, None, run.start - origin, self.end(columns) - origin)

    def _compact_view(self, rows: list[int] | None, columns: slice, run: slice) -> tuple[CanvasView, torch.Tensor]:
        """View of a forward pass over these columns (if these are all columns, each row's own), and [A, 1] the first
        column of each row on the canvas. Rows are cached from the first column on."""
        canvas, end = self.canvas, self.end(columns)
        chosen = canvas.rows if rows is None else rows
        origin_A1 = canvas.origin(rows)[:, None]
        lengths = canvas.lengths(rows, end)
        length = max(lengths)
        if canvas.tokens.is_cuda:  # few shapes
            length = max(length, min(-(-length // COMPACT_MULTIPLE) * COMPACT_MULTIPLE, canvas.cache_width - 1))
        whole = run == slice(0, end)
        if whole:
            own_AQ = origin_A1 + torch.arange(length, device=origin_A1.device)
        else:
            stop = min(run.stop, max(canvas.ends[row] for row in chosen))
            own_AQ = torch.arange(run.start, stop, device=origin_A1.device).expand(len(chosen), -1)
        source_AQ = own_AQ.clamp(max=canvas.width - 1)
        place_AQ = own_AQ - origin_A1
        length_A1 = canvas.real(rows)[:, :end].sum(dim=1, keepdim=True)
        # With the cache "dual", a row's closing token is not run again, even if another row's block extends past it.
        closing = 0 if whole or run.stop > self._block.stop else canvas.ends[chosen[0]] - canvas.stops[chosen[0]]
        real_AQ = (place_AQ >= 0) & (place_AQ < length_A1 - closing)
        run_lengths = canvas.lengths(rows, min(run.stop, end), run.start, closing)
        packing = Packing(real_AQ, run_lengths, attended=None if whole else lengths)
        attended_AK = torch.arange(length, device=own_AQ.device) < length_A1
        cached_AQ = None
        if self.cache.stores:  # padding is written to a column that nothing attends to
            cached_AQ = place_AQ.masked_fill(~real_AQ, canvas.cache_width - 1)
        tokens_AQ = canvas.take(rows, source_AQ)
        if self.cfg_scale:
            condition_AQ = self._condition(rows, columns).gather(1, source_AQ)
            tokens_AQ = torch.cat([tokens_AQ, tokens_AQ.masked_fill(condition_AQ, MASK)])
            attended_AK, place_AQ = attended_AK.repeat(2, 1), place_AQ.repeat(2, 1)
            cached_AQ = None if cached_AQ is None else cached_AQ.repeat(2, 1)
            packing = packing.repeat(2)
        view = CanvasView(
            tokens_AQ, attended_AK, place_AQ.clamp(min=0), end=length, columns=cached_AQ, packing=packing
        )
        return view, own_AQ[:, :1]

    def _fill_cache(self, columns: slice) -> None:
        """Run the rows that have entered a running batch, because the next forward pass runs the block only."""
        count, self._not_cached = self._not_cached, 0
        view, _ = self._compact_view(list(range(count)), columns, slice(0, self.end(columns)))
        self._runner.hidden(view, once=True)
        if self.cfg_scale:
            self.cache.select_rows(self._copies_behind(count, len(self.canvas.rows) - count))

    def _room_in_front(self, count: int, others: int) -> list[int]:
        """Row order of the cache that makes room for `count` rows at the front and, with guidance, for their
        unconditional copies."""
        order = order_behind(count, others)
        if not self.cfg_scale:
            return [min(row, others - 1) for row in range(count)] + order
        return [0] * (2 * count) + order + [others + row for row in order]

    def _copies_behind(self, count: int, others: int) -> list[int]:
        """Row order of the cache in which all unconditional rows follow the others. Before, they follow them among the
        first 2 * `count` rows, and among the rest."""
        first, rest = range(2 * count), range(2 * count, 2 * (count + others))
        return [*first[:count], *rest[:others], *first[count:], *rest[others:]]

    def _condition(self, rows: list[int] | None, columns: slice) -> torch.Tensor:
        """[A, S], True at the condition of guidance, the prompt."""
        return ~self.canvas.behind_prompt(rows, slice(0, self.canvas.width))

    def _positions(self, rows: list[int] | None, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """[A, E] positions counted from each row's first token, and [A, E] False at padding."""
        places = self.canvas.places(rows)[:, :end]
        return places.clamp(min=0), self.canvas.real(rows)[:, :end]


class RowCachePredictor(Predictor):
    """Causal attention to committed tokens, which each row caches independently, in columns counted from its first
    token. Rows enter the cache with their prompts."""

    caches: ClassVar[tuple[type[KVCache], ...]] = (KVCache, BlockKVCache)

    def __init__(self, runner: ModelRunner, canvas: Canvas, cache: KVCache, **options: Any) -> None:
        super().__init__(runner, canvas, cache, **options)
        self._rows = canvas.rows  # rows in the cache

    def open_block(self, block: slice, rows: list[int]) -> None:
        super().open_block(block, rows)
        if len(rows) == len(self.canvas.rows):
            self._rows = rows

    def select_rows(self, rows: list[int]) -> None:
        cached, places = set(self._rows), {row: place for place, row in enumerate(rows)}
        stay = [row for row in rows if row in cached]
        self.keep_rows(stay)
        self._rows = [places[row] for row in stay]

    def keep_rows(self, rows: list[int]) -> None:
        """Keep only these rows of the canvas in the cache, for the rest of their block."""
        if rows != self._rows:
            places = {row: place for place, row in enumerate(self._rows)}
            self.cache.select_rows([places[row] for row in rows])
        self._rows = rows

    def admit(self, count: int) -> None:
        if self._rows:
            self.cache.select_rows(self._room_in_front(count, len(self._rows)))
        self._rows = self.canvas.rows

    def prompt_view(self, rows: list[int]) -> CanvasView:
        """View of these rows' prompts, from the first column on. Padding after a prompt is cached too, and overwritten
        before anything attends to it."""
        canvas = self.canvas
        width = max(canvas.starts[row] - canvas.origins[row] for row in rows)
        places_Q = torch.arange(width, device=canvas.tokens.device)
        source_AQ = canvas.origin(rows)[:, None] + places_Q
        real_AQ = source_AQ < canvas.first_new(rows)[:, None]
        tokens_AQ = canvas.take(rows, source_AQ.clamp(max=canvas.width - 1))
        packing = Packing(real_AQ, tuple(canvas.starts[row] - canvas.origins[row] for row in rows), causal=True)
        return CanvasView(tokens_AQ, causal_mask(real_AQ), places_Q.expand_as(source_AQ), 0, width, packing=packing)


class BlockCachePredictor(Predictor):
    """Base class for block-causal models, with an exact KV cache of committed blocks.

    A committed block is run once more with its final tokens, to cache its keys and values. This needs no extra forward
    pass: a block's first forward pass also runs the previous block (for the first block, the prompt), whose attention
    is unchanged.
    """

    caches: ClassVar[tuple[type[KVCache], ...]] = (KVCache, BlockKVCache)

    def __init__(self, runner: ModelRunner, canvas: Canvas, cache: KVCache, **options: Any) -> None:
        super().__init__(runner, canvas, cache, **options)
        # Replaces `prefill` of the first rows, if set: a prefix cache knows some of their columns.
        self.enter: Callable[[int], torch.Tensor] | None = None
        self._last_cached: torch.Tensor | None = None  # [A, 1, H], hidden state of the last cached column
        # [A, N, H] of a speculative forward pass over the block and possibly the next one.
        self._speculative: torch.Tensor | None = None

    def run_once(self, view: CanvasView) -> torch.Tensor:
        """Last hidden states of a forward pass between two steps, which the rows of the canvas take no part in."""
        if self._speculative is not None:  # the pass may overwrite it
            self._speculative = self._speculative.clone()
        return self._runner.hidden(view, once=True)

    @property
    def forwards(self) -> int:
        return super().forwards - (self._speculative is not None)

    @property
    def _cached(self) -> int:
        """Number of cached columns."""
        assert isinstance(self.cache, BlockKVCache)
        return self.cache.length

    def open_block(self, block: slice, rows: list[int]) -> None:
        if self._speculative is not None:  # has cached the previous block, and possibly run this one
            length = self._block.stop - self._block.start
            self.write_cache(block.start, self._speculative[:, :length])
            self._speculative = self._speculative[:, length:] if self._speculative.shape[1] > length else None
        super().open_block(block, rows)

    def select_rows(self, rows: list[int]) -> None:
        if self._speculative is not None:
            self._speculative = self._speculative[to_device(rows, self._speculative.device)]
        if self._last_cached is not None:
            if self.cfg_scale:  # the unconditional rows follow the others
                rows = rows + [len(self._last_cached) // 2 + row for row in rows]
            self._last_cached = self._last_cached[to_device(rows, self._last_cached.device)]
        self.cache.select_rows(rows)

    def admit(self, count: int) -> None:
        """Insert rows at the front, and cache the columns of their prompts that are cached for the other rows."""
        if self._speculative is not None:  # does not include the entering rows
            self.write_cache(self._block.stop, self._speculative[:, : self._block.stop - self._block.start])
            self._speculative = None
        if not self.cache.stores or self._last_cached is None:
            return
        others = len(self.canvas.rows) - count
        self.cache.select_rows(self._room_in_front(count, others))
        order_B = to_device(order_behind(count, others), self._last_cached.device)
        halves = self._last_cached.split(others)  # two with guidance
        entering = self.prefill(range(count)) if self.enter is None else self.enter(count)
        self._last_cached = torch.cat([entering, *(half[order_B] for half in halves)])
        if self.cfg_scale:
            order = self._copies_behind(count, others)
            self.cache.select_rows(order)
            self._last_cached = self._last_cached[to_device(order, self._last_cached.device)]

    @property
    def causal_block(self) -> int:
        """Tokens per block of the attention to committed tokens, counted from a row's first token; 1: causal."""
        raise NotImplementedError

    def prefill(self, consecutive: range, begin: int = 0) -> torch.Tensor:
        """[A, 1, H], hidden state of the last cached column, by a forward pass over the cached columns of these rows
        from `begin` on. Rows may begin after these columns."""
        rows, end = list(consecutive), self._cached
        first = min(self.canvas.origins[row] for row in rows)
        if max(begin, first) >= end:
            assert self._last_cached is not None
            count = len(rows) * (2 if self.cfg_scale else 1)
            return self._last_cached.new_zeros(count, *self._last_cached.shape[1:])
        buffers = self.cache.buffers
        if consecutive.start and buffers is not None:
            buffers = buffers.of_rows(slice(consecutive.start, consecutive.stop))
        if begin > first:  # the columns before are cached
            view = replace(self._cached_view(begin, slice(end, end), rows), buffers=buffers)
            return self._runner.hidden(view, once=True)[:, -1:].clone()
        begin = first
        whole = self._uncached_view(rows, slice(end, end))
        assert whole.attention_mask is not None
        assert whole.position_ids is not None
        mask, positions = whole.attention_mask[:, :, begin:], whole.position_ids[:, begin:]
        packing = None if whole.packing is None else whole.packing.from_column(begin)
        view = CanvasView(whole.tokens[:, begin:], mask, positions, begin, end, packing=packing, buffers=buffers)
        if self.cfg_scale:
            view = self._with_unconditional_rows(view, self._condition(rows, self._block))
        return self._runner.hidden(view, once=True)[:, -1:].clone()

    def end(self, block: slice) -> int:
        return block.stop

    def _logits(self, rows: list[int] | None, columns: slice, shift: bool) -> torch.Tensor:
        view = self.view(rows, columns)
        origins = self.canvas.origins if rows is None else [self.canvas.origins[row] for row in rows]
        if not self.cfg_scale:
            return self._shifted_logits(origins, view, columns, shift)
        both = self._with_unconditional_rows(view, self._condition(rows, columns))
        logits, unconditional = self._shifted_logits(origins * 2, both, columns, shift).chunk(2)
        return unconditional + (self.cfg_scale + 1) * (logits - unconditional)

    def _with_unconditional_rows(self, view: CanvasView, condition_AS: torch.Tensor) -> CanvasView:
        """Append a copy of the rows in which the condition is masked, for classifier-free guidance."""
        unconditional = view.tokens.clone()
        unconditional[condition_AS[:, view.first : view.first + unconditional.shape[1]]] = MASK
        mask, positions = view.attention_mask, view.position_ids
        return replace(
            view,
            tokens=torch.cat([view.tokens, unconditional]),
            attention_mask=mask if mask is None else mask.repeat(2, *[1] * (mask.dim() - 1)),
            position_ids=positions if positions is None else positions.repeat(2, 1),
            packing=None if view.packing is None else view.packing.repeat(2),
        )

    def view(self, rows: list[int] | None, columns: slice) -> CanvasView:
        """Model input of a forward pass that predicts these columns."""
        if not self.cache.stores:
            return self._uncached_view(rows, columns)
        run = self.cache.read(self._block, self._block.stop, shift=self.shift)
        return self._cached_view(run.start, self._block)

    def run(self, view: CanvasView, columns: slice) -> torch.Tensor:
        """Logits of one forward pass at these columns of the canvas."""
        if not self.cache.stores:
            return self._runner.logits(view, columns)
        start = self._block.start
        if columns.stop <= start:  # only the column before the block
            return self._runner.head(self._hidden_before_block(), slice(None))
        hidden = self._hidden_of_block(view)[:, max(columns.start - start, 0) : columns.stop - start]
        if columns.start < start:
            assert self._last_cached is not None
            hidden = torch.cat([self._last_cached, hidden], dim=1)
        return self._runner.head(hidden, slice(None))

    def _shifted_logits(self, origins: list[int], view: CanvasView, columns: slice, shift: bool) -> torch.Tensor:
        first = columns.start
        # With a shift, logits[i - 1] predict token i. A row's first token is predicted by its own logits, as in
        # Dream's sampler.
        alone = [(row, at - first) for row, at in enumerate(origins) if first <= at < columns.stop] if shift else []
        own = bool(alone) or (shift and first == 0)
        logits = self.run(view, slice(max(first - shift, 0), columns.stop - (shift and not own)))
        if not own:
            return logits
        if first == 0:
            shifted, unshifted = torch.cat([logits[:, :1], logits[:, :-1]], dim=1), logits
        else:
            shifted, unshifted = logits[:, :-1].clone(), logits[:, 1:]
        moved = [(row, place) for row, place in alone if first + place > 0]
        if moved:
            at = tuple(map(list, zip(*moved, strict=True)))
            shifted[at] = unshifted[at]
        return shifted

    def _hidden_of_block(self, view: CanvasView) -> torch.Tensor:
        """[A, N, H], hidden states of the block, from the speculative forward pass if there is one."""
        start, stop = self._block.start, self._block.stop
        hidden, self._speculative = self._speculative, None
        if hidden is None:
            hidden = self._runner.hidden(view, once=view.first == 0)  # the shape of a prompt will not occur again
            if view.first < start:
                self.write_cache(start, hidden[:, : start - view.first])
                hidden = hidden[:, start - view.first :]
        return hidden[:, : stop - start]

    def _hidden_before_block(self) -> torch.Tensor:
        """[A, 1, H], hidden state of the column before the block, by a separate forward pass if it is not cached."""
        begin, start = self._cached, self._block.start
        self._speculative = None
        if begin < start:
            view = self._cached_view(begin, slice(start, start))
            if self.cfg_scale:
                view = self._with_unconditional_rows(view, self._condition(None, self._block))
            self.write_cache(start, self._runner.hidden(view, once=begin == 0))
        assert self._last_cached is not None
        return self._last_cached

    def write_cache(self, stop: int, hidden: torch.Tensor) -> None:
        """Record that a forward pass with hidden states [A, N, H] has cached the columns before `stop`."""
        self.cache.write(stop)
        self._last_cached = hidden[:, -1:].clone()

    def _uncached_view(self, rows: list[int] | None, block: slice) -> CanvasView:
        """View of the canvas up to the block's end. An empty block: all columns are committed."""
        raise NotImplementedError

    def _bidirectional_view(self, rows: list[int] | None, columns: slice, end: int) -> CanvasView:
        """View in which these columns attend to the first `end` columns of the canvas."""
        tokens = self.canvas.take(rows, columns)
        if not self.canvas.padded:  # attention without a mask runs a faster kernel
            return CanvasView(tokens, None, None, columns.start, end)
        positions, real = self._positions(rows, end)
        lengths = self.canvas.lengths(rows, min(columns.stop, end), columns.start)
        attended = None if columns == slice(0, end) else self.canvas.lengths(rows, end)
        packing = Packing(real[:, columns], lengths, attended)
        return CanvasView(tokens, real, positions[:, columns], columns.start, end, packing=packing)

    def _cached_view(self, begin: int, block: slice, rows: list[int] | None = None) -> CanvasView:
        """View of the columns from `begin` to the block's end; earlier ones are cached."""
        if begin == block.start:
            return self._bidirectional_view(rows, block, block.stop)
        whole = self._uncached_view(rows, block)
        assert whole.attention_mask is not None
        assert whole.position_ids is not None
        mask, positions = whole.attention_mask[:, :, begin:], whole.position_ids[:, begin:]
        packing = None if begin else whole.packing
        return CanvasView(whole.tokens[:, begin:], mask, positions, begin, block.stop, packing=packing)


class BlockCausalPredictor(BlockCachePredictor):
    """Block-causal attention: a position attends to its own block and earlier ones. Blocks start at those of the
    canvas."""

    def __init__(
        self, runner: ModelRunner, canvas: Canvas, cache: KVCache, *, block_length: int, **options: Any
    ) -> None:
        super().__init__(runner, canvas, cache, **options)
        self._block_length = block_length
        self._offset = -canvas.blocks[0].start % block_length

    @property
    def causal_block(self) -> int:
        return self._block_length

    def launch_speculatively(self, *, done: bool = False) -> None:
        """Run the current state of the block: its next step or, if it is complete, the forward pass that caches it.
        The next block is included as its first forward pass, if the current one is known to be complete or the next
        one takes almost no additional time."""
        block, blocks = self._block, self.canvas.blocks
        one = block.stop - block.start <= self._block_length and block != blocks[-1]
        if not self.cache.stores or not one or self.cfg_scale:
            return
        if self._speculative is not None or self._cached < block.start:
            return
        free = 2 * self._block_length * len(self.canvas.rows) <= SPECULATIVE_TOKENS
        both = (done or free) and not self.commits_first_token
        following = blocks[blocks.index(block) + 1] if both else block
        self._speculative = self._runner.hidden(self._cached_view(block.start, following))

    def _uncached_view(self, rows: list[int] | None, block: slice) -> CanvasView:
        positions, real = self._positions(rows, block.stop)
        index = torch.arange(block.stop, device=positions.device).expand_as(positions) + self._offset
        mask = block_causal_mask(index, self._block_length, real)
        packing = None
        if self.canvas.padded:
            lengths = self.canvas.lengths(rows, block.stop)
            packing = Packing(real, lengths, blocks=index // self._block_length)
        return CanvasView(self.canvas.take(rows, slice(0, block.stop)), mask, positions, packing=packing)

    def _cached_view(self, begin: int, block: slice, rows: list[int] | None = None) -> CanvasView:
        # Whole blocks from `begin` on need no mask, unless a row begins in them. The first columns may be only
        # padding.
        last = max(self.canvas.origins[row] for row in (self.canvas.rows if rows is None else rows))
        if not begin or last > begin or (begin + self._offset) % self._block_length:
            return super()._cached_view(begin, block, rows)
        view = self._bidirectional_view(rows, slice(begin, block.stop), block.stop)
        one = block.stop - begin <= self._block_length
        return view if one else replace(view, block=self._block_length, packing=None)
