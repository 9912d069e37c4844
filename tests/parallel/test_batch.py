"""What a rank gets of a batch: its positions, the attention mask, where the loss is, documents of variable length."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from dlm_bridge.attention.masks import MaskDescriptor
from dlm_bridge.errors import LayoutError, SettingError
from dlm_bridge.objectives.batches import NoisyBatch
from dlm_bridge.objectives.linear_cross_entropy import loss_bucket
from dlm_bridge.objectives.single_stream import MaskedDiffusion, NextTokenPrediction
from dlm_bridge.parallel.batch import MicroBatch, micro_batch, rank_positions
from tests.parallel.context_cases import LENGTH, Case, annealed, cases, packed, padded, plain
from tests.refusals import refused

CASES = {case.name: case for case in cases()}


def _parts(case: Case, noisy: NoisyBatch, cp: int) -> list[MicroBatch]:
    return [micro_batch(noisy, case.family.attention_pattern, 4, rank, cp) for rank in range(cp)]


def _order(noisy: NoisyBatch, cp: int) -> torch.Tensor:
    length = noisy.input_ids.shape[1]
    return rank_positions(length, cp, length // LENGTH)


@pytest.mark.parametrize("cp", [1, 2, 3])
@pytest.mark.parametrize("name", list(CASES))
def test_every_position_is_on_one_rank_with_its_loss_and_its_view(name: str, cp: int) -> None:
    case = CASES[name]
    noisy = case.noisy()
    order = _order(noisy, cp)
    assert torch.equal(order.flatten().sort().values, torch.arange(noisy.input_ids.shape[1]))
    numbers = torch.zeros_like(noisy.mask, dtype=torch.long)
    numbers[noisy.mask] = torch.arange(len(noisy.targets))
    seen = []
    usual = torch.arange(noisy.input_ids.shape[1])[None]
    one_stream = noisy.input_ids.shape[1] == LENGTH  # whose documents keep their places in the row
    positions = usual if noisy.position_ids is None or one_stream else noisy.position_ids
    for rank, part in enumerate(_parts(case, noisy, cp)):
        mine = order[rank]
        assert torch.equal(part.input_ids, noisy.input_ids[:, mine])
        held = usual[:, mine] if part.position_ids is None else part.position_ids
        real = _real(noisy)[:, mine]
        assert torch.equal(held.expand_as(real)[real], positions[:, mine].expand_as(real)[real])
        with_loss = part.weights > 0
        row, column = part.loss_positions[with_loss] // len(mine), part.loss_positions[with_loss] % len(mine)
        which = numbers[row, mine[column]]
        assert torch.equal(part.targets[with_loss], noisy.targets[which])
        assert torch.equal(part.weights[with_loss], noisy.weights[which])
        assert (part.terms is None) == (noisy.terms is None)
        assert part.terms is None or torch.equal(part.terms[with_loss], noisy.terms[which])
        assert int(part.loss_positions[~with_loss].sum()) == 0
        assert len(part.loss_positions) == loss_bucket(int(with_loss.sum()), part.input_ids.numel())
        seen.append(which)
        wanted = noisy.model_mask()
        if part.attention_mask is not None and wanted is not None and wanted.dim() == 4:
            pairs = (
                part.attention_mask if part.attention_mask.dim() == 4 else MaskDescriptor(part.attention_mask).dense()
            )
            assert torch.equal(pairs, wanted[:, :, order.flatten()][..., order.flatten()])
    assert torch.equal(torch.cat(seen).sort().values, torch.arange(len(noisy.targets)))


def _real(noisy: NoisyBatch) -> torch.Tensor:
    if noisy.attention_mask is None and noisy.mask_descriptor is None:
        return torch.ones_like(noisy.mask)
    if noisy.mask_descriptor is not None:
        return (noisy.mask_descriptor.codes[..., 0] >= 0).expand_as(noisy.mask)
    assert noisy.attention_mask is not None
    return noisy.attention_mask


def test_the_order_is_transformer_engines_and_each_stream_is_dealt_on_its_own() -> None:
    assert rank_positions(12, 2).tolist() == [[0, 1, 2, 9, 10, 11], [3, 4, 5, 6, 7, 8]]
    assert rank_positions(16, 2, streams=2).tolist() == [
        [0, 1, 6, 7, 8, 9, 14, 15],
        [2, 3, 4, 5, 10, 11, 12, 13],
    ]
    assert rank_positions(5, 1).tolist() == [[0, 1, 2, 3, 4]]


def test_lengths_that_do_not_divide_are_named() -> None:
    with refused(LayoutError, "seq_length", "24", "10", "`cp=5`"):
        micro_batch(plain(MaskedDiffusion(99)), "bidirectional", cp_rank=0, cp_size=5)
    two_streams = CASES["sdar-BlockDiffusion-plain"].noisy()
    with refused(LayoutError, "seq_length", "24", "16"):
        micro_batch(two_streams, "block_causal", 4, 0, 8)


@pytest.mark.parametrize("attention_pattern", ["bidirectional", "causal"])
def test_what_the_layers_know_needs_no_mask(attention_pattern: str) -> None:
    noisy = plain(MaskedDiffusion(99))
    part = micro_batch(noisy, attention_pattern)
    assert part.attention_mask is None
    assert part.position_ids is None
    whole = dataclasses.replace(noisy, attention_mask=torch.ones_like(noisy.mask))
    assert micro_batch(whole, attention_pattern).attention_mask is None
    cut = micro_batch(padded(MaskedDiffusion(99)), attention_pattern)
    assert cut.attention_mask is not None
    seen = MaskDescriptor(cut.attention_mask).dense()[1, 0]
    assert not seen[:17, 17:].any()
    assert bool(seen[0, 16]) == (attention_pattern == "bidirectional")
    alone = micro_batch(noisy, "block_causal", 4)
    assert alone.attention_mask is not None
    assert torch.equal(MaskDescriptor(alone.attention_mask).dense()[0, 0, 5], torch.arange(LENGTH) < 8)
    with refused(SettingError, "block_size"):
        micro_batch(noisy, "block_causal")


def test_rows_of_one_stream_or_two_share_their_positions_in_spite_of_padding() -> None:
    """So that the fused rotary kernel takes them."""
    case = CASES["sdar-BlockDiffusion-padded"]
    (part,) = _parts(case, case.noisy(), 1)
    assert part.position_ids is not None
    assert torch.equal(part.position_ids, torch.arange(LENGTH).repeat(2)[None])
    permuted = CASES["wedlm-WeDLMDiffusion-plain"]
    assert _parts(permuted, permuted.noisy(), 1)[0].position_ids.shape == (2, 2 * LENGTH)


@pytest.mark.parametrize(
    ("objective", "attention_pattern"), [(MaskedDiffusion(99), "bidirectional"), (NextTokenPrediction(), "causal")]
)
def test_documents_of_variable_length(
    objective: MaskedDiffusion | NextTokenPrediction, attention_pattern: str
) -> None:
    whole = micro_batch(plain(objective), attention_pattern, packed=True)
    assert whole.packed is not None
    assert whole.packed.cu_seqlens.tolist() == [0, 24, 48]
    noisy = packed(objective)
    part = micro_batch(noisy, attention_pattern, packed=True)
    assert part.packed is not None
    assert (part.attention_mask, part.position_ids) == (None, None)
    assert part.packed.cu_seqlens.dtype == torch.int32
    assert part.packed.cu_seqlens.tolist() == [0, 5, 16, 24, 40, 48]
    assert part.packed.max_seqlen == 16
    assert torch.equal(part.input_ids, noisy.input_ids.reshape(1, -1))
    apart = micro_batch(noisy, attention_pattern)
    for name in ("loss_positions", "targets", "weights"):
        assert torch.equal(getattr(part, name), getattr(apart, name))
    tail = micro_batch(padded(objective), attention_pattern, packed=True)
    assert tail.packed is not None
    assert tail.packed.cu_seqlens.tolist() == [0, 24, 41, 48]


def test_what_documents_cannot_say_is_refused() -> None:
    objective = MaskedDiffusion(99)
    documents = torch.tensor([[0] * 8 + [1] * 8 + [0] * 8])
    torn = dataclasses.replace(packed(objective), mask_descriptor=MaskDescriptor.bidirectional(documents))
    two_streams = CASES["gqa-NemotronDiffusion-plain"].noisy()
    for noisy, pattern, ranks in (
        (packed(objective), "bidirectional", 2),
        (packed(objective), "causal", 1),
        (two_streams, "bidirectional", 1),
        (annealed(objective), "bidirectional", 1),
        (torn, "bidirectional", 1),
    ):
        with refused(SettingError, "packed"):
            micro_batch(noisy, pattern, cp_size=ranks, packed=True)


def test_losses_come_in_few_sizes() -> None:
    sizes = {loss_bucket(count, 100_000) for count in range(20_000)}
    assert min(sizes) == 64
    assert all(size % 64 == 0 for size in sizes)
    assert len(sizes) < 60
    for count in (1, 64, 65, 700, 4096, 19_999):
        assert count <= loss_bucket(count, 100_000) <= max(64, count * 1.13 + 64)
    assert loss_bucket(40, 48) == 48


def test_a_device_and_pinned_memory_keep_everything() -> None:
    part = micro_batch(packed(MaskedDiffusion(99)), "bidirectional", packed=True)
    moved = part.to(torch.device("meta"))
    assert moved.packed is not None
    assert {value.device.type for value in (moved.input_ids, moved.loss_positions, moved.packed.cu_seqlens)} == {
        "meta"
    }
    assert moved.packed.max_seqlen == 16
