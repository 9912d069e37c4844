"""Multi-token prediction layers, which the engine does not train: every checkpoint of a run keeps them as they were.

Each rank holds a share of them on the CPU, from the start, because what a run began with may be gone when it saves.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from dlm_bridge.convert.checkpoint import Checkpoint
from dlm_bridge.convert.mapping import Link
from dlm_bridge.parallel.core import ShardedTensor

Share = dict[Link, torch.Tensor]  # whole Megatron tensors of one layer (and expert), in the dtype that they came in


def read_share(checkpoint: Checkpoint) -> Share:
    """What this rank keeps of a checkpoint's multi-token prediction layers; nothing where it has none."""
    links = [link for link in checkpoint.links if link.is_mtp]
    mine = links[dist.get_rank() :: dist.get_world_size()]
    return {link: link.to_megatron(checkpoint.read_link(link)) for link in mine}


def sharded(share: Share) -> dict[str, ShardedTensor]:
    """The share as megatron-core saves it, under the names that its own multi-token prediction layers have."""
    return {
        link.megatron_name: ShardedTensor.from_rank_offsets(
            link.megatron_key,
            tensor,
            *((axis, index, size) for axis, (index, size) in enumerate(link.stack)),
            prepend_axis_num=len(link.stack),
        )
        for link, tensor in share.items()
    }


def describe(layers: int) -> str:
    """What becomes of so many layers, for people."""
    many = "s are" if layers > 1 else " is"
    return f"{layers} multi-token prediction layer{many} not trained: every checkpoint keeps what it came with"
