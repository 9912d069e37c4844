"""Runs the model on the canvas: what it sees (topology), which of its logits are a position's (alignment), and what of
it is kept between forwards (cache).

A predictor is all that the loop knows of the model. Caches (`Cache`):

- "none": each forward runs the canvas as far as the topology lets later columns matter.
- "prefix" and "dual" (Fast-dLLM v1, arXiv 2505.22618), for bidirectional models: a block's first forward runs the
  whole canvas and keeps its keys and values; the others run just the block ("dual"), or the block and what stands
  behind it ("prefix"), and see the rest as it was then. Approximate. Fast-dLLM v2's "dual" is that of small blocks in
  a block (`small_blocks`).
- "block", for models that see nothing behind what is settled (`settling`): settled blocks are run once more and kept,
  of WeDLM's all tokens before the first mask. Exact.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar, Literal

import torch

from dlm_bridge.generation.canvas import Canvas, Columns
from dlm_bridge.generation.execution.runner import Runner, View
from dlm_bridge.models.masks import causal_mask

Cache = Literal["none", "prefix", "dual", "block"]


class Predictor:
    """Bidirectional attention over the whole canvas: every block sees the masks of all later ones."""

    caches: ClassVar[tuple[Cache, ...]] = ("none", "prefix", "dual")
    seeded = False  # True: the loop asks for a block's first token alone, before the others

    def __init__(
        self, runner: Runner, canvas: Canvas, *, shift: bool, cache: Cache = "none", cfg_scale: float = 0.0
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

    def view(self, rows: list[int] | None, columns: slice) -> View:
        """What the model is given for a forward."""
        end = self.end(columns)
        seen = slice(0, end)
        if self._cache != "none" and self._fresh:
            # With a shift, a block's first token is predicted by the column before it.
            first = max(self._block.start - self.shift, 0)
            seen = slice(first, end if self._cache == "prefix" else self._block.stop)
        return self._bidirectional(rows, seen, end)

    def run_ahead(self, *, done: bool = False) -> None:
        """Launch the next forward before it is known what comes next, if it is of use whatever comes. `done`: the
        block is settled, what is not known is which rows go on."""

    def end(self, block: slice) -> int:
        """How many columns the model sees."""
        return self.canvas.width

    def _bidirectional(self, rows: list[int] | None, seen: slice, end: int) -> View:
        """The columns `seen` looking at all of the canvas' first `end` ones."""
        tokens = self.canvas.take(rows, seen)
        if not self.canvas.padded:  # the same numbers, by the faster kernel
            return View(tokens, None, None, seen.start, end)
        positions, real = self._positions(rows, end)
        return View(tokens, real, positions[:, seen], seen.start, end)

    def _guided(self, rows: list[int] | None, columns: slice, shift: bool) -> torch.Tensor:
        view = self.view(rows, columns)
        origins = self.canvas.origins if rows is None else [self.canvas.origins[row] for row in rows]
        if not self.cfg_scale:
            return self._logits(origins, view, columns, shift)
        both = self._with_blind_rows(view, self._given(rows, columns))
        logits, unconditional = self._logits(origins * 2, both, columns, shift).chunk(2)
        return unconditional + (self.cfg_scale + 1) * (logits - unconditional)

    def _with_blind_rows(self, view: View, given_AS: torch.Tensor) -> View:
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

    def _logits(self, origins: list[int], view: View, columns: slice, shift: bool) -> torch.Tensor:
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

    def run(self, view: View, keep: slice) -> torch.Tensor:
        """One forward; the output layer runs on the canvas' columns `keep` alone (a slice costs no device sync)."""
        self._fresh = True
        return self._runner.logits(view, keep)


class Growing(Predictor):
    """Bidirectional attention over a canvas that ends with the current block: later blocks do not exist yet.

    Guidance hides the finished blocks too, since iLLaDA's sampler takes them for its prompt.
    """

    caches: ClassVar[tuple[Cache, ...]] = ("none", "prefix")

    def end(self, block: slice) -> int:
        return self._block.stop

    def _given(self, rows: list[int] | None, columns: slice) -> torch.Tensor:
        given = torch.zeros_like(self.canvas.take(rows, slice(0, self.canvas.width)), dtype=torch.bool)
        given[:, : columns.start] = True
        return given


