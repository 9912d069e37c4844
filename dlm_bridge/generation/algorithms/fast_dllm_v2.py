"""Fast-dLLM v2's sampler: block-causal, shifted, small blocks within blocks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from dlm_bridge.errors import DlmBridgeError
from dlm_bridge.generation.algorithms.base import Algorithm, Tokens
from dlm_bridge.generation.canvas import Layout
from dlm_bridge.generation.loop import Recipe
from dlm_bridge.generation.rules.threshold import SmallBlocks
from dlm_bridge.generation.small_blocks import SmallBlockCausal
from dlm_bridge.models.spec import Topology


@dataclass(frozen=True, kw_only=True)
class FastDLLMv2(Algorithm):
    """Fast-dLLM v2's `generate` (arXiv 2509.26328); with the cache "dual" that of `use_block_cache`.

    A block's first token is the best guess of the position before it, as in an autoregressive model; the others are
    settled from small block to small block. A prompt of exactly one block counts as context, too (there it is lost).
    """

    name: ClassVar[str] = "fast_dllm_v2"
    topologies: ClassVar[tuple[Topology, ...]] = ("block_causal",)
    model_blocks: ClassVar[bool] = True

    gen_length: int = 2048
    block_size: int = 32
    small_block_size: int = 8
    threshold: float = 1.0
    top_p: float | None = 0.95

    def recipe(self, tokens: Tokens) -> Recipe:
        if self.block_size % self.small_block_size:
            raise DlmBridgeError(
                f"block_size {self.block_size} is not a multiple of small_block_size {self.small_block_size}"
            )
        return Recipe(
            rule=SmallBlocks(self.threshold, self.small_block_size),
            sampling=self.sampling(),
            seed="greedy",
            layout=Layout(self.block_size, aligned=True),
            predictor=SmallBlockCausal,
            predictor_options={"block_length": self.block_size, "small_block_length": self.small_block_size},
        )
