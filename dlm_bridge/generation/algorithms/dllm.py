"""dLLM's two samplers, for its A2D models: masked diffusion over the whole canvas, and block diffusion."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from math import ceil
from typing import Any, ClassVar

from dlm_bridge.generation.algorithms.base import Algorithm, Tokens
from dlm_bridge.generation.canvas import Layout
from dlm_bridge.generation.loop import Recipe
from dlm_bridge.generation.predict import Predictor
from dlm_bridge.generation.rules.quota import Quota
from dlm_bridge.generation.rules.schedules import by_rounding
from dlm_bridge.generation.rules.scores import low_confidence, random_order
from dlm_bridge.generation.settling import BlockCausal
from dlm_bridge.models.spec import Topology


@dataclass(frozen=True, kw_only=True)
class MDLM(Algorithm):
    """dLLM's `MDLMSampler`: LLaDA's sampler with another schedule, and any number of steps and of new tokens."""

    name: ClassVar[str] = "mdlm"
    topologies: ClassVar[tuple[Topology, ...]] = ("bidirectional",)

    _ranks_canvas: ClassVar[bool] = True

    block_size: int = 128
    steps: int = 128  # over all blocks
    cfg_scale: float = 0.0
    remasking: str = "low_confidence"

    def recipe(self, tokens: Tokens) -> Recipe:
        steps = ceil(self.steps / ceil(self.gen_length / self.block_size))
        score = random_order if self.remasking == "random" else low_confidence
        return Recipe(
            layout=Layout(self.block_size),
            rule=Quota(score, partial(by_rounding, steps=steps), on_canvas=self._ranks_canvas),
            sampling=self.sampling(),
            **self._predictor(),
        )

    def _predictor(self) -> dict[str, Any]:
        return {"predictor": Predictor, "predictor_options": {"cfg_scale": self.cfg_scale}}


@dataclass(frozen=True, kw_only=True)
class BD3LM(MDLM):
    """dLLM's `BD3LMSampler`: attention in blocks that are counted from the prompt's end, in both directions.

    For the bd3lm checkpoints of A2D, which share their classes and configs with the mdlm ones.
    """

    name: ClassVar[str] = "bd3lm"
    families: ClassVar[tuple[str, ...]] = ("a2d_qwen3", "a2d_qwen2", "a2d_llama")

    infills: ClassVar[bool] = False  # a block sees nothing of what follows, and begins where the prompt ends
    _ranks_canvas: ClassVar[bool] = False

    block_size: int = 32

    def _predictor(self) -> dict[str, Any]:
        options = {"cfg_scale": self.cfg_scale, "block_length": self.block_size}
        return {"predictor": BlockCausal, "predictor_options": options}
