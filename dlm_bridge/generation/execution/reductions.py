"""The best token of a position, and a token's probability: Triton kernels over the vocabulary. Imports Triton.

They read the logits once and write one number a position, where PyTorch writes probabilities of the logits' size.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = 8192  # tokens that a program looks at in one turn of its loop
_LOWEST: tl.constexpr = tl.constexpr(
    -3e38
)  # below every logit but minus infinity; finite: the difference of two infinities is none


def serves(logits: torch.Tensor) -> bool:
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
