"""dLLM's block diffusion sampler, `BD3LMSampler` (BD3-LM, arXiv 2503.09573).

    as dLLM's masked diffusion sampler (see `mdlm`), but for
        attention is block-causal, in blocks of block_length that are counted from the end of the prompt
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
    """dLLM's `BD3LMSampler`, with `MDLMSampler`'s parameters: `steps` are those over all blocks."""

    name: ClassVar[str] = "bd3lm"
    families: ClassVar[tuple[str, ...]] = ("a2d_qwen3", "a2d_qwen2", "a2d_llama")
    infills: ClassVar[bool] = False  # a block does not attend to what follows, and begins where the prompt ends

    block_length: int = parameter(32, minimum=1)

    def _predictor(self) -> tuple[type[Predictor], dict[str, Any]]:
        return BlockCausalPredictor, {"block_length": self.block_length}
