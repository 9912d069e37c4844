"""The Block Buffer of multi-block diffusion (MBD-LMs, arXiv 2606.29215): several blocks are denoised at once.

    buffer = buffer_size blocks from the first one that contains new tokens; the prompt's blocks before it are cached
    started = the first block, if the prompt's last tokens are part of it
    while new tokens are masked:
        if no block is started, or the last started one has at least block_add_threshold of its tokens and is not the
                buffer's last:
            start the next block
        logits = model(buffer), block-causal          # the same forward pass caches the complete blocks at its front
        tokens = argmax(logits), or draws;  scores = their probabilities without the mask token
        in every started block, commit all masks with score > threshold; if there are none, and the previous block has
            at least semi_complete_threshold of its tokens: the best one
        drop the blocks that are now cached from the buffer's front, and append as many blocks of masks to it

A block's tokens depend on no later block. A complete block leaves the buffer after one more forward pass, which caches
it and denoises the blocks after it. Only if all blocks of the buffer are complete, this pass commits nothing: with a
buffer of one block, the tokens are those of the `llada2` and `sdar` samplers, but each block takes one more pass.

Not implemented: `token_stability_threshold`, which above 0 equals block_add_threshold 1 unless tokens are edited, and
`auto_max_nfe`, which ends a text early if it takes more forward passes than its first eight suggest.

Source: SJTU-DENG-Lab/Diffulex 184ba97, diffulex/engine/request.py, dllm_block.py and scheduler.py, with
sampler/llada2.py and sdar.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from dlm_bridge.attention.masks import AttentionPattern, block_causal_mask
from dlm_bridge.generation.canvas import BlockLayout, Canvas, Columns, to_device
from dlm_bridge.generation.commit_rules import (
    MINUS_INFINITY,
    DenoisingRule,
    OneOrMoreRule,
    SamplerContext,
    Step,
    best,
)
from dlm_bridge.generation.constraints import Constraints
from dlm_bridge.generation.kv_cache import KVCache
from dlm_bridge.generation.predictors import RowCachePredictor
from dlm_bridge.generation.runtime.runner import CanvasView, ModelRunner
from dlm_bridge.generation.runtime.varlen import Packing
from dlm_bridge.generation.samplers import Sampler, SamplerSpec, SpecialTokens, parameter
from dlm_bridge.generation.samplers.idlm import COLUMN_MULTIPLE
from dlm_bridge.generation.token_sampling import Noise, probability_of, without_token

# Names of each row's values in `RowMemory`: the index of the buffer's first block, and how many of its blocks are
# started, and complete so that this step's forward pass caches them.
FIRST, STARTED, COMPLETE = "buffer: first block", "buffer: started", "buffer: complete"
# By the position in the row: weight of the mask token in the embedding, where tokens are merged.
MASK_WEIGHT = "buffer: mask weight"


@dataclass(frozen=True, kw_only=True)
class BlockBufferSampler(Sampler):
    """What samplers on a Block Buffer share: the settings' published names, the layout and the predictor."""

    attention_patterns: ClassVar[tuple[AttentionPattern, ...]] = ("block_causal",)
    shifted: ClassVar[bool | None] = False
    aliases: ClassVar[Mapping[str, str]] = {
        **Sampler.aliases, "accept_threshold": "threshold", "add_block_threshold": "block_add_threshold",
    }  # fmt: skip
    model_blocks: ClassVar[bool] = True
    infills: ClassVar[bool] = False
    takes_commit_rule: ClassVar[bool] = False

    block_length: int = parameter(32)
    buffer_size: int  # each has its own default

    def buffer_spec(self, rule: BlockBufferRule, **options: Any) -> SamplerSpec:
        # Whole buffers, also where the first block is the last one with new tokens.
        spare = self.buffer_size * self.block_length - 1
        return SamplerSpec(
            layout=BlockLayout(None, spare=spare, multiple=self.block_length),
            rule=rule,
            sampling=self.sampling(),
            predictor=BufferPredictor,
            predictor_options={"block_length": self.block_length, "buffer_size": self.buffer_size, **options},
        )


@dataclass(frozen=True, kw_only=True)
class MultiBDSampler(BlockBufferSampler):
    """MBD-LMs' Block Buffer."""

    name: ClassVar[str] = "multi_bd"

    buffer_size: int = parameter(
        4,
        "Blocks that a forward pass runs; MBD's LLaDA2 weights were trained with 2, its SDAR weights with 4.",
        minimum=1,
    )
    threshold: float = parameter(
        0.95, "Probability above which a token is committed; published as `accept_threshold`."
    )
    block_add_threshold: float = parameter(
        0.1,
        "Committed fraction of the last started block at which the next one starts; published as "
        "`add_block_threshold`.",
        minimum=0,
        maximum=1,
    )
    semi_complete_threshold: float = parameter(
        0.9,
        "Committed fraction of a block from which on the next one commits a token in every step.",
        minimum=0,
        maximum=1,
    )

    def spec(self, tokens: SpecialTokens) -> SamplerSpec:
        return self.buffer_spec(
            BlockBufferRule(
                self.block_length,
                self.buffer_size,
                self.threshold,
                self.block_add_threshold,
                self.semi_complete_threshold,
            )
        )


