"""The optimizer step of the Megatron engine, with gradient clipping on the device."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist

from dlm_bridge.parallel import platform
from dlm_bridge.parallel.mcore_patches.fused_step import FusedOptimizerStep
from dlm_bridge.parallel.mcore_patches.optimizers import parts_of

# With these settings the gradients are elsewhere than in `grad`, or the state is on the CPU: megatron-core's own step.
MCORE_STEP = ("use_precision_aware_optimizer", "optimizer_cpu_offload")
# Bytes of gradients from which on scaling them all, needed or not, costs more than the wait.
MAX_ALWAYS_SCALED_BYTES = 12 << 30


class ClippedOptimizerStep:
    """Clips the gradients to a global norm and updates the weights."""

    def __init__(self, optimizer: Any, max_norm: float, mcore_step: bool = False) -> None:
        """`max_norm` 0 does not clip; `mcore_step` asks for megatron-core's own step, which FSDP needs."""
        self.optimizer, self.max_norm = optimizer, max_norm
        self.mcore_step = mcore_step or any(getattr(optimizer.config, name) for name in MCORE_STEP)
        self.parts = parts_of(optimizer)
        self.fused_steps = [None if self.mcore_step else FusedOptimizerStep.of(part) for part in self.parts]

    @torch.no_grad()
    def __call__(self) -> tuple[bool, torch.Tensor]:
        """Whether the weights were updated (fp16 gradients can overflow), and the norm before clipping, fp32 on the
        device, infinite where they were not."""
        if self.mcore_step:
            updated, norm, _ = self.optimizer.step()
            return updated, torch.tensor(float("inf") if norm is None else float(norm))
        pairs = list(zip(self.fused_steps, self.parts, strict=True))
        # All of them, whatever the first returns: each has gradients to prepare.
        overflowed = [(fused or part).prepare_grads() for fused, part in pairs]
        if any(overflowed):
            return False, torch.tensor(float("inf"))
        norm = gradient_norm(self.parts, self.fused_steps)
        clip_coef = (self.max_norm / (norm + 1e-6)).clamp(max=1.0) if self.max_norm else torch.ones_like(norm)
        with ExitStack() as clipping:
            gradients = []  # clipped before the step; a fused step clips as it reads them
            for fused, part in pairs:
                if fused is None:
                    gradients += [p.grad for p in part.get_parameters() if p.grad is not None]
                else:
                    clipping.enter_context(fused.clipping(clip_coef))
            if gradients and self.max_norm:
                small = sum(gradient.nbytes for gradient in gradients) <= MAX_ALWAYS_SCALED_BYTES
                if small or norm > self.max_norm:
                    torch._foreach_mul_(gradients, clip_coef)
            return self.optimizer.step_with_ready_grads(), norm


def gradient_norm(parts: list[Any], fused_steps: list[FusedOptimizerStep | None]) -> torch.Tensor:
    """The global norm of the gradients of megatron-core optimizers, each summed over its own ranks, a scalar."""
    total: torch.Tensor | None = None
    for part, fused in zip(parts, fused_steps, strict=True):
        group = part.get_grad_stats_parallel_group()
        gradients = (fused or part).get_main_grads_for_grad_norm()
        if gradients:
            squares = torch.stack(torch._foreach_norm(gradients, dtype=torch.float32)).square().sum()
        else:  # a rank without a shard of it still takes part in the sum
            squares = torch.zeros((), device=platform.current().device())
        dist.all_reduce(squares, group=group)
        total = squares if total is None else total + squares
    assert total is not None
    return total.sqrt()
