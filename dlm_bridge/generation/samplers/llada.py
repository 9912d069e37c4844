"""LLaDA's sampler (arXiv 2502.09992), with Fast-dLLM v1's parallel rules (arXiv 2505.22618)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch

from dlm_bridge.attention_mask import AttentionPattern
from dlm_bridge.errors import DlmBridgeError
from dlm_bridge.generation.canvas import BlockLayout, Canvas, Columns, to_device
from dlm_bridge.generation.commit_rules import (
    MINUS_INFINITY,
    CommitRule,
    OneOrMoreRule,
    Score,
    Step,
    ThresholdRule,
    TopScoresRule,
    even_schedule,
    low_confidence,
    precise_confidence,
    random_order,
    without_tokens,
)
from dlm_bridge.generation.loop import SamplerSpec
from dlm_bridge.generation.predictors import Predictor
from dlm_bridge.generation.runtime.runner import ModelRunner
from dlm_bridge.generation.samplers.base import Sampler, SpecialTokens, check_blocks


@dataclass(frozen=True)
class EndThink:
    """What closes a thought, and how much it is urged.

    Args:
        token_ids: the tokens that close it, such as those of </think>.
        boost: what is added to a logit where all of the text is written.
        power: of the share of the text that is written, for what is added before.
        gen_length: new tokens, all of them.
    """

    token_ids: tuple[int, ...]
    boost: float
    power: float
    gen_length: int

    @classmethod
    def of(cls, token_ids: Any, boost: float, power: float, gen_length: int) -> EndThink | None:
        """None where nothing is urged. Raises DlmBridgeError for a boost of nothing."""
        if not boost:
            return None
        if not token_ids:
            raise DlmBridgeError(
                "end_think_logit_boost is about the tokens that close a thought: pass their ids as end_think_token_ids"
            )
        return cls(tuple(token_ids), boost, power, gen_length)


class EndThinkBias(Predictor):
    """As long as the closing tokens do not stand in a row's text, the one of them that comes next is likelier at the
    block's first mask."""

    def __init__(self, runner: ModelRunner, canvas: Canvas, *, end_think: EndThink, **options: Any) -> None:
        super().__init__(runner, canvas, **options)
        self._end_think = end_think
        self._closing_L = to_device(list(end_think.token_ids), canvas.tokens.device)

    def __call__(self, rows: list[int] | None, columns: Columns, shift: bool | None = None) -> torch.Tensor:
        assert isinstance(columns, slice)
        logits_ANV = super().__call__(rows, columns, shift)
        known = logits_ANV.shape[-1]
        if max(self._end_think.token_ids) >= known:
            raise DlmBridgeError(
                f"end_think_token_ids {list(self._end_think.token_ids)} go beyond the vocabulary of {known}"
            )
        masked_AN = self.canvas.masked(rows, columns)
        place_A = masked_AN.int().argmax(dim=1)
        position_A, start_A = place_A + columns.start, self.canvas.first_new(rows)
        tokens_AS = self.canvas.take(rows, slice(0, self.canvas.width))
        share_A = ((position_A - start_A + 1).double() / self._end_think.gen_length).clamp(0, 1)
        open_A = masked_AN.any(dim=1) & (position_A >= start_A) & ~self._closed(tokens_AS, start_A)
        boost_A = torch.where(open_A, self._end_think.boost * share_A**self._end_think.power, 0.0)
        index = (
            torch.arange(len(tokens_AS), device=tokens_AS.device),
            place_A,
            self._next(tokens_AS, position_A, start_A),
        )
        urged_A = (logits_ANV[index].double() + boost_A).to(logits_ANV.dtype)
        return logits_ANV.index_put(index, urged_A)

    def _closed(self, tokens_AS: torch.Tensor, start_A: torch.Tensor) -> torch.Tensor:
        """[A], True where the closing tokens stand in a row behind the prompt."""
        count = len(self._closing_L)
        if tokens_AS.shape[1] < count:
            return torch.zeros_like(start_A, dtype=torch.bool)
        found_AW = (tokens_AS.unfold(1, count, 1) == self._closing_L).all(dim=-1)
        first_W = torch.arange(found_AW.shape[1], device=tokens_AS.device)
        return (found_AW & (first_W >= start_A[:, None])).any(dim=1)

    def _next(self, tokens_AS: torch.Tensor, position_A: torch.Tensor, start_A: torch.Tensor) -> torch.Tensor:
        """[A], the closing token that goes on with the longest part of them that stands before the position."""
        next_A = self._closing_L[:1].expand(len(tokens_AS))
        for count in range(1, len(self._closing_L)):
            before_AC = position_A[:, None] + torch.arange(-count, 0, device=tokens_AS.device)
            stands_A = (tokens_AS.gather(1, before_AC.clamp(min=0)) == self._closing_L[:count]).all(dim=1)
            next_A = torch.where(stands_A & (before_AC[:, 0] >= start_A), self._closing_L[count], next_A)
        return next_A


