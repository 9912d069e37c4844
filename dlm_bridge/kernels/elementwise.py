"""Triton kernels of the elementwise operations of a decoder layer, as custom operators. Imports Triton.

Each kernel rounds as transformers' layers do and returns the same numbers: statistics and functions are computed in
float32, and every product and sum is rounded to the dtype that PyTorch would use. A kernel reads and writes memory
once, whereas the layers write every intermediate result (those of a norm in float32).
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MAX_NORM_SIZE = 16384  # maximum row length of a norm, which one program loads whole
_TILE = 2048  # maximum number of elements per program
_PROGRAMS = 8  # programs per multiprocessor, above which a program processes several rows


@torch.library.custom_op("dlm_bridge::rms_norm", mutates_args=())
def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`rms_norm_torch` in one launch. Returns [..., H]."""
    x = x.contiguous()
    output = torch.empty_like(x)
    _launch_norm(x, None, weight, None, output, eps)
    return output


@torch.library.custom_op("dlm_bridge::add_rms_norm", mutates_args=())
def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """`x + residual` and its `rms_norm_torch` in one launch. Returns [..., H] twice."""
    x, residual = x.contiguous(), residual.contiguous()
    total, output = torch.empty_like(x), torch.empty_like(x)
    _launch_norm(x, residual, weight, total, output, eps)
    return total, output


