"""Model updates: the clipped policy gradient (GRPO) and preference optimisation (VRPO), under Accelerate."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F  # noqa: N812

from dlm_bridge.errors import DlmBridgeError
from dlm_bridge.objectives.batches import NoisyBatch
from dlm_bridge.objectives.noise import Purpose, Uniforms
from dlm_bridge.train.rl.likelihood import (
    LikelihoodQuery,
    Sequences,
    bound_query,
    bound_sums,
    token_logps,
)
from dlm_bridge.train.rl.rollout import Rollout
from dlm_bridge.train.rl.rows import PreferencePair


@dataclass(frozen=True)
class UpdateMetrics:
    """What an update measured. Sums are over this process's part; the engine adds those of all."""

    loss: float
    grad_norm: float
    sums: dict[str, float]


class Updater(Protocol):
    """What follows a rollout: all that an engine has to offer to train on one."""

    def update(self, rollout: Rollout, step: int) -> UpdateMetrics:
        """Change the model. Every process calls it with its own part of the same step."""
        ...


QueryFactory = Callable[
    [Sequences, int, list[int]], LikelihoodQuery
]  # (sequences, draw, global sample indices) -> what is read


def policy_loss(
    new: torch.Tensor,
    old: torch.Tensor,
    reference: torch.Tensor | None,
    advantages: torch.Tensor,
    scored: torch.Tensor,
    clip_range: float,
    beta: float,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """GRPO's loss (arXiv 2402.03300, equation 3), summed over the rows: each row's mean over its scored tokens of
    -min(r A, clip(r, 1 - eps, 1 + eps) A) + beta (exp(q) - q - 1), r = exp(new - old), q = reference - new.

    Args:
        new, old, reference: [B, L] log-probabilities of the model as it is, as it sampled, and as it began.
        advantages: [B].
        scored: [B, L] bool.

    Returns:
        A scalar, and detached sums over the scored tokens: `clipped` (how many the clip keeps from gaining) and `kl`
        (of the rows' means).
    """
    tokens_B = scored.sum(dim=1).clamp(min=1)
    ratio = (new - old).exp()
    free = ratio * advantages[:, None]
    gain = torch.minimum(free, ratio.clamp(1 - clip_range, 1 + clip_range) * advantages[:, None])
    loss_BL = -gain
    kl = torch.zeros((), device=new.device)
    if reference is not None:
        away = reference - new
        kl_BL = away.exp() - away - 1
        loss_BL = loss_BL + beta * kl_BL
        kl = ((kl_BL * scored).sum(dim=1) / tokens_B).sum().detach()
    clipped = ((gain < free) & scored).sum()
    return ((loss_BL * scored).sum(dim=1) / tokens_B).sum(), {"clipped": clipped.detach(), "kl": kl}


@dataclass
class PolicyUpdater:
    """Optimizer steps with the completions of one rollout.

    Each step draws the likelihoods' noise anew, the same for the model as it is, as it sampled and as it began.
    """

    accelerator: Any
    model: Any  # as Accelerate wraps it
    optimizer: torch.optim.Optimizer
    ask: QueryFactory
    reference: Callable[[LikelihoodQuery], torch.Tensor] | None
    updates: int
    micro_batch_size: int
    total: int  # completions of a step, over all processes
    clip_range: float
    beta: float
    clip_grad: float

    def update(self, rollout: Rollout, step: int) -> UpdateMetrics:
        """As `Updater.update`. Raises DlmBridgeError where the loss or the gradient is no number."""
        device = self.accelerator.device
        parts = [
            slice(start, start + self.micro_batch_size) for start in range(0, len(rollout), self.micro_batch_size)
        ]
        draws = [(step - 1) * self.updates + number + 1 for number in range(self.updates)]
        asked = [[self._asked(rollout, part, draw, device) for part in parts] for draw in draws]
        # All of it before the first optimizer step; with a single one the model still is as it sampled.
        before = None if self.updates == 1 else [[self._frozen(query) for query in row] for row in asked]
        sums = {"clipped": 0.0, "kl": 0.0}
        loss = norm = 0.0
        for number, queries in enumerate(asked):
            loss_sum = torch.zeros((), device=device)
            for place, (part, query) in enumerate(zip(parts, queries, strict=True)):
                last = place + 1 == len(parts)
                reference = None if self.reference is None else self.reference(query)
                with contextlib.nullcontext() if last else self.accelerator.no_sync(self.model):
                    new = token_logps(self.model, query)
                    value, measured = policy_loss(
                        new,
                        new.detach() if before is None else before[number][place],
                        reference,
                        rollout.advantages[part].to(device),
                        rollout.sequences.scored[part].to(device),
                        self.clip_range,
                        self.beta,
                    )
                    # Data parallelism averages over processes; the mean over all completions wants the sum.
                    self.accelerator.backward(value * (self.accelerator.num_processes / self.total))
                loss_sum += value.detach()
                sums = {name: total + float(measured[name]) for name, total in sums.items()}
            loss += float(self.accelerator.reduce(loss_sum, reduction="sum")) / self.total / self.updates
            norm = max(norm, self._step(step))
        return UpdateMetrics(loss, norm, {name: total / self.updates for name, total in sums.items()})

    def _step(self, step: int) -> float:
        return optimizer_step(self.accelerator, self.model, self.optimizer, self.clip_grad, step)

    def _asked(self, rollout: Rollout, part: slice, draw: int, device: torch.device) -> LikelihoodQuery:
        return self.ask(rollout.sequences.rows(part), draw, rollout.samples[part]).to(device)

    @torch.no_grad()
    def _frozen(self, query: LikelihoodQuery) -> torch.Tensor:
        return token_logps(self.model, query)


def optimizer_step(accelerator: Any, model: Any, optimizer: Any, clip_grad: float, step: int) -> float:
    """Clip, step and forget the gradients; the norm before clipping. Raises DlmBridgeError where it is no number."""
    norm = float(accelerator.clip_grad_norm_(model.parameters(), clip_grad or math.inf))
    if not math.isfinite(norm) and accelerator.scaler is None:
        raise DlmBridgeError(f"step {step}: the gradient norm is {norm}: lower --lr")
    optimizer.step()
    optimizer.zero_grad()
    return norm


@dataclass(frozen=True)
class PairRows:
    """2 N rows: the chosen answers with their prompts, then the rejected ones."""

    tokens: torch.Tensor  # [2 N, L] int64
    answer: torch.Tensor  # [2 N, L] bool
    real: torch.Tensor  # [2 N, L] bool, false at padding


def preference_loss(margins: torch.Tensor, beta: float) -> torch.Tensor:
    """[N] DPO's loss (arXiv 2305.18290) of (policy - reference) of the chosen answer less that of the rejected."""
    return -F.logsigmoid(beta * margins)


def pair_rows(pairs: Sequence[PreferencePair]) -> PairRows:
    """The rows of N pairs, padded on the right."""
    examples = [pair.chosen for pair in pairs] + [pair.rejected for pair in pairs]
    width = max(len(example.input_ids) for example in examples)
    tokens = torch.zeros(len(examples), width, dtype=torch.long)
    answer, real = torch.zeros_like(tokens, dtype=torch.bool), torch.zeros_like(tokens, dtype=torch.bool)
    for row, example in enumerate(examples):
        count = len(example.input_ids)
        tokens[row, :count] = torch.tensor(example.input_ids)
        answer[row, :count] = torch.tensor(example.answer)
        real[row, :count] = True
    return PairRows(tokens, answer, real)


def bound_uniforms(
    seed: int,
    step: int,
    samples: Sequence[int],
    length: int,
    levels: int,
    masks: int,
    purpose: Purpose = Purpose.TRAIN_NOISE,
) -> Uniforms:
    """The noise of `levels` x `masks` samples of the bounds of N pairs, keyed by (seed, step, pair): the masks of a
    level share it. [K x 2 N] rows, in the order (level, mask, chosen or rejected, pair)."""
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


@dataclass
class PreferenceUpdater:
    """VRPO (LLaDA 1.5, arXiv 2505.19223): DPO in which log-likelihoods are Monte-Carlo bounds over `levels` x `masks`
    draws, the same draws for policy and reference, whose errors then largely cancel in the difference."""

    accelerator: Any
    model: Any  # as Accelerate wraps it
    plain_model: Any
    reference: Any  # noisy batch -> [rows] bounds
    optimizer: torch.optim.Optimizer
    seed: int
    micro_batch_size: int  # pairs
    total: int  # pairs of a step, over all processes
    levels: int
    masks: int
    beta: float
    clip_grad: float

    def update(self, pairs: Sequence[PreferencePair], samples: Sequence[int], step: int) -> UpdateMetrics:
        """One optimizer step with this process's pairs, whose global sample indices key the noise. Raises
        DlmBridgeError where the gradient is no number."""
        sums = {"preferred": 0.0, "margin": 0.0}
        loss_sum = torch.zeros((), device=self.accelerator.device)
        starts = range(0, len(pairs), self.micro_batch_size)
        for start in starts:
            part = slice(start, start + self.micro_batch_size)
            last = start == starts[-1]
            with contextlib.nullcontext() if last else self.accelerator.no_sync(self.model):
                margins = self.margins(pairs[part], samples[part], step, self.model)
                loss = preference_loss(margins, self.beta).sum()
                self.accelerator.backward(loss * (self.accelerator.num_processes / self.total))
            loss_sum += loss.detach()
            sums["preferred"] += float((margins > 0).sum())
            sums["margin"] += float(self.beta * margins.detach().sum())
        loss_value = float(self.accelerator.reduce(loss_sum, reduction="sum")) / self.total
        norm = optimizer_step(self.accelerator, self.model, self.optimizer, self.clip_grad, step)
        return UpdateMetrics(loss_value, norm, sums)

    def margins(
        self,
        pairs: Sequence[PreferencePair],
        samples: Sequence[int],
        step: int,
        model: Any,
        purpose: Purpose = Purpose.TRAIN_NOISE,
    ) -> torch.Tensor:
        """[N] (policy - reference) of the chosen answers less that of the rejected, in nats."""
        answers = pair_rows(pairs)
        count = self.levels * self.masks
        uniforms = bound_uniforms(self.seed, step, samples, answers.tokens.shape[1], self.levels, self.masks, purpose)
        noisy: NoisyBatch = bound_query(
            self.plain_model,
            answers.tokens.repeat(count, 1),
            answers.answer.repeat(count, 1),
            answers.real.repeat(count, 1),
            uniforms,
        ).to(self.accelerator.device)
        gains = bound_sums(model, noisy) - self.reference(noisy)
        chosen, rejected = gains.reshape(count, 2, len(pairs)).mean(dim=0)
        return chosen - rejected
