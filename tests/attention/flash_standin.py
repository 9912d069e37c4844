"""Functions with the signatures of FlashAttention 4's, in plain torch on any device and in any dtype."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch


def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    softmax_scale: float,
    causal: bool,
    return_lse: bool,
    out: torch.Tensor,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
) -> tuple[Any, ...]:
    """Writes into `out`, as the kernels do."""
    assert return_lse
    checked(q, k, v, out)
    found, sums = attend(q, k, v, softmax_scale, causal, cu_seqlens_q)
    out.copy_(found)
    return out, sums, None, None, None


def backward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    dout: torch.Tensor,
    lse: torch.Tensor,
    *,
    softmax_scale: float,
    causal: bool,
    dq: torch.Tensor,
    dk: torch.Tensor,
    dv: torch.Tensor,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
) -> tuple[torch.Tensor, ...]:
    """Writes into `dq`, `dk` and `dv`; `out` and `lse` have to be what the forward gave."""
    checked(q, k, v, out, dout, dq, dk, dv)
    again, sums = attend(q, k, v, softmax_scale, causal, cu_seqlens_q)
    torch.testing.assert_close(again, out)
    torch.testing.assert_close(sums, lse)
    bounds = [0, q.shape[0]] if cu_seqlens_q is None else cu_seqlens_q.tolist()
    for begin, end in pairwise(bounds):
        mine = [tensor[begin:end] for tensor in (q, k, v, out, dout, dq, dk, dv)]
        if cu_seqlens_q is not None:
            mine = [tensor[None] for tensor in mine]
        for room, gradient in zip(mine[5:], _gradients(*mine[:5], softmax_scale, causal), strict=True):
            room.copy_(gradient)
    return dq, dk, dv


def checked(*tensors: torch.Tensor) -> None:
    """What the kernels ask of memory: they would copy, or fail."""
    for tensor in tensors:
        assert tensor.stride(-1) == 1
        assert 0 not in tensor.stride()


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, causal: bool, starts: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention [B, S, H, D] and the logarithms of the softmax's sums [B, H, S]; of documents [T, H, D], [H, T]."""
    if starts is not None:
        bounds = starts.tolist()
        parts = [
            attend(*(tensor[None, begin:end] for tensor in (q, k, v)), scale, causal, None)
            for begin, end in pairwise(bounds)
        ]
        return torch.cat([part[0][0] for part in parts]), torch.cat([part[1][0] for part in parts], dim=-1)
    chances, sums = _softmax(q, k, scale, causal)
    return torch.einsum("bhqk,bkhd->bqhd", chances, _of_heads(v, q)).to(v.dtype), sums


def _gradients(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    dout: torch.Tensor,
    scale: float,
    causal: bool,
) -> tuple[torch.Tensor, ...]:
    """By hand, since torch records nothing inside of an operation."""
    chances, _ = _softmax(q, k, scale, causal)
    products = torch.einsum("bqhd,bkhd->bhqk", dout.float(), _of_heads(v, q))
    products = chances * (products - (dout.float() * out.float()).sum(-1).transpose(1, 2)[..., None]) * scale
    dq = torch.einsum("bhqk,bkhd->bqhd", products, _of_heads(k, q))
    dk = torch.einsum("bhqk,bqhd->bkhd", products, q.float())
    dv = torch.einsum("bhqk,bqhd->bkhd", chances, dout.float())
    return dq, *(tensor.unflatten(2, (k.shape[2], -1)).sum(3) for tensor in (dk, dv))


def _softmax(q: torch.Tensor, k: torch.Tensor, scale: float, causal: bool) -> tuple[torch.Tensor, torch.Tensor]:
    scores = torch.einsum("bqhd,bkhd->bhqk", q.float(), _of_heads(k, q)) * scale
    if causal:
        scores = scores.masked_fill(torch.ones_like(scores[0, 0], dtype=torch.bool).triu(1), float("-inf"))
    return scores.softmax(-1), scores.logsumexp(-1)


def _of_heads(tensor: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    return tensor.float().repeat_interleave(q.shape[2] // tensor.shape[2], dim=2)
