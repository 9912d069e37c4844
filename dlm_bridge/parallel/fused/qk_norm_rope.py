"""Fused split of the QKV projection, QK-norm and RoPE: one kernel for the forward and one for the backward pass.

Unfused, each pass copies the three parts and runs two kernels for norms and two for rotations, the backward pass also
a concatenation, each of them a pass over memory. Norms are RMSNorm (Zhang & Sennrich 2019) of each head, rotations
RoPE (Su et al. 2021); both are computed in fp32 and rounded once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

ROWS = 16  # query groups of tokens per tile
PROGRAMS = 1056  # maximum for a backward pass that sums the norms' gradients: 8 on each of 132 multiprocessors


@dataclass(frozen=True)
class HeadLayout:
    """Layout of a token's heads in the QKV projection: for each query group the queries, then a key, then a value."""

    queries: int  # per group
    size: int  # D, of one head
    eps: float  # of the norms
    interleaved: bool  # RoPE rotates pairs of neighbours instead of the two halves


def split_qkv(
    mixed_SBGC: torch.Tensor,
    table: torch.Tensor,
    query_weight_D: torch.Tensor | None,
    key_weight_D: torch.Tensor | None,
    heads: HeadLayout,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Split, normalise and rotate. Returns query [S, B, G * queries, D], key and value [S, B, G, D], contiguous.

    Args:
        mixed_SBGC: contiguous, C = (queries + 2) * D.
        table: [S, B or 1, 2, A / 2] fp32, cosines and sines of a position's angles; the first A of a head's D elements
            are rotated.
        query_weight_D: weight of the queries' RMSNorm; None for none. Both weights are given, or neither.
        key_weight_D: weight of the keys' RMSNorm.
    """
    return _Split.apply(mixed_SBGC, table, query_weight_D, key_weight_D, heads)


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        mixed: torch.Tensor,
        table: torch.Tensor,
        query_weight: torch.Tensor | None,
        key_weight: torch.Tensor | None,
        heads: HeadLayout,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        length, batch, groups, _ = mixed.shape
        query = mixed.new_empty(length, batch, groups * heads.queries, heads.size)
        key = mixed.new_empty(length, batch, groups, heads.size)
        value = torch.empty_like(key)
        normed = query_weight is not None
        # Without norms the backward pass does not read the product.
        ctx.save_for_backward(table, *((mixed, query_weight, key_weight) if normed else ()))
        ctx.heads, ctx.shape = heads, mixed.shape
        rows = length * batch * groups
        _forward_kernel[(triton.cdiv(rows, ROWS),)](
            mixed,
            table,
            query_weight if normed else mixed,
            key_weight if normed else mixed,
            query,
            key,
            value,
            rows,
            **_sizes(mixed.shape, table, heads, normed),
        )
        return query, key, value

    @staticmethod
    def backward(  # type: ignore[override, unused-ignore]
        ctx: Any, d_query: torch.Tensor, d_key: torch.Tensor, d_value: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        table, *of_norms = ctx.saved_tensors
        normed = bool(of_norms)
        d_query, d_key, d_value = (gradient.contiguous() for gradient in (d_query, d_key, d_value))
        d_mixed = d_query.new_empty(ctx.shape)
        length, batch, groups, _ = ctx.shape
        rows = length * batch * groups
        programs = triton.cdiv(rows, ROWS)
        if normed:
            programs = min(programs, PROGRAMS)
        mixed, query_weight, key_weight = of_norms if normed else (d_mixed,) * 3
        sums = table.new_empty(programs, 2, ctx.heads.size)  # partial sums of the weights' gradients
        _backward_kernel[(programs,)](
            mixed,
            table,
            query_weight,
            key_weight,
            d_query,
            d_key,
            d_value,
            d_mixed,
            sums,
            rows,
            **_sizes(ctx.shape, table, ctx.heads, normed),
        )
        if not normed:
            return d_mixed, None, None, None, None
        d_weights = sums.sum(dim=0)
        return d_mixed, None, d_weights[0].to(query_weight.dtype), d_weights[1].to(key_weight.dtype), None


def _sizes(shape: torch.Size, table: torch.Tensor, heads: HeadLayout, normed: bool) -> dict[str, Any]:
    """Common arguments of the two kernels."""
    half = table.shape[-1]
    rest = heads.size - 2 * half
    return {
        "eps": heads.eps,
        "per_angle": shape[2] * (shape[1] if table.shape[1] == 1 else 1),
        "QUERIES": heads.queries,
        "SIZE": heads.size,
        "HALF": half,
        "REST": rest,
        "HALF_TILE": triton.next_power_of_2(half),
        "REST_TILE": triton.next_power_of_2(max(rest, 1)),
        "SIZE_TILE": triton.next_power_of_2(heads.size),
        "NORMED": normed,
        "INTERLEAVED": heads.interleaved,
        "ROWS": ROWS,
    }


@triton.jit
def _columns(HALF: tl.constexpr, HALF_TILE: tl.constexpr, INTERLEAVED: tl.constexpr):  # type: ignore[no-untyped-def]
    """The two columns of each rotated pair, and the mask of the tile."""
    column = tl.arange(0, HALF_TILE)
    there = column < HALF
    if INTERLEAVED:
        return 2 * column, 2 * column + 1, there
    else:
        return column, HALF + column, there


@triton.jit
def _angles(table, row, per_angle, exists, HALF: tl.constexpr, HALF_TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Cosines and sines [ROWS, HALF]."""
    column = tl.arange(0, HALF_TILE)
    where = table + (row // per_angle)[:, None] * (2 * HALF) + column[None, :]
    return tl.load(where, mask=exists, other=0.0), tl.load(where + HALF, mask=exists, other=0.0)


@triton.jit
def _forward_kernel(  # type: ignore[no-untyped-def]
    mixed,
    table,
    query_weight,
    key_weight,
    query,
    key,
    value,
    rows,
    eps,
    per_angle,
    QUERIES: tl.constexpr,
    SIZE: tl.constexpr,
    HALF: tl.constexpr,
    REST: tl.constexpr,
    HALF_TILE: tl.constexpr,
    REST_TILE: tl.constexpr,
    SIZE_TILE: tl.constexpr,
    NORMED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Forward pass. A row is a query group of a token: `QUERIES` queries, a key and a value."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    there = row < rows
    first, second, inside = _columns(HALF, HALF_TILE, INTERLEAVED)
    turned = there[:, None] & inside[None, :]
    cosine, sine = _angles(table, row, per_angle, turned, HALF, HALF_TILE)
    rest = 2 * HALF + tl.arange(0, REST_TILE)
    kept = there[:, None] & (rest < SIZE)[None, :]
    for head in tl.static_range(QUERIES + 1):
        if head < QUERIES:
            target = query + (row * QUERIES + head) * SIZE
            weight = query_weight
        else:
            target = key + row * SIZE
            weight = key_weight
        source = mixed + (row * (QUERIES + 2) + head) * SIZE
        x1 = tl.load(source[:, None] + first[None, :], mask=turned, other=0.0).to(tl.float32)
        x2 = tl.load(source[:, None] + second[None, :], mask=turned, other=0.0).to(tl.float32)
        if REST > 0:
            x3 = tl.load(source[:, None] + rest[None, :], mask=kept, other=0.0).to(tl.float32)
        if NORMED:
            squares = tl.sum(x1 * x1 + x2 * x2, axis=1)
            if REST > 0:
                squares += tl.sum(x3 * x3, axis=1)
            scale = tl.rsqrt(squares / SIZE + eps)[:, None]
            x1 *= scale * tl.load(weight + first, mask=inside, other=0.0).to(tl.float32)[None, :]
            x2 *= scale * tl.load(weight + second, mask=inside, other=0.0).to(tl.float32)[None, :]
            if REST > 0:
                x3 *= scale * tl.load(weight + rest, mask=rest < SIZE, other=0.0).to(tl.float32)[None, :]
        y1 = x1 * cosine - x2 * sine
        y2 = x2 * cosine + x1 * sine
        tl.store(target[:, None] + first[None, :], y1.to(query.dtype.element_ty), mask=turned)
        tl.store(target[:, None] + second[None, :], y2.to(query.dtype.element_ty), mask=turned)
        if REST > 0:
            tl.store(target[:, None] + rest[None, :], x3.to(query.dtype.element_ty), mask=kept)
    column = tl.arange(0, SIZE_TILE)
    whole = there[:, None] & (column < SIZE)[None, :]
    copied = tl.load((mixed + (row * (QUERIES + 2) + QUERIES + 1) * SIZE)[:, None] + column[None, :], mask=whole)
    tl.store((value + row * SIZE)[:, None] + column[None, :], copied, mask=whole)


@triton.jit
def _backward_kernel(  # type: ignore[no-untyped-def]
    mixed,
    table,
    query_weight,
    key_weight,
    d_query,
    d_key,
    d_value,
    d_mixed,
    sums,
    rows,
    eps,
    per_angle,
    QUERIES: tl.constexpr,
    SIZE: tl.constexpr,
    HALF: tl.constexpr,
    REST: tl.constexpr,
    HALF_TILE: tl.constexpr,
    REST_TILE: tl.constexpr,
    SIZE_TILE: tl.constexpr,
    NORMED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Gradients of a program's rows. With norms, whose scale is recomputed, also partial sums of the weights'
    gradients over the program's rows, in a fixed order."""
    first, second, inside = _columns(HALF, HALF_TILE, INTERLEAVED)
    rest = 2 * HALF + tl.arange(0, REST_TILE)
    column = tl.arange(0, SIZE_TILE)
    query_sum1 = tl.zeros((ROWS, HALF_TILE), tl.float32)
    query_sum2 = tl.zeros((ROWS, HALF_TILE), tl.float32)
    query_sum3 = tl.zeros((ROWS, REST_TILE), tl.float32)
    key_sum1 = tl.zeros((ROWS, HALF_TILE), tl.float32)
    key_sum2 = tl.zeros((ROWS, HALF_TILE), tl.float32)
    key_sum3 = tl.zeros((ROWS, REST_TILE), tl.float32)
    for block in range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0)):
        row = tl.cast(block, tl.int64) * ROWS + tl.arange(0, ROWS)
        there = row < rows
        turned = there[:, None] & inside[None, :]
        kept = there[:, None] & (rest < SIZE)[None, :]
        cosine, sine = _angles(table, row, per_angle, turned, HALF, HALF_TILE)
        for head in tl.static_range(QUERIES + 1):
            if head < QUERIES:
                source = d_query + (row * QUERIES + head) * SIZE
                weight = query_weight
            else:
                source = d_key + row * SIZE
                weight = key_weight
            place = (row * (QUERIES + 2) + head) * SIZE
            y1 = tl.load(source[:, None] + first[None, :], mask=turned, other=0.0).to(tl.float32)
            y2 = tl.load(source[:, None] + second[None, :], mask=turned, other=0.0).to(tl.float32)
            d1 = y1 * cosine + y2 * sine
            d2 = y2 * cosine - y1 * sine
            if REST > 0:
                d3 = tl.load(source[:, None] + rest[None, :], mask=kept, other=0.0).to(tl.float32)
            if NORMED:
                x1 = tl.load((mixed + place)[:, None] + first[None, :], mask=turned, other=0.0).to(tl.float32)
                x2 = tl.load((mixed + place)[:, None] + second[None, :], mask=turned, other=0.0).to(tl.float32)
                squares = tl.sum(x1 * x1 + x2 * x2, axis=1)
                if REST > 0:
                    x3 = tl.load((mixed + place)[:, None] + rest[None, :], mask=kept, other=0.0).to(tl.float32)
                    squares += tl.sum(x3 * x3, axis=1)
                scale = tl.rsqrt(squares / SIZE + eps)[:, None]
                x1 *= scale
                x2 *= scale
                if head < QUERIES:
                    query_sum1 += d1 * x1
                    query_sum2 += d2 * x2
                else:
                    key_sum1 += d1 * x1
                    key_sum2 += d2 * x2
                d1 *= tl.load(weight + first, mask=inside, other=0.0).to(tl.float32)[None, :]
                d2 *= tl.load(weight + second, mask=inside, other=0.0).to(tl.float32)[None, :]
                product = tl.sum(d1 * x1 + d2 * x2, axis=1)
                if REST > 0:
                    x3 *= scale
                    if head < QUERIES:
                        query_sum3 += d3 * x3
                    else:
                        key_sum3 += d3 * x3
                    d3 *= tl.load(weight + rest, mask=rest < SIZE, other=0.0).to(tl.float32)[None, :]
                    product += tl.sum(d3 * x3, axis=1)
                mean = (product / SIZE)[:, None]
                d1 = scale * (d1 - x1 * mean)
                d2 = scale * (d2 - x2 * mean)
                if REST > 0:
                    d3 = scale * (d3 - x3 * mean)
            target = d_mixed + place
            tl.store(target[:, None] + first[None, :], d1.to(d_mixed.dtype.element_ty), mask=turned)
            tl.store(target[:, None] + second[None, :], d2.to(d_mixed.dtype.element_ty), mask=turned)
            if REST > 0:
                tl.store(target[:, None] + rest[None, :], d3.to(d_mixed.dtype.element_ty), mask=kept)
        whole = there[:, None] & (column < SIZE)[None, :]
        copied = tl.load((d_value + row * SIZE)[:, None] + column[None, :], mask=whole)
        tl.store((d_mixed + (row * (QUERIES + 2) + QUERIES + 1) * SIZE)[:, None] + column[None, :], copied, mask=whole)
    if NORMED:
        mine = sums + tl.program_id(0) * 2 * SIZE
        tl.store(mine + first, tl.sum(query_sum1, axis=0), mask=inside)
        tl.store(mine + second, tl.sum(query_sum2, axis=0), mask=inside)
        tl.store(mine + SIZE + first, tl.sum(key_sum1, axis=0), mask=inside)
        tl.store(mine + SIZE + second, tl.sum(key_sum2, axis=0), mask=inside)
        if REST > 0:
            tl.store(mine + rest, tl.sum(query_sum3, axis=0), mask=rest < SIZE)
            tl.store(mine + SIZE + rest, tl.sum(key_sum3, axis=0), mask=rest < SIZE)
