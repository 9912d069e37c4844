"""DMax's sampler (arXiv 2604.08302): tokens are rewritten until they are stable, and read as mixtures with the mask.

    buffer, blocks and cache as in `multi_bd`; in each step, for each started block that is not complete:
        tokens = argmax(logits), or draws;  p = their probabilities
        write the tokens at all new positions that have one, and at the masks from the left on whose p >= threshold,
            up to the first mask with a lower p; at least at the first mask
        complete = no masks, and (no token has changed, or all p >= 0.9, or it was the block's block_length-th step)
        embedding of a written token, in the next step:
            e = p E(token) + (1 - p) E(mask), scaled to the norm p |E(token)| + (1 - p) |E(mask)|
    a complete block is read, and cached, with the embeddings of its tokens

With the default `block_add_threshold`, 1, a block starts when the previous one is complete, as published; lower values
denoise several blocks at once. It needs weights that were trained to read such mixtures.

Source: czg1225/DMax 82bc29e, dInfer/python/dinfer/decoding/parallel_strategy.py and generate_uniform.py;
SJTU-DENG-Lab/Diffulex 184ba97, diffulex/sampler/llada2.py (LLaDA2DMaxSampler), for several blocks. Diffulex's default
computes p at masks only and takes 1 elsewhere (`dmax_sampler_fast_path`); here, as in DMax, each position has its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from dlm_bridge.errors import SettingError
from dlm_bridge.extra_samplers.multi_bd import (
    COMPLETE,
    MASK_WEIGHT,
    STARTED,
    BlockBufferRule,
    BlockBufferSampler,
)
from dlm_bridge.generation.canvas import Canvas, to_device
from dlm_bridge.generation.commit_rules import DenoisingRule, Step
from dlm_bridge.generation.constraints import Constraints
from dlm_bridge.generation.samplers import SamplerSpec, SpecialTokens, parameter
from dlm_bridge.generation.token_sampling import Noise

CONFIDENT = 0.9  # probability from which on a token is taken to be stable
# By the position in the row: 1 in a complete block, and the number of steps of its block so far.
FINAL, AGE = "buffer: final", "buffer: steps"


@dataclass(frozen=True, kw_only=True)
class DMaxSampler(BlockBufferSampler):
    """DMax's decoding with token merging."""

    name: ClassVar[str] = "dmax"

    buffer_size: int = parameter(2, "Blocks that a forward pass runs.", minimum=1)
    threshold: float = parameter(0.5, "Probability from which on masks are committed, from left to right.")
    block_add_threshold: float = parameter(
        1.0, "Committed fraction of the last started block at which the next one starts; 1: when it is complete.",
        minimum=0, maximum=1,
    )  # fmt: skip

    def spec(self, tokens: SpecialTokens) -> SamplerSpec:
        rule = TokenMergingRule(
            self.block_length,
            self.buffer_size,
            self.threshold,
            self.block_add_threshold,
            semi_complete_threshold=0.0,  # every started block commits a token in each step
        )
        return self.buffer_spec(rule, merges=True)


class TokenMergingRule(BlockBufferRule):
    """Writes tokens in the started blocks of each row's buffer until they are stable; see the module."""

    edits = True
    keeps_text = False  # a token may change after those behind it
    _width = 0  # positions of a row in memory

    def begin(self, masks: list[int], noise: Noise) -> list[list[int]]:
        # A block takes at most block_length steps, and one that caches it; the first and the last may be partial.
        return [[1] * ((count // self.block_length + 2) * (self.block_length + 1)) for count in masks]

    def constrained(self, constraints: Constraints) -> DenoisingRule:
        if constraints.ordered:
            raise SettingError("algorithm", "dmax rewrites tokens after those behind them: choose another sampler")
        return self

    def write(self, step: Step) -> torch.Tensor:
        rows_A = to_device(step.rows, step.masked.device)
        masked_AKN, new_AKN = self._by_block(step.masked), self._by_block(step.new)
        started_A1, complete_A1 = (self.memory.tensor(name)[rows_A][:, None] for name in (STARTED, COMPLETE))
        slot_K = self._slots(started_A1)
        active_AK = (slot_K < started_A1) & (slot_K >= complete_A1)
        scores_AKN = self._by_block(step.probabilities())
        below_AKN = masked_AKN & (scores_AKN < self.threshold)
        first_AKN = masked_AKN & (masked_AKN.long().cumsum(dim=2) == 1)
        taken_AKN = first_AKN | (masked_AKN & (below_AKN.long().cumsum(dim=2) == 0))
        written_AKN = new_AKN & (taken_AKN | ~masked_AKN) & active_AK[..., None]
        changed_AK = (written_AKN & self._by_block(step.tokens != step.before)).any(dim=2)
        sure_AK = ((scores_AKN >= CONFIDENT) | ~new_AKN).all(dim=2)
        age_AN = self._get(AGE, step, rows_A) + active_AK.repeat_interleave(self.block_length, dim=1)
        oldest_AK = self._by_block(age_AN >= self.block_length).all(dim=2)
        full_AK = ~(masked_AKN & ~taken_AKN).any(dim=2) & active_AK
        final_AK = full_AK & (~changed_AK | sure_AK | oldest_AK)
        weights_AKN = torch.where(written_AKN & ~final_AK[..., None], 1 - scores_AKN, 0.0)
        self._set(AGE, step, rows_A, age_AN)
        # A block that waits for the one before it may change again.
        kept_AKN = torch.where(
            active_AK[..., None], final_AK[..., None], self._by_block(self._get(FINAL, step, rows_A)).bool()
        )
        self._set(FINAL, step, rows_A, kept_AKN.flatten(1))
        self._set(MASK_WEIGHT, step, rows_A, weights_AKN.flatten(1))
        return torch.where(written_AKN.flatten(1), step.tokens, step.before)

    def provisional(self, canvas: Canvas, rows: list[int] | None) -> torch.Tensor:
        final_BS, places_AS = self._stored(FINAL), canvas.places(rows).clamp(min=0)
        return (final_BS if rows is None else final_BS[canvas.index(rows)]).gather(1, places_AS) == 0

    def _completion(self, canvas: Canvas, rows: list[int], columns_AN: torch.Tensor) -> torch.Tensor:
        """Extends `BlockBufferRule`: a block that may still change is half a token below 1."""
        self._width = canvas.width
        places_AN = columns_AN - canvas.origin(rows)[:, None]
        final_BS = self.memory.tensor(FINAL, self._width)
        final_AK = self._by_block(final_BS[canvas.index(rows)].gather(1, places_AN)).bool().all(dim=2)
        progress_AK = super()._completion(canvas, rows, columns_AN)
        return torch.where(final_AK, progress_AK, progress_AK.clamp(max=1 - 0.5 / self.block_length))

    def _get(self, name: str, step: Step, rows_A: torch.Tensor) -> torch.Tensor:
        return self._stored(name)[rows_A].gather(1, step.places)

    def _set(self, name: str, step: Step, rows_A: torch.Tensor, values_AN: torch.Tensor) -> None:
        stored_BS = self._stored(name)
        stored_BS[rows_A] = stored_BS[rows_A].scatter(1, step.places, values_AN.to(stored_BS.dtype))

    def _stored(self, name: str) -> torch.Tensor:
        """[B, S], values by position in the row."""
        return self.memory.tensor(name, self._width, dtype=torch.float32 if name == MASK_WEIGHT else torch.long)
