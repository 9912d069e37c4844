"""Triton kernels: attention over the KV cache, best and drawn tokens, token probability. Imports Triton.

Attention: a query group is one matrix whose rows are the queries of all heads that share keys, so that keys and values
are read from the cache once. New keys and values are read from the input and written to the cache in the same pass, so
that no program reads memory that another one writes. With fewer groups than multiprocessors, several programs share a
group's columns, and a second kernel merges their partial results (flash-decoding,
https://pytorch.org/blog/flash-decoding).

Vocabulary reductions: the logits are read once (three times for a draw) and one number is written per position,
whereas PyTorch writes probabilities of the logits' size. A position's result does not depend on other positions.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from dlm_bridge.kernels.elementwise import multiprocessors

# Score of a masked column. Finite: the difference of two infinities is NaN.
_MASKED_SCORE: tl.constexpr = tl.constexpr(-1e30)
_LOG2_E = 1.4426950408889634
_SCANNED = 512  # columns of a mask that are read together


@dataclass(frozen=True)
class AttentionTiles:
    """Tile sizes and launch options.

    Args:
        rows: maximum number of rows per program; a power of two, at least 16.
        keys: columns per iteration of a program's loop.
    """

    rows: int = 64
    keys: int = 64
    warps: int = 4
    stages: int = 3


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    columns: torch.Tensor,
    end: int,
    mask: torch.Tensor | None,
    scaling: float | None,
    length: torch.Tensor | None = None,
    block: int | None = None,
    tiles: AttentionTiles | None = None,
    splits: int | None = None,
) -> torch.Tensor:
    """Write `key` and `value` to the cache and attend to its first `end` columns.

    Args:
        query, key, value: [B, heads, Q, D] and twice [B, groups, Q, D], of any strides with stride 1 along D.
        key_cache, value_cache: [B, groups, K or more, D]; changed in place.
        columns: consecutive cache columns of the new keys, [Q], or [B, Q] per row. Columns from `end` on, and repeated
            ones after the others, are written but not attended to.
        mask: [B or 1, 1, 1, K] boolean, True at columns to attend to; None: all. The result is zero for a row without
            any.
        scaling: factor of the scores, by default 1 / sqrt(D).
        length: [1], the number of columns to attend to as a tensor on the device, so that one CUDA graph serves every
            length.
        block: length of the blocks in which attention among the new columns, which are the last ones, is block-causal.
        splits: number of programs that share a group's columns; by default as many as fill the GPU.

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
    sums, marks = output, output  # unused without splits
    if splits > 1:
        sums = query.new_empty(batch * groups, splits, rows, size, dtype=torch.float32)
        marks = query.new_empty(2, batch * groups, splits, rows, dtype=torch.float32)
    scale = (size**-0.5 if scaling is None else scaling) * _LOG2_E
    with torch.cuda.device_of(query):
        _attend_kernel[(batch * groups, row_tiles, splits)](
            query,
            key,
            value,
            key_cache,
            value_cache,
            columns if mask is None else mask,
            columns,
            columns if length is None else length,
            output,
            sums,
            marks,
            end,
            width if block is None else block,
            scale,
            *query.stride()[:3],
            *key.stride()[:3],
            *value.stride()[:3],
            *key_cache.stride()[:3],
            *value_cache.stride()[:3],
            0 if mask is None or len(mask) == 1 else mask.stride(0),
            0 if mask is None else mask.stride(3),
            0 if columns.dim() == 1 else columns.stride(0),
            columns.stride(-1),
            groups,
            width,
            rows,
            SIZE=size,
            ROWS=tile,
            KEYS=tiles.keys,
            NEW=max(16, triton.next_power_of_2(width)),
            SCANNED=_SCANNED,
            MASKED=mask is not None,
            HAS_LENGTH=length is not None,
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
    """True if `attend` supports these inputs: few queries, and one mask for all queries of a row."""
    return (
        dtype in (torch.bfloat16, torch.float16, torch.float32)
        and size in (16, 32, 64, 128, 256)
        and (mask is None or (mask.shape[2] == 1 and mask.dtype == torch.bool))
        and width <= 64
        and heads_per_group * width <= 512
    )


def _tiles(programs: int, rows: int, row_bytes: int, device: torch.device) -> AttentionTiles:
    """Tile sizes, tuned with `benchmarks/attention.py --tune` on an H200."""
    if row_bytes > 256:  # prefetched tiles must fit in shared memory
        return AttentionTiles(rows=32, keys=32, stages=2)
    many = programs >= 4 * multiprocessors(device)  # many programs hide latency: small tiles are best
    return AttentionTiles(keys=32, warps=2) if many and rows <= 32 else AttentionTiles()


def _splits(programs: int, turns: int, device: torch.device) -> int:
    """Number of splits: about two programs per multiprocessor, of two or more loop iterations each. Short loops are
    not split."""
    return max(1, min(2 * multiprocessors(device) // programs, turns // 2)) if turns >= 8 else 1


@triton.jit
def _scores(query, key, attended, scale, precision: tl.constexpr):  # type: ignore[no-untyped-def]
    """Scores [rows, columns], masked by `attended` [1 or rows, columns]."""
    scores = tl.dot(query, tl.trans(key), input_precision=precision) * scale
    return tl.where(attended, scores, _MASKED_SCORE)


@triton.jit
def _accumulate(total, peak, mass, scores, attended, value, precision: tl.constexpr):  # type: ignore[no-untyped-def]
    """Accumulate another tile's columns into the running softmax."""
    higher = tl.maximum(peak, tl.max(scores, 1))
    shrink = tl.exp2(peak - higher)
    weights = tl.where(attended, tl.exp2(scores - higher[:, None]), 0.0)
    total = total * shrink[:, None] + tl.dot(weights.to(value.dtype), value, input_precision=precision)
    return total, higher, mass * shrink + tl.sum(weights, 1)


@triton.jit(do_not_specialize=["end"])
def _attend_kernel(  # type: ignore[no-untyped-def]
    query, key, value, key_cache, value_cache, mask, columns, length, output, sums, marks, end, block, scale,
    query_b, query_h, query_q, key_b, key_g, key_q, value_b, value_g, value_q,
    key_cache_b, key_cache_g, key_cache_c, value_cache_b, value_cache_g, value_cache_c, mask_b, mask_c,
    columns_b, columns_q,
    groups, width, rows,
    SIZE: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, NEW: tl.constexpr, SCANNED: tl.constexpr,
    MASKED: tl.constexpr, HAS_LENGTH: tl.constexpr, SPLIT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    pair, tile, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if HAS_LENGTH:
        end = tl.minimum(end, tl.load(length).to(tl.int32))
    b, g = (pair // groups).to(tl.int64), pair % groups
    n = tl.arange(0, NEW)
    written = n < width
    column = tl.load(columns + b * columns_b + n * columns_q, mask=written, other=0).to(tl.int32)
    # The new columns to attend to are one run among the written ones.
    is_new = written & (column < end)
    shift = tl.max(tl.where(is_new, column - n, -NEW), 0)
    is_new = is_new & (column - n == shift)
    first = tl.min(tl.where(is_new, column, end), 0)
    last = tl.max(tl.where(is_new, column + 1, 0), 0)
    shared = rows // width  # heads per group
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

    keys_of_group = key_cache + b * key_cache_b + g * key_cache_g
    values_of_group = value_cache + b * value_cache_b + g * value_cache_g
    start = 0
    if MASKED:  # the loop skips padding at the start of a row
        start = end
        for begin in range(0, end, SCANNED):
            c = begin + tl.arange(0, SCANNED)
            unmasked = tl.load(mask + b * mask_b + c * mask_c, mask=c < end, other=0) != 0
            start = tl.minimum(start, tl.min(tl.where(unmasked, c, end), 0))
    per_split = tl.cdiv(tl.cdiv(end - start, KEYS), tl.num_programs(2)) * KEYS
    for begin in range(start + split * per_split, tl.minimum(start + (split + 1) * per_split, end), KEYS):
        c = begin + tl.arange(0, KEYS)
        attended = (c < first) | ((c >= last) & (c < end))
        if MASKED:
            attended = attended & (tl.load(mask + b * mask_b + c * mask_c, mask=c < end, other=0) != 0)
        key_tile = tl.load(keys_of_group + c[:, None] * key_cache_c + d[None, :], mask=attended[:, None], other=0.0)
        value_tile = tl.load(
            values_of_group + c[:, None] * value_cache_c + d[None, :], mask=attended[:, None], other=0.0
        )
        scores = _scores(query_tile, key_tile, attended[None, :], scale, PRECISION)
        total, peak, mass = _accumulate(total, peak, mass, scores, attended[None, :], value_tile, PRECISION)

    if split == 0:
        attended = is_new
        if MASKED:
            attended = attended & (tl.load(mask + b * mask_b + column * mask_c, mask=is_new, other=0) != 0)
        key_tile = tl.load(
            key + b * key_b + g * key_g + n[:, None] * key_q + d[None, :], mask=written[:, None], other=0.0
        )
        value_tile = tl.load(
            value + b * value_b + g * value_g + n[:, None] * value_q + d[None, :], mask=written[:, None], other=0.0
        )
        attended_new = attended[None, :] & (n[None, :] // block <= at[:, None] // block)
        scores = _scores(query_tile, key_tile, attended_new, scale, PRECISION)
        total, peak, mass = _accumulate(total, peak, mass, scores, attended_new, value_tile, PRECISION)
        if tile == 0:
            keys_written = keys_of_group + column[:, None] * key_cache_c + d[None, :]
            values_written = values_of_group + column[:, None] * value_cache_c + d[None, :]
            tl.store(keys_written, key_tile, mask=written[:, None])
            tl.store(values_written, value_tile, mask=written[:, None])

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
    """Merge the partial softmaxes of one row of a group."""
    pair, r = tl.program_id(0).to(tl.int64), tl.program_id(1)
    b, g = pair // groups, pair % groups
    shared = rows // width
    s, d = tl.arange(0, SPLITS), tl.arange(0, SIZE)
    place = (pair * splits + s) * rows + r
    peaks = tl.load(marks + place, mask=s < splits, other=_MASKED_SCORE)
    masses = tl.load(marks + tl.num_programs(0).to(tl.int64) * splits * rows + place, mask=s < splits, other=0.0)
    weights = tl.exp2(peaks - tl.max(peaks, 0))
    sums_SD = tl.load(sums + place[:, None] * SIZE + d[None, :], mask=(s < splits)[:, None], other=0.0)
    mass = tl.sum(weights * masses, 0)
    total = tl.sum(weights[:, None] * sums_SD, 0) / tl.where(mass > 0, mass, 1.0)
    at = (b * width + r % width) * (groups * shared) + g * shared + r // width
    tl.store(output + at * SIZE + d, total.to(output.dtype.element_ty))


_BLOCK = 8192  # tokens per iteration of a program's loop
_LOWEST: tl.constexpr = tl.constexpr(-3e38)  # below every finite logit


def supports_logits(logits: torch.Tensor) -> bool:
    """True if the vocabulary kernels support these logits."""
    return (
        logits.dim() == 3 and logits.stride(-1) == 1 and logits.dtype in (torch.bfloat16, torch.float16, torch.float)
    )


def best_token(logits_ANV: torch.Tensor, without: int) -> torch.Tensor:
    """Token with the highest logit except the token `without`, [A, N]; the first one of equal logits."""
    return _launch(_best_token_kernel, logits_ANV, torch.long, without)


def draw_token(logits_ANV: torch.Tensor, without: int, uniform_AN: torch.Tensor) -> torch.Tensor:
    """Inverse-CDF sampling from softmax(logits) except the token `without`, [A, N]: the first token whose cumulative
    probability exceeds `uniform_AN`, float64 on (0, 1). Exponentials are float32, sums float64."""
    return _launch(_draw_token_kernel, logits_ANV, torch.long, without, uniform_AN.contiguous())


def probability_of(tokens_AN: torch.Tensor, logits_ANV: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """softmax(logits) at the tokens in `dtype`, [A, N], computed in float64 for that dtype, else in float32."""
    accumulator = tl.float64 if dtype == torch.float64 else tl.float32
    return _launch(_probability_kernel, logits_ANV, dtype, tokens_AN.contiguous(), ACCUMULATOR=accumulator)


def _launch(
    kernel: triton.JITFunction, logits_ANV: torch.Tensor, dtype: torch.dtype, *of: object, **options: object
) -> torch.Tensor:
    rows, positions, vocabulary = logits_ANV.shape
    output = torch.empty(rows, positions, dtype=dtype, device=logits_ANV.device)
    if output.numel():
        with torch.cuda.device_of(logits_ANV):
            kernel[(rows * positions,)](
                logits_ANV,
                *of,
                output,
                positions,
                vocabulary,
                *logits_ANV.stride()[:2],
                BLOCK=_BLOCK,
                num_warps=8,
                **options,
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
        x = _others(logits, v, vocabulary, without)
        token = tl.where(x > best, v, token)
        best = tl.maximum(best, x)
    tl.store(output + row, tl.min(tl.where(best == tl.max(best, 0), token, vocabulary), 0).to(tl.int64))


@triton.jit(do_not_specialize=["without"])
def _draw_token_kernel(  # type: ignore[no-untyped-def]
    logits, without, uniform, output, positions, vocabulary, stride_a, stride_n, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    logits += row // positions * stride_a + row % positions * stride_n
    highest = tl.full((BLOCK,), _LOWEST, tl.float32)
    for begin in range(0, vocabulary, BLOCK):
        highest = tl.maximum(highest, _others(logits, begin + tl.arange(0, BLOCK), vocabulary, without))
    peak = tl.max(highest, 0)
    total = tl.full((), 0, tl.float64)
    for begin in range(0, vocabulary, BLOCK):
        x = _others(logits, begin + tl.arange(0, BLOCK), vocabulary, without)
        total += tl.sum(tl.exp(x - peak).to(tl.float64), 0)
    # Less than the total, and the same sums are computed again below: rounding leaves no remainder for a rare token.
    target = tl.load(uniform + row) * total
    before = tl.full((), 0, tl.float64)
    token = vocabulary
    for begin in range(0, vocabulary, BLOCK):
        v = begin + tl.arange(0, BLOCK)
        weight = tl.exp(_others(logits, v, vocabulary, without) - peak).to(tl.float64)
        after = before + tl.sum(weight, 0)
        if (token == vocabulary) & (after > target):
            reached = (before + tl.cumsum(weight, 0) > target) & (weight > 0)
            last = tl.max(tl.where(weight > 0, v, 0), 0)
            token = tl.minimum(tl.min(tl.where(reached, v, vocabulary), 0), last)
        before = after
    # For NaN logits: any other token.
    tl.store(output + row, tl.where(token == vocabulary, without == 0, token).to(tl.int64))


@triton.jit
def _others(logits, v, vocabulary, without):  # type: ignore[no-untyped-def]
    """Logits, minus infinity at `without`. (As a mask of the load it would prevent vectorised loads.)"""
    x = tl.load(logits + v, mask=v < vocabulary, other=float("-inf")).to(tl.float32)
    return tl.where(v == without, float("-inf"), x)


@triton.jit
def _probability_kernel(  # type: ignore[no-untyped-def]
    logits, tokens, output, positions, vocabulary, stride_a, stride_n, BLOCK: tl.constexpr, ACCUMULATOR: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    logits += row // positions * stride_a + row % positions * stride_n
    peak = tl.full((), _LOWEST, tl.float32)
    mass = tl.zeros((BLOCK,), ACCUMULATOR)
    for begin in range(0, vocabulary, BLOCK):
        v = begin + tl.arange(0, BLOCK)
        x = tl.load(logits + v, mask=v < vocabulary, other=float("-inf")).to(tl.float32)
        higher = tl.maximum(peak, tl.max(x, 0))
        # With float64 the differences as well: those of float32 logits have more digits than float32.
        shrink = tl.exp(peak.to(ACCUMULATOR) - higher.to(ACCUMULATOR))
        mass = mass * shrink + tl.exp(x.to(ACCUMULATOR) - higher.to(ACCUMULATOR))
        peak = higher
    own = tl.load(logits + tl.load(tokens + row)).to(tl.float32)
    probability = tl.exp(own.to(ACCUMULATOR) - peak.to(ACCUMULATOR)) / tl.sum(mass, 0)
    tl.store(output + row, probability.to(output.dtype.element_ty))


def philox_uniform(seed: torch.Tensor, major: torch.Tensor, minor: torch.Tensor) -> torch.Tensor:
    """Same numbers as `dlm_bridge.objectives.noise.philox_uniform` in one launch; arguments are [A, 1] or [A, N]."""
    seed, major, minor = torch.broadcast_tensors(seed, major, minor)
    output = torch.empty(minor.shape, dtype=torch.float64, device=minor.device)
    if output.numel():
        with torch.cuda.device_of(output):
            strides = [stride for one in (seed, major, minor) for stride in one.stride()]
            _philox_kernel[(triton.cdiv(output.numel(), _NUMBERS),)](
                seed, major, minor, output, output.numel(), output.shape[1], *strides, BLOCK=_NUMBERS
            )
    return output


_NUMBERS = 256  # numbers per program


@triton.jit
def _philox_kernel(  # type: ignore[no-untyped-def]
    seed, major, minor, output, count, width, seed_a, seed_n, major_a, major_n, minor_a, minor_n, BLOCK: tl.constexpr
):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    a, n = (i // width).to(tl.int64), i % width
    key = tl.load(seed + a * seed_a + n * seed_n, mask=i < count, other=0)
    high = tl.load(major + a * major_a + n * major_n, mask=i < count, other=0)
    low = tl.load(minor + a * minor_a + n * minor_n, mask=i < count, other=0)
    words = tl.philox(key, _word(low), _word(low >> 32), _word(high), _word(high >> 32))
    bits = (words[0].to(tl.uint64) << 20) | (words[1].to(tl.uint64) >> 12)
    tl.store(output + i, (bits.to(tl.float64) + 0.5) * (1.0 / 4503599627370496), mask=i < count)


@triton.jit
def _word(number):  # type: ignore[no-untyped-def]
    return (number & 0xFFFFFFFF).to(tl.uint32)
