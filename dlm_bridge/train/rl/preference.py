"""Preference optimisation of diffusion models: VRPO's DPO loss on differences of likelihood bounds."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812

from dlm_bridge.train.keyed import Purpose
from dlm_bridge.train.objectives import NoisyBatch, Uniforms
from dlm_bridge.train.rl.likelihood import bound_sums, bounds
from dlm_bridge.train.rl.policy import optimizer_step
from dlm_bridge.train.rl.rollout import Figures
from dlm_bridge.train.rl.rows import Pair


@dataclass(frozen=True)
class Answers:
    """2 N rows: the chosen answers with their prompts, then the rejected ones."""

    tokens: torch.Tensor  # [2 N, L] int64
    answer: torch.Tensor  # [2 N, L] bool
    real: torch.Tensor  # [2 N, L] bool, false at padding


def preference_loss(margins: torch.Tensor, beta: float) -> torch.Tensor:
    """[N] DPO's loss (arXiv 2305.18290) of (policy - reference) of the chosen answer less that of the rejected."""
    return -F.logsigmoid(beta * margins)


def rows_of(pairs: Sequence[Pair]) -> Answers:
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
    return Answers(tokens, answer, real)


def draws(
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

    def update(self, pairs: Sequence[Pair], samples: Sequence[int], step: int) -> Figures:
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
        return Figures(loss_value, norm, sums)

    def margins(
        self,
        pairs: Sequence[Pair],
        samples: Sequence[int],
        step: int,
        model: Any,
        purpose: Purpose = Purpose.TRAIN_NOISE,
    ) -> torch.Tensor:
        """[N] (policy - reference) of the chosen answers less that of the rejected, in nats."""
        answers = rows_of(pairs)
        count = self.levels * self.masks
        uniforms = draws(self.seed, step, samples, answers.tokens.shape[1], self.levels, self.masks, purpose)
        noisy: NoisyBatch = bounds(
            self.plain_model,
            answers.tokens.repeat(count, 1),
            answers.answer.repeat(count, 1),
            answers.real.repeat(count, 1),
            uniforms,
        ).to(self.accelerator.device)
        gains = bound_sums(model, noisy) - self.reference(noisy)
        chosen, rejected = gains.reshape(count, 2, len(pairs)).mean(dim=0)
        return chosen - rejected
