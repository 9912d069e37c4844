"""Losses as functions of log-probabilities: the clipped policy gradient (GRPO, TraceRL), with a value model's
advantages and loss, and preference optimisation (VRPO)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812

from dlm_bridge.objectives.batches import NoisyBatch
from dlm_bridge.objectives.noise import Purpose, Uniforms
from dlm_bridge.train.rl.likelihood import bound_query, bound_sums
from dlm_bridge.train.rl.rows import PreferencePair


@dataclass(frozen=True)
class UpdateMetrics:
    """Metrics of an update. `loss` and `sums` cover this replica's part; the trainer adds up all replicas."""

    loss: float
    grad_norm: float
    sums: dict[str, float]


def token_weights(scored: torch.Tensor, normalisation: str, steps: torch.Tensor | None = None) -> torch.Tensor:
    """Weight of each token in the policy loss, [B, L] fp32: 1 over the number of scored tokens of its row ("rows") or
    of its aggregated step ("steps"; `steps` [B, L], -1 where nothing is scored), or 1 ("tokens")."""
    ones = scored.float()
    if normalisation == "rows":
        return ones / scored.sum(dim=1, keepdim=True).clamp(min=1)
    if normalisation == "steps":
        assert steps is not None
        places = steps.clamp(min=0)
        return ones / torch.zeros_like(ones).scatter_add(1, places, ones).gather(1, places).clamp(min=1)
    return ones


