"""Commit rules: which proposed tokens a denoising step commits."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from dlm_bridge.errors import DlmBridgeError
from dlm_bridge.generation.callbacks import CallbackHandler
from dlm_bridge.generation.canvas import (
    Canvas,
    Columns,
    read_flags,
    to_device,
)
from dlm_bridge.generation.constraints import Constraints
from dlm_bridge.generation.predictors import Predictor
from dlm_bridge.generation.token_sampling import Noise, TokenSampling, probability_of, propose_tokens

if TYPE_CHECKING:
    from dlm_bridge.generation.loop import SamplerSpec


@dataclass(frozen=True)
class SamplerContext:
    """The parts of one call: where tokens stand, who predicts them, by which recipe, and who is told."""

    canvas: Canvas
    predictor: Predictor
    recipe: SamplerSpec
    constraints: Constraints
    noise: Noise
    observer: CallbackHandler
    vocabulary: int


MINUS_INFINITY = -torch.inf


@dataclass(frozen=True)
class Step:
    """What one forward proposes for N columns of the A rows that are still at work on the block."""

    rows: list[int]  # [A], which rows of the canvas these are
    index: int  # how many steps the block has had before
    num_transfer_tokens: list[int]  # [A], what `CommitRule.begin` announced for this step
    logits: torch.Tensor  # [A, N, V], without noise, guidance applied
    shaped: torch.Tensor  # [A, N, V], after temperature, top-k and top-p
    tokens: torch.Tensor  # [A, N], the proposed tokens, none of them the mask token
    before: torch.Tensor  # [A, N], what stands there now
    masked: torch.Tensor  # [A, N], True where a position is not settled yet
    new: torch.Tensor  # [A, N], True behind the prompt
    columns: slice | torch.Tensor  # where the N columns are on the canvas
    width: int  # S, the columns of the canvas that the model saw
    origins: list[int]  # [A], the first column that is no padding
    noise: Noise

    def probabilities(self) -> torch.Tensor:
        """[A, N], each proposal's probability in the distribution that it was drawn from."""
        return probability_of(self.tokens, self.shaped)

    def raw_probabilities(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """[A, N], each proposal's probability by the model's own logits, computed in `dtype`, by default theirs."""
        return probability_of(self.tokens, self.logits, dtype)


class CommitRule(ABC):
    """Chooses the positions to settle. One object serves one call of `generate` at a time.

    A rule of one's own is passed as `generate(..., commit_rule=EveryOther())`:

        class EveryOther(CommitRule):
            def begin(self, masks, noise):
                return [[1] * count for count in masks]  # a step settles at least one position

            def select(self, step):
                even = torch.arange(step.masked.shape[1], device=step.masked.device) % 2 == 0
                sure = step.probabilities() * (1 + even)  # those in even places first
                return best(sure.masked_fill(~step.masked, -torch.inf))
    """

    exact = (
        False  # True: `select` settles just the num_transfer_tokens, so that the rows' progress need not be looked at
    )
    edits = False  # True: what is settled may still change until its block is done

    @abstractmethod
    def begin(self, masks: list[int], noise: Noise) -> list[list[int]]:
        """A block is opened, in which each row has so many masked positions.

        Returns each row's steps, as how many positions a step settles at least. A row may need fewer steps than it
        announces unless the rule is exact.
        """

    @abstractmethod
    def select(self, step: Step) -> torch.Tensor:
        """A boolean [A, N] tensor."""

    def goes_on(self, step: Step, unfinished_A: torch.Tensor) -> torch.Tensor:
        """[A], True where a row needs another step; `unfinished_A` says where it has masks left."""
        return unfinished_A


def best(scores_AN: torch.Tensor) -> torch.Tensor:
    """[A, N], True at each row's highest score, the left-most of equal ones."""
    return torch.zeros_like(scores_AN, dtype=torch.bool).scatter(1, scores_AN.argmax(dim=1, keepdim=True), True)


def top_scores(scores_AN: torch.Tensor, counts: list[int]) -> torch.Tensor:
    """[A, N], True at each row's so many highest scores, never at minus infinity."""
    picked_AN = torch.zeros_like(scores_AN, dtype=torch.bool)
    for count in set(counts):
        if len(set(counts)) == 1:
            picked_AN.scatter_(1, scores_AN.topk(count, dim=1).indices, True)
        else:
            rows = [row for row, own in enumerate(counts) if own == count]
            indices = scores_AN[rows].topk(count, dim=1).indices
            picked_AN[rows] = torch.zeros_like(picked_AN[rows]).scatter(1, indices, True)
    return picked_AN & (scores_AN > MINUS_INFINITY)


def top_scores_on_canvas(step: Step, scores_AN: torch.Tensor, counts: list[int]) -> torch.Tensor:
    """[A, N], True at each row's so many highest scores.

    torch.topk breaks ties by where a value stands in its row, so that the row is the one that LLaDA's and Dream's own
    code ranks: the whole canvas without padding, minus infinity outside the block.
    """
    scores_AS = scores_AN.new_full((len(scores_AN), step.width), MINUS_INFINITY)
    scores_AS[:, step.columns] = scores_AN
    if len(set(counts)) == 1 and not any(step.origins):
        return top_scores(scores_AS, counts)[:, step.columns]
    picked_AS = torch.zeros_like(scores_AS, dtype=torch.bool)
    for picked_S, scores_S, count, origin in zip(picked_AS, scores_AS, counts, step.origins, strict=True):
        picked_S[origin:].index_fill_(0, scores_S[origin:].topk(count).indices, True)
    return picked_AS[:, step.columns]


def denoise_block(work: SamplerContext, block: slice) -> None:
    """Denoise a block. A row takes part until its own steps are over, so that it is what it would be alone."""
    canvas, predictor, recipe, noise = work.canvas, work.predictor, work.recipe, work.noise
    assert isinstance(recipe.rule, CommitRule)
    masks = canvas.masks(block)
    for row in commit_first_token(work, block):
        masks[row] -= 1
    if not any(masks):  # a block that was given as a whole
        return
    num_transfer_tokens = recipe.rule.begin(masks, noise)
    active = [row for row in canvas.rows if masks[row] and num_transfer_tokens[row]]
    index = 0
    while active:
        rows = None if len(active) == len(canvas.rows) else active
        columns = predictor.columns(rows, block)
        if recipe.window is not None:
            columns = window_columns(canvas, rows, block, recipe.window)
        logits = work.constraints(predictor(rows, columns), canvas, active, columns)
        shaped, tokens = propose_tokens(logits, canvas, active, columns, recipe.sampling, noise)
        before = canvas.take(rows, columns)
        new = canvas.behind_prompt(rows, columns)
        step = Step(
            rows=active,
            index=index,
            num_transfer_tokens=[num_transfer_tokens[row][index] for row in active],
            logits=logits,
            shaped=shaped,
            tokens=tokens,
            before=before,
            masked=(before == canvas.mask_token_id) & new,
            new=new,
            columns=columns,
            width=predictor.end(block),
            origins=[canvas.origins[row] for row in active],
            noise=noise,
        )
        canvas.put(rows, columns, torch.where(recipe.rule.select(step), tokens, before))
        work.observer.step(canvas, active, columns, logits, predictor.forwards, final=not recipe.rule.edits)
        index += 1
        more = [index < len(num_transfer_tokens[row]) for row in active]
        if not recipe.rule.exact and any(more):
            unfinished_A = recipe.rule.goes_on(step, canvas.unfinished(rows, block))
            more = [
                a and b for a, b in zip(more, read_flags(unfinished_A, predictor.launch_speculatively), strict=True)
            ]
        active = [row for row, on in zip(active, more, strict=True) if on]


def commit_first_token(work: SamplerContext, block: slice) -> list[int]:
    """Settle the block's first token where it is new and has something before it, as an autoregressive model would.

    Returns the rows in which it did.
    """
    canvas, predictor, recipe = work.canvas, work.predictor, work.recipe
    if recipe.seed is None:
        return []
    active = [row for row in canvas.rows if canvas.opens(row, block.start)]
    if active:
        rows = None if len(active) == len(canvas.rows) else active
        first = slice(block.start, block.start + 1)
        sampling = recipe.sampling if recipe.seed == "sampled" else TokenSampling()
        logits = work.constraints(predictor(rows, first, shift=True), canvas, active, first)
        canvas.put(rows, first, propose_tokens(logits, canvas, active, first, sampling, work.noise)[1])
        work.observer.step(canvas, active, first, logits, predictor.forwards, final=not recipe.rule.edits)
    return active


def window_columns(canvas: Canvas, rows: list[int] | None, block: slice, size: int) -> Columns:
    """[A, size] columns of the block from each row's first mask on; the canvas has `size` to spare at its end."""
    first = block.start + canvas.masked(rows, block).int().argmax(dim=1)
    return first[:, None] + torch.arange(size, device=first.device)


class CheckedRule(CommitRule):
    """Asks `rule`, and raises DlmBridgeError where an answer is not what `CommitRule` promises."""

    def __init__(self, rule: Any) -> None:
        if not isinstance(rule, CommitRule):
            raise DlmBridgeError(
                f"commit_rule must be an object of a class below dlm_bridge.generation.CommitRule, not {rule!r}"
            )
        self._rule = rule
        self._name = type(rule).__name__
        self._steps: list[int] = []
        self.exact = rule.exact
        self.edits = rule.edits

    def begin(self, masks: list[int], noise: Noise) -> list[list[int]]:
        num_transfer_tokens = self._rule.begin(masks, noise)
        if len(num_transfer_tokens) != len(masks):
            raise DlmBridgeError(
                f"{self._name}.begin has steps for {len(num_transfer_tokens)} rows, there are {len(masks)}"
            )
        for count, steps in zip(masks, num_transfer_tokens, strict=True):
            if count and not steps:
                raise DlmBridgeError(f"{self._name}.begin announces no step for a row of {count} masks")
            if self.exact and sum(steps) != count:
                raise DlmBridgeError(
                    f"{self._name} is exact, but its steps settle {sum(steps)} positions of a row of {count} masks"
                )
        self._steps = [len(steps) for steps in num_transfer_tokens]
        return num_transfer_tokens

    def select(self, step: Step) -> torch.Tensor:
        picked_AN = self._rule.select(step)
        if picked_AN.dtype != torch.bool or picked_AN.shape != step.masked.shape:
            raise DlmBridgeError(
                f"{self._name}.select must give a boolean tensor of shape {tuple(step.masked.shape)}, not "
                f"{picked_AN.dtype} of {tuple(picked_AN.shape)}"
            )
        if not self.edits and (picked_AN & ~step.masked).any():
            raise DlmBridgeError(f"{self._name}.select picks a position that is settled: set its `edits` to True")
        counts = picked_AN.sum(dim=1).tolist()
        if self.exact and counts != step.num_transfer_tokens:
            raise DlmBridgeError(
                f"{self._name} is exact, but step {step.index} picks {counts}, not {step.num_transfer_tokens}"
            )
        last = [self._steps[row] == step.index + 1 for row in step.rows]
        left = (step.masked & ~picked_AN).any(dim=1).tolist()
        if any(over and masked for over, masked in zip(last, left, strict=True)):
            raise DlmBridgeError(
                f"{self._name} leaves masks after its last step, {step.index}: announce more in begin"
            )
        return picked_AN

    def goes_on(self, step: Step, unfinished_A: torch.Tensor) -> torch.Tensor:
        more_A = self._rule.goes_on(step, unfinished_A)
        if (unfinished_A & ~more_A).any():
            raise DlmBridgeError(f"{self._name}.goes_on ends a row that has masks left")
        return more_A


Score = Callable[[Step], torch.Tensor]


def low_confidence(step: Step) -> torch.Tensor:
    """LLaDA (arXiv 2502.09992, algorithm 5): the token's probability by the model's own logits.

    In the model's dtype, as published: in half precision the rounding decides between near ties.
    """
    return step.raw_probabilities()


def random_order(step: Step) -> torch.Tensor:
    """LLaDA's random remasking (algorithm 4)."""
    return step.noise.per_position(step.rows, step.width, step.origins)[:, step.columns]


def without_tokens(score: Score, tokens: tuple[int, ...]) -> Score:
    """The score as if the model's logits of these tokens were minus infinity: where they are proposed, it is zero.

    LLaDA's `confidence_eos_eot_inf` (appendix B.4), so that ends of text are settled last.
    """

    def scored(step: Step) -> torch.Tensor:
        logits = step.logits.clone()
        logits[..., [token for token in tokens if token < logits.shape[-1]]] = -torch.inf
        return score(replace(step, logits=logits))

    return scored


def precise_confidence(step: Step) -> torch.Tensor:
    """Fast-dLLM's: as LLaDA's, in float64."""
    return step.raw_probabilities(torch.float64)


def probability(step: Step) -> torch.Tensor:
    """The token's probability in the distribution that it was drawn from (SDAR, LLaDA2, Dream's maskgit_plus)."""
    return step.probabilities()


def entropy(logits: torch.Tensor) -> torch.Tensor:
    """[A, N], the entropy of softmax(logits) in nats; a probability of zero adds nothing."""
    logarithms = logits.log_softmax(dim=-1)
    probabilities = logarithms.exp()
    return -(probabilities * logarithms.masked_fill(probabilities == 0, 0)).sum(dim=-1)


def even_schedule(masks: int, steps: int) -> list[int]:
    """masks / steps in every step, the remainder one each in the first steps."""
    share, remainder = divmod(masks, steps)
    return [share + (step < remainder) for step in range(steps) if share or step < remainder]


def noise_levels(steps: int, eps: float) -> torch.Tensor:
    """float32 [steps + 1], from 1 down to `eps`: the noise level before and after each step."""
    return torch.linspace(1, eps, steps + 1)


class TopScoresRule(CommitRule):
    """Settles the highest scores, so many in each step as the schedule says (LLaDA, Dream, RND1).

    With a `rank_temperature` the positions are drawn from softmax(score / rank_temperature) without replacement
    instead (Dream's alg_temp).
    """

    exact = True

    def __init__(
        self,
        score: Score,
        schedule: Callable[[int], list[int]],
        rank_temperature: float | None = None,
        *,
        on_canvas: bool = True,  # equal scores are told apart as in a ranking of the whole canvas, not of the block
    ) -> None:
        self._score = score
        self._schedule = schedule
        self._rank_temperature = rank_temperature
        self._on_canvas = on_canvas

    def begin(self, masks: list[int], noise: Noise) -> list[list[int]]:
        schedules = {count: self._schedule(count) for count in set(masks)}
        return [schedules[count] for count in masks]

    def select(self, step: Step) -> torch.Tensor:
        scores_AN = self._score(step)
        if self._rank_temperature:
            # The highest of score / T + Gumbel noise are draws without replacement.
            uniform_AS = step.noise.per_position(step.rows, step.width, step.origins)
            uniform_AN = uniform_AS[:, step.columns].clamp(min=1e-30)
            scores_AN = scores_AN / self._rank_temperature - uniform_AN.log().neg().log()
        scores_AN = scores_AN.masked_fill(~step.masked, MINUS_INFINITY)
        return (
            top_scores_on_canvas(step, scores_AN, step.num_transfer_tokens)
            if self._on_canvas
            else top_scores(scores_AN, step.num_transfer_tokens)
        )


class AncestralRule(CommitRule):
    """Each position is revealed on its own, from noise level t to s with probability 1 - s / t, in the last step all.

    Dream's origin; with eps = 0 it is DiffuLLaMA's sampler, where step k of n reveals with probability 1 / (n - k).
    A position is masked after a step with the probability that the step's noise level is, so that one uniform number
    tells when it is revealed; steps that reveal nothing need no forward.
    """

    exact = True

    def __init__(self, steps: int, eps: float) -> None:
        self._rising_levels = noise_levels(steps, eps)[1:-1].flip(0)
        self._order: list[torch.Tensor] = []  # by row and mask, the step in which it is revealed
        self._masks: dict[int, torch.Tensor] = {}  # by row, where its masks were

    def begin(self, masks: list[int], noise: Noise) -> list[list[int]]:
        width = max(masks)
        uniform_BN = noise.per_position(range(len(masks)), width, [width - count for count in masks])
        # A position is still masked after the steps whose level is above its number.
        levels = self._rising_levels.to(uniform_BN.device)
        when_BN = len(levels) - torch.searchsorted(levels, uniform_BN, right=True)
        num_transfer_tokens, self._order = [], []
        for count, when_N in zip(masks, when_BN, strict=True):
            _, order, counts = when_N[width - count :].unique(return_inverse=True, return_counts=True)
            num_transfer_tokens.append(counts.tolist())
            self._order.append(order)
        return num_transfer_tokens

    def select(self, step: Step) -> torch.Tensor:
        if step.index == 0:
            self._masks = dict(zip(step.rows, step.masked, strict=True))
        picked_AN = torch.zeros_like(step.masked)
        for picked_N, row in zip(picked_AN, step.rows, strict=True):
            picked_N.masked_scatter_(self._masks[row], self._order[row] == step.index)
        return picked_AN


class OneOrMoreRule(CommitRule):
    """The steps of a rule that settles at least one position a step, until none is left."""

    def begin(self, masks: list[int], noise: Noise) -> list[list[int]]:
        return [[1] * count for count in masks]


class ThresholdRule(OneOrMoreRule):
    """Settles the best position and all others with confidence >= threshold (Fast-dLLM v1, Nemotron).

    Of equally good ones it is the left-most: torch.topk would choose by how many columns a block has, which are fewer
    in the first block of a prompt to fill than in the same row's block of a wider batch.
    """

    def __init__(self, threshold: float, score: Score = precise_confidence) -> None:
        self._threshold = threshold
        self._score = score

    def select(self, step: Step) -> torch.Tensor:
        scores_AN = self._score(step).masked_fill(~step.masked, MINUS_INFINITY)
        sure_AN = (scores_AN >= self._threshold) & step.masked
        return sure_AN | (best(scores_AN) & (scores_AN > MINUS_INFINITY))  # NaN is above nothing


class DynamicThresholdRule(CommitRule):
    """Settles all positions with probability > threshold, or the quota's best where those are fewer.

    SDAR's low_confidence_dynamic and LLaDA2.0's rule. The num_transfer_tokens are those of a whole block of masks; after the last
    scheduled step nothing is left. Without a threshold just the quota is settled (SDAR's low_confidence_static).
    """

    def __init__(self, schedule: list[int], threshold: float | None) -> None:
        self._schedule = schedule
        self._threshold = threshold

    def begin(self, masks: list[int], noise: Noise) -> list[list[int]]:
        return [truncate_schedule(self._schedule, count) for count in masks]

    def select(self, step: Step) -> torch.Tensor:
        scores_AN = probability(step).masked_fill(~step.masked, MINUS_INFINITY)
        best_AN = top_scores(scores_AN, step.num_transfer_tokens)
        if self._threshold is None:
            return best_AN
        sure_AN = (scores_AN > self._threshold) & step.masked
        enough_A = sure_AN.sum(dim=1) >= to_device(step.num_transfer_tokens, sure_AN.device)
        return torch.where(enough_A[:, None], sure_AN, best_AN)


class LeftToRightRule(OneOrMoreRule):
    """Settles one token a step, from left to right, as an autoregressive model writes."""

    def select(self, step: Step) -> torch.Tensor:
        return step.masked & (step.masked.long().cumsum(dim=1) == 1)


def truncate_schedule(schedule: list[int], masks: int) -> list[int]:
    """The schedule's first steps, as far as they have masks to settle."""
    num_transfer_tokens = []
    for quota in schedule:
        if masks:
            num_transfer_tokens.append(min(quota, masks))
            masks -= num_transfer_tokens[-1]
    return num_transfer_tokens


def one_each_then_rest(steps: int, masks: int) -> list[int]:
    """At least one position in each of so many steps, in the last all that are left."""
    return [1] * masks if masks <= steps else [1] * (steps - 1) + [masks - steps + 1]


def all_in_last_step(step: Step, steps: int) -> torch.Tensor:
    return step.masked if step.index == steps - 1 else torch.zeros_like(step.masked)
