"""Commit rules: which proposed tokens a denoising step commits."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Literal

import torch

from dlm_bridge.errors import SettingError, counted
from dlm_bridge.generation.callbacks import StepObserver
from dlm_bridge.generation.canvas import Canvas, Columns, RowMemory, to_device
from dlm_bridge.generation.constraints import Constraints, TextDecoder
from dlm_bridge.generation.predictors import Predictor
from dlm_bridge.generation.request import MASK
from dlm_bridge.generation.token_sampling import Noise, TokenSampling, probability_of, propose_tokens

MINUS_INFINITY = -torch.inf
# (logits [A, N, V], canvas, rows, columns) -> logits; `rows` None: all rows
LogitsBias = Callable[[torch.Tensor, Canvas, list[int] | None, Columns], torch.Tensor]


@dataclass
class SamplerContext:
    """Parts and counts of a run of the sampler.

    Args:
        first_token: commit a block's first token alone, predicted by the position before it: the best token ("greedy")
            or a draw ("sampled").
        window: number of columns, from a row's first mask on, that each step predicts instead of the whole block.
        logits_bias: the sampler's change of the logits.
        planner: returns the rule that plans the steps of the named row; None: the run's rule.
        text: keeps the text constraints of rows; None: no row has had one.
        row_forwards: number of rows, summed over the forward passes.
    """

    canvas: Canvas
    predictor: Predictor
    sampling: TokenSampling
    constraints: Constraints | None
    noise: Noise
    observers: Sequence[StepObserver]
    vocabulary_size: int
    first_token: Literal["greedy", "sampled"] | None = None
    window: int | None = None
    logits_bias: LogitsBias | None = None
    planner: Callable[[Any], DenoisingRule] | None = None
    text: TextDecoder | None = None
    row_forwards: int = field(init=False, default=0)
    # [A, N, V], the last logits without bias and constraints, kept for observers with `unconstrained`.
    unconstrained: torch.Tensor | None = field(init=False, default=None)

    def predict(self, rows: list[int], columns: Columns, shift: bool | None = None) -> torch.Tensor:
        """Logits [A, N, V] of these columns, with the sampler's bias and the call's constraints."""
        selected = self.selected(rows)
        logits = unconstrained = self.predictor(selected, columns, shift)
        if self.logits_bias is not None:
            logits = self.logits_bias(logits, self.canvas, selected, columns)
        logits = self.constrain(logits, rows, columns)
        self.keep_unconstrained(unconstrained)
        return logits

    def keep_unconstrained(self, logits: torch.Tensor) -> None:
        """Keep these logits until the next `report`, if an observer asks for them."""
        if any(getattr(observer, "unconstrained", False) for observer in self.observers):
            self.unconstrained = logits

    def constrain(self, logits: torch.Tensor, rows: list[int], columns: Columns) -> torch.Tensor:
        """Apply the call's constraints to logits [A, N, V], and flag rows with NaN on the canvas. All tokens are
        proposed from the result."""
        self.keep_unconstrained(logits)
        if self.constraints is not None:
            logits = self.constraints(logits, self.canvas, rows, columns)
        self.canvas.flag_non_finite(self.selected(rows), columns, logits)
        return logits

    def read(self, flags: torch.Tensor) -> list[Any]:
        """Copy the result of a step to the host. On a GPU, the next forward pass may be launched before waiting."""
        return self.canvas.read(flags, self.predictor.launch_speculatively)

    def selected(self, rows: list[int]) -> list[int] | None:
        """See `Canvas.selected`."""
        return self.canvas.selected(rows)

    def propose(self, rows: list[int], columns: Columns, logits: torch.Tensor, num_transfer_tokens: list[int]) -> Step:
        """Propose tokens for these columns from their logits [A, N, V], see `predict`."""
        canvas, selected = self.canvas, self.selected(rows)
        logits, shaped, tokens = self.propose_tokens(rows, columns, logits)
        before, new = canvas.take(selected, columns), canvas.behind_prompt(selected, columns)
        return Step(
            rows=rows,
            index=canvas.steps(rows),
            num_transfer_tokens=num_transfer_tokens,
            logits=logits,
            shaped=shaped,
            tokens=tokens,
            before=before,
            masked=(before == MASK) & new,
            new=new,
            columns=columns,
            places=canvas.places(selected, columns),
            noise=self.noise,
            excluded_token_id=canvas.excluded_token_id,
        )

    def propose_tokens(
        self, rows: list[int], columns: Columns, logits: torch.Tensor, sampling: TokenSampling | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Logits [A, N, V] of these columns under the rows' text constraints, the distribution that tokens are drawn
        from, and proposed tokens [A, N]."""
        sampling = self.sampling if sampling is None else sampling
        shaped, tokens = propose_tokens(logits, self.canvas, rows, columns, sampling, self.noise)
        if self.text is None:
            return logits, shaped, tokens
        return self.text.propose(rows, columns, logits, shaped, tokens, sampling)

    def follow(
        self, rows: list[int], lasts: list[int], drafts_AM: torch.Tensor, logits_ANV: torch.Tensor
    ) -> torch.Tensor:
        """Logits of the N columns after each row's last committed token, at `lasts`, under the rows' text constraints
        if the draft's tokens are in the first M columns."""
        if self.text is None:
            return logits_ANV
        return self.text.follow(rows, [last + 1 for last in lasts], drafts_AM, logits_ANV)

    def report(
        self,
        rows: list[int],
        columns: Columns,
        logits_ANV: torch.Tensor,
        *,
        final: bool,
        moved: torch.Tensor | None = None,
    ) -> None:
        """Count a forward pass that predicted these columns, and call the observers, after the commit. `final`:
        committed tokens do not change any more. `moved`: see `Canvas`."""
        self.canvas.moved = moved
        self.row_forwards += len(rows)
        own, self.unconstrained = self.unconstrained, None
        for observer in self.observers:
            seen = own if own is not None and getattr(observer, "unconstrained", False) else logits_ANV
            observer.step(self.canvas, rows, columns, seen, self.predictor.forwards, final=final)