@torch.library.custom_op("dlm_bridge::silu_and_mul", mutates_args=())
def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up, [..., I], of the concatenated gate and up, [..., 2 * I]."""
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
    """Rotary embedding of the queries and keys of a QKV projection: `rotate_torch` in one launch.

    Args:
        qkv: [B, S, C], query heads, key heads and value heads, in this order.
        cos, sin: [B or 1, S, R], in the dtype of `qkv` or in float32; the first R numbers of a head are rotated.
        query_weight, key_weight: [D], weights of the RMSNorm of each head before the rotation; None: no norm.
        eps: epsilon of that norm.
        queries, keys: number of query heads, and of key heads.

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
    tile = _rows_per_program(tokens * heads, _TILE // 2 // half_tile, qkv.device)
    with torch.cuda.device_of(qkv):
        _rotate_kernel[(triton.cdiv(tokens * heads, tile),)](
            qkv,
            cos,
            sin,
            qkv if query_weight is None else query_weight,
            qkv if key_weight is None else key_weight,
            output,
            tokens * heads,
            cos.shape[0] * cos.shape[1],
            eps,
            QUERIES=queries,
            HEADS=heads,
            CHANNELS=channels,
            SIZE=size,
            HALF=half,
            REST=rest,
            HALF_TILE=half_tile,
            REST_TILE=triton.next_power_of_2(max(rest, 1)),
            NORMED=query_weight is not None,
            ROWS=tile,
            num_warps=min(4, max(1, tile * half_tile // 256)),
            enable_fp_fusion=False,  # a fused multiply-add would not round the product
        )
    return output


@torch.library.custom_op("dlm_bridge::sum_experts", mutates_args=())
def sum_experts(rows: torch.Tensor, places: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Weighted sum of the expert outputs of each token, [N, H]: `sum_experts_torch` in one launch.

    Args:
        rows: [N * K, H], outputs of the experts.
        places: [N * K], index into `rows` for each token and each of its experts.
        weights: [N, K], routing weights in the dtype of `rows` or in float32.
    """
    rows, places, weights = rows.contiguous(), places.contiguous(), weights.contiguous()
    (tokens, experts), size = weights.shape, rows.shape[1]
    output = rows.new_empty(tokens, size)
    if output.numel():
        block = min(1024, triton.next_power_of_2(size))
        with torch.cuda.device_of(rows):
            _sum_experts_kernel[(tokens, triton.cdiv(size, block))](
                rows,
                places,
                weights,
                output,
                size,
                EXPERTS=experts,
                BLOCK=block,
                num_warps=max(1, block // 256),
                enable_fp_fusion=False,  # as in `rotate_heads`
            )
    return output


@torch.library.custom_op("dlm_bridge::route_in_groups", mutates_args=())
def route_in_groups(
    logits: torch.Tensor, bias: torch.Tensor, groups: int, top_groups: int, top: int, normalised: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Group-limited routing: `route_in_groups_torch` in one launch. Of equal scores the lowest expert index wins.

    Args:
        logits: [N, E], float32.

    Returns:
        Weights [N, top] in float32, and expert indices [N, top].
    """
    logits, bias = logits.contiguous(), bias.contiguous()
    tokens, experts = logits.shape
    weights = logits.new_empty(tokens, top)
    chosen = torch.empty(tokens, top, dtype=torch.int64, device=logits.device)
    if tokens:
        with torch.cuda.device_of(logits):
            _route_kernel[(tokens,)](
                logits,
                bias,
                weights,
                chosen,
                scale,
                GROUPS=groups,
                MEMBERS=experts // groups,
                GROUP_TILE=triton.next_power_of_2(groups),
                MEMBER_TILE=triton.next_power_of_2(experts // groups),
                TOP_GROUPS=top_groups,
                TOP=top,
                TOP_TILE=triton.next_power_of_2(top),
                NORMALISED=normalised,
                num_warps=1,
            )
    return weights, chosen


def rms_norm_torch(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm as in transformers' Llama: rounded to the dtype of `x` before the multiplication with the weight."""
    x_float = x.float()
    normed = x_float * torch.rsqrt(x_float.pow(2).mean(-1, keepdim=True) + eps)
    return weight * normed.to(x.dtype)


def rotate_torch(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of heads [B, S, heads, D] as in transformers' Llama, computed in the wider dtype of `x` and the
    tables and rounded to that of `x`. The two halves of the first R numbers are rotated into each other."""
    cos, sin = cos.unsqueeze(2), sin.unsqueeze(2)
    turned, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    first, second = turned.chunk(2, dim=-1)
    turned = turned * cos + torch.cat([-second, first], dim=-1) * sin
    return torch.cat([turned.to(x.dtype), rest], dim=-1)


def sum_experts_torch(rows: torch.Tensor, places: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Weighted sum of expert outputs as in transformers: products in the wider dtype, summed in float32."""
    products = rows[places].view(*weights.shape, -1) * weights[..., None]
    return products.sum(dim=1).to(rows.dtype)


def route_in_groups_torch(
    logits: torch.Tensor, bias: torch.Tensor, groups: int, top_groups: int, top: int, normalised: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sigmoid router as in DeepSeek-V3, GLM-4.5 and LLaDA2: the best `top` experts of the best groups. The score of a
    group is the sum of its two best experts. The bias affects the choice, not the weights."""
    scores = logits.sigmoid()
    choice = scores + bias
    in_groups = choice.unflatten(-1, (groups, -1))
    best = in_groups.topk(2, dim=-1).values.sum(dim=-1).topk(top_groups, dim=-1).indices
    closed = torch.ones_like(in_groups[..., 0], dtype=torch.bool).scatter(-1, best, False)
    experts = in_groups.masked_fill(closed[..., None], -torch.inf).flatten(-2).topk(top, dim=-1).indices
    weights = scores.gather(-1, experts)
    if normalised:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
    return weights * scale, experts


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
    """Number of rows per program, a power of two."""
    share = rows // (_PROGRAMS * multiprocessors(device))
    return 1 << (max(1, min(share, most)).bit_length() - 1)


@functools.cache
def multiprocessors(device: torch.device) -> int:
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
    qkv, cos, sin, query_weight, key_weight, output, rows, angles, eps,
    QUERIES: tl.constexpr, HEADS: tl.constexpr, CHANNELS: tl.constexpr, SIZE: tl.constexpr,
    HALF: tl.constexpr, REST: tl.constexpr, HALF_TILE: tl.constexpr, REST_TILE: tl.constexpr,
    NORMED: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    # A row is a head of a token.
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token, head = row // HEADS, row % HEADS
    column, rest = tl.arange(0, HALF_TILE), 2 * HALF + tl.arange(0, REST_TILE)
    inside, behind = column < HALF, rest < SIZE
    turned, kept = (row < rows)[:, None] & inside[None, :], (row < rows)[:, None] & behind[None, :]
    # Products and sums are rounded to the dtype of cos and sin, which is that of the heads or wider.
    wider: tl.constexpr = cos.dtype.element_ty
    own: tl.constexpr = output.dtype.element_ty
    angle = (token % angles).to(tl.int64)[:, None] * (2 * HALF) + column[None, :]
    cos1 = tl.load(cos + angle, mask=turned, other=0.0).to(tl.float32)
    cos2 = tl.load(cos + HALF + angle, mask=turned, other=0.0).to(tl.float32)
    sin1 = tl.load(sin + angle, mask=turned, other=0.0).to(tl.float32)
    sin2 = tl.load(sin + HALF + angle, mask=turned, other=0.0).to(tl.float32)
    source = qkv + (token.to(tl.int64) * CHANNELS + head * SIZE)[:, None]
    target = output + row.to(tl.int64)[:, None] * SIZE
    x1 = tl.load(source + column[None, :], mask=turned, other=0.0).to(tl.float32)
    x2 = tl.load(source + HALF + column[None, :], mask=turned, other=0.0).to(tl.float32)
    if REST > 0:
        x3 = tl.load(source + rest[None, :], mask=kept, other=0.0).to(tl.float32)
    if NORMED:
        squares = tl.sum(x1 * x1, axis=1) + tl.sum(x2 * x2, axis=1)
        if REST > 0:
            squares += tl.sum(x3 * x3, axis=1)
        scale = tl.rsqrt(squares / SIZE + eps)[:, None]
        is_query = (head < QUERIES)[:, None]
        x1 = _weighted(x1 * scale, query_weight, key_weight, is_query, column, inside, own)
        x2 = _weighted(x2 * scale, query_weight, key_weight, is_query, HALF + column, inside, own)
        if REST > 0:
            x3 = _weighted(x3 * scale, query_weight, key_weight, is_query, rest, behind, own)
    y1 = (x1 * cos1).to(wider).to(tl.float32) + (-x2 * sin1).to(wider).to(tl.float32)
    y2 = (x2 * cos2).to(wider).to(tl.float32) + (x1 * sin2).to(wider).to(tl.float32)
    tl.store(target + column[None, :], y1.to(wider).to(own), mask=turned)
    tl.store(target + HALF + column[None, :], y2.to(wider).to(own), mask=turned)
    if REST > 0:
        tl.store(target + rest[None, :], x3.to(own), mask=kept)


@triton.jit
def _weighted(normed, query_weight, key_weight, is_query, column, inside, own: tl.constexpr):  # type: ignore[no-untyped-def]
    """Multiply columns of normalised heads by the norm's weights for queries or keys."""
    of_query = tl.load(query_weight + column, mask=inside, other=0.0)
    of_key = tl.load(key_weight + column, mask=inside, other=0.0)
    weight = tl.where(is_query, of_query[None, :], of_key[None, :]).to(tl.float32)
    return (weight * normed.to(own).to(tl.float32)).to(own).to(tl.float32)


@triton.jit
def _sum_experts_kernel(  # type: ignore[no-untyped-def]
    rows, places, weights, output, size, EXPERTS: tl.constexpr, BLOCK: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = column < size
    wider: tl.constexpr = weights.dtype.element_ty
    total = tl.zeros((BLOCK,), tl.float32)
    for lane in tl.static_range(min(4, EXPERTS)):  # PyTorch's sum has four partial sums
        part = tl.zeros((BLOCK,), tl.float32)
        for expert in tl.static_range(lane, EXPERTS, 4):
            pair = token * EXPERTS + expert
            value = tl.load(rows + tl.load(places + pair).to(tl.int64) * size + column, mask=there, other=0.0)
            part += (tl.load(weights + pair).to(tl.float32) * value.to(tl.float32)).to(wider).to(tl.float32)
        total += part
    tl.store(output + token * size + column, total.to(output.dtype.element_ty), mask=there)


@triton.jit
def _route_kernel(  # type: ignore[no-untyped-def]
    logits, bias, weights, experts, scale,
    GROUPS: tl.constexpr, MEMBERS: tl.constexpr, GROUP_TILE: tl.constexpr, MEMBER_TILE: tl.constexpr,
    TOP_GROUPS: tl.constexpr, TOP: tl.constexpr, TOP_TILE: tl.constexpr, NORMALISED: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    group, member = tl.arange(0, GROUP_TILE), tl.arange(0, MEMBER_TILE)
    exists = (group < GROUPS)[:, None] & (member < MEMBERS)[None, :]
    expert = group[:, None] * MEMBERS + member[None, :]
    logit = tl.load(logits + token * GROUPS * MEMBERS + expert, mask=exists, other=0.0)
    score = 1 / (1 + tl.exp(-logit))
    choice = tl.where(exists, score + tl.load(bias + expert, mask=exists, other=0.0).to(tl.float32), -float("inf"))
    if TOP_GROUPS < GROUPS:
        best = tl.max(choice, 1)
        at_best = tl.min(tl.where(choice == best[:, None], member[None, :], MEMBER_TILE), 1)
        second = tl.max(tl.where(member[None, :] == at_best[:, None], -float("inf"), choice), 1)
        of_group = tl.where(group < GROUPS, best + second, -float("inf"))
        chosen = tl.zeros((GROUP_TILE,), tl.int32)
        for _ in tl.static_range(TOP_GROUPS):
            left = tl.where(chosen > 0, -float("inf"), of_group)
            first = tl.min(tl.where(left == tl.max(left, 0), group, GROUP_TILE), 0)
            chosen = tl.where(group == first, 1, chosen)
        choice = tl.where(chosen[:, None] > 0, choice, -float("inf"))
    rank = tl.arange(0, TOP_TILE)
    kept, kept_score, total = tl.zeros((TOP_TILE,), tl.int32), tl.zeros((TOP_TILE,), tl.float32), 0.0
    for place in tl.static_range(TOP):
        highest = tl.max(tl.max(choice, 1), 0)
        first = tl.min(tl.min(tl.where(choice == highest, expert, GROUPS * MEMBERS), 1), 0)
        own = tl.sum(tl.sum(tl.where(expert == first, score, 0.0), 1), 0)
        choice = tl.where(expert == first, -float("inf"), choice)
        kept, kept_score = tl.where(rank == place, first, kept), tl.where(rank == place, own, kept_score)
        total += own
    if NORMALISED:
        kept_score = kept_score / (total + 1e-20)
    tl.store(weights + token * TOP + rank, kept_score * scale, mask=rank < TOP)
    tl.store(experts + token * TOP + rank, kept.to(tl.int64), mask=rank < TOP)
