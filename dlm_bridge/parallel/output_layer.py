"""Fused linear cross-entropy of a vocabulary-parallel output layer at the loss positions only, without keeping
logits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist

CHUNK_BYTES = 512 << 20  # of fp32 logits at a time
TILE = 128  # rows; matrix products take as long for a part of one


@dataclass(frozen=True)
class LossPositions:
    """The M loss positions, their targets and weights."""

    positions: torch.Tensor  # [M] int64, b * S + s, with S counted over all tensor parallel ranks
    targets: torch.Tensor  # [M] int64, below the true vocabulary
    weights: torch.Tensor  # [M] fp32, the global normaliser already in them; zero for padding
    terms: torch.Tensor | None = None  # [M] int64, which sum a position belongs to; None where there is one
    num_terms: int = 1


@dataclass(frozen=True)
class VocabShard:
    """A tensor parallel rank's shard of the true vocabulary."""

    first: int  # token
    tokens: int  # rows of the weight that are tokens; the rest is padding
    group: dist.ProcessGroup | None = None  # None: of one rank


def linear_cross_entropy(
    hidden_MH: torch.Tensor,
    weight_VH: torch.Tensor,
    loss_positions: LossPositions,
    shard: VocabShard,
    accumulates: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weighted cross-entropy of hidden states through the output layer, and its terms.

    Args:
        hidden_MH: hidden states of the loss positions, the same on every rank of `shard.group`; the gradient is
            that of this rank's tokens, to be summed over the group.
        weight_VH: this rank's rows of the output layer; those beyond `shard.tokens` are padding: they enter no softmax
            and get no gradient.
        accumulates: add the weight's gradient to `weight.main_grad`, where there is one, as megatron-core's
            gradient_accumulation_fusion does.

    Returns:
        loss: scalar fp32, sum(weights * cross-entropy), the same on every rank. Zero, with a graph, where M is 0.
        sums: [num_terms] fp32, its terms, without a graph.
    """
    if torch.is_grad_enabled() and (hidden_MH.requires_grad or weight_VH.requires_grad):
        loss, losses_M = _LinearCrossEntropy.apply(
            hidden_MH, weight_VH, loss_positions.targets, loss_positions.weights, shard, accumulates
        )
    else:
        losses_M = _cross_entropy(hidden_MH, weight_VH, loss_positions.targets, shard)
        loss = torch.dot(losses_M, loss_positions.weights)
    weighted_M = losses_M * loss_positions.weights
    if loss_positions.terms is None:
        return loss, weighted_M.sum()[None]
    return loss, torch.stack(
        [(weighted_M * (loss_positions.terms == term)).sum() for term in range(loss_positions.num_terms)]
    )


class _LinearCrossEntropy(torch.autograd.Function):
    """Gradients are computed with the logits in the forward pass: one product with the vocabulary, no logits kept.

    What is kept is softmax minus target, [M, V] in half precision, until two products give both gradients. Where that
    would take more memory than the weight's gradient in fp32, the products are made at once, some rows at a time.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        targets: torch.Tensor,
        weights: torch.Tensor,
        shard: VocabShard,
        accumulates: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rows, size = hidden.shape
        most = max(1, 4 * size // hidden.element_size())
        tokens = weight[: shard.tokens]
        delta = _aligned_rows(min(rows, most), shard.tokens, hidden)
        ctx.folded = rows > most
        if not ctx.folded:
            losses = _cross_entropy(hidden, weight, targets, shard, delta)
            ctx.save_for_backward(hidden, delta, weights)
        else:
            losses = torch.empty_like(weights)
            unit = weights.abs().amax().clamp(min=torch.finfo(torch.float32).tiny)  # 1 / tokens underflows in fp16
            scale = weights / unit
            grad_hidden = torch.empty_like(hidden, dtype=torch.float32)
            grad_weight = torch.zeros_like(tokens, dtype=torch.float32)
            for part in _parts(rows, most):
                mine = delta[: part.stop - part.start]
                losses[part] = _cross_entropy(hidden[part], weight, targets[part], shard, mine)
                grad_hidden[part] = _scaled(_product(mine, tokens), scale[part])
                _add_product(grad_weight, mine, _scaled(hidden[part], scale[part]))
            ctx.save_for_backward(grad_hidden, grad_weight, unit)
        ctx.weight, ctx.tokens, ctx.accumulates = weight, shard.tokens, accumulates  # its attributes are needed too
        ctx.dtype = hidden.dtype
        ctx.mark_non_differentiable(losses)
        return torch.dot(losses, weights), losses

    @staticmethod
    def backward(ctx: Any, upstream: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override, unused-ignore]
        weight = ctx.weight
        grad_hidden = None
        if ctx.folded:
            grad_hidden, grad_weight, unit = ctx.saved_tensors
            scale = upstream * unit
            grad_hidden = (grad_hidden * scale).to(ctx.dtype)

            def add_to(target: torch.Tensor) -> None:
                target.addcmul_(grad_weight, scale)

        else:
            hidden, delta, weights = ctx.saved_tensors
            scale = upstream * weights
            if ctx.needs_input_grad[0]:
                grad_hidden = _scaled(_product(delta, weight[: ctx.tokens]), scale).to(ctx.dtype)

            def add_to(target: torch.Tensor) -> None:
                _add_product(target, delta, _scaled(hidden, scale))

        grad_weight = _deliver(weight, ctx.tokens, ctx.accumulates, add_to) if ctx.needs_input_grad[1] else None
        return grad_hidden, grad_weight, None, None, None, None


def _deliver(
    weight: Any, tokens: int, accumulates: bool, add_to: Callable[[torch.Tensor], None]
) -> torch.Tensor | None:
    """Add the weight's gradient where its owner reads it, and return the gradient for autograd."""
    # Megatron FSDP's `main_grad` is a passing buffer, which its own hook fills from what autograd is given.
    if not accumulates or not hasattr(weight, "main_grad") or hasattr(weight, "__fsdp_param__"):
        gradient = torch.zeros_like(weight)
        add_to(gradient[:tokens])
        return gradient
    add_to(weight.main_grad[:tokens])
    weight.grad_added_to_main_grad = True
    # The embedding on the same stage gives autograd its gradient, which megatron-core then adds too ...
    if getattr(weight, "zero_out_wgrad", False):
        return None
    # ... else its hook only has to be called, with something that it does not read.
    return torch.empty_like(weight)


def _cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    shard: VocabShard,
    delta: torch.Tensor | None = None,
) -> torch.Tensor:
    """[M] fp32; `delta` [M, tokens] becomes softmax minus target."""
    rows = hidden.shape[0]
    losses = torch.empty(rows, dtype=torch.float32, device=hidden.device)
    targets = targets - shard.first
    columns = weight[: shard.tokens].t()
    if hidden.device.type != "cuda":
        columns = columns.float()  # once for all chunks
    statistics, combine, gradient = (_kernel(function, hidden.device.type) for function in KERNELS)
    for part in _parts(rows, max(1, CHUNK_BYTES // (4 * shard.tokens))):
        logits = _product(hidden[part], columns)
        found = statistics(logits, targets[part])[None]
        if shard.group is not None and shard.group.size() > 1:
            all_ranks = found.new_empty(shard.group.size(), *found.shape[1:])
            dist.all_gather_into_tensor(all_ranks, found, group=shard.group)
            found = all_ranks
        total, losses[part] = combine(found)
        if delta is not None:
            gradient(logits, total, targets[part], delta[part])
    return losses


def _statistics(logits_MV: torch.Tensor, targets_M: torch.Tensor) -> torch.Tensor:
    """[3, M]: the largest logit, the sum of exponentials relative to it, the target's logit or 0 on other ranks."""
    largest = logits_MV.amax(1)
    total = torch.exp(logits_MV - largest[:, None]).sum(1)
    here = (targets_M >= 0) & (targets_M < logits_MV.shape[1])
    target = logits_MV.gather(1, targets_M.clamp(0, logits_MV.shape[1] - 1)[:, None]).squeeze(1)
    return torch.stack([largest, total, torch.where(here, target, 0.0)])


def _combine(statistics_T3M: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[M] the log-sum-exp over all ranks, and [M] the cross-entropy."""
    largest_T, total_T, target_T = statistics_T3M.unbind(1)
    largest = largest_T.amax(0)
    total = largest + torch.log((total_T * torch.exp(largest_T - largest)).sum(0))
    return total, total - target_T.sum(0)


def _gradient(logits_MV: torch.Tensor, total_M: torch.Tensor, targets_M: torch.Tensor, delta_MV: torch.Tensor) -> None:
    """Softmax minus target, into `delta_MV`."""
    tokens = torch.arange(logits_MV.shape[1], device=logits_MV.device)
    target = (tokens == targets_M[:, None]).to(logits_MV.dtype)
    delta_MV.copy_(torch.exp(logits_MV - total_M[:, None]) - target)


KERNELS: tuple[Callable[..., Any], ...] = (_statistics, _combine, _gradient)


@cache
def _kernel(function: Callable[..., Any], device: str) -> Callable[..., Any]:
    """Fused on CUDA, where each would otherwise be several passes over the logits."""
    return torch.compile(function) if device == "cuda" else function


def _product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """left @ right in fp32, from factors in half precision on CUDA."""
    if left.is_cuda and left.dtype != torch.float32:
        return torch.mm(left, right, out_dtype=torch.float32)
    return torch.mm(left.float(), right.float())


def _add_product(target: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """target += left^T @ right, accumulated in fp32."""
    if target.dtype == left.dtype:
        target.addmm_(left.t(), right)
    elif target.is_cuda:
        torch.addmm(target, left.t(), right, out_dtype=target.dtype, out=target)
    else:
        target.addmm_(left.t().to(target.dtype), right.to(target.dtype))


def _scaled(values_MN: torch.Tensor, scale_M: torch.Tensor) -> torch.Tensor:
    """Rows times fp32 factors, in the rows' dtype."""
    return (values_MN * scale_M[:, None]).to(values_MN.dtype)


def _aligned_rows(rows: int, columns: int, like: torch.Tensor) -> torch.Tensor:
    """[rows, columns] whose rows are aligned to 16 bytes, for fast matrix products."""
    return like.new_empty(rows, -(-columns // 8) * 8)[:, :columns]


def _parts(rows: int, most: int) -> list[slice]:
    """Slices of at most `most` rows of about equal size, in whole tiles where possible."""
    tile = TILE if most >= TILE else 1
    pieces = -(-rows // (most // tile * tile))
    size = -(-rows // max(1, pieces * tile)) * tile
    return [slice(start, min(start + size, rows)) for start in range(0, rows, max(1, size))]
