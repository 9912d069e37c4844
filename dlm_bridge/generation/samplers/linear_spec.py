"""Nemotron-Labs-Diffusion's linear self-speculation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from dlm_bridge.attention_mask import AttentionPattern
from dlm_bridge.generation.canvas import BlockLayout
from dlm_bridge.generation.loop import SamplerSpec
from dlm_bridge.generation.samplers.base import Sampler, SpecialTokens
from dlm_bridge.generation.speculation import SpeculativePredictor, SpeculativeRule


@dataclass(frozen=True, kw_only=True)
class LinearSpecSampler(Sampler):
    """The model's `linear_spec_generate`: it drafts `block_length` - 1 tokens as a denoiser, and checks them as a
    causal model. At temperature 0 the text is the causal model's own, token for token; above, it is drawn from that.

    `threshold` above 0 drafts in several forwards, each of which takes what is at least that sure. `draft_adapter` is
    the name of a PEFT adapter that is on in drafts alone, as the published `linear_spec_lora` is.
    """

    name: ClassVar[str] = "linear_spec"
    attention_patterns: ClassVar[tuple[AttentionPattern, ...]] = ("bidirectional",)
    families: ClassVar[tuple[str, ...]] = ("nemotron_labs_diffusion",)
    infills: ClassVar[bool] = False  # what follows is not seen
    model_blocks: ClassVar[bool] = True

    block_length: int = 32
    threshold: float = 0.0
    draft_adapter: str | None = None

    def recipe(self, tokens: SpecialTokens) -> SamplerSpec:
        spare = self.block_length - 1  # what a check may say behind the last new token
        return SamplerSpec(
            layout=BlockLayout(self.gen_length + spare, whole=True, spare=spare),
            rule=SpeculativeRule(self.block_length, self.threshold),
            sampling=self.sampling(),
            predictor=SpeculativePredictor,
            predictor_options={"adapter": self.draft_adapter},
        )
