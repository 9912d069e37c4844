"""Runs the model on the canvas: what it sees (topology), and which of its logits are a position's (alignment).

A predictor is all that the loop knows of the model. These here keep no cache: each call runs the canvas as far as the
topology lets later columns matter.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from dlm_bridge.generation.canvas import Canvas, Columns
from dlm_bridge.models.masks import block_causal_mask, causal_mask


@dataclass(frozen=True)
class View:
    """The model's input for A rows and the canvas' first E columns."""

    tokens: torch.Tensor  # [A, E]
    attention_mask: torch.Tensor | None  # [A, E] or [A, 1, E, E]
    position_ids: torch.Tensor | None  # [A, E]


class Predictor:
    """Bidirectional attention over the whole canvas: every block sees the masks of all later ones."""

    def __init__(self, model: Any, canvas: Canvas, *, shift: bool, cfg_scale: float = 0.0) -> None:
        self.forwards = 0
        self.model = model
        self.canvas = canvas
        self.shift = shift
        self.cfg_scale = cfg_scale

    def __call__(self, rows: list[int] | None, columns: Columns, shift: bool | None = None) -> torch.Tensor:
        """Logits [A, N, V] of these columns' tokens, in the model's dtype.

        `rows` None means all. `shift` overrides the model's own alignment.
        """
        assert isinstance(columns, slice)
        view = self.view(rows, columns)
        shift = self.shift if shift is None else shift
        if not self.cfg_scale:
            return self._logits(rows, view, columns, shift)
        # Classifier-free guidance: a second copy of the rows, which does not see what was given.
        blind = view.tokens.clone()
        blind[self._given(rows, columns)[:, : blind.shape[1]]] = self.canvas.mask_token_id
        mask, positions = view.attention_mask, view.position_ids
        both = View(
            torch.cat([view.tokens, blind]),
            mask if mask is None else mask.repeat(2, *[1] * (mask.dim() - 1)),
            positions if positions is None else positions.repeat(2, 1),
        )
        logits, unconditional = self._logits(None if rows is None else rows * 2, both, columns, shift).chunk(2)
        return unconditional + (self.cfg_scale + 1) * (logits - unconditional)

    def view(self, rows: list[int] | None, columns: slice) -> View:
        end = self.end(columns)
        tokens = self.canvas.take(rows, slice(0, end))
        if not self.canvas.padded:  # the same numbers, by the faster kernel
            return View(tokens, None, None)
        positions, real = self._positions(rows, end)
        return View(tokens, real.long(), positions)

    def end(self, block: slice) -> int:
        """How many columns the model sees."""
        return self.canvas.width

    def _given(self, rows: list[int] | None, columns: slice) -> torch.Tensor:
        """[A, S], True at what guidance hides: the prompt."""
        return ~self.canvas.behind_prompt(rows, slice(0, self.canvas.width))

    def _positions(self, rows: list[int] | None, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """[A, E] positions, each row counted from its own first token, and which columns are no padding."""
        origins = self.canvas.origins if rows is None else [self.canvas.origins[row] for row in rows]
        device = self.canvas.tokens.device
        positions = torch.arange(end, device=device) - torch.tensor(origins, device=device)[:, None]
        return positions.clamp(min=0), positions >= 0

    def _logits(self, rows: list[int] | None, view: View, columns: slice, shift: bool) -> torch.Tensor:
        first = columns.start
        # With a shift, logits[i - 1] are about token i. A row's first token has nothing before it: it is predicted
        # by its own logits, as Dream's sampler does.
        origins = self.canvas.origins if rows is None else [self.canvas.origins[row] for row in rows]
        alone = [row for row, origin in enumerate(origins) if origin == first] if shift else []
        keep = slice(first, columns.stop)
        if shift:
            keep = slice(max(first - 1, 0), columns.stop if alone else columns.stop - 1)
        logits = self.run(view, keep)
        if not shift or not alone:
            return logits
        if first == 0:
            return torch.cat([logits[:, :1], logits[:, :-1]], dim=1)
        shifted = logits[:, :-1].clone()
        shifted[alone, 0] = logits[alone, 1]
        return shifted

    def run(self, view: View, keep: slice | torch.Tensor) -> torch.Tensor:
        """One forward; the output layer runs on the columns `keep` alone (a slice costs no device sync)."""
        self.forwards += 1
        output = self.model(
            input_ids=view.tokens,
            attention_mask=view.attention_mask,
            position_ids=view.position_ids,
            logits_to_keep=keep,
        )
        return output.logits.to(view.tokens.device)


class Growing(Predictor):
    """Bidirectional attention over a canvas that ends with the current block: later blocks do not exist yet.

    Guidance hides the finished blocks too, since iLLaDA's sampler takes them for its prompt.
    """

    def end(self, block: slice) -> int:
        return block.stop

    def _given(self, rows: list[int] | None, columns: slice) -> torch.Tensor:
        given = torch.zeros_like(self.canvas.take(rows, slice(0, self.canvas.width)), dtype=torch.bool)
        given[:, : columns.start] = True
        return given


class BlockCausal(Predictor):
    """A position sees its own block and those before it. Blocks are counted from where those of the canvas begin."""

    def __init__(self, model: Any, canvas: Canvas, *, shift: bool, block_length: int, cfg_scale: float = 0.0) -> None:
        super().__init__(model, canvas, shift=shift, cfg_scale=cfg_scale)
        self._block_length = block_length
        self._offset = -canvas.blocks[0].start % block_length

    def end(self, block: slice) -> int:
        return block.stop

    def view(self, rows: list[int] | None, columns: slice) -> View:
        end = self.end(columns)
        positions, real = self._positions(rows, end)
        index = torch.arange(end, device=positions.device).expand_as(positions) + self._offset
        mask = block_causal_mask(index, self._block_length, real)
        return View(self.canvas.take(rows, slice(0, end)), mask, positions)


class CausalContext(Predictor):
    """What stands before the current block is causal; the block sees all of that and itself (Nemotron)."""

    def end(self, block: slice) -> int:
        return block.stop

    def view(self, rows: list[int] | None, columns: slice) -> View:
        positions, real = self._positions(rows, columns.stop)
        return View(self.canvas.take(rows, slice(0, columns.stop)), causal_mask(real, columns.start), positions)


class Reordered(Predictor):
    """Causal attention in the order of knowledge: settled tokens first, masks last, each with its own position.

    So a mask sees every settled token, also those to its right, and the masks before it (WeDLM, arXiv 2512.22737).
    """

    def __call__(self, rows: list[int] | None, columns: Columns, shift: bool | None = None) -> torch.Tensor:
        assert isinstance(columns, torch.Tensor)
        canvas = self.canvas
        tokens = canvas.take(rows, slice(0, canvas.width))
        positions, real = self._positions(rows, canvas.width)
        order = (tokens == canvas.mask_token_id).int().argsort(dim=1, stable=True)
        view = View(tokens.gather(1, order), causal_mask(real.gather(1, order)), positions.gather(1, order))
        return self.run(view, order.argsort(dim=1).gather(1, columns))
