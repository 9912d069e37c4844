"""Fused optimizer step, one launch and one pass over memory: gradients are clipped as they are read, and the bf16 or fp16
params are written with the fp32 main params.

Transformer Engine's kernels do the update alone; clipping is then a pass over all gradients before it, and rounding
one over all main params after it. A model with experts has hundreds of small matrices, and a launch takes as long as a
few million elements: a program finds its parameter by a table of addresses. AdamW is Loshchilov & Hutter's (2019).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

BLOCK = 4096  # numbers that a program has
ALIGNED = 16  # bytes of an address, and numbers of a parameter, that let a program read several at once


class StepTensors(NamedTuple):
    """What a step reads and writes of one parameter: contiguous tensors of one size on one device."""

    master: torch.Tensor  # fp32
    gradient: torch.Tensor  # before clipping, in any dtype; left as it is
    half: torch.Tensor | None = None  # becomes the master's rounding; None where nobody reads one
    average: torch.Tensor | None = None  # fp32, of gradients
    square: torch.Tensor | None = None  # fp32, of their squares


@dataclass(frozen=True)
class AdamSettings:
    """What a parameter group has in common."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float  # decoupled
    step: int  # from 1; the averages begin at zero, which is made up for


class FusedParamGroup:
    """Parameters that are updated alike, step after step: where they lie goes to the device once, while they stay."""

    def __init__(self) -> None:
        self._tables: dict[tuple[torch.dtype, torch.dtype | None], PointerTable] = {}

    def adam_step(self, parameters: Sequence[StepTensors], share: torch.Tensor, adam: AdamSettings) -> None:
        """One step of AdamW, in place. `share`: scalar, fp32, on the device, what gradients are multiplied by. Raises
        ValueError where tensors of a parameter differ in size or are not contiguous."""
        self._launch(
            _adam_kernel,
            parameters,
            share,
            adam.lr,
            adam.beta1,
            adam.beta2,
            1 - adam.beta1,
            1 - adam.beta2,
            adam.eps,
            adam.weight_decay,
            1 / (1 - adam.beta1**adam.step),
            1 / (1 - adam.beta2**adam.step),
        )

    def sgd_step(self, parameters: Sequence[StepTensors], share: torch.Tensor, lr: float, weight_decay: float) -> None:
        """One step of plain gradient descent, in place; as `adam_step`, but the weight decay is a part of the
        gradient."""
        self._launch(_sgd_kernel, parameters, share, lr, weight_decay)

    def _launch(self, kernel: Any, parameters: Sequence[StepTensors], share: torch.Tensor, *numbers: float) -> None:
        kinds: dict[tuple[torch.dtype, torch.dtype | None], list[StepTensors]] = {}
        for parameter in parameters:
            if parameter.master.numel():
                half = None if parameter.half is None else parameter.half.dtype
                kinds.setdefault((parameter.gradient.dtype, half), []).append(parameter)
        for kind, alike in kinds.items():
            table = self._tables.setdefault(kind, PointerTable())
            table.find(alike)
            first = alike[0]
            kernel[(len(table.owners),)](
                table.addresses,
                table.counts,
                table.owners,
                table.blocks,
                first.master,
                first.gradient,
                first.master if first.half is None else first.half,
                share,
                len(alike),
                *numbers,
                HALF=first.half is not None,
                ALIGNED=ALIGNED if table.aligned else 1,
                BLOCK=BLOCK,
                num_warps=8,
            )


class PointerTable:
    """Where parameters lie, on the device."""

    addresses: torch.Tensor  # [5, n] int64: of Parameter's fields, in their order; the master's for one that is None
    counts: torch.Tensor  # [n] int64, numbers of each
    owners: torch.Tensor  # [programs] int32, the parameter that each has a block of
    blocks: torch.Tensor  # [programs] int32, which block of it
    aligned: bool

    def __init__(self) -> None:
        self._places: list[int] = []
        self._counts: list[int] = []

    def find(self, parameters: Sequence[StepTensors]) -> None:
        """Make this the table of `parameters`."""
        counts = [parameter.master.numel() for parameter in parameters]
        places = []
        for field in range(len(StepTensors._fields)):
            for parameter, count in zip(parameters, counts, strict=True):
                tensor = parameter[field]
                if tensor is None:
                    tensor = parameter.master
                elif tensor.numel() != count or not tensor.is_contiguous():
                    raise ValueError(f"{StepTensors._fields[field]}: not {count} numbers one after the other")
                places.append(tensor.data_ptr())
        device = parameters[0].master.device
        if counts != self._counts:
            self.counts = torch.tensor(counts, device=device)
            programs = (self.counts + (BLOCK - 1)) // BLOCK
            total = sum(-(-count // BLOCK) for count in counts)
            numbers = torch.arange(len(counts), device=device)
            owners = numbers.repeat_interleave(programs, output_size=total)
            first = programs.cumsum(0) - programs
            self.owners = owners.int()
            self.blocks = (torch.arange(total, device=device) - first[owners]).int()
        if places != self._places:
            self.addresses = torch.tensor(places, device=device)
        self.aligned = all(number % ALIGNED == 0 for number in (*places, *counts))
        self._places, self._counts = places, counts


@triton.jit
def _block(counts, owners, blocks, ALIGNED: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Of this program: its parameter, the numbers it has, and which of them are there."""
    owner = tl.load(owners + tl.program_id(0))
    size = tl.multiple_of(tl.load(counts + owner), ALIGNED)
    where = tl.load(blocks + tl.program_id(0)).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    return owner, where, where < size


@triton.jit
def _tensor(addresses, owner, field, count, like, ALIGNED: tl.constexpr):  # type: ignore[no-untyped-def]
    """A field of a parameter, with numbers as those of `like`."""
    return tl.multiple_of(tl.load(addresses + field * count + owner).to(like.dtype), ALIGNED)


@triton.jit
def _adam_kernel(  # type: ignore[no-untyped-def]
    addresses,
    counts,
    owners,
    blocks,
    masters,
    gradients,
    halves,
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
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    owner, where, there = _block(counts, owners, blocks, ALIGNED, BLOCK)
    master = _tensor(addresses, owner, 0, count, masters, ALIGNED)
    gradient = _tensor(addresses, owner, 1, count, gradients, ALIGNED)
    average = _tensor(addresses, owner, 3, count, masters, ALIGNED)
    square = _tensor(addresses, owner, 4, count, masters, ALIGNED)
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
        half = _tensor(addresses, owner, 2, count, halves, ALIGNED)
        tl.store(half + where, p.to(half.dtype.element_ty), mask=there)


@triton.jit
def _sgd_kernel(  # type: ignore[no-untyped-def]
    addresses,
    counts,
    owners,
    blocks,
    masters,
    gradients,
    halves,
    share,
    count,
    lr,
    decay,
    HALF: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    owner, where, there = _block(counts, owners, blocks, ALIGNED, BLOCK)
    master = _tensor(addresses, owner, 0, count, masters, ALIGNED)
    gradient = _tensor(addresses, owner, 1, count, gradients, ALIGNED)
    p = tl.load(master + where, mask=there, other=0.0)
    g = tl.load(gradient + where, mask=there, other=0.0).to(tl.float32) * tl.load(share)
    p -= lr * (g + decay * p)
    tl.store(master + where, p, mask=there)
    if HALF:
        half = _tensor(addresses, owner, 2, count, halves, ALIGNED)
        tl.store(half + where, p.to(half.dtype.element_ty), mask=there)