@dataclass(eq=False)
class BlockBufferRule(OneOrMoreRule):
    """Commits tokens in the started blocks of each row's buffer; see `MultiBDSampler` for the arguments.

    Args:
        ordered: commit one token per step, from left to right.
    """

    block_length: int
    buffer_size: int
    threshold: float
    block_add_threshold: float
    semi_complete_threshold: float
    ordered: bool = False

    def constrained(self, constraints: Constraints) -> DenoisingRule:
        return replace(self, ordered=True) if constraints.ordered else self

    def begin(self, masks: list[int], noise: Noise) -> list[list[int]]:
        # Steps that commit nothing are fewer than blocks. A row ends before the masks behind its last new token.
        return [[1] * (2 * count) for count in masks]

    def begin_block(self, context: SamplerContext, block: slice, rows: list[int]) -> list[int]:
        """Cache the prompts of these rows. The block contains all new tokens."""
        canvas, predictor = context.canvas, context.predictor
        assert isinstance(predictor, BufferPredictor)
        going = super().begin_block(context, block, rows)
        index, lengths_A = canvas.index(rows), canvas.first_new(rows) - canvas.origin(rows)
        canvas.memory.tensor(FIRST)[index] = lengths_A // self.block_length
        canvas.memory.tensor(STARTED)[index] = (lengths_A % self.block_length).clamp(max=1)
        predictor.cache_prompts(rows)
        return going

    def denoise_step(self, context: SamplerContext, block: slice, rows: list[int]) -> list[int]:
        self._move_buffers(context, block, rows)
        return super().denoise_step(context, block, rows)

    def select(self, step: Step) -> torch.Tensor:
        started_A = self.memory.tensor(STARTED)[to_device(step.rows, step.masked.device)]
        masked_AKN = self._by_block(step.masked)
        open_AKN = masked_AKN & (self._slots(started_A) < started_A[:, None])[..., None]
        open_AN = open_AKN.flatten(1)
        if self.ordered:
            return open_AN & (open_AN.long().cumsum(dim=1) == 1)
        # As published, among the tokens that may be proposed.
        logits_ANV = without_token(step.shaped, step.excluded_token_id, step.shaped.dtype)
        scores_AN = probability_of(step.tokens, logits_ANV).masked_fill(~open_AN, MINUS_INFINITY)
        confident_AKN = self._by_block(scores_AN > self.threshold) & open_AKN
        enough_AK = self._progress(masked_AKN) >= self.semi_complete_threshold
        follows_AK = torch.cat([torch.ones_like(enough_AK[:, :1]), enough_AK[:, :-1]], dim=1)
        lacks_AK = follows_AK & ~confident_AKN.any(dim=2)
        best_AKN = best(self._by_block(scores_AN).flatten(0, 1)).view_as(open_AKN) & open_AKN
        return (confident_AKN | (best_AKN & lacks_AK[..., None])).flatten(1)

    def _move_buffers(self, context: SamplerContext, block: slice, rows: list[int]) -> None:
        """Move the rows' buffers behind the blocks that the last forward pass has cached, and start blocks."""
        canvas, memory, index = context.canvas, context.canvas.memory, context.canvas.index(rows)
        first_B, started_B, complete_B = (memory.tensor(name) for name in (FIRST, STARTED, COMPLETE))
        first_B[index] += complete_B[index]
        started_A = started_B[index] - complete_B[index]
        columns_AN = context.predictor.columns(rows, block)
        assert isinstance(columns_AN, torch.Tensor)
        progress_AK = self._completion(canvas, rows, columns_AN)
        before_AK = self._slots(started_A) < started_A[:, None]
        complete_B[index] = ((progress_AK == 1) & before_AK).long().cumprod(dim=1).sum(dim=1)
        last_A = progress_AK.gather(1, (started_A - 1).clamp(min=0)[:, None])[:, 0]
        starts_A = (started_A == 0) | (last_A >= self.block_add_threshold)
        started_B[index] = (started_A + starts_A).clamp(max=self.buffer_size)

    def _completion(self, canvas: Canvas, rows: list[int], columns_AN: torch.Tensor) -> torch.Tensor:
        """float64 [A, K], progress of each block of the buffer; 1 if the block is complete, so that it is cached."""
        return self._progress(self._by_block(canvas.masked(rows, columns_AN)))

    def _by_block(self, values_AN: torch.Tensor) -> torch.Tensor:
        """[A, K, N / K], values of the buffer's K blocks."""
        return values_AN.unflatten(1, (self.buffer_size, self.block_length))

    def _progress(self, masked_AKN: torch.Tensor) -> torch.Tensor:
        """float64 [A, K], fraction of each block's positions that have a token."""
        return (self.block_length - masked_AKN.sum(dim=2)).double() / self.block_length

    def _slots(self, like: torch.Tensor) -> torch.Tensor:
        return torch.arange(self.buffer_size, device=like.device)


