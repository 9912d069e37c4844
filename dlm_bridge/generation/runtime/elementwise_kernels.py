"""Triton kernels of what a decoder layer does between its matrix products, as custom operators. Imports Triton.

Each rounds where transformers' own layers round, so that it gives their numbers: statistics and functions in float32,
every product and sum to the dtype that PyTorch would give it. A pass over memory takes place once, where the layers
write each intermediate result, those of a norm in float32.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MAX_NORM_SIZE = 16384  # of a row, which one program holds
_TILE = 2048  # elements of a program, at most
_PROGRAMS = 8  # of each multiprocessor, before one takes several rows


@torch.library.custom_op("dlm_bridge::rms_norm", mutates_args=())
def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`rms_norm_torch` in one launch. [..., H]."""
    x = x.contiguous()
    output = torch.empty_like(x)
    _launch_norm(x, None, weight, None, output, eps)
    return output


@torch.library.custom_op("dlm_bridge::add_rms_norm", mutates_args=())
def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """x + residual and its `rms_norm_torch` in one launch. Twice [..., H]."""
    x, residual = x.contiguous(), residual.contiguous()
    total, output = torch.empty_like(x), torch.empty_like(x)
    _launch_norm(x, residual, weight, total, output, eps)
    return total, output


@torch.library.custom_op("dlm_bridge::silu_and_mul", mutates_args=())
def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """[..., I], silu(gate) * up of [..., 2 * I], gate and up side by side."""
    gate_up = gate_up.contiguous()
    size = gate_up.shape[-1] // 2
    output = gate_up.new_empty(*gate_up.shape[:-1], size)
    if output.numel():
        block = 512 if size % 1024 else 1024
        grid = (output.numel() // size, triton.cdiv(size, block))
        with torch.cuda.device_of(gate_up):
            _silu_and_mul_kernel[grid](gate_up, output, size, BLOCK=block, num_warps=block // 256)
    return output


@torch.library.custom_op("dlm_bridge::rotate_heads", mutates_args=())
def rotate_heads(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    query_weight: torch.Tensor | None,
    key_weight: torch.Tensor | None,
    eps: float,
    queries: int,
    keys: int,
) -> torch.Tensor:
    """Queries and keys with rotary embedding, out of a QKV projection: `rotate_torch` in one launch.

    Args:
        qkv: [B, S, C], the query heads, then the key heads, then as many value heads.
        cos, sin: [B or 1, S, R], in the dtype of `qkv` or in float32; the first R numbers of a head are rotated.
        query_weight, key_weight: [D], of the heads' RMSNorm with this `eps`, before they are rotated; None: no norm.
        queries, keys: numbers of heads.

    Returns:
        [B, S, queries + keys, D].
    """
    qkv, cos, sin = qkv.contiguous(), cos.contiguous(), sin.contiguous()
    batch, width, channels = qkv.shape
    size, rotated, heads = channels // (queries + 2 * keys), cos.shape[-1], queries + keys
    output = qkv.new_empty(batch, width, heads, size)
    tokens = batch * width
    if not tokens:
        return output
    half, rest = rotated // 2, size - rotated
    half_tile = triton.next_power_of_2(half)
    tile = _rows_per_program(tokens, _TILE // 2 // half_tile, qkv.device)
    tiles = triton.cdiv(tokens, tile)
    # Programs share a token's heads where there are few tokens; else angles are read once for all heads.
    per_program = triton.cdiv(heads, min(heads, max(1, _PROGRAMS * _multiprocessors(qkv.device) // tiles)))
    with torch.cuda.device_of(qkv):
        _rotate_kernel[(tiles, triton.cdiv(heads, per_program))](
            qkv,
            cos,
            sin,
            qkv if query_weight is None else query_weight,
            qkv if key_weight is None else key_weight,
            output,
            tokens,
            cos.shape[0] * cos.shape[1],
            eps,
            queries,
            heads,
            channels,
            per_program,
            SIZE=size,
            HALF=half,
            REST=rest,
            HALF_TILE=half_tile,
            REST_TILE=triton.next_power_of_2(max(rest, 1)),
            NORMED=query_weight is not None,
            TOKENS=tile,
            num_warps=4,
            enable_fp_fusion=False,  # a fused multiply-add would leave out the rounding of its product
        )
    return output


def rms_norm_torch(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm as transformers' Llama computes it: rounded to the dtype of `x` before the weight."""
    x_float = x.float()
    normed = x_float * torch.rsqrt(x_float.pow(2).mean(-1, keepdim=True) + eps)
    return weight * normed.to(x.dtype)


def rotate_torch(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of heads [B, S, heads, D] as transformers' Llama computes it, in the wider dtype of `x` and of
    cos and sin, and rounded to that of `x`. Two halves of the first R numbers are rotated into each other."""
    cos, sin = cos.unsqueeze(2), sin.unsqueeze(2)
    turned, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    first, second = turned.chunk(2, dim=-1)
    turned = turned * cos + torch.cat([-second, first], dim=-1) * sin
    return torch.cat([turned.to(x.dtype), rest], dim=-1)


def _launch_norm(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    total: torch.Tensor | None,
    output: torch.Tensor,
    eps: float,
) -> None:
    size = x.shape[-1]
    rows = x.numel() // size
    if not rows:
        return
    tile = triton.next_power_of_2(size)
    per_program = _rows_per_program(rows, _TILE // tile, x.device)
    with torch.cuda.device_of(x):
        _norm_kernel[(triton.cdiv(rows, per_program),)](
            x,
            x if residual is None else residual,
            weight,
            x if total is None else total,
            output,
            rows,
            eps,
            SIZE=size,
            TILE=tile,
            ROWS=per_program,
            ADD=residual is not None,
            num_warps=min(16, max(1, tile * per_program // 512)),
        )


def _rows_per_program(rows: int, most: int, device: torch.device) -> int:
    """A power of two."""
    share = rows // (_PROGRAMS * _multiprocessors(device))
    return 1 << (max(1, min(share, most)).bit_length() - 1)


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


@triton.jit
def _norm_kernel(  # type: ignore[no-untyped-def]
    x, residual, weight, total, output, rows, eps,
    SIZE: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, TILE)
    there = (row < rows)[:, None] & (column < SIZE)[None, :]
    place = row[:, None] * SIZE + column[None, :]
    value = tl.load(x + place, mask=there, other=0.0).to(tl.float32)
    if ADD:
        value += tl.load(residual + place, mask=there, other=0.0).to(tl.float32)
        rounded = value.to(total.dtype.element_ty)
        tl.store(total + place, rounded, mask=there)
        value = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, axis=1) / SIZE + eps)
    normed = (value * scale[:, None]).to(output.dtype.element_ty).to(tl.float32)
    factor = tl.load(weight + column, mask=column < SIZE, other=0.0).to(tl.float32)
    tl.store(output + place, (factor[None, :] * normed).to(output.dtype.element_ty), mask=there)


@triton.jit
def _silu_and_mul_kernel(gate_up, output, size, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = column < size
    gate = tl.load(gate_up + row * 2 * size + column, mask=there, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * size + size + column, mask=there, other=0.0).to(tl.float32)
    activated = (gate / (1 + tl.exp(-gate))).to(output.dtype.element_ty).to(tl.float32)
    tl.store(output + row * size + column, (activated * up).to(output.dtype.element_ty), mask=there)


@triton.jit
def _rotate_kernel(  # type: ignore[no-untyped-def]
    qkv, cos, sin, query_weight, key_weight, output,
    tokens, angles, eps, queries, heads, channels, per_program,
    SIZE: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr, HALF_TILE: tl.constexpr, REST_TILE: tl.constexpr,
    NORMED: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Some heads of some tokens."""
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    exists = token < tokens
    column, rest = tl.arange(0, HALF_TILE), 2 * HALF + tl.arange(0, REST_TILE)
    inside, behind = column < HALF, rest < SIZE
    turned, kept = exists[:, None] & inside[None, :], exists[:, None] & behind[None, :]
    # Products and sums are rounded to the dtype of the angles, which is that of the heads or wider.
    wider: tl.constexpr = cos.dtype.element_ty
    own: tl.constexpr = output.dtype.element_ty
    angle = (token % angles)[:, None] * (2 * HALF) + column[None, :]
    cos1 = tl.load(cos + angle, mask=turned, other=0.0).to(tl.float32)
    cos2 = tl.load(cos + HALF + angle, mask=turned, other=0.0).to(tl.float32)
    sin1 = tl.load(sin + angle, mask=turned, other=0.0).to(tl.float32)
    sin2 = tl.load(sin + HALF + angle, mask=turned, other=0.0).to(tl.float32)
    first = tl.program_id(1) * per_program
    for head in range(first, tl.minimum(first + per_program, heads)):
        source = qkv + token[:, None] * channels + head * SIZE
        x1 = tl.load(source + column[None, :], mask=turned, other=0.0).to(tl.float32)
        x2 = tl.load(source + HALF + column[None, :], mask=turned, other=0.0).to(tl.float32)
        target = output + token[:, None] * (heads * SIZE) + head * SIZE
        if NORMED:
            squares = tl.sum(x1 * x1, axis=1) + tl.sum(x2 * x2, axis=1)
        if REST > 0:
            x3 = tl.load(source + rest[None, :], mask=kept, other=0.0).to(tl.float32)
            if NORMED:
                squares += tl.sum(x3 * x3, axis=1)
        if NORMED:
            scale = tl.rsqrt(squares / SIZE + eps)
            x1 = _weighted(x1 * scale[:, None], query_weight, key_weight, head < queries, column, inside, own)
            x2 = _weighted(x2 * scale[:, None], query_weight, key_weight, head < queries, HALF + column, inside, own)
        y1 = (x1 * cos1).to(wider).to(tl.float32) + (-x2 * sin1).to(wider).to(tl.float32)
        y2 = (x2 * cos2).to(wider).to(tl.float32) + (x1 * sin2).to(wider).to(tl.float32)
        tl.store(target + column[None, :], y1.to(wider).to(own), mask=turned)
        tl.store(target + HALF + column[None, :], y2.to(wider).to(own), mask=turned)
        if REST > 0:
            if NORMED:
                x3 = _weighted(x3 * scale[:, None], query_weight, key_weight, head < queries, rest, behind, own)
            tl.store(target + rest[None, :], x3.to(own), mask=kept)


@triton.jit
def _weighted(normed, query_weight, key_weight, is_query, column, inside, own: tl.constexpr):  # type: ignore[no-untyped-def]
    """These columns of a head, by the weights of queries or of keys."""
    of_query = tl.load(query_weight + column, mask=inside & is_query, other=0.0)
    of_key = tl.load(key_weight + column, mask=inside & (is_query == 0), other=0.0)
    weight = tl.where(is_query, of_query, of_key).to(tl.float32)
    return (weight[None, :] * normed.to(own).to(tl.float32)).to(own).to(tl.float32)
