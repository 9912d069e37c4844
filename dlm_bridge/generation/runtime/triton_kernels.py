"""Triton kernels: attention over the KV cache, best token and token probability. Imports Triton.

Attention: a query group is one matrix, whose rows are the queries of all heads that share keys, so that keys and values
are read once from the cache. New keys and values are attended to where they come from and written to the cache in the
same pass: no program reads what another writes. Where there are fewer groups than multiprocessors, several programs
share a group's columns and a second kernel merges their partial results (flash-decoding,
https://pytorch.org/blog/flash-decoding).

Vocabulary reductions: the logits are read once and one number is written per position, where PyTorch writes
probabilities of the logits' size.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

# Below this a score is that of no column at all. A finite number: the difference of two infinities is none.
_MASKED_SCORE: tl.constexpr = tl.constexpr(-1e30)
_LOG2_E = 1.4426950408889634


@dataclass(frozen=True)
class AttentionTiles:
    """How the work is cut.

    Args:
        rows: most rows of a program; a power of two, 16 at least.
        keys: columns that a program looks at in one turn of its loop.
    """

    rows: int = 64
    keys: int = 64
    warps: int = 4
    stages: int = 3


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    kept_keys: torch.Tensor,
    kept_values: torch.Tensor,
    columns: torch.Tensor,
    end: int,
    mask: torch.Tensor | None,
    scaling: float | None,
    ends: torch.Tensor | None = None,
    block: int | None = None,
    tiles: AttentionTiles | None = None,
    splits: int | None = None,
) -> torch.Tensor:
    """Keep `key` and `value` at their columns and attend to the first `end` columns of what is kept.

    Args:
        query, key, value: [B, heads, Q, D], [B, groups, Q, D] twice, of any strides with D's elements side by side.
        kept_keys, kept_values: [B, groups, K or more, D]; changed in place.
        columns: [Q], one after the other, the last of them before `end`.
        mask: [B or 1, 1, 1, K] boolean, True: may be looked at; None: all may. A row that sees nothing gets zero.
        scaling: what scores are multiplied with, by default 1 / sqrt(D).
        ends: [1], on the device, how many of those columns there are, so that a recorded launch serves every length.
        block: of the new columns a query sees its own block of so many and those before it; they are the last ones.
        splits: how many programs share a group's columns; by default as many as fill the GPU.

    Returns:
        [B, Q, heads, D].
    """
    if query.stride(-1) != 1 or key.stride(-1) != 1 or value.stride(-1) != 1:
        query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
    batch, heads, width, size = query.shape
    groups = key.shape[1]
    rows = heads // groups * width
    tiles = tiles or _tiles(batch * groups, rows, size * query.element_size(), query.device)
    tile = min(tiles.rows, max(16, triton.next_power_of_2(rows)))
    row_tiles = triton.cdiv(rows, tile)
    if splits is None:
        splits = _splits(batch * groups * row_tiles, triton.cdiv(end, tiles.keys), query.device)
    output = query.new_empty(batch, width, heads, size)
    sums, marks = output, output  # not looked at by a program that has a group's columns to itself
    if splits > 1:
        sums = query.new_empty(batch * groups, splits, rows, size, dtype=torch.float32)
        marks = query.new_empty(2, batch * groups, splits, rows, dtype=torch.float32)
    scale = (size**-0.5 if scaling is None else scaling) * _LOG2_E
    with torch.cuda.device_of(query):
        _attend_kernel[(batch * groups, row_tiles, splits)](
            query,
            key,
            value,
            kept_keys,
            kept_values,
            columns if mask is None else mask,
            columns,
            columns if ends is None else ends,
            output,
            sums,
            marks,
            end,
            width if block is None else block,
            scale,
            *query.stride()[:3],
            *key.stride()[:3],
            *value.stride()[:3],
            *kept_keys.stride()[:3],
            *kept_values.stride()[:3],
            0 if mask is None or len(mask) == 1 else mask.stride(0),
            0 if mask is None else mask.stride(3),
            groups,
            width,
            rows,
            SIZE=size,
            ROWS=tile,
            KEYS=tiles.keys,
            NEW=max(16, triton.next_power_of_2(width)),
            MASKED=mask is not None,
            ENDS=ends is not None,
            SPLIT=splits > 1,
            PRECISION="ieee" if query.dtype == torch.float32 else "tf32",
            num_warps=tiles.warps,
            num_stages=tiles.stages,
        )
        if splits > 1:
            _merge_kernel[(batch * groups, rows)](
                sums,
                marks,
                output,
                groups,
                width,
                rows,
                splits,
                SIZE=size,
                SPLITS=triton.next_power_of_2(splits),
                num_warps=1,
            )
    return output


def supports_attention(
    dtype: torch.dtype, width: int, heads_per_group: int, size: int, mask: torch.Tensor | None
) -> bool:
    """Whether `attend` is for so many new positions of heads of this size: short rows of queries, of which no mask
    says what each of them sees."""
    return (
        dtype in (torch.bfloat16, torch.float16, torch.float32)
        and size in (16, 32, 64, 128, 256)
        and (mask is None or (mask.shape[2] == 1 and mask.dtype == torch.bool))
        and width <= 64
        and heads_per_group * width <= 512
    )


def _tiles(programs: int, rows: int, row_bytes: int, device: torch.device) -> AttentionTiles:
    """By `benchmarks/attention.py --tune` on an H200."""
    if row_bytes > 256:  # what is loaded ahead has to fit the shared memory
        return AttentionTiles(rows=32, keys=32, stages=2)
    many = programs >= 4 * _multiprocessors(device)  # they hide each other's waits, the smaller the better
    return AttentionTiles(keys=32, warps=2) if many and rows <= 32 else AttentionTiles()


def _splits(programs: int, turns: int, device: torch.device) -> int:
    """As many as bring about two programs to each multiprocessor, each with two turns of its loop at least. A short
    loop takes no longer than to merge what several found."""
    return max(1, min(2 * _multiprocessors(device) // programs, turns // 2)) if turns >= 8 else 1


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


@triton.jit
def _scores(query, key, seen, scale, precision: tl.constexpr):  # type: ignore[no-untyped-def]
    """[rows, columns]; `seen` is [1 or rows, columns]."""
    scores = tl.dot(query, tl.trans(key), input_precision=precision) * scale
    return tl.where(seen, scores, _MASKED_SCORE)


@triton.jit
def _accumulate(total, peak, mass, scores, seen, value, precision: tl.constexpr):  # type: ignore[no-untyped-def]
    """Take another tile's columns into the running softmax."""
    higher = tl.maximum(peak, tl.max(scores, 1))
    shrink = tl.exp2(peak - higher)
    weights = tl.where(seen, tl.exp2(scores - higher[:, None]), 0.0)
    total = total * shrink[:, None] + tl.dot(weights.to(value.dtype), value, input_precision=precision)
    return total, higher, mass * shrink + tl.sum(weights, 1)


