"""dLLM's block diffusion sampler, `BD3LMSampler` (BD3-LM, arXiv 2503.09573).

    as dLLM's masked diffusion sampler (see `mdlm`), except
        attention is block-causal, in blocks of block_length counted from the end of the prompt
        scores are ranked within the block

Source: ZHZisZZ/dllm ca17675, `BD3LMSampler.sample`. For the bd3lm checkpoints of A2D, which share their classes and
configs with the mdlm ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from dlm_bridge.generation.predictors import BlockCausalPredictor, Predictor
from dlm_bridge.generation.samplers import parameter
from dlm_bridge.generation.samplers.mdlm import MDLMSampler


@dataclass(frozen=True, kw_only=True)
class BD3LMSampler(MDLMSampler):
    """dLLM's `BD3LMSampler`, with `MDLMSampler`'s parameters."""

    name: ClassVar[str] = "bd3lm"
    families: ClassVar[tuple[str, ...]] = ("a2d_qwen3", "a2d_qwen2", "a2d_llama")
    infills: ClassVar[bool] = False  # blocks start after the prompt and do not attend to later tokens

    block_length: int = parameter(32)

    def _predictor(self) -> tuple[type[Predictor], dict[str, Any]]:
        return BlockCausalPredictor, {"block_length": self.block_length}
