"""How many positions each step settles. Steps that would settle nothing are left out: they would change nothing."""

from __future__ import annotations

import torch


def even(masks: int, steps: int) -> list[int]:
    """masks / steps in every step, the remainder one each in the first steps."""
    share, remainder = divmod(masks, steps)
    return [share + (step < remainder) for step in range(steps) if share or step < remainder]


def times(steps: int, eps: float) -> torch.Tensor:
    """float32 [steps + 1], from 1 down to `eps`: the noise level before and after each step."""
    return torch.linspace(1, eps, steps + 1)


def by_time(masks: int, steps: int, eps: float) -> list[int]:
    """Dream's whole-canvas schedule: from noise level t to s, int((1 - s / t) of the masks), the last step the rest.

    In float32, as published: rounding decides between neighbouring counts. Dream's code counts the mean of the batch,
    which reveals wrong numbers where rows differ; here each row counts its own masks.
    """
    level = times(steps, eps)
    fractions = 1 - level[1:] / level[:-1]
    quotas = []
    for step in range(steps):
        quota = int(torch.tensor(float(masks)) * fractions[step]) if step < steps - 1 else masks
        if quota:
            quotas.append(quota)
        masks -= quota
        if not masks:
            break
    return quotas


def by_rounding(masks: int, steps: int) -> list[int]:
    """dLLM's schedule: each step settles its share of what is left, rounded half to even, with float32 levels."""
    level = 1 - (1 - torch.arange(steps, -1, -1) / steps)
    shares = 1 - (level[1:] / level[:-1]).double()
    quotas = []
    for share in shares.tolist():
        quota = min(round(masks * share), masks)
        if quota:
            quotas.append(quota)
            masks -= quota
    return quotas


def by_rank(masks: int, steps: int) -> list[int]:
    """RND1's schedule: after step k of n, floor(masks * (n - k) / n) are still masked. In float32, as published."""
    left, quotas = masks, []
    for step in range(steps - 1, -1, -1):
        keep = int((torch.tensor(masks) * (step / steps)).long())
        if keep < left:
            quotas.append(left - keep)
            left = keep
    return quotas
