"""Nemotron-Labs-Diffusion's samplers: block diffusion behind a causal prefix, and linear self-speculation."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from dlm_bridge.generation.algorithms.base import Algorithm, Tokens, check_blocks
from dlm_bridge.generation.canvas import Layout
from dlm_bridge.generation.loop import Recipe
from dlm_bridge.generation.rules.base import CommitRule
from dlm_bridge.generation.rules.quota import Quota
from dlm_bridge.generation.rules.schedules import even
from dlm_bridge.generation.rules.scores import low_confidence
from dlm_bridge.generation.rules.threshold import Threshold
from dlm_bridge.generation.settling import CausalContext
from dlm_bridge.generation.speculation import Speculation, Speculative
from dlm_bridge.models.spec import Topology


@dataclass(frozen=True, kw_only=True)
class Nemotron(Algorithm):
    """The model's `generate` with `causal_context=True`: blocks start where the prompt ends.

    A block's first token is the causal model's next token; the others are settled at `threshold`, one a step without
    it.
    """

    name: ClassVar[str] = "nemotron"
    topologies: ClassVar[tuple[Topology, ...]] = ("bidirectional",)
    families: ClassVar[tuple[str, ...]] = ("nemotron_labs_diffusion",)
    infills: ClassVar[bool] = False  # a block sees nothing of what follows, and begins where the prompt ends
    model_blocks: ClassVar[bool] = True
    shortens_block: ClassVar[bool] = True

    block_length: int = 32
    threshold: float | None = 0.9

    def recipe(self, tokens: Tokens) -> Recipe:
        check_blocks(self.gen_length, self.block_length)
        rule: CommitRule = Quota(low_confidence, partial(even, steps=self.block_length), on_canvas=False)
        if self.threshold is not None:
            rule = Threshold(self.threshold, low_confidence)
        return Recipe(
            layout=Layout(self.block_length),
            rule=rule,
            sampling=self.sampling(),
            predictor=CausalContext,
            predictor_options={},
            seed="sampled",
        )


@dataclass(frozen=True, kw_only=True)
class LinearSpec(Algorithm):
    """The model's `linear_spec_generate`: it drafts `block_length` - 1 tokens as a denoiser, and checks them as a
    causal model. At temperature 0 the text is the causal model's own, token for token; above, it is drawn from that.

    `threshold` above 0 drafts in several forwards, each of which takes what is at least that sure. `draft_adapter` is
    the name of a PEFT adapter that is on in drafts alone, as the published `linear_spec_lora` is.
    """

    name: ClassVar[str] = "linear_spec"
    topologies: ClassVar[tuple[Topology, ...]] = ("bidirectional",)
    families: ClassVar[tuple[str, ...]] = ("nemotron_labs_diffusion",)
    infills: ClassVar[bool] = False  # what follows is not seen
    model_blocks: ClassVar[bool] = True

    block_length: int = 32
    threshold: float = 0.0
    draft_adapter: str | None = None

    def recipe(self, tokens: Tokens) -> Recipe:
        spare = self.block_length - 1  # what a check may say behind the last new token
        return Recipe(
            layout=Layout(self.gen_length + spare, whole=True, spare=spare),
            rule=Speculation(self.block_length, self.threshold),
            sampling=self.sampling(),
            predictor=Speculative,
            predictor_options={"adapter": self.draft_adapter},
        )