class FactorRule(OneOrMoreRule):
    """Settles the r most confident positions while the r-th has confidence >= 1 - factor / (r + 1) (Fast-dLLM v1).

    The most confident one is always settled.
    """

    def __init__(self, factor: float, score: Score = precise_confidence) -> None:
        self._factor = factor
        self._score = score

    def select(self, step: Step) -> torch.Tensor:
        scores_AN = self._score(step).masked_fill(~step.masked, MINUS_INFINITY)
        ordered_AN, order_AN = scores_AN.sort(dim=1, descending=True, stable=True)
        rank_N = torch.arange(1, scores_AN.shape[1] + 1, device=scores_AN.device)
        # Confidence falls and the bound rises with the rank: those that pass come first.
        passed_AN = ordered_AN >= 1 - self._factor / (rank_N + 1)
        passed_AN[:, 0] = True
        return torch.zeros_like(step.masked).scatter(1, order_AN, passed_AN) & step.masked


@dataclass(frozen=True, kw_only=True)
class EndThinkSampler(Sampler):
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
class LLaDASampler(EndThinkSampler):
    """Blocks from the prompt's end on; each step settles a fixed share of the block (arXiv 2502.09992).

    With `threshold` or `factor` a step settles what the model is sure of instead, as many as that is, and `steps` is
    of no account (Fast-dLLM v1 without its cache, arXiv 2505.22618).
    """

    name: ClassVar[str] = "llada"
    attention_patterns: ClassVar[tuple[AttentionPattern, ...]] = ("bidirectional",)
    shortens_block: ClassVar[bool] = True

    block_length: int = 128
    steps: int | None = None  # over all blocks; one for each new token by default
    threshold: float | None = None
    factor: float | None = None
    logits_eos_inf: bool = False
    confidence_eos_eot_inf: bool = False
    eot_token_id: int | None = None

    def recipe(self, tokens: SpecialTokens) -> SamplerSpec:
        blocks = check_blocks(self.gen_length, self.block_length)
        steps = self.gen_length if self.steps is None else self.steps
        if steps % blocks:
            below = steps // blocks * blocks
            numbers = f"{below} or {below + blocks}" if below else f"{blocks} or more"
            raise DlmBridgeError(
                f"steps {steps} is not a multiple of the {blocks} blocks "
                f"(gen_length {self.gen_length} / block_length {self.block_length}): use steps {numbers}"
            )
        return SamplerSpec(
            layout=BlockLayout(self.block_length),
            rule=self._rule(steps // blocks, tokens),
            sampling=self.sampling(),
            suppress=_some_end(tokens.end_token_ids, "logits_eos_inf") if self.logits_eos_inf else (),
            **self._predictor(Predictor, EndThinkBias),
        )

    def _confidence(self) -> Score:
        return low_confidence

    def _rule(self, steps: int, tokens: SpecialTokens) -> CommitRule:
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
            return ThresholdRule(self.threshold, score)
        if self.factor is not None:
            return FactorRule(self.factor, score)
        return TopScoresRule(score, partial(even_schedule, steps=steps))


def _some_end(tokens: tuple[int, ...], name: str) -> tuple[int, ...]:
    if not tokens:
        raise DlmBridgeError(f"{name}: the model's config names no end-of-sequence token: pass eos_token_id")
    return tokens
