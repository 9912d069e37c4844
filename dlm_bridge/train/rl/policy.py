"""The clipped policy gradient of group-relative rewards, on estimated token likelihoods, under Accelerate."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from dlm_bridge.errors import DlmBridgeError
from dlm_bridge.train.rl.likelihood import Query, Sequences, token_logps
from dlm_bridge.train.rl.rollout import Figures, Rollout

Asking = Callable[[Sequences, int, list[int]], Query]  # (sequences, draw, global sample indices) -> what is read


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
    ask: Asking
    reference: Callable[[Query], torch.Tensor] | None
    updates: int
    micro_batch_size: int
    total: int  # completions of a step, over all processes
    clip_range: float
    beta: float
    clip_grad: float

    def update(self, rollout: Rollout, step: int) -> Figures:
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
        return Figures(loss, norm, {name: total / self.updates for name, total in sums.items()})

    def _step(self, step: int) -> float:
        return optimizer_step(self.accelerator, self.model, self.optimizer, self.clip_grad, step)

    def _asked(self, rollout: Rollout, part: slice, draw: int, device: torch.device) -> Query:
        return self.ask(rollout.sequences.rows(part), draw, rollout.samples[part]).to(device)

    @torch.no_grad()
    def _frozen(self, query: Query) -> torch.Tensor:
        return token_logps(self.model, query)


def optimizer_step(accelerator: Any, model: Any, optimizer: Any, clip_grad: float, step: int) -> float:
    """Clip, step and forget the gradients; the norm before clipping. Raises DlmBridgeError where it is no number."""
    norm = float(accelerator.clip_grad_norm_(model.parameters(), clip_grad or math.inf))
    if not math.isfinite(norm) and accelerator.scaler is None:
        raise DlmBridgeError(f"step {step}: the gradient norm is {norm}: lower --lr")
    optimizer.step()
    optimizer.zero_grad()
    return norm
