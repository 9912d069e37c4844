"""The optimizer step of the Megatron engine, with gradient clipping on the device."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist

from dlm_bridge.parallel import platform
from dlm_bridge.parallel.mcore_patches.fused_step import FusedOptimizerStep
from dlm_bridge.parallel.mcore_patches.optimizers import parts_of

# megatron-core keeps these gradients elsewhere than in `grad`, or the state on the CPU: its own step then.
OWN_STEP = ("use_precision_aware_optimizer", "optimizer_cpu_offload")
# Bytes of gradients from which on scaling them all, needed or not, costs more than the wait.
MAX_ALWAYS_SCALED_BYTES = 12 << 30


class ClippedOptimizerStep:
    """Clips the gradients to a global norm and updates the weights."""

    def __init__(self, optimizer: Any, max_norm: float, special: bool = False) -> None:
        """`max_norm` 0 does not clip; `special` asks for megatron-core's own step, which FSDP needs."""
        self.optimizer, self.max_norm = optimizer, max_norm
        self.special = special or any(getattr(optimizer.config, name) for name in OWN_STEP)
        self.parts = parts_of(optimizer)
        self.updates = [None if self.special else FusedOptimizerStep.of(part) for part in self.parts]

    @torch.no_grad()
    def __call__(self) -> tuple[bool, torch.Tensor]:
        """Whether the weights were updated (fp16 gradients can overflow), and the norm before clipping, fp32 on the
        device, infinite where they were not."""
        if self.special:
            updated, norm, _ = self.optimizer.step()
            return updated, torch.tensor(float("inf") if norm is None else float(norm))
        max_norm, pairs = self.max_norm, list(zip(self.updates, self.parts, strict=True))
        # All of them, whatever the first says: each has gradients to prepare.
        overflowed = [(update or part).prepare_grads() for update, part in pairs]
        if any(overflowed):
            return False, torch.tensor(float("inf"))
        norm = gradient_norm(self.parts, self.updates)
        share = (max_norm / (norm + 1e-6)).clamp(max=1.0) if max_norm else torch.ones_like(norm)
        with ExitStack() as clipping:
            gradients = []  # which are clipped before the step
            for update, part in pairs:
                if update is None:
                    gradients += [p.grad for p in part.get_parameters() if p.grad is not None]
                else:
                    clipping.enter_context(update.clipping(share))
            if (
                gradients
                and max_norm
                and (sum(g.nbytes for g in gradients) <= MAX_ALWAYS_SCALED_BYTES or norm > max_norm)
            ):
                torch._foreach_mul_(gradients, share)
            return self.optimizer.step_with_ready_grads(), norm


def gradient_norm(parts: list[Any], updates: list[FusedOptimizerStep | None]) -> torch.Tensor:
    """The global norm of the gradients of megatron-core optimizers, each summed over its own ranks, a scalar."""
    total: torch.Tensor | None = None
    for part, update in zip(parts, updates, strict=True):
        group = part.get_grad_stats_parallel_group()
        gradients = (update or part).get_main_grads_for_grad_norm()
        if gradients:
            squares = torch.stack(torch._foreach_norm(gradients, dtype=torch.float32)).square().sum()
        else:  # a rank without a part of it still takes part in the sum
            squares = torch.zeros((), device=platform.current().device())
        dist.all_reduce(squares, group=group)
        total = squares if total is None else total + squares
    assert total is not None
    return total.sqrt()
