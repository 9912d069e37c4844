"""LLaDA's semi-autoregressive sampler (arXiv 2502.09992), with the parallel rules of Fast-dLLM v1 (arXiv 2505.22618).

    canvas = prompt + [MASK] * gen_length
    for block in blocks of block_length, from left to right:
        for count in the masks of the block, divided evenly over steps / blocks:
            logits = model(canvas)                          # guidance: un + (cfg_scale + 1) * (cond - un)
            tokens = argmax(logits / temperature + Gumbel noise)
            scores = softmax(logits)[tokens]                # remasking "random": uniform numbers
            commit the count masks of the block with the highest scores
            # threshold: instead commit those with score >= threshold, at least the best one
            # factor: commit the r best ones while the r-th has score >= 1 - factor / (r + 1)
        # factor_exact: if all masks of the block but the last one pass, commit that one too

Source: ML-GSAI/LLaDA b7e6c35, generate.py; NVlabs/Fast-dLLM 24cc59e, llada/generate.py.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, field, replace
from functools import partial
from math import ceil
from typing import Any, ClassVar, Self

import torch

from dlm_bridge.attention.masks import AttentionPattern
from dlm_bridge.errors import SettingError, counted
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
)
from dlm_bridge.generation.samplers import Presets, Sampler, SamplerSpec, SpecialTokens, parameter


@dataclass(frozen=True, kw_only=True)
class GuidedSampler(Sampler):
    """Parameters of LLaDA's and iLLaDA's samplers. Guidance: logits = un + (cfg_scale + 1) * (cond - un)."""

    cfg_scale: float = parameter(0.0)
    remasking: str = parameter(
        "low_confidence",
        "Positions that a step commits: low_confidence (the most probable) or random.",
        choices=("low_confidence", "random"),
    )
    end_think_token_ids: tuple[int, ...] | None = parameter(None, "Sequence of tokens that ends a thought.")
    end_think_logit_boost: float = parameter(0.0, "Boost of their logits at the end of `gen_length`.", minimum=0)
    end_think_boost_power: float = parameter(
        2.0, "Exponent of the generated fraction of `gen_length`, for the boost before the end.", minimum=0
    )

    def end_think_bias(self) -> EndThinkBias | None:
        """Return the bias of the logits, if any. Raises SettingError for a boost without tokens."""
        if not self.end_think_logit_boost:
            return None
        if not self.end_think_token_ids:
            raise SettingError("end_think_logit_boost", "needs `end_think_token_ids`, the tokens that end a thought")
        token_ids = tuple(self.end_think_token_ids)
        return EndThinkBias(token_ids, self.end_think_logit_boost, self.end_think_boost_power, self.gen_length)


@dataclass(frozen=True, kw_only=True)
class LLaDASampler(GuidedSampler):
    """LLaDA's `generate`."""

    name: ClassVar[str] = "llada"
    attention_patterns: ClassVar[tuple[AttentionPattern, ...]] = ("bidirectional",)
    shortens_block: ClassVar[bool] = True
    whole_blocks: ClassVar[bool] = True
    presets: ClassVar[Presets] = {
        "fast": {"threshold": 0.9, "block_length": 32},
        "careful": {"threshold": None, "factor": None, "steps": None, "block_length": 32},
    }

    block_length: int = parameter(128)
    steps: int | None = parameter(None, "Denoising steps in total, over all blocks; by default one per new token.")
    threshold: float | None = parameter(
        None, "Confidence from which a token is committed (Fast-dLLM v1); `steps` then has no effect."
    )
    factor: float | None = parameter(None, "Fast-dLLM v1's other parallel rule, instead of a threshold.", minimum=0)
    factor_exact: bool = parameter(
        False,
        "Reproduce the off-by-one error of Fast-dLLM's code, which commits the least confident mask if it alone "
        "fails (so that two masks are always committed together).",
    )
    logits_eos_inf: bool = parameter(False, "Never propose end-of-sequence tokens.")
    confidence_eos_eot_inf: bool = parameter(
        False,
        "Commit end-of-sequence tokens and `eot_token_id` last, at every temperature. (Above 0, the published code "
        "does so for `eot_token_id` only.)",
    )
    eot_token_id: int | None = parameter(None, "End-of-turn token, if it is not an `eos_token_id`.", minimum=0)

    def fitted(self, explicit: Container[str]) -> Self:
        changed: dict[str, Any] = {}
        blocks = ceil(self.gen_length / self.block_length)
        if self.steps is not None and "steps" not in explicit:
            changed["steps"] = max(self.steps // blocks, 1) * blocks
        for name, other in (("threshold", "factor"), ("factor", "threshold")):
            if other in explicit and getattr(self, other) is not None and name not in explicit:
                changed[name] = None
        return replace(self, **changed)

    def spec(self, tokens: SpecialTokens) -> SamplerSpec:
        blocks = ceil(self.gen_length / self.block_length)
        steps = blocks * self.block_length if self.steps is None else self.steps
        if steps % blocks:
            below = steps // blocks * blocks
            numbers = f"{below} or {below + blocks}" if below else f"{blocks} or more"
            raise SettingError(
                "steps",
                f"{steps} is not a multiple of the {counted(blocks, 'block')} (`gen_length={self.gen_length}` / "
                f"`block_length={self.block_length}`): use {numbers}",
            )
        return SamplerSpec(
            layout=BlockLayout(self.block_length),
            rule=self._rule(steps // blocks, tokens),
            sampling=self.sampling(),
            predictor_options={"cfg_scale": self.cfg_scale},
            logits_bias=self.end_think_bias(),
            suppress=_required(tokens.end_token_ids, "logits_eos_inf") if self.logits_eos_inf else (),
        )

    def _confidence(self) -> Score:
        return low_confidence

    def _rule(self, steps: int, tokens: SpecialTokens) -> CommitRule:
        if self.threshold is not None and self.factor is not None:
            raise SettingError("threshold", "excludes `factor`: set one of them")
        parallel = self.threshold is not None or self.factor is not None
        score: Score = (
            random_order if self.remasking == "random" else precise_confidence if parallel else self._confidence()
        )
        if self.confidence_eos_eot_inf:
            ends = tokens.end_token_ids + (() if self.eot_token_id is None else (self.eot_token_id,))
            score = partial(_without_confidence, score=score, tokens=_required(ends, "confidence_eos_eot_inf"))
        if self.threshold is not None:
            return ThresholdRule(self.threshold, score)
        if self.factor is not None:
            return FactorRule(self.factor, score, self.factor_exact)
        return TopScoresRule(score, partial(even_schedule, steps=steps))


class FactorRule(OneOrMoreRule):
    """Commits the r most confident positions while the r-th has confidence >= 1 - factor / (r + 1) (Fast-dLLM v1).

    The most confident position is always committed, and with `exact` the least confident one if it alone fails.
    """

    def __init__(self, factor: float, score: Score, exact: bool = False) -> None:
        self._factor = factor
        self._score = score
        self._off_by_one = int(exact)

    def select(self, step: Step) -> torch.Tensor:
        scores_AN = self._score(step).masked_fill(~step.masked, MINUS_INFINITY)
        ordered_AN, order_AN = scores_AN.sort(dim=1, descending=True, stable=True)
        rank_N = torch.arange(1, scores_AN.shape[1] + 1, device=scores_AN.device)
        # Confidence falls and the bound rises with the rank, so the positions that pass come first.
        passed_AN = ordered_AN >= 1 - self._factor / (rank_N + 1)
        passed_AN[:, 0] = True
        left_A = (~passed_AN & (ordered_AN > MINUS_INFINITY)).sum(dim=1)
        passed_AN |= (left_A <= self._off_by_one)[:, None]
        return torch.zeros_like(step.masked).scatter(1, order_AN, passed_AN) & step.masked


@dataclass
class EndThinkBias:
    """Logits bias that raises the probability of the end of a thought with the length of the text.

    Until a row contains the closing sequence, the sequence's next token gets a higher logit at the block's first mask.
    Source: ML-GSAI/LLaDA, generate.py.

    Args:
        token_ids: the closing sequence, such as the tokens of </think>.
        boost: added to a logit at the end of the text.
        power: exponent of the generated fraction of the text, for the boost before the end.
        gen_length: length of the text in tokens.
    """

    token_ids: tuple[int, ...]
    boost: float
    power: float
    gen_length: int
    _closing: torch.Tensor | None = field(default=None, init=False)  # the sequence on the device

    def __call__(
        self, logits_ANV: torch.Tensor, canvas: Canvas, rows: list[int] | None, columns: Columns
    ) -> torch.Tensor:
        assert isinstance(columns, slice)
        vocabulary = logits_ANV.shape[-1]
        if max(self.token_ids) >= vocabulary:
            raise SettingError("end_think_token_ids", f"{list(self.token_ids)} exceed the vocabulary of {vocabulary}")
        if self._closing is None:
            self._closing = to_device(list(self.token_ids), canvas.tokens.device)
        closing_L = self._closing
        masked_AN = canvas.masked(rows, columns)
        place_A = masked_AN.int().argmax(dim=1)
        position_A, start_A = place_A + columns.start, canvas.first_new(rows)
        tokens_AS = canvas.take(rows, slice(0, canvas.width))
        fraction_A = ((position_A - start_A + 1).double() / self.gen_length).clamp(0, 1)
        open_A = masked_AN.any(dim=1) & (position_A >= start_A) & ~_contains(tokens_AS, closing_L, start_A)
        boost_A = torch.where(open_A, self.boost * fraction_A**self.power, 0.0)
        row_A = torch.arange(len(tokens_AS), device=tokens_AS.device)
        index = (row_A, place_A, _next_token(tokens_AS, closing_L, position_A, start_A))
        return logits_ANV.index_put(index, (logits_ANV[index].double() + boost_A).to(logits_ANV.dtype))


def _contains(tokens_AS: torch.Tensor, sequence_L: torch.Tensor, start_A: torch.Tensor) -> torch.Tensor:
    """[A], True if the row contains the sequence after its start."""
    count = len(sequence_L)
    if tokens_AS.shape[1] < count:
        return torch.zeros_like(start_A, dtype=torch.bool)
    found_AW = (tokens_AS.unfold(1, count, 1) == sequence_L).all(dim=-1)
    first_W = torch.arange(found_AW.shape[1], device=tokens_AS.device)
    return (found_AW & (first_W >= start_A[:, None])).any(dim=1)


def _next_token(
    tokens_AS: torch.Tensor, sequence_L: torch.Tensor, position_A: torch.Tensor, start_A: torch.Tensor
) -> torch.Tensor:
    """[A], the token that continues the longest prefix of the sequence directly before the position."""
    next_A = sequence_L[:1].expand(len(tokens_AS))
    for count in range(1, len(sequence_L)):
        before_AC = position_A[:, None] + torch.arange(-count, 0, device=tokens_AS.device)
        stands_A = (tokens_AS.gather(1, before_AC.clamp(min=0)) == sequence_L[:count]).all(dim=1)
        next_A = torch.where(stands_A & (before_AC[:, 0] >= start_A), sequence_L[count], next_A)
    return next_A


def _without_confidence(step: Step, *, score: Score, tokens: tuple[int, ...]) -> torch.Tensor:
    """The score with the logits of these tokens at minus infinity (LLaDA's appendix B.4)."""
    logits = step.logits.clone()
    logits[..., [token for token in tokens if token < logits.shape[-1]]] = -torch.inf
    return score(replace(step, logits=logits))


def _required(tokens: tuple[int, ...], name: str) -> tuple[int, ...]:
    if not tokens:
        raise SettingError(name, "the model's config has no end-of-sequence token: set `eos_token_id`")
    return tokens
