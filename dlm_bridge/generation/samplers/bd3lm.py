"""dLLM's block diffusion sampler."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from dlm_bridge.generation.predictors import BlockCausalPredictor
from dlm_bridge.generation.samplers.mdlm import MDLMSampler


@dataclass(frozen=True, kw_only=True)
class BD3LMSampler(MDLMSampler):
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
        return {"predictor": BlockCausalPredictor, "predictor_options": options}