class DenoisingRule(ABC):
    """Denoises blocks. Rows begin and complete their blocks at different steps, so a rule stores its state of a row
    within its block in `canvas.memory`."""

    edits = False  # True: committed tokens may still change until their block is complete
    needs_prompt: ClassVar[bool] = False  # True: a prompt needs at least one token
    keeps_text: ClassVar[bool] = False  # True: supports text constraints (`SamplerContext.text`)

    def constrained(self, constraints: Constraints) -> DenoisingRule:
        """Return the rule for these constraints. Raises SettingError for unsupported ones."""
        return self

    @abstractmethod
    def begin_block(self, context: SamplerContext, block: slice, rows: list[int]) -> list[int]:
        """Begin the block in these rows. Returns those that need steps."""

    @abstractmethod
    def denoise_step(self, context: SamplerContext, block: slice, rows: list[int]) -> list[int]:
        """Take a step in these rows: predict, propose, and write to the canvas. Returns those that need another
        one."""


@dataclass(frozen=True)
class Step:
    """Proposals of one forward pass for N columns of the A rows that denoise the block."""

    rows: list[int]  # [A], rows of the canvas
    index: list[int]  # [A], number of earlier steps in each row's block
    num_transfer_tokens: list[int]  # [A], this step's entry in the schedule of `CommitRule.begin`
    logits: torch.Tensor  # [A, N, V], after guidance and constraints
    shaped: torch.Tensor  # [A, N, V], after temperature, top-k and top-p
    tokens: torch.Tensor  # [A, N], proposed tokens
    before: torch.Tensor  # [A, N], current tokens, `MASK` at masks
    masked: torch.Tensor  # [A, N], True at masks
    new: torch.Tensor  # [A, N], True after the prompt
    columns: slice | torch.Tensor  # N columns of the canvas
    places: torch.Tensor  # [A, N], columns counted from each row's first token
    noise: Noise
    excluded_token_id: int  # token that is never proposed; -1: none

    def uniform(self) -> torch.Tensor:
        """float64 [A, N], new random numbers on (0, 1) at every call, from each row's own seed."""
        return self.noise.uniform(self.rows, self.places)

    def probabilities(self) -> torch.Tensor:
        """[A, N], probability of each proposal in the distribution that it was drawn from."""
        return probability_of(self.tokens, self.shaped)

    def raw_probabilities(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """[A, N], probability of each proposal by the model's own logits, computed in `dtype` (default: theirs)."""
        return probability_of(self.tokens, self.logits, dtype)


class CommitRule(DenoisingRule):
    """Selects the positions to commit in each step. An object serves one call of `generate` at a time.

    In a continuous batch, rows begin their blocks at different steps, and their indices change when others leave.
    State of a row between two steps therefore belongs in `memory` (a `RowMemory`), which follows the rows.

    Pass a custom rule as `generate(..., commit_rule=EveryOther())`:

        class EveryOther(CommitRule):
            def begin(self, masks, noise):
                return [[1] * count for count in masks]  # a step commits at least one position

            def select(self, step):
                even = torch.arange(step.masked.shape[1], device=step.masked.device) % 2 == 0
                scores = step.probabilities() * (1 + even)  # even positions first
                return best(scores.masked_fill(~step.masked, -torch.inf))
    """

    keeps_text = True
    moved: torch.Tensor | None = None  # of the last `write`, see `Canvas`
    exact = False  # True: `select` commits exactly `num_transfer_tokens`, so the host need not read the progress
    # Attributes that only `begin` reads. Rows whose rules differ only in these share a continuous batch.
    planning: ClassVar[tuple[str, ...]] = ()
    memory: RowMemory  # set before `begin`

    @abstractmethod
    def begin(self, masks: list[int], noise: Noise) -> list[list[int]]:
        """Plan the steps of a block.

        Args:
            masks: number of masks per row; 0 for rows that do not begin the block now.
            noise: random numbers of the rows.

        Returns:
            For each row, the minimum number of tokens that each step commits. A row may take fewer steps than planned
            unless the rule is exact.
        """

    @abstractmethod
    def select(self, step: Step) -> torch.Tensor:
        """bool [A, N], True at the positions to commit."""

    def write(self, step: Step) -> torch.Tensor:
        """[A, N], tokens of the columns after the step: the proposals at positions that `select` commits."""
        return torch.where(self.select(step), step.tokens, step.before)

    def continues(self, step: Step, unfinished_A: torch.Tensor) -> torch.Tensor:
        """[A], True if a row needs another step. `unfinished_A`: True if it has masks."""
        return unfinished_A

    def provisional(self, canvas: Canvas, rows: list[int] | None) -> torch.Tensor | None:
        """bool [A, S], True at tokens that may change, so that they do not end the text; None: nowhere."""
        return None

    def constrained(self, constraints: Constraints) -> DenoisingRule:
        return LeftToRightRule() if constraints.ordered else self

    def begin_block(self, context: SamplerContext, block: slice, rows: list[int]) -> list[int]:
        canvas = context.canvas
        masks = canvas.masks(block)
        for row in self._commit_first_token(context, block, rows):
            masks[row] -= 1
        planners: dict[CommitRule, list[int]] = {}
        for row in rows:
            if masks[row]:  # else the block is part of the prompt
                planner = self if context.planner is None else context.planner(canvas.names[row])
                assert isinstance(planner, CommitRule)
                planners.setdefault(planner, []).append(row)
        planned = canvas.memory.values("schedule")
        for planner, own in planners.items():
            planner.memory = canvas.memory
            chosen = {*own}
            schedules = planner.begin(
                [count if row in chosen else 0 for row, count in enumerate(masks)], context.noise
            )
            for row in own:
                planned[row] = schedules[row]
        self.memory = canvas.memory
        return [row for row in rows if planned[row]]

    def denoise_step(self, context: SamplerContext, block: slice, rows: list[int]) -> list[int]:
        """Predict, propose and commit. Each row takes its own number of steps, so its tokens do not depend on the
        batch."""
        canvas, predictor = context.canvas, context.predictor
        planned = canvas.memory.values("schedule")
        selected = context.selected(rows)
        columns = predictor.columns(selected, block)
        if context.window is not None:
            columns = _window_columns(canvas, selected, block, context.window)
        logits = context.predict(rows, columns)
        counts = [planned[row][done] for row, done in zip(rows, canvas.steps(rows), strict=True)]
        step = context.propose(rows, columns, logits, counts)
        tokens = self.write(step)
        if context.text is not None:
            alone = self.exact and max(step.num_transfer_tokens) <= 1  # a single feasible token needs no check
            least = None if alone else step.num_transfer_tokens
            tokens = context.text.commit(rows, columns, tokens, step.logits, least)
        canvas.put(selected, columns, tokens)
        context.report(rows, columns, logits, final=not self.edits, moved=self.moved)
        more = [done + 1 < len(planned[row]) for row, done in zip(rows, step.index, strict=True)]
        if not self.exact and any(more):
            unfinished = canvas.read_unfinished(
                selected, block, context.read, partial(self.continues, step), self.provisional(canvas, selected)
            )
            more = [a and b for a, b in zip(more, unfinished, strict=True)]
        return [row for row, on in zip(rows, more, strict=True) if on]

    def _commit_first_token(self, context: SamplerContext, block: slice, rows: list[int]) -> list[int]:
        """Commit the first token of the block as an autoregressive model does, in rows where it is new and has a token
        before it. Returns these rows."""
        if context.first_token is None:
            return []
        canvas = context.canvas
        active = [row for row in rows if canvas.opens(row, block.start)]
        if active:
            first = slice(block.start, block.start + 1)
            sampling = context.sampling if context.first_token == "sampled" else TokenSampling()
            logits = context.predict(active, first, shift=True)
            allowed, _, tokens = context.propose_tokens(active, first, logits, sampling)
            if context.text is not None:
                tokens = context.text.commit(active, first, tokens, allowed, None)
            canvas.put(context.selected(active), first, tokens)
            context.report(active, first, logits, final=not self.edits)
        return active


def _window_columns(canvas: Canvas, rows: list[int] | None, block: slice, size: int) -> torch.Tensor:
    """[A, size] columns from each row's first mask on. The canvas has `size` spare columns at its end."""
    first = block.start + canvas.masked(rows, block).int().argmax(dim=1)
    return first[:, None] + torch.arange(size, device=first.device)


class CheckedRule(CommitRule):
    """Wraps the caller's commit rule. Raises SettingError if a result breaks the contract of `CommitRule`."""

    def __init__(self, rule: Any) -> None:
        if not isinstance(rule, CommitRule):
            raise _refusal(f"must be an object of a subclass of CommitRule, not {rule!r}")
        self._rule = rule
        self._name = type(rule).__name__
        self._steps: list[int] = []
        self.exact = rule.exact
        self.edits = rule.edits

    def begin(self, masks: list[int], noise: Noise) -> list[list[int]]:
        self._rule.memory = self.memory
        schedules = self._rule.begin(masks, noise)
        if len(schedules) != len(masks):
            raise _refusal(f"{self._name}.begin returns steps for {counted(len(schedules), 'row')}, not {len(masks)}")
        for count, steps in zip(masks, schedules, strict=True):
            if count and not steps:
                raise _refusal(f"{self._name}.begin plans no step for a row of {counted(count, 'mask')}")
            if self.exact and sum(steps) != count:
                raise _refusal(
                    f"{self._name} is exact, but its steps commit {counted(sum(steps), 'token')} of a row of "
                    f"{counted(count, 'mask')}"
                )
        self._steps = [len(steps) for steps in schedules]
        return schedules

    def select(self, step: Step) -> torch.Tensor:
        picked_AN = self._rule.select(step)
        if picked_AN.dtype != torch.bool or picked_AN.shape != step.masked.shape:
            raise _refusal(
                f"{self._name}.select must return a boolean tensor of shape {tuple(step.masked.shape)}, not "
                f"{picked_AN.dtype} of {tuple(picked_AN.shape)}"
            )
        if not self.edits and (picked_AN & ~step.masked).any():
            raise _refusal(f"{self._name}.select picks a committed position: set its attribute edits to True")
        counts = picked_AN.sum(dim=1).tolist()
        if self.exact and counts != step.num_transfer_tokens:
            raise _refusal(
                f"{self._name} is exact, but step {step.index[0]} picks {counts}, not {step.num_transfer_tokens}"
            )
        last = [self._steps[row] == done + 1 for row, done in zip(step.rows, step.index, strict=True)]
        left = (step.masked & ~picked_AN).any(dim=1).tolist()
        if any(over and masked for over, masked in zip(last, left, strict=True)):
            raise _refusal(f"{self._name} leaves masks after its last step, {step.index[0]}: plan more in begin")
        return picked_AN

    def continues(self, step: Step, unfinished_A: torch.Tensor) -> torch.Tensor:
        more_A = self._rule.continues(step, unfinished_A)
        if (unfinished_A & ~more_A).any():
            raise _refusal(f"{self._name}.continues ends a row that has masks")
        return more_A


def _refusal(reason: str) -> SettingError:
    return SettingError("commit_rule", reason)


# ---- Scores [A, N], by which rules rank positions: the highest is committed first.

Score = Callable[[Step], torch.Tensor]


def low_confidence(step: Step) -> torch.Tensor:
    """LLaDA's confidence (arXiv 2502.09992, algorithm 5): the token's probability by the model's own logits.

    Computed in the model's dtype, as published; in half precision, rounding decides between near ties.
    """
    return step.raw_probabilities()


def precise_confidence(step: Step) -> torch.Tensor:
    """Fast-dLLM's confidence: LLaDA's in float64."""
    return step.raw_probabilities(torch.float64)


def random_order(step: Step) -> torch.Tensor:
    """Uniform random scores for LLaDA's random remasking (algorithm 4)."""
    return step.uniform()


def probability(step: Step) -> torch.Tensor:
    """Probability of the token in the distribution that it was drawn from (SDAR, LLaDA2, Dream's maskgit_plus)."""
    return step.probabilities()


def entropy(logits: torch.Tensor) -> torch.Tensor:
    """[A, N], entropy of softmax(logits) in nats."""
    logarithms = logits.log_softmax(dim=-1)
    probabilities = logarithms.exp()
    return -(probabilities * logarithms.masked_fill(probabilities == 0, 0)).sum(dim=-1)


# ---- Selections [A, N] by score.


def best(scores_AN: torch.Tensor) -> torch.Tensor:
    """[A, N], True at each row's highest score, the leftmost of equal ones."""
    return torch.zeros_like(scores_AN, dtype=torch.bool).scatter(1, scores_AN.argmax(dim=1, keepdim=True), True)


def top_scores(scores_AN: torch.Tensor, counts: list[int] | torch.Tensor) -> torch.Tensor:
    """[A, N], True at each row's `counts` highest scores, never at minus infinity. Of equal scores, the leftmost ranks
    higher, so the result does not depend on padding or the width of the batch."""
    order_AN = scores_AN.sort(dim=1, descending=True, stable=True).indices
    ranks_N = torch.arange(scores_AN.shape[1], device=scores_AN.device)
    counts_A = counts if isinstance(counts, torch.Tensor) else to_device(counts, scores_AN.device)
    picked_AN = torch.zeros_like(scores_AN, dtype=torch.bool).scatter(1, order_AN, ranks_N < counts_A[:, None])
    return picked_AN & (scores_AN != MINUS_INFINITY)


# ---- Schedules: tokens per step, without steps that commit nothing.


def even_schedule(masks: int, steps: int) -> list[int]:
    """masks / steps in every step; the first steps commit one more for the remainder."""
    share, remainder = divmod(masks, steps)
    return [share + (step < remainder) for step in range(steps) if share or step < remainder]


def truncate_schedule(schedule: list[int], masks: int) -> list[int]:
    """Cut the schedule to the number of masks."""
    truncated = []
    for count in schedule:
        if masks:
            truncated.append(min(count, masks))
            masks -= truncated[-1]
    return truncated


def one_each_then_rest(steps: int, masks: int) -> list[int]:
    """One position per step; the last step commits the rest."""
    return [1] * masks if masks <= steps else [1] * (steps - 1) + [masks - steps + 1]


def all_in_last_step(step: Step, steps: int) -> torch.Tensor:
    """[A, N], True at the masks of rows in the last of `steps` steps."""
    return step.masked & (to_device(step.index, step.masked.device) == steps - 1)[:, None]


# ---- Rules that several samplers use.


class TopScoresRule(CommitRule):
    """Commits the highest scores, with the number of tokens per step from a schedule (LLaDA, Dream, RND1).

    With a `rank_temperature`, positions are instead drawn from softmax(score / rank_temperature) without replacement
    (Dream's alg_temp).
    """

    exact = True
    planning: ClassVar[tuple[str, ...]] = ("_schedule",)

    def __init__(
        self,
        score: Score,
        schedule: Callable[[int], list[int]],
        rank_temperature: float | None = None,
    ) -> None:
        self._score = score
        self._schedule = schedule
        self._rank_temperature = rank_temperature

    def begin(self, masks: list[int], noise: Noise) -> list[list[int]]:
        schedules = {count: self._schedule(count) for count in set(masks)}
        return [schedules[count] for count in masks]

    def select(self, step: Step) -> torch.Tensor:
        scores_AN = self._score(step)
        if self._rank_temperature:
            # The highest values of score / T + Gumbel noise are draws without replacement.
            scores_AN = scores_AN / self._rank_temperature - step.uniform().log().neg().log()
        scores_AN = scores_AN.masked_fill(~step.masked, MINUS_INFINITY)
        return top_scores(scores_AN, step.num_transfer_tokens)


class OneOrMoreRule(CommitRule):
    """Base class of rules that commit at least one position per step, until the block has no masks."""

    def begin(self, masks: list[int], noise: Noise) -> list[list[int]]:
        return [[1] * count for count in masks]


class LeftToRightRule(OneOrMoreRule):
    """Commits one token per step, from left to right, as an autoregressive model does."""

    def select(self, step: Step) -> torch.Tensor:
        return step.masked & (step.masked.long().cumsum(dim=1) == 1)


class ThresholdRule(OneOrMoreRule):
    """Commits the best position and all others with confidence >= threshold (Fast-dLLM v1, Nemotron).

    Of equal scores, the leftmost is best. torch.topk's choice depends on the number of columns, which differs between
    a row alone and in a wider batch.
    """

    def __init__(self, threshold: float, score: Score = precise_confidence) -> None:
        self._threshold = threshold
        self._score = score

    def select(self, step: Step) -> torch.Tensor:
        scores_AN = self._score(step).masked_fill(~step.masked, MINUS_INFINITY)
        confident_AN = (scores_AN >= self._threshold) & step.masked
        return confident_AN | (best(scores_AN) & step.masked)


class DynamicThresholdRule(CommitRule):
    """Commits all positions with probability > threshold, or the scheduled number of best ones if these are more.

    Rule of SDAR's low_confidence_dynamic and of LLaDA2.0. The schedule is for a block of masks, and commits all of
    them. Without a threshold, only the schedule decides (SDAR's low_confidence_static).
    """

    planning: ClassVar[tuple[str, ...]] = ("_schedule",)

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
        confident_AN = (scores_AN > self._threshold) & step.masked
        enough_A = confident_AN.sum(dim=1) >= to_device(step.num_transfer_tokens, confident_AN.device)
        return torch.where(enough_A[:, None], confident_AN, best_AN)