@triton.jit(do_not_specialize=["end"])
def _attend_kernel(  # type: ignore[no-untyped-def]
    query, key, value, kept_keys, kept_values, mask, columns, ends, output, sums, marks, end, block, scale,
    query_b, query_h, query_q, key_b, key_g, key_q, value_b, value_g, value_q,
    kept_keys_b, kept_keys_g, kept_keys_c, kept_values_b, kept_values_g, kept_values_c, mask_b, mask_c,
    groups, width, rows,
    SIZE: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, NEW: tl.constexpr,
    MASKED: tl.constexpr, ENDS: tl.constexpr, SPLIT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    pair, tile, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if ENDS:
        end = tl.minimum(end, tl.load(ends).to(tl.int32))
    per_split = tl.cdiv(tl.cdiv(end, KEYS), tl.num_programs(2)) * KEYS
    b, g = (pair // groups).to(tl.int64), pair % groups
    first = tl.load(columns).to(tl.int32)
    last = first + width
    shared = rows // width  # heads of a group
    d = tl.arange(0, SIZE)

    r = tile * ROWS + tl.arange(0, ROWS)
    real = r < rows
    head, at = g * shared + r // width, r % width
    query_tile = tl.load(
        query + b * query_b + (head * query_h + at * query_q)[:, None] + d[None, :], mask=real[:, None], other=0.0
    )
    total = tl.zeros((ROWS, SIZE), tl.float32)
    peak = tl.full((ROWS,), _MASKED_SCORE, tl.float32)
    mass = tl.zeros((ROWS,), tl.float32)

    keys_of_group = kept_keys + b * kept_keys_b + g * kept_keys_g
    values_of_group = kept_values + b * kept_values_b + g * kept_values_g
    for begin in range(split * per_split, tl.minimum((split + 1) * per_split, end), KEYS):
        c = begin + tl.arange(0, KEYS)
        seen = (c < first) | ((c >= last) & (c < end))
        if MASKED:
            seen = seen & (tl.load(mask + b * mask_b + c * mask_c, mask=c < end, other=0) != 0)
        key_tile = tl.load(keys_of_group + c[:, None] * kept_keys_c + d[None, :], mask=seen[:, None], other=0.0)
        value_tile = tl.load(values_of_group + c[:, None] * kept_values_c + d[None, :], mask=seen[:, None], other=0.0)
        scores = _scores(query_tile, key_tile, seen[None, :], scale, PRECISION)
        total, peak, mass = _accumulate(total, peak, mass, scores, seen[None, :], value_tile, PRECISION)

    if split == 0:
        n = tl.arange(0, NEW)
        is_new = n < width
        seen = is_new
        if MASKED:
            seen = seen & (tl.load(mask + b * mask_b + (first + n) * mask_c, mask=is_new, other=0) != 0)
        key_tile = tl.load(
            key + b * key_b + g * key_g + n[:, None] * key_q + d[None, :], mask=is_new[:, None], other=0.0
        )
        value_tile = tl.load(
            value + b * value_b + g * value_g + n[:, None] * value_q + d[None, :], mask=is_new[:, None], other=0.0
        )
        of_block = seen[None, :] & (n[None, :] // block <= at[:, None] // block)
        scores = _scores(query_tile, key_tile, of_block, scale, PRECISION)
        total, peak, mass = _accumulate(total, peak, mass, scores, of_block, value_tile, PRECISION)
        if tile == 0:
            c = first + n
            tl.store(keys_of_group + c[:, None] * kept_keys_c + d[None, :], key_tile, mask=is_new[:, None])
            tl.store(values_of_group + c[:, None] * kept_values_c + d[None, :], value_tile, mask=is_new[:, None])

    if SPLIT:
        place = (pair.to(tl.int64) * tl.num_programs(2) + split) * rows + r
        tl.store(sums + place[:, None] * SIZE + d[None, :], total, mask=real[:, None])
        tl.store(marks + place, peak, mask=real)
        tl.store(marks + tl.num_programs(0).to(tl.int64) * tl.num_programs(2) * rows + place, mass, mask=real)
    else:
        total = total / tl.where(mass > 0, mass, 1.0)[:, None]
        place = (b * width + at) * (groups * shared) + head
        tl.store(output + place[:, None] * SIZE + d[None, :], total.to(output.dtype.element_ty), mask=real[:, None])


@triton.jit
def _merge_kernel(  # type: ignore[no-untyped-def]
    sums, marks, output, groups, width, rows, splits, SIZE: tl.constexpr, SPLITS: tl.constexpr
):
    """One row of a group: what its columns' programs found becomes one softmax."""
    pair, r = tl.program_id(0).to(tl.int64), tl.program_id(1)
    b, g = pair // groups, pair % groups
    shared = rows // width
    s, d = tl.arange(0, SPLITS), tl.arange(0, SIZE)
    place = (pair * splits + s) * rows + r
    peaks = tl.load(marks + place, mask=s < splits, other=_MASKED_SCORE)
    masses = tl.load(marks + tl.num_programs(0).to(tl.int64) * splits * rows + place, mask=s < splits, other=0.0)
    weights = tl.exp2(peaks - tl.max(peaks, 0))
    found = tl.load(sums + place[:, None] * SIZE + d[None, :], mask=(s < splits)[:, None], other=0.0)
    mass = tl.sum(weights * masses, 0)
    total = tl.sum(weights[:, None] * found, 0) / tl.where(mass > 0, mass, 1.0)
    at = (b * width + r % width) * (groups * shared) + g * shared + r // width
    tl.store(output + at * SIZE + d, total.to(output.dtype.element_ty))


_BLOCK = 8192  # tokens that a program looks at in one turn of its loop
_LOWEST: tl.constexpr = tl.constexpr(
    -3e38
)  # below every logit but minus infinity; finite: the difference of two infinities is none


def supports_logits(logits: torch.Tensor) -> bool:
    """Whether the kernels are for such logits."""
    return (
        logits.dim() == 3 and logits.stride(-1) == 1 and logits.dtype in (torch.bfloat16, torch.float16, torch.float)
    )


def best_token(logits_ANV: torch.Tensor, without: int) -> torch.Tensor:
    """[A, N], the highest logit's token but `without`, the first of equal ones."""
    return _launch(_best_token_kernel, logits_ANV, torch.long, without)


def probability_of(tokens_AN: torch.Tensor, logits_ANV: torch.Tensor) -> torch.Tensor:
    """[A, N], softmax(logits) at the tokens, computed in float32, in the dtype of the logits."""
    return _launch(_probability_kernel, logits_ANV, logits_ANV.dtype, tokens_AN.contiguous())


def _launch(kernel: triton.JITFunction, logits_ANV: torch.Tensor, dtype: torch.dtype, of: object) -> torch.Tensor:
    rows, positions, vocabulary = logits_ANV.shape
    output = torch.empty(rows, positions, dtype=dtype, device=logits_ANV.device)
    if output.numel():
        with torch.cuda.device_of(logits_ANV):
            kernel[(rows * positions,)](
                logits_ANV, of, output, positions, vocabulary, *logits_ANV.stride()[:2], BLOCK=_BLOCK, num_warps=8
            )
    return output


@triton.jit(do_not_specialize=["without"])
def _best_token_kernel(  # type: ignore[no-untyped-def]
    logits, without, output, positions, vocabulary, stride_a, stride_n, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    logits += row // positions * stride_a + row % positions * stride_n
    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    token = tl.zeros((BLOCK,), tl.int32)
    for begin in range(0, vocabulary, BLOCK):
        v = begin + tl.arange(0, BLOCK)
        x = tl.load(logits + v, mask=v < vocabulary, other=float("-inf")).to(tl.float32)
        x = tl.where(v == without, float("-inf"), x)  # not a mask of the load, which would go one by one
        token = tl.where(x > best, v, token)
        best = tl.maximum(best, x)
    tl.store(output + row, tl.min(tl.where(best == tl.max(best, 0), token, vocabulary), 0).to(tl.int64))


@triton.jit
def _probability_kernel(  # type: ignore[no-untyped-def]
    logits, tokens, output, positions, vocabulary, stride_a, stride_n, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    logits += row // positions * stride_a + row % positions * stride_n
    peak = tl.full((), _LOWEST, tl.float32)
    mass = tl.zeros((BLOCK,), tl.float32)
    for begin in range(0, vocabulary, BLOCK):
        v = begin + tl.arange(0, BLOCK)
        x = tl.load(logits + v, mask=v < vocabulary, other=float("-inf")).to(tl.float32)
        higher = tl.maximum(peak, tl.max(x, 0))
        mass = mass * tl.exp(peak - higher) + tl.exp(x - higher)
        peak = higher
    own = tl.load(logits + tl.load(tokens + row)).to(tl.float32)
    tl.store(output + row, (tl.exp(own - peak) / tl.sum(mass, 0)).to(output.dtype.element_ty))
