"""Multi-token prediction (MTP) layers that a Megatron run does not train: every checkpoint has them as they were.

Each rank holds a part of them on the CPU, from the start, because the source of the run may be gone when it saves.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from dlm_bridge.convert.checkpoint import Checkpoint
from dlm_bridge.mapping.rules import ParamMapping
from dlm_bridge.parallel.core import ShardedTensor

UNTRAINED_MTP = (
    "its multi-token prediction layers were not trained: resume with --mtp-loss-scaling-factor 0, or export it and "
    "start from that"
)

# Unsharded Megatron tensors of one layer (and expert), in their stored dtype.
MTPShard = dict[ParamMapping, torch.Tensor]


def read_mtp_shard(checkpoint: Checkpoint) -> MTPShard:
    """This rank's part of a checkpoint's multi-token prediction layers; empty where it has none."""
    params = [param for param in checkpoint.params if param.is_mtp]
    mine = params[dist.get_rank() :: dist.get_world_size()]
    return {param: param.to_megatron(checkpoint.read_param(param)) for param in mine}


def sharded_mtp(shard: MTPShard) -> dict[str, ShardedTensor]:
    """The shard as megatron-core saves it, under the names of its own multi-token prediction layers."""
    return {
        param.megatron_name: ShardedTensor.from_rank_offsets(
            param.megatron_key,
            tensor,
            *((axis, index, size) for axis, (index, size) in enumerate(param.stack)),
            prepend_axis_num=len(param.stack),
        )
        for param, tensor in shard.items()
    }


def describe_mtp(layers: int, factor: float) -> str:
    """The line for the console about so many multi-token prediction layers."""
    many = "s are" if layers > 1 else " is"
    what = (
        f"trained, with {factor:g} of the loss" if factor else "not trained: every checkpoint keeps what it came with"
    )
    return f"{layers} multi-token prediction layer{many} {what}"