def policy_loss(
    new: torch.Tensor,
    old: torch.Tensor,
    reference: torch.Tensor | None,
    advantages: torch.Tensor,
    weights: torch.Tensor,
    clip_range: float,
    beta: float,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """GRPO's loss (arXiv 2402.03300, equation 3) and TraceRL's (arXiv 2509.06949), a weighted sum over tokens of
    -min(r A, clip(r, 1 - eps, 1 + eps) A) + beta (exp(q) - q - 1), r = exp(new - old), q = reference - new.

    The caller divides by the number of rows, tokens or steps.

    Args:
        new, old, reference: [B, L] log-probabilities under the current model, the sampling model, and the reference.
        advantages: [B, L], or [B, 1] if all tokens of a row have the same.
        weights: [B, L] of `token_weights`, zero where nothing is scored.

    Returns:
        A scalar, and detached sums: `clipped`, the tokens whose gain is clipped, and `kl`, weighted.
    """
    ratio = (new - old).exp()
    free = ratio * advantages
    gain = torch.minimum(free, ratio.clamp(1 - clip_range, 1 + clip_range) * advantages)
    loss_BL = -gain
    kl = torch.zeros((), device=new.device)
    if reference is not None:
        away = reference - new
        kl_BL = away.exp() - away - 1
        loss_BL = loss_BL + beta * kl_BL
        kl = (kl_BL * weights).sum().detach()
    clipped = ((gain < free) & (weights > 0)).sum()
    return (loss_BL * weights).sum(), {"clipped": clipped.detach(), "kl": kl}


def trajectory_advantages(
    rewards: torch.Tensor, values: torch.Tensor, steps: torch.Tensor, discount: float, gae_lambda: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns and generalised advantages (GAE, arXiv 1506.02438) of tokens, by the steps that committed them.

    The value of a step is the mean over its tokens. Tokens of the last step have the reward r, all others 0. With step
    t of token j, R_j = r_j + discount R_{t+1} and A_j = r_j - V_j + discount V_{t+1} + discount lambda A_{t+1}.

    Args:
        rewards: [B] of the completions.
        values: [B, L] of the tokens.
        steps: [B, L] int64, each token's step, -1 where nothing is scored.

    Returns:
        [B, L] returns and [B, L] advantages, zero where nothing is scored.
    """
    scored, places = steps >= 0, steps.clamp(min=0)
    count = int(steps.max()) + 2  # a column of zeros behind the last step
    empty = torch.zeros(len(steps), count)
    last = steps.amax(dim=1, keepdim=True)
    rewards_BL = torch.where(scored & (steps == last), rewards[:, None], 0.0)
    sizes = empty.scatter_add(1, places, scored.float()).clamp(min=1)
    step_rewards, step_values = (
        empty.scatter_add(1, places, torch.where(scored, each, 0.0)) / sizes for each in (rewards_BL, values)
    )
    returns, advantages = empty.clone(), empty.clone()
    for step in reversed(range(count - 1)):
        delta = step_rewards[:, step] - step_values[:, step] + discount * step_values[:, step + 1]
        returns[:, step] = step_rewards[:, step] + discount * returns[:, step + 1]
        advantages[:, step] = delta + discount * gae_lambda * advantages[:, step + 1]
    return_next, value_next, advantage_next = (
        each.gather(1, places + 1) for each in (returns, step_values, advantages)
    )
    token_returns = rewards_BL + discount * return_next
    token_advantages = rewards_BL - values + discount * value_next + discount * gae_lambda * advantage_next
    return torch.where(scored, token_returns, 0.0), torch.where(scored, token_advantages, 0.0)


def value_loss(
    new: torch.Tensor, old: torch.Tensor, returns: torch.Tensor, weights: torch.Tensor, clip_range: float
) -> torch.Tensor:
    """The weighted sum over tokens of max((V - R)^2, (clip(V, V_old - eps, V_old + eps) - R)^2) / 2, all [B, L]."""
    clipped = old + (new - old).clamp(-clip_range, clip_range)
    return (0.5 * torch.maximum((new - returns) ** 2, (clipped - returns) ** 2) * weights).sum()


@dataclass(frozen=True)
class PairedSequences:
    """2 N rows: the chosen answers with their prompts, then the rejected ones."""

    tokens: torch.Tensor  # [2 N, L] int64
    answer: torch.Tensor  # [2 N, L] bool
    real: torch.Tensor  # [2 N, L] bool, false at padding


def preference_loss(margins: torch.Tensor, beta: float) -> torch.Tensor:
    """[N] DPO's loss (arXiv 2305.18290) of (policy - reference) of the chosen answer less that of the rejected."""
    return -F.logsigmoid(beta * margins)


def longest(pairs: Sequence[PreferencePair]) -> int:
    """The tokens of the longest answer with its prompt."""
    return max(len(example.input_ids) for pair in pairs for example in (pair.chosen, pair.rejected))


def pair_rows(pairs: Sequence[PreferencePair], width: int) -> PairedSequences:
    """The rows of N pairs, padded on the right to `width` tokens."""
    examples = [pair.chosen for pair in pairs] + [pair.rejected for pair in pairs]
    tokens = torch.zeros(len(examples), width, dtype=torch.long)
    answer, real = torch.zeros_like(tokens, dtype=torch.bool), torch.zeros_like(tokens, dtype=torch.bool)
    for row, example in enumerate(examples):
        count = len(example.input_ids)
        tokens[row, :count] = torch.tensor(example.input_ids)
        answer[row, :count] = torch.tensor(example.answer)
        real[row, :count] = True
    return PairedSequences(tokens, answer, real)


def bound_uniforms(
    seed: int,
    step: int,
    samples: Sequence[int],
    length: int,
    levels: int,
    masks: int,
) -> Uniforms:
    """Uniforms of `levels` x `masks` samples of the bounds of N pairs, keyed by (seed, step, pair). Masks of a level
    have the same noise level. [K x 2 N] rows, in the order (level, mask, chosen or rejected, pair)."""
    count = levels * masks
    keyed = [
        Uniforms.keyed(
            seed, step, [((sample * 2 + side) * count + k) for sample in samples], length, Purpose.TRAIN_NOISE
        )
        for k in range(count)
        for side in (0, 1)
    ]
    uniforms = Uniforms(*(torch.cat([getattr(one, name) for one in keyed]) for name in Uniforms.__dataclass_fields__))
    shape = (levels, masks, 2 * len(samples))
    level = uniforms.level.reshape(shape)[:, :1].expand(shape).reshape(-1)
    blocks = uniforms.block.reshape(*shape, length)[:, :1].expand(*shape, length).reshape(-1, length)
    return Uniforms(level=level, token=uniforms.token, cut=uniforms.cut, cut_length=uniforms.cut_length, block=blocks)


@dataclass(frozen=True)
class BoundDraws:
    """VRPO's likelihoods (LLaDA 1.5, arXiv 2505.19223): Monte-Carlo bounds over `levels` x `masks` draws, the same for
    policy and reference, so that most of their error cancels in the difference."""

    levels: int
    masks: int
    seed: int

    def query(
        self, model: Any, pairs: Sequence[PreferencePair], samples: Sequence[int], step: int, width: int
    ) -> NoisyBatch:
        """Input of the model for all draws of N pairs in rows of `width` tokens; (step, sample) keys their noise."""
        answers = pair_rows(pairs, width)
        count = self.levels * self.masks
        uniforms = bound_uniforms(self.seed, step, samples, width, self.levels, self.masks)
        repeated = [value.repeat(count, 1) for value in (answers.tokens, answers.answer, answers.real)]
        return bound_query(model, repeated[0], repeated[1], repeated[2], uniforms)

    def margins(self, noisy: NoisyBatch, logps_M: torch.Tensor, reference_M: torch.Tensor) -> torch.Tensor:
        """[N] (policy - reference) of the chosen answers less that of the rejected, in nats."""
        gains = bound_sums(noisy, logps_M) - bound_sums(noisy, reference_M)
        chosen, rejected = gains.reshape(self.levels * self.masks, 2, -1).mean(dim=0)
        return chosen - rejected
