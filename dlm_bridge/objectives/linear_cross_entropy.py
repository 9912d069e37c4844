"""Fused linear loss of a vocabulary-parallel output layer, at the loss positions only and without storing logits.

Losses are the cross-entropy, with or without certainty-forcing, the divergences of random tokens, and the z-loss.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
import torch.distributed as dist

from dlm_bridge.objectives.losses import Certainty, NoisePositions, balanced_weights, divergence

CHUNK_BYTES = 512 << 20  # fp32 logits computed at a time
TILE = 128  # rows; a matrix product takes as long for a part of a tile
ALIGNED = 8  # tokens; matrix products are several times slower for numbers that are not multiples
SMALLEST_BUCKET = 64  # loss positions


@dataclass(frozen=True)
class LossPositions:
    """The M loss positions, their targets and weights."""

    positions: torch.Tensor  # [M] int64, b * S + s, with S counted over all tensor parallel ranks
    targets: torch.Tensor  # [M] int64, below the true vocabulary
    weights: torch.Tensor  # [M] fp32, divided by the global normaliser; zero for padding
    terms: torch.Tensor | None = None  # [M] int64, index of each position's sum; None: a single sum
    num_terms: int = 1
    noise: NoisePositions | None = None  # random tokens; None: the loss is cross-entropy
    certainty: Certainty | None = None  # added to the cross-entropy
    z_weights: torch.Tensor | None = (
        None  # [M] fp32, of each squared log-sum-exp, zero where `weights` is; None: no z-loss
    )
    summed: bool = True  # False: `sums` returns the weighted losses of the positions
    rows: torch.Tensor | None = None  # [M] int64, row of each position, if the two sums are balanced; else None
    num_rows: int = 0
    row_group: dist.ProcessGroup | None = None  # processes with parts of the same rows

    def balanced(self, losses_M: torch.Tensor) -> LossPositions:
        """Replace the weights by `balanced_weights`, if the sums are balanced."""
        if self.rows is None or self.terms is None:
            return self
        weights_M = balanced_weights(self.weights, losses_M, self.terms, self.rows, self.num_rows, self.row_group)
        return replace(self, weights=weights_M, rows=None)

    def sums(self, losses_M: torch.Tensor, log_sums_M: torch.Tensor) -> torch.Tensor:
        """[num_terms] sums of the weighted (and balanced) losses by term, followed by the sum of the z-loss, if any;
        [M] weighted losses unless `summed`."""
        weighted_M = losses_M * self.balanced(losses_M).weights
        if not self.summed:
            return weighted_M
        if self.terms is None:
            sums = [weighted_M.sum()]
        else:
            sums = [(weighted_M * (self.terms == term)).sum() for term in range(self.num_terms)]
        if self.z_weights is not None:
            sums.append((log_sums_M.square() * self.z_weights).sum())
        return torch.stack(sums)

    @property
    def z_factors(self) -> torch.Tensor | None:
        """[M] weights of squared log-sum-exps relative to `weights`."""
        if self.z_weights is None:
            return None
        return torch.where(self.weights != 0, self.z_weights / self.weights, 0.0)


def loss_bucket(count: int, most: int) -> int:
    """Size to which `count` loss positions are padded: at least `SMALLEST_BUCKET`, in steps of an eighth, at most
    `most`."""
    step = max(SMALLEST_BUCKET, 2 ** (max(count, 1).bit_length() - 4))
    return min(max(-(-count // step), 1) * step, most)


@dataclass(frozen=True)
class VocabShard:
    """Tensor parallel rank's shard of the true vocabulary."""

    first: int  # first token
    tokens: int  # rows of the weight that are tokens; the others are padding, with finite values
    group: dist.ProcessGroup | None = None  # None: a single rank

    def aligned(self, weight_VH: torch.Tensor) -> torch.Tensor:
        """Rows of tokens, with the rows of padding (as far as they exist) that make matrix products fast."""
        return weight_VH[: -(-self.tokens // ALIGNED) * ALIGNED]


def linear_cross_entropy(
    hidden_MH: torch.Tensor,
    weight_VH: torch.Tensor,
    loss_positions: LossPositions,
    shard: VocabShard,
    accumulates: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weighted loss of hidden states through the output layer, and its terms.

    Args:
        hidden_MH: hidden states of the loss positions, equal on every rank of `shard.group`. The gradient is that of
            this rank's tokens, to be summed over the group.
        weight_VH: this rank's rows of the output layer. Rows beyond `shard.tokens` are padding: they are excluded from
            the softmax and get no gradient. If the number of tokens is not a multiple of 8, padding makes products
            fast.
        accumulates: add the weight's gradient to `weight.main_grad`, if it exists, like megatron-core's
            gradient_accumulation_fusion.

    Returns:
        loss: scalar fp32, equal on every rank: sum(weights * cross-entropy), with the divergences of random tokens
            instead of the cross-entropy for such noise, plus sum(z_weights * log-sum-exp^2) with z-loss. If M is 0,
            zero, connected to the graph.
        sums: [num_terms], or [num_terms + 1] with z-loss, fp32: the terms, without a graph; [M] losses of the
            positions unless `summed`.
    """
    if torch.is_grad_enabled() and (hidden_MH.requires_grad or weight_VH.requires_grad):
        loss, sums = _LinearCrossEntropy.apply(hidden_MH, weight_VH, loss_positions, shard, accumulates)
        return loss, sums
    losses_M, log_sums_M = _losses(hidden_MH, weight_VH, loss_positions, slice(None), shard)
    sums = loss_positions.sums(losses_M, log_sums_M)
    return sums.sum(), sums


class _LinearCrossEntropy(torch.autograd.Function):
    """Fused linear loss that computes gradients of the logits in the forward pass, with a single vocabulary product.

    The gradient of the logits, [M, V] in half precision, is stored until the backward pass, where two products give
    both gradients. If it needs more memory than the weight's gradient in fp32, the forward pass computes both
    products, some rows at a time.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        loss_positions: LossPositions,
        shard: VocabShard,
        accumulates: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rows, size = hidden.shape
        most = max(1, 4 * size // hidden.element_size())
        aligned = shard.aligned(weight)
        delta = _aligned_rows(min(rows, most), aligned.shape[0], hidden)
        delta[:, shard.tokens :] = 0  # padding
        ctx.folded = rows > most
        if not ctx.folded:
            found = _losses(hidden, weight, loss_positions, slice(None), shard, delta)
            loss_positions = loss_positions.balanced(found[0])
            ctx.save_for_backward(hidden, delta, loss_positions.weights)
        else:
            if loss_positions.rows is not None:  # the products below need balanced weights, which depend on all losses
                losses = _losses(hidden, weight, loss_positions, slice(None), shard)[0]
                loss_positions = loss_positions.balanced(losses)
            weights = loss_positions.weights
            found = weights.new_empty(2, rows)
            unit = weights.abs().amax().clamp(min=torch.finfo(torch.float32).tiny)  # 1 / tokens underflows in fp16
            scale = weights / unit
            grad_hidden = torch.empty_like(hidden, dtype=torch.float32)
            grad_weight = torch.zeros_like(weight[: shard.tokens], dtype=torch.float32)
            for part in _parts(rows, most):
                mine = delta[: part.stop - part.start]
                found[:, part] = _losses(hidden[part], weight, loss_positions, part, shard, mine)
                grad_hidden[part] = _scaled(_product(mine, aligned), scale[part])
                _add_product(grad_weight, mine[:, : shard.tokens], _scaled(hidden[part], scale[part]))
            ctx.save_for_backward(grad_hidden, grad_weight, unit)
        ctx.weight, ctx.shard, ctx.accumulates = weight, shard, accumulates  # its attributes are needed too
        ctx.dtype = hidden.dtype
        sums = loss_positions.sums(*found)
        ctx.mark_non_differentiable(sums)
        return sums.sum(), sums

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
                grad_hidden = _scaled(_product(delta, ctx.shard.aligned(weight)), scale).to(ctx.dtype)

            def add_to(target: torch.Tensor) -> None:
                _add_product(target, delta[:, : ctx.shard.tokens], _scaled(hidden, scale))

        grad_weight = _deliver(weight, ctx.shard.tokens, ctx.accumulates, add_to) if ctx.needs_input_grad[1] else None
        return grad_hidden, grad_weight, None, None, None


def _deliver(
    weight: Any, tokens: int, accumulates: bool, add_to: Callable[[torch.Tensor], None]
) -> torch.Tensor | None:
    """Accumulate the weight's gradient in `main_grad` if it is used, and return the gradient for autograd."""
    # Megatron FSDP's `main_grad` is a temporary buffer, which its own hook fills from autograd's gradient.
    if not accumulates or not hasattr(weight, "main_grad") or hasattr(weight, "__fsdp_param__"):
        gradient = torch.zeros_like(weight)
        add_to(gradient[:tokens])
        return gradient
    add_to(weight.main_grad[:tokens])
    weight.grad_added_to_main_grad = True
    # The tied embedding on the same stage returns a gradient to autograd, which megatron-core adds.
    if getattr(weight, "zero_out_wgrad", False):
        return None
    # Otherwise a gradient is needed to trigger megatron-core's hook, which does not read it.
    return torch.empty_like(weight)


def _losses(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    loss_positions: LossPositions,
    selected: slice,
    shard: VocabShard,
    delta: torch.Tensor | None = None,
) -> torch.Tensor:
    """[2, M] fp32: losses and log-sum-exps of the `selected` loss positions with states `hidden`. Writes the gradient
    of the logits (of loss and z-loss) into the columns of `delta` that are tokens."""
    rows = hidden.shape[0]
    found = torch.empty(2, rows, dtype=torch.float32, device=hidden.device)
    targets = loss_positions.targets[selected]
    noise = None if loss_positions.noise is None else loss_positions.noise.each(lambda tensor: tensor[selected])
    z_factors = None if loss_positions.z_factors is None else loss_positions.z_factors[selected]
    columns = shard.aligned(weight).t()
    if hidden.device.type != "cuda":
        columns = columns.float()  # once for all chunks
    for part in _parts(rows, max(1, CHUNK_BYTES // (4 * columns.shape[1]))):
        logits = _product(hidden[part], columns)[:, : shard.tokens]
        gradient = None if delta is None else delta[part, : shard.tokens]
        if noise is None and loss_positions.certainty is not None:
            here = _certain_cross_entropy(logits, targets[part], loss_positions.certainty, shard, gradient)
        elif noise is None:
            here = _cross_entropy(logits, targets[part], shard, gradient)
        else:
            of_part = noise.each(lambda tensor, part=part: tensor[part])  # type: ignore[misc]
            here = _divergence(logits, targets[part], of_part, shard, gradient)
        found[0, part], found[1, part] = here
        if gradient is not None and z_factors is not None:
            _kernel(_add_z_gradient, logits.device.type)(logits, here[1], z_factors[part], gradient)
    return found


def _cross_entropy(
    logits_MV: torch.Tensor, targets_M: torch.Tensor, shard: VocabShard, delta_MV: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """[M] fp32 cross-entropies, and [M] log-sum-exps; `delta_MV` becomes softmax minus target."""
    device, targets_M = logits_MV.device.type, targets_M - shard.first
    total_M, losses_M = _kernel(_combine, device)(_gathered(_kernel(_statistics, device)(logits_MV, targets_M), shard))
    if delta_MV is not None:
        _kernel(_gradient, device)(logits_MV, total_M, targets_M, delta_MV)
    return losses_M, total_M


def _certain_cross_entropy(
    logits_MV: torch.Tensor,
    targets_M: torch.Tensor,
    certainty: Certainty,
    shard: VocabShard,
    delta_MV: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """[M] fp32 cross-entropies with certainty-forcing, and [M] log-sum-exps; `delta_MV` becomes the gradient of the
    former."""
    device, targets_M = logits_MV.device.type, targets_M - shard.first
    found = _gathered(_kernel(_statistics, device)(logits_MV, targets_M), shard)
    total_M, losses_M = _kernel(_combine, device)(found)
    right_M = found[:, 2].sum(0) >= found[:, 0].amax(0)
    scaled = _kernel(_entropy_sums, device)(logits_MV, found[:, 0].amax(0), certainty.temperature)
    sum_M, mean_M = _gathered(scaled, shard).sum(0)
    entropies_M = sum_M.log() - mean_M / sum_M
    if delta_MV is not None:
        shares_M = torch.where(right_M, certainty.weight / certainty.temperature, 0.0)
        _kernel(_certain_gradient, device)(
            logits_MV, total_M, targets_M, found[:, 0].amax(0), sum_M, entropies_M, shares_M, certainty.temperature,
            delta_MV,
        )  # fmt: skip
    return losses_M + torch.where(right_M, certainty.weight * entropies_M, 0.0), total_M


def _divergence(
    logits_MV: torch.Tensor,
    targets_M: torch.Tensor,
    noise: NoisePositions,
    shard: VocabShard,
    delta_MV: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """[M] fp32 divergences of random tokens, and [M] log-sum-exps; `delta_MV` becomes the gradient of the former. The
    mask token is never predicted."""
    device, mask = logits_MV.device.type, noise.mask_token_id - shard.first
    if noise.mask_token_id >= 0 and 0 <= mask < logits_MV.shape[1]:
        logits_MV[:, mask] = -torch.inf
    clean_M, observed_M = targets_M - shard.first, noise.tokens - shard.first
    # Cross-entropies of the clean and of the noisy token (infinite for a mask), then sums over the vocabulary of
    # functions of the softmax.
    found = torch.stack([_kernel(_statistics, device)(logits_MV, tokens_M) for tokens_M in (clean_M, observed_M)])
    found = _gathered(found, shard)
    (total_M, clean_loss_M), (_, observed_loss_M) = (_kernel(_combine, device)(found[:, which]) for which in (0, 1))
    logs_M, slopes_M = _gathered(_kernel(_logs, device)(logits_MV, total_M, noise.ratio), shard).sum(0)
    x_clean_M, x_observed_M = (-clean_loss_M).exp(), (-observed_loss_M).exp()
    same_M = noise.tokens == targets_M
    if delta_MV is not None:
        _kernel(_divergence_gradient, device)(
            logits_MV, total_M, clean_M, observed_M, x_clean_M, x_observed_M, slopes_M, same_M, noise.ratio,
            noise.spread, delta_MV,
        )  # fmt: skip
    return divergence(x_clean_M, x_observed_M, logs_M, same_M, noise.ratio, noise.spread), total_M


def _gathered(found: torch.Tensor, shard: VocabShard) -> torch.Tensor:
    """[T, ...]: results of the T ranks, gathered on every rank."""
    if shard.group is None or shard.group.size() == 1:
        return found[None]
    all_ranks = found.new_empty(shard.group.size(), *found.shape)
    dist.all_gather_into_tensor(all_ranks, found[None].contiguous(), group=shard.group)
    return all_ranks


def _statistics(logits_MV: torch.Tensor, targets_M: torch.Tensor) -> torch.Tensor:
    """[3, M]: largest logit, sum of exponentials relative to it, logit of the target (0 if on another rank)."""
    largest = logits_MV.amax(1)
    total = torch.exp(logits_MV - largest[:, None]).sum(1)
    here = (targets_M >= 0) & (targets_M < logits_MV.shape[1])
    target = logits_MV.gather(1, targets_M.clamp(0, logits_MV.shape[1] - 1)[:, None]).squeeze(1)
    return torch.stack([largest, total, torch.where(here, target, 0.0)])


def _combine(statistics_T3M: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[M] log-sum-exp over all ranks, and [M] cross-entropy."""
    largest_T, total_T, target_T = statistics_T3M.unbind(1)
    largest = largest_T.amax(0)
    total = largest + torch.log((total_T * torch.exp(largest_T - largest)).sum(0))
    return total, total - target_T.sum(0)


def _gradient(logits_MV: torch.Tensor, total_M: torch.Tensor, targets_M: torch.Tensor, delta_MV: torch.Tensor) -> None:
    """Write softmax minus target into `delta_MV`."""
    tokens = torch.arange(logits_MV.shape[1], device=logits_MV.device)
    target = (tokens == targets_M[:, None]).to(logits_MV.dtype)
    delta_MV.copy_(torch.exp(logits_MV - total_M[:, None]) - target)


def _add_z_gradient(
    logits_MV: torch.Tensor, total_M: torch.Tensor, factors_M: torch.Tensor, delta_MV: torch.Tensor
) -> None:
    """Add the gradient of factor * log-sum-exp^2 to `delta_MV`."""
    delta_MV.add_(torch.exp(logits_MV - total_M[:, None]) * (2 * factors_M * total_M)[:, None])


def _entropy_sums(logits_MV: torch.Tensor, largest_M: torch.Tensor, temperature: float) -> torch.Tensor:
    """[2, M]: sums of exp(u_j) and u_j exp(u_j) over this rank's tokens, where u_j = (logit_j - largest logit of all
    ranks) / temperature."""
    below_MV = (logits_MV - largest_M[:, None]) / temperature
    weights_MV = below_MV.exp()
    return torch.stack([weights_MV.sum(1), (weights_MV * below_MV).sum(1)])


def _certain_gradient(
    logits_MV: torch.Tensor,
    total_M: torch.Tensor,
    targets_M: torch.Tensor,
    largest_M: torch.Tensor,
    sum_M: torch.Tensor,
    entropies_M: torch.Tensor,
    shares_M: torch.Tensor,
    temperature: float,
    delta_MV: torch.Tensor,
) -> None:
    """Write softmax minus target minus shares_M * p_j (log p_j + entropy) into `delta_MV`, where p is the softmax at
    the temperature."""
    tokens_V = torch.arange(logits_MV.shape[1], device=logits_MV.device)
    target_MV = (tokens_V == targets_M[:, None]).to(logits_MV.dtype)
    log_p_MV = (logits_MV - largest_M[:, None]) / temperature - sum_M.log()[:, None]
    certain_MV = shares_M[:, None] * log_p_MV.exp() * (log_p_MV + entropies_M[:, None])
    delta_MV.copy_(torch.exp(logits_MV - total_M[:, None]) - target_MV - certain_MV)


def _logs(logits_MV: torch.Tensor, total_M: torch.Tensor, ratio_M: torch.Tensor) -> torch.Tensor:
    """[2, M]: sums of log(1 + ratio x_j) and x_j ratio / (1 + ratio x_j) over this rank's tokens."""
    scaled_MV = ratio_M[:, None] * torch.exp(logits_MV - total_M[:, None])
    return torch.stack([torch.log1p(scaled_MV).sum(1), (scaled_MV / (1 + scaled_MV)).sum(1)])


def _divergence_gradient(
    logits_MV: torch.Tensor,
    total_M: torch.Tensor,
    clean_M: torch.Tensor,
    observed_M: torch.Tensor,
    x_clean_M: torch.Tensor,
    x_observed_M: torch.Tensor,
    slopes_M: torch.Tensor,
    same_M: torch.Tensor,
    ratio_M: torch.Tensor,
    spread_M: torch.Tensor,
    delta_MV: torch.Tensor,
) -> None:
    """Write the gradient of `divergence` with respect to the logits into `delta_MV`: x_j (g_j - sum_i x_i g_i), where
    g is the gradient with respect to x. Every g_j contains -spread ratio / (1 + ratio x_j); the clean and the noisy
    token have an additional part."""
    tokens_V = torch.arange(logits_MV.shape[1], device=logits_MV.device)
    x_MV = torch.exp(logits_MV - total_M[:, None])
    clean_part_M = -spread_M * ratio_M * ratio_M * x_clean_M / (1 + ratio_M * x_clean_M)
    denominator_M = 1 + ratio_M * x_observed_M
    r_M = torch.where(same_M, 1 + ratio_M, 1.0) / denominator_M
    observed_part_M = x_observed_M * ratio_M * (1 - r_M) / denominator_M
    mean_M = clean_part_M + observed_part_M - spread_M * slopes_M
    everywhere_MV = -spread_M[:, None] * ratio_M[:, None] * x_MV / (1 + ratio_M[:, None] * x_MV)
    own_MV = torch.where(tokens_V == clean_M[:, None], clean_part_M[:, None], 0.0)
    own_MV = own_MV + torch.where(tokens_V == observed_M[:, None], observed_part_M[:, None], 0.0)
    delta_MV.copy_(everywhere_MV + own_MV - x_MV * mean_M[:, None])


@cache
def _kernel(function: Callable[..., Any], device: str) -> Callable[..., Any]:
    """Compile a function on CUDA, where its operations would otherwise be several passes over the logits."""
    return torch.compile(function) if device == "cuda" else function


def _product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """left @ right in fp32; the factors may be in half precision on CUDA."""
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
    """Multiply rows by fp32 factors, in the rows' dtype."""
    return (values_MN * scale_M[:, None]).to(values_MN.dtype)


def _aligned_rows(rows: int, columns: int, like: torch.Tensor) -> torch.Tensor:
    """Uninitialised [rows, columns] with aligned rows, for fast matrix products."""
    return like.new_empty(rows, -(-columns // ALIGNED) * ALIGNED)[:, :columns]


def _parts(rows: int, most: int) -> list[slice]:
    """Slices of about equal size, at most `most` rows each, in whole tiles if possible."""
    tile = TILE if most >= TILE else 1
    pieces = -(-rows // (most // tile * tile))
    size = -(-rows // max(1, pieces * tile)) * tile
    return [slice(start, min(start + size, rows)) for start in range(0, rows, max(1, size))]
