"""Visibility says the same as the dense masks, in a few numbers a position."""

import pytest
import torch

from dlm_bridge.models.masks import block_causal_mask, positions_of, two_stream_mask
from dlm_bridge.models.visibility import Visibility, allowed, documents_of

LENGTH = 13
POSITIONS = torch.arange(LENGTH)[None]
ONE = torch.zeros(1, LENGTH, dtype=torch.int32)
PADDED = torch.arange(LENGTH)[None] < torch.tensor([[LENGTH], [9]])


def test_one_stream() -> None:
    assert Visibility.bidirectional(ONE).dense().all()
    assert torch.equal(Visibility.causal(ONE).dense(), block_causal_mask(POSITIONS, 1))
    assert torch.equal(Visibility.block_causal(ONE, POSITIONS, 4).dense(), block_causal_mask(POSITIONS, 4))


@pytest.mark.parametrize("clean", ["block", "causal"])
@pytest.mark.parametrize("noisy", ["block", "causal"])
def test_two_streams(noisy, clean) -> None:
    expected = two_stream_mask(POSITIONS, 4, None, noisy, clean)
    assert torch.equal(Visibility.two_streams(ONE, POSITIONS, 4, noisy, clean).dense(), expected)

    positions = positions_of(PADDED)
    expected = two_stream_mask(positions, 4, PADDED.repeat(1, 2), noisy, clean)
    found = Visibility.two_streams(documents_of(PADDED), positions, 4, noisy, clean).dense()
    real = PADDED.repeat(1, 2)[:, None, :, None]
    assert torch.equal(found & real, expected & real)
    assert found.any(dim=-1).all()  # padding looks at itself
    assert not (found & real & ~real.transpose(2, 3)).any()  # and nobody looks at it


def test_documents_do_not_see_each_other_and_are_masked_as_if_alone() -> None:
    lengths = (6, 7)
    documents = torch.cat([torch.full((1, length), number) for number, length in enumerate(lengths)], dim=1)
    positions = torch.cat([torch.arange(length)[None] for length in lengths], dim=1)
    packed = Visibility.two_streams(documents, positions, 4).dense()[0, 0]
    for number, length in enumerate(lengths):
        mine = (documents[0] == number).repeat(2).nonzero()[:, 0]
        alone = two_stream_mask(torch.arange(length)[None], 4)[0, 0]
        assert torch.equal(packed[mine][:, mine], alone)
        others = (documents[0] != number).repeat(2)
        assert not packed[mine][:, others].any()


def test_some_queries_over_all_keys() -> None:
    visibility = Visibility.two_streams(ONE, POSITIONS, 4)
    some = torch.tensor([0, 5, 14, 25])
    assert torch.equal(visibility.dense(some), visibility.dense()[:, :, some])
    codes = visibility.codes[0]
    assert torch.equal(allowed(codes[some][:, None], codes[None]), visibility.dense()[0, 0, some])
