"""Ranges of elements of a tensor parallel rank's shard, read from a checkpoint without the others."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dlm_bridge import Bridge, Layout
from dlm_bridge.convert.checkpoint import Checkpoint
from tests.interop.cases import models

pytest.importorskip("megatron.core")

from dlm_bridge.parallel import weights

FAMILIES = ("gqa", "odd_vocabulary", "llada_moe", "deepseek_v3", "gpt_oss")


@pytest.mark.parametrize("format_", ["huggingface", "torch_dist"])
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.fast("llada_moe-*", "gqa-*")
def test_ranges_are_those_of_the_shard(
    name: str, format_: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models()[name].write(tmp_path / "hub")
    bridge = Bridge.from_hf(tmp_path / "hub")
    if format_ == "torch_dist":
        bridge.to_megatron(tmp_path / "megatron", Layout())
        bridge = Bridge.from_megatron(tmp_path / "megatron")
    checkpoint = bridge.checkpoint
    found = [shards_are_equal(checkpoint, tp, monkeypatch) for tp in (1, 2)]
    assert all(share > 0.9 for share in found) or name == "gpt_oss", found


def shards_are_equal(checkpoint: Checkpoint, tp: int, monkeypatch: pytest.MonkeyPatch) -> float:
    """Of all pieces, compared where they can be read so. Returns their part of all."""
    read = total = 0
    for param in checkpoint.params:
        stored = checkpoint.read_param(param)
        for number, piece in enumerate(param.pieces[:2]):
            total += 1
            if not checkpoint.streams(param):
                continue
            read += 1
            for rank in range(tp):
                monkeypatch.setattr(weights, "tensor_parallel", lambda _, rank=rank: (rank, tp))
                unsharded = weights._unsharded(piece, param, stored)
                rows = -(-(piece.megatron_shape[0] + 6) // tp)  # of a padded vocabulary
                padded = torch.empty(rows, *piece.megatron_shape[1:])
                shard = weights.shard_of(piece, unsharded, padded)
                target = padded if weights.is_vocabulary(piece) else torch.empty(shard.shape)
                assert weights._shard_shape(piece, target) == shard.shape
                wanted = torch.zeros(target.numel(), dtype=shard.dtype)
                wanted[: shard.numel()] = shard.reshape(-1)
                size = len(wanted)
                for start, stop in ((0, size), (1, size - 1), (size // 3, size // 2), (size - 2, size), (1, 1)):
                    values = weights.read_shard(checkpoint, param, piece, target, start, stop)
                    where = (piece.megatron_name, number, rank, start, stop)
                    assert torch.equal(values, wanted[start:stop]), where
    return read / total
