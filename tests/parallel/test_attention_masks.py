"""Masks of a micro-batch: FlexAttention's rule against the dense one, and the cache that all layers share."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from dlm_bridge.attention.masks import MaskDescriptor, document_ids
from dlm_bridge.errors import SettingError
from dlm_bridge.parallel.attention import (
    MaskCache,
    block_mask,
    causal_descriptor,
    dense_mask,
    mask_mod,
    plain_mask,
)
from dlm_bridge.parallel.batch import rank_positions
from dlm_bridge.parallel.core_attention import masked_attention, non_sink_mass, tile_options
from tests.refusals import refused

LENGTH = 24


def _codes(kind: str) -> torch.Tensor:
    documents = torch.tensor([[0] * 5 + [1] * 11 + [2] * 8, [0] * 17 + [-1 - i for i in range(17, 24)]]).int()
    positions = torch.arange(LENGTH)[None]
    if kind == "shared":
        documents = documents[:1]
    if kind == "two streams":
        return MaskDescriptor.two_streams(documents, positions, 4, noisy="causal").codes
    return MaskDescriptor.causal(documents).codes


@pytest.mark.parametrize("kind", ["shared", "rows", "two streams"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_kernels_rule_is_the_dense_mask(kind: str, ranks: int) -> None:
    from torch.nn.attention.flex_attention import create_mask, flex_attention

    codes = _codes(kind)
    keys = codes.shape[1]
    queries = keys // ranks
    generator = torch.Generator().manual_seed(0)
    k, v = (torch.randn(2, 2, keys, 8, generator=generator) for _ in range(2))
    for rank in range(ranks):
        dense = dense_mask(codes, rank, queries)
        assert torch.equal(dense, MaskDescriptor(codes).dense(torch.arange(rank * queries, (rank + 1) * queries)))
        asked = create_mask(mask_mod(codes, rank * queries), 2, None, queries, keys, device="cpu")
        assert torch.equal(asked, dense.expand(2, -1, -1, -1))
        q = torch.randn(2, 4, queries, 8, generator=generator)
        blocks = block_mask(codes, rank, queries)
        found = flex_attention(q, k, v, block_mask=blocks, scale=0.3, enable_gqa=True)
        repeated = [tensor.repeat_interleave(2, dim=1) for tensor in (k, v)]
        wanted = torch.nn.functional.scaled_dot_product_attention(q, *repeated, attn_mask=dense, scale=0.3)
        torch.testing.assert_close(found, wanted, atol=1e-6, rtol=0)


@pytest.mark.parametrize("kind", ["shared", "rows"])
def test_a_window_counts_the_positions_of_causal_documents(kind: str) -> None:
    """On each of two context parallel ranks, whose positions are dealt."""
    from torch.nn.attention.flex_attention import create_mask

    codes, order = _codes(kind), rank_positions(LENGTH, 2)
    near = torch.arange(LENGTH)[:, None] - torch.arange(LENGTH) <= 3
    wanted = MaskDescriptor(codes).dense() & near
    dealt, half = codes[:, order.flatten()], LENGTH // 2
    for rank in range(2):
        mine = wanted[:, :, order[rank]][..., order.flatten()]
        assert torch.equal(dense_mask(dealt, rank, half, 3), mine)
        asked = create_mask(mask_mod(dealt, rank * half, 3), len(codes), None, half, LENGTH, device="cpu")
        assert torch.equal(asked, mine)
    plain = MaskDescriptor.causal(torch.zeros(1, LENGTH, dtype=torch.int32)).codes
    assert torch.equal(causal_descriptor(LENGTH, 2, torch.device("cpu")), plain[:, order.flatten()])


def test_a_window_of_another_mask_is_refused() -> None:
    documents, positions = torch.zeros(1, LENGTH, dtype=torch.int32), torch.arange(LENGTH)[None]
    others = (
        MaskDescriptor.bidirectional(documents).codes,
        MaskDescriptor.block_causal(documents, positions, 4).codes,
        _codes("two streams"),
    )
    for codes in others:
        for make in (dense_mask, block_mask):
            with refused(SettingError, "attention_mask"):
                make(codes, 0, codes.shape[1], 3)
    with refused(SettingError, "attention_mask"):
        dense_mask(torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool), 0, LENGTH, 3)


def test_sinks_take_their_part_of_the_softmax() -> None:
    """The definition, with one more logit for each head and no value, in fp64; and what FlexAttention's output is
    multiplied by: values and gradients."""
    from torch.nn.attention.flex_attention import flex_attention

    generator = torch.Generator().manual_seed(0)
    group = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
    q, k, v = (torch.randn(LENGTH, 2, heads, 8, generator=generator, dtype=torch.double) for heads in (4, 2, 2))
    sinks = torch.randn(4, generator=generator, dtype=torch.double)
    codes = _codes("rows")
    given = [tensor.requires_grad_() for tensor in (q, k, v, sinks)]
    found = masked_attention(q, k, v, codes, 0.3, group, (5, 0), sinks)
    (found * torch.arange(found.numel()).view_as(found)).sum().backward()
    gradients = [tensor.grad.clone() for tensor in given]
    for tensor in given:
        tensor.grad = None
    k_each, v_each = (tensor.repeat_interleave(2, dim=2) for tensor in (k, v))
    logits = torch.einsum("sbhd,tbhd->bhst", q, k_each) * 0.3
    logits = logits.masked_fill(~dense_mask(codes, 0, LENGTH, 5), -torch.inf)
    plain = torch.einsum("bhst,tbhd->bhsd", logits.softmax(dim=-1), v_each)
    wanted = (plain * non_sink_mass(logits.logsumexp(dim=-1), sinks)).permute(2, 0, 1, 3).flatten(2)
    torch.testing.assert_close(found, wanted, atol=1e-6, rtol=1e-5)  # a softmax in fp32
    (wanted * torch.arange(wanted.numel()).view_as(wanted)).sum().backward()
    for one, tensor in zip(gradients, given, strict=True):
        torch.testing.assert_close(one, tensor.grad, atol=1e-5 * float(tensor.grad.abs().max()), rtol=0)
    with torch.no_grad():
        heads = [tensor.permute(1, 2, 0, 3).float() for tensor in (q, k, v)]
        blocks = block_mask(codes, 0, LENGTH, 5)
        flexed, sums = flex_attention(*heads, block_mask=blocks, scale=0.3, enable_gqa=True, return_lse=True)
        flexed = (flexed * non_sink_mass(sums, sinks)).permute(2, 0, 1, 3).flatten(2)
    torch.testing.assert_close(flexed.double(), wanted.detach(), atol=1e-5, rtol=1e-5)


@pytest.mark.gpu
def test_sinks_and_a_window_on_a_gpu() -> None:
    """Forward and backward of FlexAttention, against the definition on the CPU."""
    generator = torch.Generator().manual_seed(0)
    length, group = 256, SimpleNamespace(size=lambda: 1, rank=lambda: 0)
    rows = [torch.randn(length, 2, heads, 64, generator=generator) for heads in (8, 2, 2)]
    rows.append(torch.randn(8, generator=generator))
    codes = MaskDescriptor.causal((torch.arange(length) * 3 // length)[None].int()).codes
    gradients = []
    for device in ("cpu", "cuda"):
        q, k, v, sinks = given = [row.detach().to(device).requires_grad_() for row in rows]
        output = masked_attention(q, k, v, codes.to(device), 0.125, group, (40, 0), sinks)
        output.square().sum().backward()
        gradients.append([output.detach().cpu(), *(tensor.grad.cpu() for tensor in given)])
    for one, other in zip(*gradients, strict=True):
        assert float((one - other).abs().max() / one.abs().max()) < 5e-3  # products may be TF32


@pytest.mark.parametrize(
    ("dtype", "width", "of_values", "chosen"),
    [
        (torch.float32, 192, 128, True),  # multi-head latent attention of DeepSeek-V3
        (torch.float32, 128, 160, True),
        (torch.float32, 128, 128, False),
        (torch.bfloat16, 192, 128, False),
    ],
)
def test_wide_heads_of_fp32_get_tiles_that_fit(dtype: torch.dtype, width: int, of_values: int, chosen: bool) -> None:
    from torch.nn.attention.flex_attention import FlexKernelOptions, flex_attention

    q, k, v = (torch.randn(1, 2, LENGTH, size, dtype=dtype) for size in (width, width, of_values))
    options = tile_options(q, v)
    assert (options is not None) == chosen
    if options is None:
        return
    known = FlexKernelOptions.__annotations__
    assert {name.removeprefix("fwd_").removeprefix("bwd_") for name in options} <= known.keys()
    tile, rounded = options["fwd_BLOCK_M"] + options["fwd_BLOCK_N"], 1 << (width - 1).bit_length()
    values = options["fwd_BLOCK_N"] * (1 << (of_values - 1).bit_length())
    assert 4 * options["fwd_num_stages"] * (tile * rounded + values) <= 99 << 10  # bytes: of the smallest GPUs
    blocks = block_mask(_codes("shared"), 0, LENGTH)
    plain, tiled = (flex_attention(q, k, v, block_mask=blocks, kernel_options=given) for given in (None, options))
    assert torch.equal(plain, tiled)  # they are no part of the maths, and torch takes them


@pytest.mark.gpu
@pytest.mark.parametrize("length", [LENGTH, 256])
@pytest.mark.parametrize(("width", "of_values"), [(192, 128), (256, 256)])
def test_wide_heads_of_fp32_on_a_gpu(length: int, width: int, of_values: int) -> None:
    """Forward and backward, against a dense mask in fp64."""
    generator = torch.Generator().manual_seed(0)
    sizes = (width, width, of_values)
    rows = [torch.randn(length, 2, 4, size, generator=generator).cuda().requires_grad_() for size in sizes]
    documents = (torch.arange(length) * 3 // length)[None].int()
    codes = MaskDescriptor.causal(documents).codes
    group = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
    found = masked_attention(*rows, codes.cuda(), width**-0.5, group)
    exact = [row.detach().double().requires_grad_() for row in rows]
    heads = [row.permute(1, 2, 0, 3) for row in exact]
    dense = dense_mask(codes, 0, length).cuda()
    wanted = torch.nn.functional.scaled_dot_product_attention(*heads, attn_mask=dense, scale=width**-0.5)
    wanted = wanted.permute(2, 0, 1, 3).flatten(2)
    found.square().sum().backward()
    wanted.square().sum().backward()
    pairs = [(found, wanted), *((row.grad, other.grad) for row, other in zip(rows, exact, strict=True))]
    for one, other in pairs:
        assert float((one.double() - other).abs().max() / other.abs().max()) < 5e-3  # products may be TF32


def test_a_mask_of_pairs_is_cut_by_queries() -> None:
    pairs = torch.rand(2, 1, 8, 8, generator=torch.Generator().manual_seed(0)) < 0.5
    assert torch.equal(dense_mask(pairs, 1, 4), pairs[:, :, 4:])


def test_without_codes_positions_are_dealt_as_transformer_engine_deals_them() -> None:
    order = rank_positions(LENGTH, 2)
    whole = MaskDescriptor.causal(torch.zeros(1, LENGTH, dtype=torch.int32)).dense()[0, 0]
    near = torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)[None] <= 3
    for rank in range(2):
        for window, wanted in ((None, whole), ((3, 0), whole & near)):
            found = plain_mask(LENGTH // 2, rank, 2, window, torch.device("cpu"))
            assert torch.equal(found[0, 0], wanted[order[rank]][:, order.flatten()])


def test_layers_recomputation_and_micro_batches_in_flight_find_their_own_mask() -> None:
    made: list[int] = []
    cache = MaskCache(kept=4)

    def make(codes: torch.Tensor) -> torch.Tensor:
        made.append(int(codes.sum()))
        return codes.sum()

    batches = [torch.full((1, 6, 5), value, dtype=torch.int32) for value in range(3)]
    for _ in range(3):
        for value, codes in enumerate(batches):
            assert cache.get(codes, "sum", make) == 30 * value
            assert cache.get(codes.detach(), "sum", make) == 30 * value
    assert made == [0, 30, 60]
    assert cache.get(batches[1], "another kind", lambda codes: "made anew") == "made anew"
    assert cache.get(batches[1][:, :3], "sum", make) == 15  # the same memory, but less of it
    assert len(cache) == 4


def test_freed_memory_and_changed_values_never_hit_an_old_mask() -> None:
    cache = MaskCache(kept=2)
    pointers: set[int] = set()
    for value in range(10_000):
        codes = torch.full((1, 6, 5), value, dtype=torch.int32)
        used_again = codes.data_ptr() in pointers
        pointers.add(codes.data_ptr())
        assert cache.get(codes, "sum", torch.sum) == 30 * value
        if used_again and value > 50:
            break
    assert used_again
    codes.fill_(7)
    assert cache.get(codes, "sum", torch.sum) == 210
    cache.clear()
    assert len(cache) == 0


def test_padding_looks_at_itself_alone() -> None:
    real = torch.tensor([[True] * 5 + [False] * 3])
    codes = MaskDescriptor.bidirectional(document_ids(real)).codes
    assert torch.equal(dense_mask(codes, 0, 8)[0, 0, 5:], torch.eye(8, dtype=torch.bool)[5:])
