"""Mask descriptors agree with the dense masks."""

import pytest
import torch

from dlm_bridge.attention.masks import (
    MaskDescriptor,
    block_causal_mask,
    can_attend,
    document_ids,
    position_ids_from_padding,
)
from tests.reference import two_stream_mask

LENGTH = 13
POSITIONS = torch.arange(LENGTH)[None]
ONE = torch.zeros(1, LENGTH, dtype=torch.int32)
PADDED = torch.arange(LENGTH)[None] < torch.tensor([[LENGTH], [9]])


def test_one_stream() -> None:
    assert MaskDescriptor.bidirectional(ONE).dense().all()
    assert torch.equal(MaskDescriptor.causal(ONE).dense(), block_causal_mask(POSITIONS, 1))
    assert torch.equal(MaskDescriptor.block_causal(ONE, POSITIONS, 4).dense(), block_causal_mask(POSITIONS, 4))


@pytest.mark.parametrize("clean", ["block", "causal"])
@pytest.mark.parametrize("noisy", ["block", "causal"])
def test_two_streams(noisy, clean) -> None:
    expected = two_stream_mask(POSITIONS, 4, None, noisy, clean)
    assert torch.equal(MaskDescriptor.two_streams(ONE, POSITIONS, 4, noisy, clean).dense(), expected)

    positions = position_ids_from_padding(PADDED)
    expected = two_stream_mask(positions, 4, PADDED.repeat(1, 2), noisy, clean)
    found = MaskDescriptor.two_streams(document_ids(PADDED), positions, 4, noisy, clean).dense()
    real = PADDED.repeat(1, 2)[:, None, :, None]
    assert torch.equal(found & real, expected & real)
    assert found.any(dim=-1).all()  # padding attends to itself
    assert not (found & real & ~real.transpose(2, 3)).any()  # and nothing attends to it


def test_documents_do_not_see_each_other_and_are_masked_as_if_alone() -> None:
    lengths = (6, 7)
    documents = torch.cat([torch.full((1, length), number) for number, length in enumerate(lengths)], dim=1)
    positions = torch.cat([torch.arange(length)[None] for length in lengths], dim=1)
    packed = MaskDescriptor.two_streams(documents, positions, 4).dense()[0, 0]
    for number, length in enumerate(lengths):
        mine = (documents[0] == number).repeat(2).nonzero()[:, 0]
        alone = two_stream_mask(torch.arange(length)[None], 4)[0, 0]
        assert torch.equal(packed[mine][:, mine], alone)
        others = (documents[0] != number).repeat(2)
        assert not packed[mine][:, others].any()


def test_some_queries_over_all_keys() -> None:
    mask_descriptor = MaskDescriptor.two_streams(ONE, POSITIONS, 4)
    some = torch.tensor([0, 5, 14, 25])
    assert torch.equal(mask_descriptor.dense(some), mask_descriptor.dense()[:, :, some])
    codes = mask_descriptor.codes[0]
    assert torch.equal(can_attend(codes[some][:, None], codes[None]), mask_descriptor.dense()[0, 0, some])