class BufferPredictor(RowCachePredictor):
    """Block-causal attention of each row's buffer. Blocks are counted from the row's first token.

    With the cache "block", each row caches keys and values in columns of its own. Those of the buffer's blocks are
    overwritten by every forward pass until the buffer has moved behind them: the last one to do so sees a complete
    block.

    Args:
        merges: the model reads tokens mixed with the mask token, by the weights in the rows' memory (DMax).
    """

    def __init__(
        self,
        runner: ModelRunner,
        canvas: Canvas,
        cache: KVCache,
        *,
        block_length: int,
        buffer_size: int,
        merges: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(runner, canvas, cache, **options)
        self._merges = merges
        self._block_length = block_length
        self._width = block_length * buffer_size

    def columns(self, rows: list[int] | None, block: slice) -> torch.Tensor:
        first_B = self.canvas.memory.tensor(FIRST)
        first_A = first_B if rows is None else first_B[self.canvas.index(rows)]
        begin_A1 = (self.canvas.origin(rows) + first_A * self._block_length)[:, None]
        return begin_A1 + torch.arange(self._width, device=begin_A1.device)

    def cache_prompts(self, rows: list[int]) -> None:
        """Cache the whole blocks of these rows' prompts by one forward pass. They are the first rows."""
        canvas, block = self.canvas, self._block_length
        lengths = [(canvas.starts[row] - canvas.origins[row]) // block * block for row in rows]
        width = max(lengths)
        if not self.cache.stores or not width:
            return
        place_AQ = torch.arange(width, device=canvas.tokens.device).expand(len(rows), -1)
        real_AQ = place_AQ < to_device(lengths, place_AQ.device)[:, None]
        tokens_AQ = canvas.take(rows, (canvas.origin(rows)[:, None] + place_AQ).clamp(max=canvas.width - 1))
        packing = Packing(real_AQ, tuple(lengths), blocks=place_AQ // block) if min(lengths) < width else None
        mask = block_causal_mask(place_AQ, block, real_AQ)
        view = CanvasView(tokens_AQ, mask, place_AQ, 0, width, packing=packing)
        self._runner.hidden(view, once=True)

    def __call__(self, rows: list[int] | None, columns: Columns, shift: bool | None = None) -> torch.Tensor:
        assert isinstance(columns, torch.Tensor)
        canvas = self.canvas
        chosen = canvas.rows if rows is None else rows
        place_AN = columns - canvas.origin(rows)[:, None]
        lengths = [canvas.ends[row] - canvas.origins[row] for row in chosen]
        end = max(lengths)
        if self.cache.stores:
            self.keep_rows(chosen)
            end = min(-(-end // COLUMN_MULTIPLE) * COLUMN_MULTIPLE, canvas.cache_width)
            attended_AK = torch.arange(end, device=place_AN.device) <= place_AN[:, -1:]
            tokens_AN = canvas.take(rows, columns)
            view = CanvasView(
                tokens_AN, attended_AK, place_AN, end=end, columns=place_AN, block=self._block_length,
                mask_weights=self._mask_weights(rows, place_AN),
            )  # fmt: skip
            return self._runner.head(self._runner.hidden(view), slice(None))
        place_AS = torch.arange(end, device=place_AN.device).expand(len(chosen), -1)
        real_AS = place_AS < to_device(lengths, place_AS.device)[:, None]
        tokens_AS = canvas.take(rows, (canvas.origin(rows)[:, None] + place_AS).clamp(max=canvas.width - 1))
        packing = None
        if min(lengths) < end:
            packing = Packing(real_AS, tuple(lengths), blocks=place_AS // self._block_length)
        mask = block_causal_mask(place_AS, self._block_length, real_AS)
        weights = self._mask_weights(rows, place_AS)
        return self._runner.logits_at(
            CanvasView(tokens_AS, mask, place_AS, packing=packing, mask_weights=weights), place_AN
        )

    def _mask_weights(self, rows: list[int] | None, place_AQ: torch.Tensor) -> torch.Tensor | None:
        """[A, Q], `CanvasView.mask_weights` of these positions; None: the sampler does not merge tokens."""
        if not self._merges:
            return None
        weights_BS = self.canvas.memory.tensor(MASK_WEIGHT, self.canvas.width, dtype=torch.float32)
        weights_AS = weights_BS if rows is None else weights_BS[self.canvas.index(rows)]
        return weights_AS.gather(1, place_AQ.clamp(max=self.canvas.width - 1))
