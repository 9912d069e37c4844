"""Losses and updates: the clipped policy gradient (GRPO), and preference optimisation (VRPO) under Accelerate."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch.distributed.fsdp import FSDPModule

from dlm_bridge.errors import DlmBridgeError
from dlm_bridge.objectives.batches import NoisyBatch
from dlm_bridge.objectives.noise import Purpose, Uniforms
from dlm_bridge.train.accelerate.fsdp import clip_grad_norm
from dlm_bridge.train.rl.likelihood import bound_query, bound_sums
from dlm_bridge.train.rl.rows import PreferencePair


@dataclass(frozen=True)
class UpdateMetrics:
    """Metrics of an update. `sums` are over this process's part; the trainer adds those of all processes."""

    loss: float
    grad_norm: float
    sums: dict[str, float]


def policy_loss(
    new: torch.Tensor,
    old: torch.Tensor,
    reference: torch.Tensor | None,
    advantages: torch.Tensor,
    scored: torch.Tensor,
    clip_range: float,
    beta: float,
    normalisation: str = "rows",
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """GRPO's loss (arXiv 2402.03300, equation 3), a sum over the rows of each one's mean over its scored tokens of
    -min(r A, clip(r, 1 - eps, 1 + eps) A) + beta (exp(q) - q - 1), r = exp(new - old), q = reference - new.

    With `normalisation` "tokens" it is the sum over all scored tokens, as in d1's code. The caller divides by the
    number of rows or of tokens (`loss_divisor`).

    Args:
        new, old, reference: [B, L] log-probabilities under the current model, the sampling model, and the reference.
        advantages: [B].
        scored: [B, L] bool.

    Returns:
        A scalar, and detached sums: `clipped`, the scored tokens whose gain is clipped, and `kl`, of the rows' means.
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
    loss_B = (loss_BL * scored).sum(dim=1)
    if normalisation == "rows":
        loss_B = loss_B / tokens_B
    return loss_B.sum(), {"clipped": clipped.detach(), "kl": kl}


def loss_divisor(accelerator: Any, scored: torch.Tensor, normalisation: str) -> float:
    """What makes a mean of the sums of `policy_loss` over all processes: their rows, or their scored tokens.

    Args:
        scored: [B, L] bool, of all rows of this process.
    """
    own = len(scored) if normalisation == "rows" else int(scored.sum())
    return max(1.0, float(accelerator.reduce(torch.tensor(float(own), device=accelerator.device), reduction="sum")))


def accumulates(accelerator: Any, model: Any, last: bool) -> AbstractContextManager[None]:
    """In which a micro-batch's gradients are added to those before it: without a reduction over the processes, but for
    the last one, and under FSDP, where a process has no room for unsharded ones."""
    reduces = last or isinstance(model, FSDPModule)
    return contextlib.nullcontext() if reduces else accelerator.no_sync(model)


def optimizer_step(accelerator: Any, model: Any, optimizer: Any, clip_grad: float, step: int) -> float:
    """Clip the gradients, step, zero them; returns the norm before clipping. Raises DlmBridgeError where it is NaN."""
    max_norm = clip_grad or math.inf
    weights: list[torch.nn.Parameter] = list(model.parameters())
    if isinstance(model, FSDPModule):
        norm = float(clip_grad_norm(weights, max_norm, accelerator.device))
    else:
        norm = float(accelerator.clip_grad_norm_(weights, max_norm))
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


@dataclass
class PreferenceUpdater:
    """VRPO (LLaDA 1.5, arXiv 2505.19223): DPO in which log-likelihoods are Monte-Carlo bounds over `levels` x `masks`
    draws, the same for policy and reference, so that most of their error cancels in the difference."""

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
        DlmBridgeError where the gradient norm is NaN."""
        sums = {"preferred": 0.0, "margin": 0.0}
        loss_sum = torch.zeros((), device=self.accelerator.device)
        starts = range(0, len(pairs), self.micro_batch_size)
        for start in starts:
            part = slice(start, start + self.micro_batch_size)
            last = start == starts[-1]
            with accumulates(self.accelerator, self.model, last):
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
    ) -> torch.Tensor:
        """[N] (policy - reference) of the chosen answers less that of the rejected, in nats."""
        answers = pair_rows(pairs)
        count = self.levels * self.masks
        uniforms = bound_uniforms(self.seed, step, samples, answers.tokens.shape[1], self.levels, self.masks)
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
