"""Samplers of block-causal models without a shift: SDAR's, and LLaDA2's with and without editing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from dlm_bridge.generation.algorithms.base import Algorithm, Tokens
from dlm_bridge.generation.canvas import Layout
from dlm_bridge.generation.loop import Recipe
from dlm_bridge.generation.propose import Sampling
from dlm_bridge.generation.rules.base import CommitRule
from dlm_bridge.generation.rules.editing import Editing
from dlm_bridge.generation.rules.entropy import EntropyBounded
from dlm_bridge.generation.rules.schedules import even
from dlm_bridge.generation.rules.threshold import Dynamic, Sequential
from dlm_bridge.generation.settling import BlockCausal
from dlm_bridge.models.spec import Topology


def by_blocks(block_length: int) -> dict[str, Any]:
    """The parts of a recipe that do not depend on the rule."""
    return {
        "layout": Layout(block_length, aligned=True),
        "predictor": BlockCausal,
        "predictor_options": {"block_length": block_length},
    }


@dataclass(frozen=True, kw_only=True)
class SDAR(Algorithm):
    """SDAR's and TraDo's `block_diffusion_generate` (arXiv 2510.06303), and DreamReasoner's, which is made after it.

    Temperature 0, by which the published code divides, is greedy here. After `denoising_steps` steps nothing of a
    block is left masked, and prompt tokens are never overwritten (both can happen there).
    """

    name: ClassVar[str] = "sdar"
    topologies: ClassVar[tuple[Topology, ...]] = ("block_causal",)
    model_blocks: ClassVar[bool] = True

    temperature: float = 1.0
    block_length: int = 4
    denoising_steps: int | None = None  # of each block; one for each of its tokens by default
    remasking_strategy: str = "low_confidence_dynamic"
    confidence_threshold: float = 0.85
    eb_threshold: float = 0.35

    def recipe(self, tokens: Tokens) -> Recipe:
        sampling = Sampling(self.temperature, self.top_k, self.top_p)
        return Recipe(rule=self._rule(), sampling=sampling, **by_blocks(self.block_length))

    def _rule(self) -> CommitRule:
        steps = self.denoising_steps or self.block_length
        schedule = even(self.block_length, steps)
        if self.remasking_strategy == "sequential":
            return Sequential(schedule)
        if self.remasking_strategy == "entropy_bounded":
            return EntropyBounded(self.eb_threshold, steps)
        dynamic = self.remasking_strategy == "low_confidence_dynamic"
        return Dynamic(schedule, self.confidence_threshold if dynamic else None)


@dataclass(frozen=True, kw_only=True)
class LLaDA2(Algorithm):
    """LLaDA2.0's `generate`: what has probability > threshold, or the schedule's share (arXiv 2512.15745)."""

    name: ClassVar[str] = "llada2"
    topologies: ClassVar[tuple[Topology, ...]] = ("block_causal",)
    model_blocks: ClassVar[bool] = True

    gen_length: int = 2048
    block_length: int = 32
    steps: int = 32  # of each block
    threshold: float = 0.95
    minimal_topk: int = 1

    def recipe(self, tokens: Tokens) -> Recipe:
        steps = max(1, min(self.steps, self.gen_length // self.minimal_topk))
        rule = Dynamic(even(self.block_length, steps), self.threshold)
        return Recipe(rule=rule, sampling=self.sampling(), **by_blocks(self.block_length))


@dataclass(frozen=True, kw_only=True)
class LLaDA21(Algorithm):
    """LLaDA2.1's `generate`: settled tokens of the block are edited where the model has become sure of another."""

    name: ClassVar[str] = "llada2.1"
    topologies: ClassVar[tuple[Topology, ...]] = ("block_causal",)
    model_blocks: ClassVar[bool] = True

    gen_length: int = 2048
    block_length: int = 32
    threshold: float = 0.95
    editing_threshold: float = 0.9
    max_post_steps: int = 16
    num_to_transfer: int = 1

    def recipe(self, tokens: Tokens) -> Recipe:
        rule = Editing(self.threshold, self.editing_threshold, self.max_post_steps, self.num_to_transfer)
        return Recipe(rule=rule, sampling=self.sampling(), **by_blocks(self.block_length))
