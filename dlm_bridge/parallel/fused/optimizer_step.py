"""Fused optimizer step with one launch and one pass over memory: gradients are clipped as they are read, and the bf16
or fp16 params are written with the fp32 main params.

Transformer Engine's kernels only update; clipping is another pass over all gradients, and rounding another one over
all main params. A model with experts has hundreds of small matrices, and a launch costs as much as a few million
elements: each program looks up its parameter in a table of addresses. AdamW: Loshchilov & Hutter (2019).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl

BLOCK = 4096  # elements per program
ALIGNED = 16  # addresses in bytes and sizes in elements that are multiples of this allow vectorised loads


class StepTensors(NamedTuple):
    """Tensors of one parameter that a step reads and writes: contiguous, of the same size, on one device."""

    main_param: torch.Tensor  # fp32
    gradient: torch.Tensor  # before clipping, in any dtype; not modified
    model_param: torch.Tensor | None = None  # set to the rounded main param; None if there is none
    exp_avg: torch.Tensor | None = None  # fp32, of gradients
    exp_avg_sq: torch.Tensor | None = None  # fp32, of their squares


@dataclass(frozen=True)
class AdamSettings:
    """Settings of a parameter group."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float  # decoupled
    step: int  # from 1, for the bias correction


class FusedParamGroup:
    """Parameters with the same settings. Their addresses are copied to the device when they change."""

    def __init__(self) -> None:
        self._tables: dict[tuple[torch.dtype, torch.dtype | None], PointerTable] = {}

    def adam_step(self, parameters: Sequence[StepTensors], clip_coef: torch.Tensor, adam: AdamSettings) -> None:
        """One step of AdamW, in place. `clip_coef` is an fp32 scalar on the device by which gradients are multiplied.
        Raises ValueError if tensors of a parameter differ in size or are not contiguous."""
        self._launch(
            parameters,
            clip_coef,
            adam.lr,
            adam.weight_decay,
            beta1=adam.beta1,
            beta2=adam.beta2,
            one_minus_beta1=1 - adam.beta1,
            one_minus_beta2=1 - adam.beta2,
            eps=adam.eps,
            inv_bias_correction1=1 / (1 - adam.beta1**adam.step),
            inv_bias_correction2=1 / (1 - adam.beta2**adam.step),
        )

    def sgd_step(
        self, parameters: Sequence[StepTensors], clip_coef: torch.Tensor, lr: float, weight_decay: float
    ) -> None:
        """One step of plain gradient descent, in place. Same as `adam_step`, but weight decay is added to the
        gradient."""
        self._launch(parameters, clip_coef, lr, weight_decay)

    def _launch(
        self,
        parameters: Sequence[StepTensors],
        clip_coef: torch.Tensor,
        lr: float,
        weight_decay: float,
        **adam: float,
    ) -> None:
        kinds: dict[tuple[torch.dtype, torch.dtype | None], list[StepTensors]] = {}
        for parameter in parameters:
            if parameter.main_param.numel():
                model_param = None if parameter.model_param is None else parameter.model_param.dtype
                kinds.setdefault((parameter.gradient.dtype, model_param), []).append(parameter)
        for kind, alike in kinds.items():
            table = self._tables.setdefault(kind, PointerTable())
            table.find(alike)
            first = alike[0]
            _step_kernel[(len(table.owners),)](
                table.addresses,
                table.counts,
                table.owners,
                table.blocks,
                first.main_param,
                first.gradient,
                first.main_param if first.model_param is None else first.model_param,
                clip_coef,
                len(alike),
                lr,
                weight_decay,
                **adam,
                ADAM=bool(adam),
                WRITE_MODEL_PARAM=first.model_param is not None,
                ALIGNED=ALIGNED if table.aligned else 1,
                BLOCK=BLOCK,
                num_warps=8,
            )


class PointerTable:
    """Addresses and sizes of parameters, on the device."""

    addresses: (
        torch.Tensor
    )  # [5, n] int64, one row per field of StepTensors; the main param's for fields that are None
    counts: torch.Tensor  # [n] int64, number of elements
    owners: torch.Tensor  # [programs] int32, the parameter of each program
    blocks: torch.Tensor  # [programs] int32, the program's block in the parameter
    aligned: bool

    def __init__(self) -> None:
        self._places: list[int] = []
        self._counts: list[int] = []

    def find(self, parameters: Sequence[StepTensors]) -> None:
        """Update the table for `parameters`."""
        counts = [parameter.main_param.numel() for parameter in parameters]
        places = []
        for field in range(len(StepTensors._fields)):
            for parameter, count in zip(parameters, counts, strict=True):
                tensor = parameter[field]
                if tensor is None:
                    tensor = parameter.main_param
                elif tensor.numel() != count or not tensor.is_contiguous():
                    raise ValueError(f"{StepTensors._fields[field]}: not {count} contiguous elements")
                places.append(tensor.data_ptr())
        device = parameters[0].main_param.device
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
    """This program's parameter, the offsets of its elements, and their mask."""
    owner = tl.load(owners + tl.program_id(0))
    size = tl.multiple_of(tl.load(counts + owner), ALIGNED)
    offsets = tl.load(blocks + tl.program_id(0)).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    return owner, offsets, offsets < size


@triton.jit
def _tensor(addresses, owner, field, count, like, ALIGNED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Pointer to a field of a parameter, with the dtype of `like`."""
    return tl.multiple_of(tl.load(addresses + field * count + owner).to(like.dtype), ALIGNED)


@triton.jit
def _step_kernel(  # type: ignore[no-untyped-def]
    addresses,
    counts,
    owners,
    blocks,
    main_params,
    gradients,
    model_params,
    clip_coef,
    count,
    lr,
    decay,
    ADAM: tl.constexpr,
    WRITE_MODEL_PARAM: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
    beta1=0.0,
    beta2=0.0,
    one_minus_beta1=0.0,
    one_minus_beta2=0.0,
    eps=0.0,
    inv_bias_correction1=0.0,
    inv_bias_correction2=0.0,
):
    """One block of AdamW, or of plain gradient descent."""
    owner, offsets, exists = _block(counts, owners, blocks, ALIGNED, BLOCK)
    main_param = _tensor(addresses, owner, 0, count, main_params, ALIGNED)
    gradient = _tensor(addresses, owner, 1, count, gradients, ALIGNED)
    p = tl.load(main_param + offsets, mask=exists, other=0.0)
    g = tl.load(gradient + offsets, mask=exists, other=0.0).to(tl.float32) * tl.load(clip_coef)
    if ADAM:
        exp_avg = _tensor(addresses, owner, 3, count, main_params, ALIGNED)
        exp_avg_sq = _tensor(addresses, owner, 4, count, main_params, ALIGNED)
        m = tl.load(exp_avg + offsets, mask=exists, other=0.0)
        v = tl.load(exp_avg_sq + offsets, mask=exists, other=0.0)
        m = beta1 * m + one_minus_beta1 * g
        v = beta2 * v + one_minus_beta2 * g * g
        tl.store(exp_avg + offsets, m, mask=exists)
        tl.store(exp_avg_sq + offsets, v, mask=exists)
        g = m * inv_bias_correction1 / (tl.sqrt(v * inv_bias_correction2) + eps)
    p -= lr * (g + decay * p)
    tl.store(main_param + offsets, p, mask=exists)
    if WRITE_MODEL_PARAM:
        model_param = _tensor(addresses, owner, 2, count, model_params, ALIGNED)
        tl.store(model_param + offsets, p.to(model_param.dtype.element_ty), mask=exists)
