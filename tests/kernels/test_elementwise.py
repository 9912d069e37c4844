"""The fused elementwise kernels against transformers' formulas: on a GPU, or on a CPU in Triton's interpreter."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch.nn.functional import silu
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
pytest.importorskip("triton")
pytestmark = pytest.mark.gpu(optional=True)

from dlm_bridge.kernels import elementwise  # noqa: E402
from tests.kernels.interpreted import round_to_nearest_bf16  # noqa: E402

DEVICE = "cpu" if INTERPRETED else "cuda"
DTYPES = pytest.mark.parametrize("dtype", elementwise.DTYPES, ids=str)
kernels = torch.ops.dlm_bridge


@pytest.fixture(autouse=True)
def _rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    if INTERPRETED:
        round_to_nearest_bf16(monkeypatch)


def random(seed: int, *shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def assert_an_ulp_apart(found: torch.Tensor, expected: torch.Tensor) -> None:
    """In half precision, where intermediate results are rounded in the same way, a few numbers are one ulp apart. In
    fp32, sums of squares and functions have errors of their own."""
    assert found.dtype == expected.dtype
    eps = torch.finfo(expected.dtype).eps
    if expected.dtype == torch.float32:
        torch.testing.assert_close(found, expected, rtol=8 * eps, atol=8 * eps)
    else:
        torch.testing.assert_close(found, expected, rtol=eps, atol=eps / 16)
        assert (found != expected).sum() <= 1 + found.numel() // 100


def norm(weight: torch.Tensor) -> Any:
    module = Qwen3RMSNorm(len(weight), eps=1e-6)
    module.weight.data = weight
    return module


@DTYPES
@pytest.mark.parametrize(("rows", "size"), [(3, 576), (37, 64), (1, 80), (2, 2049)])
def test_norm(rows: int, size: int, dtype: torch.dtype) -> None:
    x, residual = (random(seed, rows, size, dtype=dtype) for seed in (0, 1))
    weight = random(2, size, dtype=dtype)
    x[0] *= 1e-3  # where eps matters
    with torch.no_grad():
        assert_an_ulp_apart(kernels.rms_norm(x, weight, 1e-6), norm(weight)(x))
        total, normed = kernels.add_rms_norm(x[None], residual[None], weight, 1e-6)
        assert torch.equal(total, (x + residual)[None])
        assert_an_ulp_apart(normed, norm(weight)(total))
        odd = torch.cat([x, residual], dim=-1)[:, :size]  # rows that are not side by side
        assert_an_ulp_apart(kernels.rms_norm(odd, weight, 1e-6), norm(weight)(x))


@DTYPES
@pytest.mark.parametrize(("rows", "size"), [(3, 1536), (2, 37), (1, 1024)])
def test_gated_activation(rows: int, size: int, dtype: torch.dtype) -> None:
    gate_up = 4 * random(0, 2, rows, 2 * size, dtype=dtype)
    expected = silu(gate_up[..., :size]) * gate_up[..., size:]
    assert_an_ulp_apart(kernels.silu_and_mul(gate_up), expected)


@DTYPES
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(
    ("batch", "width", "queries", "keys", "size", "rotated"),
    [(1, 2, 9, 3, 64, 64), (1, 3, 2, 1, 48, 48), (3, 1, 2, 2, 40, 24)],
)
@pytest.mark.fast("*float32", "3-*bfloat16")
def test_rotary_embedding(
    batch: int, width: int, queries: int, keys: int, size: int, rotated: int, normed: bool, dtype: torch.dtype
) -> None:
    """Grouped queries, heads that are rotated in part, and norms of the heads; angles of the dtype and wider ones, of
    each row and of all."""
    qkv = random(0, batch, width, (queries + 2 * keys) * size, dtype=dtype)
    weights = [random(seed, size, dtype=dtype) for seed in (1, 2)]
    heads = qkv.view(batch, width, -1, size)
    query, key = heads[:, :, :queries], heads[:, :, queries : queries + keys]
    with torch.no_grad():
        if normed:
            query, key = (norm(weight)(part) for part, weight in zip((query, key), weights, strict=True))
    for wider, rows in ((dtype, batch), (torch.float32, 1)):
        angle = torch.rand(rows, width, rotated, generator=torch.Generator().manual_seed(3)) * 6
        cos, sin = angle.cos().to(DEVICE, wider), angle.sin().to(DEVICE, wider)
        found = kernels.rotate_heads(qkv, cos, sin, *(weights if normed else (None, None)), 1e-6, queries, keys)
        parts = (part[..., :rotated].transpose(1, 2) for part in (query, key))
        for part, turned, ours in zip(
            (query, key), apply_rotary_pos_emb(*parts, cos, sin), found.split((queries, keys), dim=2), strict=True
        ):
            assert_an_ulp_apart(ours[..., :rotated], turned.to(dtype).transpose(1, 2))
            assert_an_ulp_apart(ours[..., rotated:], part[..., rotated:])


@DTYPES
@pytest.mark.parametrize(("tokens", "experts", "size"), [(3, 8, 80), (2, 1, 24), (4, 6, 1030)])
def test_sum_of_experts(tokens: int, experts: int, size: int, dtype: torch.dtype) -> None:
    """With weights of the dtype and in float32, as routers have them."""
    rows = random(0, tokens * experts, size, dtype=dtype)
    places = torch.randperm(tokens * experts, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    for wider in {dtype, torch.float32}:
        weights = random(2, tokens, experts, dtype=wider)
        found, expected = (
            function(rows, places, weights) for function in (kernels.sum_experts, elementwise.sum_experts_torch)
        )
        assert_an_ulp_apart(found, expected)
        if not INTERPRETED:  # the order in which PyTorch sums on a GPU
            assert torch.equal(found, expected)


@pytest.mark.parametrize("normalised", [False, True])
@pytest.mark.parametrize(
    ("tokens", "experts", "groups", "top_groups", "top"), [(3, 256, 8, 4, 8), (2, 24, 3, 1, 3), (5, 10, 1, 1, 4)]
)
def test_router(tokens: int, experts: int, groups: int, top_groups: int, top: int, normalised: bool) -> None:
    """Includes a decisive bias, and numbers of groups and experts that are not powers of two."""
    logits, bias = random(0, tokens, experts, dtype=torch.float32), random(1, experts, dtype=torch.float32)
    settings = (groups, top_groups, top, normalised, 2.5)
    weights, chosen = kernels.route_in_groups(logits, bias, *settings)
    expected, order = elementwise.route_in_groups_torch(logits, bias, *settings)
    assert torch.equal(chosen, order)
    torch.testing.assert_close(weights, expected, rtol=1e-6, atol=0)
    alike = torch.zeros_like(logits)
    assert kernels.route_in_groups(alike, alike[0], *settings)[1].tolist() == [list(range(top))] * tokens


def test_nothing_to_compute() -> None:
    x = torch.zeros(0, 24, device=DEVICE)
    assert kernels.rms_norm(x, torch.ones(24, device=DEVICE), 1e-6).shape == (0, 24)
    assert kernels.silu_and_mul(x).shape == (0, 12)
    angles = torch.zeros(1, 0, 4, device=DEVICE)
    assert kernels.rotate_heads(x.view(1, 0, 24), angles, angles, None, None, 0.0, 4, 1).shape == (1, 0, 5, 4)
    assert kernels.sum_experts(x, torch.zeros(0, dtype=torch.int64, device=DEVICE), x[:, :4]).shape == (0, 24)
    assert kernels.route_in_groups(x, torch.ones(24, device=DEVICE), 2, 1, 3, True, 1.0)[1].shape == (0, 3)
