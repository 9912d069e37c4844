"""The optimizer's step in one pass over memory: gradients are clipped while they are read, and the weights in half
precision are written beside the masters.

Transformer Engine's kernels do the update alone; clipping is then a pass over all gradients before it, and rounding
one over all masters after it. AdamW is Loshchilov & Hutter's (2019).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

BLOCK = 4096  # numbers that a program has


@dataclass(frozen=True)
class Adam:
    """What a parameter group has in common."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float  # decoupled
    step: int  # from 1; the averages begin at zero, which is made up for


def adam_step(
    master: torch.Tensor,
    gradient: torch.Tensor,
    average: torch.Tensor,
    square: torch.Tensor,
    half: torch.Tensor | None,
    share: torch.Tensor,
    adam: Adam,
) -> None:
    """One step of one parameter, in place; all tensors are contiguous and of one size.

    Args:
        master: fp32, the parameter.
        gradient: before clipping, in any dtype; left as it is.
        average, square: fp32, of gradients and of their squares.
        half: becomes the master's rounding; None where nobody reads one.
        share: scalar, fp32, what gradients are multiplied by.
    """
    if not (count := master.numel()):
        return
    _adam_kernel[(triton.cdiv(count, BLOCK),)](
        master,
        gradient,
        average,
        square,
        master if half is None else half,
        share,
        count,
        adam.lr,
        adam.beta1,
        adam.beta2,
        1 - adam.beta1,
        1 - adam.beta2,
        adam.eps,
        adam.weight_decay,
        1 / (1 - adam.beta1**adam.step),
        1 / (1 - adam.beta2**adam.step),
        HALF=half is not None,
        BLOCK=BLOCK,
        num_warps=8,
    )


def gradient_step(
    master: torch.Tensor,
    gradient: torch.Tensor,
    half: torch.Tensor | None,
    share: torch.Tensor,
    lr: float,
    weight_decay: float,
) -> None:
    """One step of plain gradient descent of one parameter, in place; arguments as `adam_step`'s, but the weight decay
    is a part of the gradient."""
    if not (count := master.numel()):
        return
    _gradient_kernel[(triton.cdiv(count, BLOCK),)](
        master,
        gradient,
        master if half is None else half,
        share,
        count,
        lr,
        weight_decay,
        HALF=half is not None,
        BLOCK=BLOCK,
        num_warps=8,
    )


@triton.jit
def _adam_kernel(  # type: ignore[no-untyped-def]
    master,
    gradient,
    average,
    square,
    half,
    share,
    count,
    lr,
    beta1,
    beta2,
    rest1,
    rest2,
    eps,
    decay,
    whole1,
    whole2,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
):
    where = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    there = where < count
    p = tl.load(master + where, mask=there, other=0.0)
    g = tl.load(gradient + where, mask=there, other=0.0).to(tl.float32) * tl.load(share)
    m = tl.load(average + where, mask=there, other=0.0)
    v = tl.load(square + where, mask=there, other=0.0)
    m = beta1 * m + rest1 * g
    v = beta2 * v + rest2 * g * g
    p -= lr * (m * whole1 / (tl.sqrt(v * whole2) + eps) + decay * p)
    tl.store(master + where, p, mask=there)
    tl.store(average + where, m, mask=there)
    tl.store(square + where, v, mask=there)
    if HALF:
        tl.store(half + where, p.to(half.dtype.element_ty), mask=there)


@triton.jit
def _gradient_kernel(  # type: ignore[no-untyped-def]
    master,
    gradient,
    half,
    share,
    count,
    lr,
    decay,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
):
    where = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    there = where < count
    p = tl.load(master + where, mask=there, other=0.0)
    g = tl.load(gradient + where, mask=there, other=0.0).to(tl.float32) * tl.load(share)
    p -= lr * (g + decay * p)
    tl.store(master + where, p, mask=there)
    if HALF:
        tl.store(half + where, p.to(half.dtype.element_ty), mask=there)
