"""Masks of a micro-batch: FlexAttention's rule against the dense one, and the cache that all layers share."""

from __future__ import annotations

import pytest
import torch

from dlm_bridge.models.visibility import Visibility, documents_of
from dlm_bridge.parallel.attention_masks import MaskCache, block_mask, dense_mask, mask_mod, plain_mask
from dlm_bridge.parallel.batch import rank_positions

LENGTH = 24


def _codes(kind: str) -> torch.Tensor:
    documents = torch.tensor([[0] * 5 + [1] * 11 + [2] * 8, [0] * 17 + [-1 - i for i in range(17, 24)]]).int()
    positions = torch.arange(LENGTH)[None]
    if kind == "shared":
        documents = documents[:1]
    if kind == "two streams":
        return Visibility.two_streams(documents, positions, 4, noisy="causal").codes
    return Visibility.causal(documents).codes


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
        assert torch.equal(dense, Visibility(codes).dense(torch.arange(rank * queries, (rank + 1) * queries)))
        asked = create_mask(mask_mod(codes, rank * queries), 2, None, queries, keys, device="cpu")
        assert torch.equal(asked, dense.expand(2, -1, -1, -1))
        q = torch.randn(2, 4, queries, 8, generator=generator)
        blocks = block_mask(codes, rank, queries)
        found = flex_attention(q, k, v, block_mask=blocks, scale=0.3, enable_gqa=True)
        repeated = [tensor.repeat_interleave(2, dim=1) for tensor in (k, v)]
        wanted = torch.nn.functional.scaled_dot_product_attention(q, *repeated, attn_mask=dense, scale=0.3)
        torch.testing.assert_close(found, wanted, atol=1e-6, rtol=0)


def test_a_mask_of_pairs_is_cut_by_queries() -> None:
    pairs = torch.rand(2, 1, 8, 8, generator=torch.Generator().manual_seed(0)) < 0.5
    assert torch.equal(dense_mask(pairs, 1, 4), pairs[:, :, 4:])


def test_without_codes_positions_are_dealt_as_transformer_engine_deals_them() -> None:
    order = rank_positions(LENGTH, 2)
    whole = Visibility.causal(torch.zeros(1, LENGTH, dtype=torch.int32)).dense()[0, 0]
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
    codes = Visibility.bidirectional(documents_of(real)).codes
    assert torch.equal(dense_mask(codes, 0, 8)[0, 0, 5:], torch.eye(8, dtype=torch.bool)[5:])
