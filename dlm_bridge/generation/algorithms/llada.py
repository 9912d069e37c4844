"""LLaDA's semi-autoregressive sampler, with Fast-dLLM v1's parallel rules, and iLLaDA's of growing length."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from dlm_bridge.errors import DlmBridgeError
from dlm_bridge.generation.algorithms.base import Algorithm, Tokens, check_blocks
from dlm_bridge.generation.canvas import Layout
from dlm_bridge.generation.end_think import EndThink, Urging, UrgingGrowing
from dlm_bridge.generation.loop import Recipe
from dlm_bridge.generation.predict import Growing, Predictor
from dlm_bridge.generation.rules.base import CommitRule
from dlm_bridge.generation.rules.quota import Quota
from dlm_bridge.generation.rules.schedules import even
from dlm_bridge.generation.rules.scores import (
    Score,
    low_confidence,
    precise_confidence,
    random_order,
    without_tokens,
)
from dlm_bridge.generation.rules.threshold import Factor, Threshold
from dlm_bridge.models.spec import Topology


@dataclass(frozen=True, kw_only=True)
class Guided(Algorithm):
    """What LLaDA's sampler and iLLaDA's share: guidance, and the urge to end a thought (`end_think`)."""

    cfg_scale: float = 0.0
    remasking: str = "low_confidence"
    end_think_token_ids: tuple[int, ...] | None = None
    end_think_logit_boost: float = 0.0
    end_think_boost_power: float = 2.0

    def _predictor(self, plain: type[Predictor], urging: type[Predictor]) -> dict[str, Any]:
        """A recipe's part, `plain` where nothing is urged."""
        options: dict[str, Any] = {"cfg_scale": self.cfg_scale}
        urge = EndThink.of(
            self.end_think_token_ids, self.end_think_logit_boost, self.end_think_boost_power, self.gen_length
        )
        if urge is None:
            return {"predictor": plain, "predictor_options": options}
        return {"predictor": urging, "predictor_options": options | {"end_think": urge}}


@dataclass(frozen=True, kw_only=True)
class LLaDA(Guided):
    """Blocks from the prompt's end on; each step settles a fixed share of the block (arXiv 2502.09992).

    With `threshold` or `factor` a step settles what the model is sure of instead, as many as that is, and `steps` is
    of no account (Fast-dLLM v1 without its cache, arXiv 2505.22618).
    """

    name: ClassVar[str] = "llada"
    topologies: ClassVar[tuple[Topology, ...]] = ("bidirectional",)
    shortens_block: ClassVar[bool] = True

    block_length: int = 128
    steps: int | None = None  # over all blocks; one for each new token by default
    threshold: float | None = None
    factor: float | None = None
    logits_eos_inf: bool = False
    confidence_eos_eot_inf: bool = False
    eot_token_id: int | None = None

    def recipe(self, tokens: Tokens) -> Recipe:
        blocks = check_blocks(self.gen_length, self.block_length)
        steps = self.gen_length if self.steps is None else self.steps
        if steps % blocks:
            below = steps // blocks * blocks
            numbers = f"{below} or {below + blocks}" if below else f"{blocks} or more"
            raise DlmBridgeError(
                f"steps {steps} is not a multiple of the {blocks} blocks "
                f"(gen_length {self.gen_length} / block_length {self.block_length}): use steps {numbers}"
            )
        return Recipe(
            layout=Layout(self.block_length),
            rule=self._rule(steps // blocks, tokens),
            sampling=self.sampling(),
            suppress=_some_end(tokens.end_token_ids, "logits_eos_inf") if self.logits_eos_inf else (),
            **self._predictor(Predictor, Urging),
        )

    def _confidence(self) -> Score:
        return low_confidence

    def _rule(self, steps: int, tokens: Tokens) -> CommitRule:
        if self.threshold is not None and self.factor is not None:
            raise DlmBridgeError("threshold and factor are two rules for the same choice: give one of them")
        parallel = self.threshold is not None or self.factor is not None
        score: Score = (
            random_order if self.remasking == "random" else precise_confidence if parallel else self._confidence()
        )
        if self.confidence_eos_eot_inf:
            ends = tokens.end_token_ids + (() if self.eot_token_id is None else (self.eot_token_id,))
            score = without_tokens(score, _some_end(ends, "confidence_eos_eot_inf"))
        if self.threshold is not None:
            return Threshold(self.threshold, score)
        if self.factor is not None:
            return Factor(self.factor, score)
        return Quota(score, partial(even, steps=steps))


def _some_end(tokens: tuple[int, ...], name: str) -> tuple[int, ...]:
    if not tokens:
        raise DlmBridgeError(f"{name}: the model's config names no end-of-sequence token: pass eos_token_id")
    return tokens


@dataclass(frozen=True, kw_only=True)
class ILLaDA(Guided):
    """iLLaDA's `var_generate`: masks are appended block by block until a row ends; a block sees no later one."""

    name: ClassVar[str] = "illada"
    topologies: ClassVar[tuple[Topology, ...]] = ("bidirectional",)
    infills: ClassVar[bool] = False  # a block sees nothing of what follows
    shortens_block: ClassVar[bool] = True

    block_length: int = 32
    steps: int | None = None  # of each block; one for each of its tokens by default

    def recipe(self, tokens: Tokens) -> Recipe:
        check_blocks(self.gen_length, self.block_length)
        score: Score = random_order if self.remasking == "random" else low_confidence
        return Recipe(
            layout=Layout(self.block_length),
            rule=Quota(score, partial(even, steps=self.steps or self.block_length)),
            sampling=self.sampling(),
            **self._predictor(Growing, UrgingGrowing),
        )