class Reordered(Predictor):
    """Causal attention in the order of knowledge: settled tokens first, masks last, each with its own position.

    So a mask sees every settled token, also those to its right, and the masks before it (WeDLM, arXiv 2512.22737).
    What stands before a row's first mask sees nothing else, whatever is settled later: with the cache "block" its keys
    and values are kept, and a forward runs the columns behind it, as far as the window reaches.
    """

    caches: ClassVar[tuple[Cache, ...]] = ("none", "block")

    def open(self, block: slice) -> None:
        super().open(block)
        self._rows = self.canvas.rows  # whose keys and values are kept
        self._kept_A = torch.zeros_like(self.canvas.first_new(None))  # of how many columns

    def __call__(self, rows: list[int] | None, columns: Columns, shift: bool | None = None) -> torch.Tensor:
        assert isinstance(columns, torch.Tensor)
        if self._cache == "block":
            return self._behind_kept(rows, columns)
        canvas = self.canvas
        tokens = canvas.take(rows, slice(0, canvas.width))
        positions, real = self._positions(rows, canvas.width)
        order = (tokens == canvas.mask_token_id).int().argsort(dim=1, stable=True)
        view = View(tokens.gather(1, order), causal_mask(real.gather(1, order)), positions.gather(1, order))
        return self._runner.reordered_logits(view, order.argsort(dim=1).gather(1, columns))

    def _behind_kept(self, rows: list[int] | None, columns_AN: torch.Tensor) -> torch.Tensor:
        """Logits [A, N, V] by a forward of Q columns of each row, from those that are kept on.

        In the new order what is settled without a gap stays where it is: so it is kept in its own columns. What is
        kept behind it, in columns of other tokens, is written anew by the next forward.
        """
        canvas = self.canvas
        self._drop_all_but(canvas.rows if rows is None else rows)
        width, end = self._reach(columns_AN.shape[1])
        first_A1 = self._kept_A.clamp(max=end - width)[:, None]
        own_AQ = first_A1 + torch.arange(width, device=first_A1.device)
        masked_AS = canvas.masked(rows, slice(0, canvas.width))
        order_AQ = masked_AS.gather(1, own_AQ).int().argsort(dim=1, stable=True)
        source_AQ = first_A1 + order_AQ
        positions_AS, real_AS = self._positions(rows, canvas.width)
        before_AQK = torch.arange(end, device=own_AQ.device) <= own_AQ[..., None]
        seen_AQK = (before_AQK & real_AS[:, None, :end]).scatter(2, own_AQ[..., None], True)  # padding sees itself
        view = View(
            canvas.take(rows, source_AQ), seen_AQK[:, None], positions_AS.gather(1, source_AQ), end=end, columns=own_AQ
        )
        hidden_AQH = self._runner.hidden(view, once=not self._fresh)
        self._fresh = True
        self._kept_A = masked_AS.int().argmax(dim=1)
        return self._runner.head_at(hidden_AQH, order_AQ.argsort(dim=1).gather(1, columns_AN - first_A1))

    def _reach(self, window: int) -> tuple[int, int]:
        """How many columns of each row a forward runs, and where the last of them ends."""
        canvas = self.canvas
        if any(canvas.holes):  # tokens behind the window, which it sees
            return canvas.width - int(self._kept_A.min()), canvas.width
        if not self._fresh:  # the prompt, too
            end = min(max(canvas.starts) + window, canvas.width)
            return end, end
        # A step settles no more than its window: always the same shape, wherever a row has got.
        return min(2 * window, canvas.width), canvas.width

    def _drop_all_but(self, rows: list[int]) -> None:
        """Rows that have no masks left do not come back in this block."""
        if len(rows) < len(self._rows):
            stay = [self._rows.index(row) for row in rows]
            self._runner.keep(stay)
            self._rows, self._kept_A = rows, self._kept_A[stay]
